"""Entropies and split ratios against zstandard and counting by hand; conversion word by word."""

from __future__ import annotations

import csv
import errno
import io
import json
from collections import Counter
from math import log2
from pathlib import Path

import numpy as np
import pytest
import zstandard
from offline_model import words, write_dump

from kvmnn import OutputError, SourceError
from kvmnn.analysis import select_dumps
from kvmnn.analysis.entropy import (
    ALL_LAYERS_SCOPE,
    EntropyMetrics,
    MetricsRow,
    analyze_entropy,
    compute_averages,
    format_csv,
    format_grouped_summary,
    format_summary,
    read_run_log,
)
from kvmnn.analysis.fp16_conversion import convert_to_fp16

K, V = words(1, 30), words(2, 30)
WIDE = words(3, 30, dtype="<f4")


def packed(array: np.ndarray) -> int:
    return len(zstandard.ZstdCompressor(level=3).compress(array.tobytes()))


def bits(array: np.ndarray) -> float:
    data = array.tobytes()
    return -sum(n / len(data) * log2(n / len(data)) for n in Counter(data).values())


def expected(array: np.ndarray) -> dict[str, float]:
    """Every metric, written out again."""
    wide = array.itemsize == 4
    halves = array.view("<u2" if wide else "u1").reshape(*array.shape, 2)
    lo, hi = (np.ascontiguousarray(halves[..., i]) for i in (0, 1))
    delta = hi.astype(np.int64)
    delta[1:] -= hi[:-1]
    delta = (delta % (1 << 8 * hi.itemsize)).astype(hi.dtype)
    a, b, both = ("hi16", "lo16", "split16") if wide else ("hi", "lo", "gear")
    return {
        "entropy": bits(array),
        "zstd_ratio": array.nbytes / packed(array),
        f"{a}_entropy": bits(hi),
        f"{b}_entropy": bits(lo),
        f"{a}_ratio": hi.nbytes / packed(hi),
        f"{b}_ratio": lo.nbytes / packed(lo),
        f"{both}_ratio": array.nbytes / (packed(hi) + packed(lo)),
        f"{a}_delta_ratio": hi.nbytes / packed(delta),
        f"{both}_delta_ratio": array.nbytes / (packed(delta) + packed(lo)),
    }


@pytest.fixture
def dumps(tmp_path) -> Path:
    write_dump(tmp_path / "in", 0, 0, K, V)
    write_dump(tmp_path / "in", 5, 0, WIDE, WIDE, run="wide")
    return tmp_path / "in"


def check(metrics: EntropyMetrics, array: np.ndarray) -> None:
    assert vars(metrics) == pytest.approx(dict.fromkeys(vars(metrics), 0.0) | expected(array))


def test_analyze_entropy_metrics_equal_zstandard_and_counts(dumps):
    found = analyze_entropy(select_dumps([dumps], ALL_LAYERS_SCOPE))
    arrays = {("run", "key"): K, ("run", "value"): V, ("wide", "key"): WIDE, ("wide", "value"): WIDE}
    assert [(row.entry.run_id, row.part) for row in found.layer_rows] == list(arrays)
    for row in found.layer_rows:
        check(row.metrics, arrays[row.entry.run_id, row.part])
    assert len(found.head_rows) == 8
    for row in found.head_rows:
        check(row.metrics, np.ascontiguousarray(arrays[row.entry.run_id, row.part][:, row.head]))


def test_analyze_entropy_changed_dumps_count_as_failed(dumps):
    selection = select_dumps([dumps], ALL_LAYERS_SCOPE)
    next(dumps.rglob("layer_5/v_*.bin")).unlink()
    next(dumps.rglob("layer_0/v_*.bin")).write_bytes(b"")
    found = analyze_entropy(selection)
    assert (found.layer_rows, found.num_failed) == ([], 2)


def test_compute_averages_skip_zeros_except_zstd_ratio(dumps):
    entry = select_dumps([dumps], ALL_LAYERS_SCOPE).entries[0]
    rows = [
        MetricsRow(entry, "key", None, raw, EntropyMetrics(zstd_ratio=r, gear_ratio=r))
        for raw, r in ((100, 2.0), (300, 0.0), (100, 4.0))
    ]
    assert compute_averages(rows, "zstd_ratio") == pytest.approx((2.0, 200 / 75))
    assert compute_averages(rows, "gear_ratio") == pytest.approx((3.0, 200 / 75))
    assert compute_averages([], "gear_ratio") == (0.0, 0.0)


def test_entropy_reports_have_every_row(dumps):
    found = analyze_entropy(select_dumps([dumps], ALL_LAYERS_SCOPE))
    rows = list(csv.DictReader(io.StringIO(format_csv(found.head_rows))))
    assert [row["head"] for row in rows] == ["0", "1"] * 4
    assert [row["bytes_per_elem"] for row in rows] == ["2"] * 4 + ["4"] * 4
    assert "head" not in format_csv(found.layer_rows).splitlines()[0].split(",")
    assert float(rows[0]["gear_ratio"]) == pytest.approx(found.head_rows[0].metrics.gear_ratio, abs=1e-6)
    assert "- Tensors: 4" in format_summary(found)
    text = format_grouped_summary(found, {"run": 256})
    assert [line for line in text.splitlines() if line.startswith("## ")] == ["## 0-256", "## not in the log"]


