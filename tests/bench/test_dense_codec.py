"""Dense streams in the bench: measured on whole layers or tokens, and said where they are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

import kvmnn
from kvmnn import bench
from kvmnn.bench import benchmark
from kvmnn.bench.codecs import DENSE_CODEC_NAME, count_dense_bytes, make_dense_codec, make_dense_plans, make_plan
from kvmnn.cli.entry_point import main

TOKENS, HEADS, DIM, LAYERS = 48, 2, 16, 3
WORDS = np.random.default_rng(5).standard_normal((LAYERS, TOKENS, HEADS, DIM)).astype(np.float16)
WORDS[:, 20:40] = WORDS[:, :20]
LAYER = TOKENS * HEADS * DIM * 2
TOKEN = HEADS * DIM * 2


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    for side in "kv":
        np.save(tmp_path / f"{side}.npy", WORDS)
    return [str(tmp_path / f"{side}.npy") for side in "kv"]


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("axes", ["thd", "htd"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_dense_bench_codec_round_trips(axes: Any, layers: int, threads: int) -> None:
    lying = WORDS if axes == "thd" else np.ascontiguousarray(WORDS.transpose(0, 2, 1, 3))
    plan = replace(make_plan(WORDS, dtype="fp16", part="key"), axes=axes, shape=lying.shape[1:])
    data: npt.NDArray[np.uint8] = lying[:layers].reshape(-1).view(np.uint8)
    codec = make_dense_codec(plan, threads)
    streams = codec.encode(data)
    assert len(streams) == layers
    assert codec.count_bytes(streams) == sum(map(len, streams)) < data.size
    assert benchmark._is_same(codec.decode(streams), data)


def test_count_dense_bytes_gives_whole_layers() -> None:
    plan = make_plan(WORDS, dtype="fp16", part="value")
    assert plan.nbytes == LAYER
    assert count_dense_bytes(plan, 2 * LAYER + 100) == 2 * LAYER
    assert count_dense_bytes(plan, 10 * TOKEN + 3) == 10 * TOKEN
    assert count_dense_bytes(plan, TOKEN - 1) == 0
    assert count_dense_bytes(replace(plan, axes="htd", shape=(HEADS, TOKENS, DIM)), LAYER - 1) == 0
    assert count_dense_bytes(None, LAYER) == 0
    codec = make_dense_codec(plan, 1)
    part = WORDS.reshape(-1).view(np.uint8)[: 10 * TOKEN]
    assert benchmark._is_same(codec.decode(codec.encode(part)), part)


def test_dense_bench_measures_every_layer(files: list[str]) -> None:
    source = kvmnn.open(Path(files[0]).parent, axes="lthd")
    calls: list[int] = []
    compared = bench.compare(source, repeats=1, progress=calls.append)
    assert sum(calls) == bench.count_runs(source, 1, 1)
    assert len(compared.arrays) == 2 * LAYERS
    for report in compared.arrays:
        (result,) = (each for each in report.results if each.codec == DENSE_CODEC_NAME)
        assert result.error is None and result.raw_bytes == LAYER and not report.note
        codec = make_dense_codec(make_dense_plans(source)[report.name], 1)
        assert result.stored_bytes == codec.count_bytes(codec.encode(next(source[report.name].iter_chunks(0))))


def test_dense_bench_unsuitable_input_reports_why(
    files: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "any.npy", WORDS.reshape(-1))
    assert main(["bench", str(tmp_path / "any.npy"), "--repeats", "1"]) == 0
    assert f"{DENSE_CODEC_NAME}: not measured, these are not K or V of layers" in capsys.readouterr().out
    assert main(["bench", *files, "--axes", "lthd", "--repeats", "1", "--sample-bytes", "20"]) == 0
    assert (
        f"{DENSE_CODEC_NAME}: not measured, a layer takes {LAYER:,} bytes (--sample-bytes)" in capsys.readouterr().out
    )


def test_dense_bench_streams_do_not_depend_on_threads() -> None:
    words = np.concatenate([WORDS] * 3)
    plan = make_plan(words, dtype="fp16", part="value")
    data = words.reshape(-1).view(np.uint8)
    made = [make_dense_codec(plan, threads).encode(data) for threads in (1, 2, 3)]
    assert made[0] == made[1] == made[2]