@pytest.mark.parametrize(
    ("tokens", "label"),
    [(0, "0-256"), (257, "257-512"), (1024, "513-1024"), (2048, "1025-2048"), (2049, "2049+"), (10**9, "2049+")],
)
def test_format_grouped_summary_bins_prompt_tokens(dumps, tokens, label):
    text = format_grouped_summary(
        analyze_entropy(select_dumps([dumps], ALL_LAYERS_SCOPE), with_heads=False), {"run": tokens, "wide": tokens}
    )
    assert [line for line in text.splitlines() if line.startswith("## ")] == [f"## {label}"]


def test_read_run_log_json_and_csv_are_accepted(tmp_path):
    file = tmp_path / "log"
    for good in (
        '{"run_id": "a", "prompt_tokens": 3}\n\n{"run_id": "b", "prompt_tokens": "4"}',
        "run_id,prompt_tokens\na,3\nb,4\n",
    ):
        file.write_text(good)
        assert read_run_log(str(file)) == {"a": 3, "b": 4}
    for bad in (
        "",
        "{",
        '{"run_id": "a"}',
        "run_id,tokens\na,3",
        "run_id,prompt_tokens\na,-3",
        "[" * 9,
        '{"a": ' + "[" * 99999,
    ):
        file.write_text(bad)
        with pytest.raises(SourceError, match="expected JSON lines or CSV"):
            read_run_log(str(file))


def test_convert_to_fp16_rounds_and_reports_it(dumps, tmp_path):
    found = convert_to_fp16(dumps, tmp_path / "out", allow_fp16=True)
    assert (found.converted, found.copied, found.skipped, found.exit_code) == (1, 1, 0, 0)
    folder = tmp_path / "out" / "wide" / "layer_5"
    assert (folder / "k_t0_30.bin").read_bytes() == WIDE.astype("<f2").tobytes()
    before = json.loads((dumps / "wide" / "layer_5" / "meta_t0_30.json").read_text())
    after = json.loads((folder / "meta_t0_30.json").read_text())
    new = {"source_bytes_per_elem": 4, "bytes_per_elem": 2, "dtype": "fp16", "converted_from": "fp32"}
    assert after == before | new
    copied = json.loads((tmp_path / "out" / "run" / "layer_0" / "meta_t0_30.json").read_text())
    assert copied["source_bytes_per_elem"] == 2 and "converted_from" not in copied
    assert (tmp_path / "out" / "run" / "layer_0" / "k_t0_30.bin").read_bytes() == K.tobytes()
    again = convert_to_fp16(dumps, tmp_path / "out", allow_fp16=True)
    assert (again.converted, again.copied, again.skipped) == (0, 0, 2)
    assert convert_to_fp16(dumps, tmp_path / "out", overwrite=True).converted == 1


def test_convert_to_fp16_counts_overflowed_words(tmp_path):
    large = WIDE.copy()
    large.reshape(-1)[:5] = [1e5, -7e4, np.inf, np.nan, 1.0]
    write_dump(tmp_path / "dump", 5, 0, large, WIDE)
    found = convert_to_fp16(tmp_path / "dump", tmp_path / "out")
    assert (found.cast_stats.words, found.cast_stats.overflowed) == (2 * WIDE.size, 2)
    assert found.to_dict()["cast"]["largest_error"] is None
    assert str(found).endswith("words changed, largest error infinite: 2 overflowed, beyond what fp16 can say")


def test_convert_to_fp16_reports_failed_dumps(dumps, tmp_path):
    write_dump(dumps, 7, 0, WIDE, WIDE, run="long", seq_len=31)
    write_dump(dumps, 8, 0, WIDE, WIDE, run="odd", bytes_per_elem=3)
    write_dump(dumps, 9, 0, WIDE, WIDE, run="out", k_file="../../../x.bin")
    found = convert_to_fp16(dumps, tmp_path / "half")
    assert (found.converted, found.skipped, len(found.errors), found.exit_code) == (1, 1, 3, 2)
    assert [path.name for path in sorted((tmp_path / "half").iterdir())] == ["wide"]
    (tmp_path / "none").mkdir()
    assert convert_to_fp16(tmp_path / "none", tmp_path / "half").exit_code == 1
    for bad in (dumps, dumps / "deeper", tmp_path):
        with pytest.raises(OutputError, match="must not lie in each other"):
            convert_to_fp16(dumps, bad)


def test_convert_to_fp16_full_disk_ends_conversion(dumps, tmp_path, monkeypatch):
    write_dump(dumps, 7, 0, WIDE, WIDE, run="zzz")

    def full(self: object, *_: object) -> None:
        raise OutputError("x: cannot be written: No space left on device") from OSError(errno.ENOSPC, "No space left")

    monkeypatch.setattr("kvmnn.files.atomic.StagedFile.write", full)
    found = convert_to_fp16(dumps, tmp_path / "half")
    assert (found.disk_full, found.exit_code, len(found.errors)) == (True, 3, 1)
    assert [path for path in (tmp_path / "half").rglob("*") if path.is_file()] == []
