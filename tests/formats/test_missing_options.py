"""What an input needs and does not say itself: every verb that opens it says so in one line with the option, and ends
with exit code 2; with the option it goes on."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any, NamedTuple
from unittest.mock import patch

import hf_files
import llama_files
import numpy as np
import packed_samples
import pytest
from fixtures.compressor_checkpoint import STORAGES, _Named

import kvmnn
from kvmnn.errors import MissingOptionError, OptionError, SourceError

WORDS = np.random.default_rng(4).integers(0, 1 << 16, (2, 2, 8, 2, 4), np.uint16)


class Case(NamedTuple):
    """An input, the option that it lacks, and verbs that need it."""

    make: Callable[[Path], Path]
    said: str
    option: tuple[str, ...]
    verbs: tuple[str, ...]
    more: tuple[str, ...] = ()
    """What is said in both runs."""


def session(folder: Path, **options: Any) -> Path:
    data, _ = llama_files.state(Random(1), llama_files.Shape(dims=16, value_dims=16), **{"cells": [3], **options})
    return written(folder / "a.session", data)


def written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


def saved(path: Path, **arrays: np.ndarray) -> Path:
    np.savez(path, **arrays)
    return path


def prefix(folder: Path, *names: str, dtype: str = "fp32") -> Path:
    """Noise in full files, of which neither empty rows nor means of dimensions tell anything."""
    for name in names:
        packed_samples.write_prefix(
            folder / "p", packed_samples.arrays(2, 2, 64, 8, dtype), name=name, capacity=64, padding=b"\0"
        )
    return folder / "p"


def half_full(folder: Path) -> Path:
    """A prefix whose session went on, or one of more tokens: both have such files."""
    packed_samples.write_prefix(folder / "p", packed_samples.arrays(2, 2, 100, 8), capacity=128, padding=b"\0")
    return folder / "p"


def live(folder: Path) -> Path:
    made = prefix(folder, "sys")
    for number in range(2):
        for part in "kv":
            (made / f"sys_{number}.{part}").rename(made / f"{0x1000 * (number + 1):016X}.{part}")
            (made / f"sys_{number}_sync.{part}").unlink()
            os.utime(made / f"{0x1000 * (number + 1):016X}.{part}", (1e9, 1e9))  # as copies are
    return made


def safetensors(path: Path, kind: str, **arrays: np.ndarray) -> Path:
    header, data = {}, b""
    for name, array in arrays.items():
        offsets = [len(data), len(data) + array.nbytes]
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": offsets}
        data += array.tobytes()
    text = json.dumps(header).encode()
    return written(path, len(text).to_bytes(8, "little") + text + data)


def integers(folder: Path) -> Path:
    pairs = [tuple(part.view("<i4") for part in pair) for pair in hf_files.pairs(1, dtype="fp32")]
    with patch.dict(STORAGES, {"<i4": _Named("torch", "IntStorage")}):
        return hf_files.save(folder / "c.pt", pairs)


AS_K = {"layer_0.key": WORDS[0, 0], "layer_0.value": WORDS[1, 0]}
GEOMETRY = ("--kv-heads", "2", "--head-dim", "8", "--backend", "x86-avx2")
PACKED = (*GEOMETRY, "--valid-tokens", "64")
ARRAYS = ("encode", "measure", "mnn pack")
KV = ("measure", "mnn pack")
OF_PACKED = ("encode", "measure", "mnn unpack")

CASES = {
    "llama.cpp, kv heads": Case(session, "--kv-heads", ("--kv-heads", "2"), ("mnn unpack", "mnn pack")),
    "llama.cpp, stream": Case(
        lambda folder: session(folder, cells=[3, 2]),
        "--part stream",
        ("--part", "stream=1"),
        ("mnn unpack", "mnn pack"),
        ("--kv-heads", "2"),
    ),
    "prefix, geometry": Case(
        lambda folder: prefix(folder, "sys"), "--kv-heads", PACKED[:6], verbs=OF_PACKED, more=PACKED[6:]
    ),
    "prefix, tokens": Case(
        lambda folder: half_full(folder), "--valid-tokens", PACKED[6:], verbs=OF_PACKED, more=GEOMETRY
    ),
    "prefix, name": Case(
        lambda folder: prefix(folder, "a", "b"), "--name", ("--name", "b"), verbs=OF_PACKED, more=PACKED
    ),
    "prefix, backend": Case(
        lambda folder: prefix(folder, "sys"), "--backend", PACKED[4:6], verbs=OF_PACKED, more=(*PACKED[:4], *PACKED[6:])
    ),
    "live files, order": Case(
        live, "--layer-order", ("--layer-order", "0000000000001000,0000000000002000"), verbs=OF_PACKED, more=PACKED
    ),
    "raw words, dtype": Case(
        lambda folder: written(folder / "a.bin", WORDS.tobytes()),
        "--dtype",
        ("--dtype", "fp16"),
        KV,
        ("--shape", "2,2,8,2,4", "--axes", "2lthd"),
    ),
    "raw words alone, dtype": Case(
        lambda folder: written(folder / "a.bin", WORDS.tobytes()), "--dtype", ("--dtype", "fp16"), ("encode",)
    ),
    "a page of LMCache, axes": Case(
        lambda folder: written(folder / "m@1@0@12ab@bfloat16.pt", WORDS.tobytes()),
        "--axes",
        ("--shape", "2,2,8,2,4", "--axes", "2lthd"),
        KV,
    ),
    "a page of LMCache, shape": Case(
        lambda folder: saved(folder / "a.npz", kv=WORDS.view(np.uint8)),
        "--shape",
        ("--shape", "2,2,8,2,4"),
        KV,
        ("--dtype", "fp16", "--axes", "2lthd"),
    ),
    "pages, that they are": Case(
        lambda folder: saved(folder / "a.npz", a_k_0=WORDS[0, 0], b_k_0=WORDS[0, 1], v_0=WORDS[1].reshape(16, 2, 4)),
        "--pages",
        ("--pages",),
        KV,
        ("--dtype", "fp16", "--axes", "thd"),
    ),
    "npz of int16, dtype": Case(
        lambda folder: saved(folder / "a.npz", **{name: array.view("<i2") for name, array in AS_K.items()}),
        "--dtype",
        ("--dtype", "fp16"),
        ARRAYS,
    ),
    "npz of bytes, dtype": Case(
        lambda folder: saved(folder / "a.npz", k=WORDS.view(np.uint8)), "--dtype", ("--dtype", "bf16"), ("encode",)
    ),
    "safetensors of U16, dtype": Case(
        lambda folder: safetensors(folder / "a.safetensors", "U16", **AS_K), "--dtype", ("--dtype", "bf16"), ARRAYS
    ),
    "arrays, names": Case(
        lambda folder: saved(folder / "a.npz", whole=WORDS), "--axes", ("--axes", "2lthd"), KV, ("--dtype", "bf16")
    ),
    "arrays, axes": Case(
        lambda folder: saved(folder / "a.npz", **{"0.0": WORDS[0, 0], "0.1": WORDS[1, 0]}),
        "--axes",
        ("--axes", "thd"),
        KV,
    ),
    "arrays, tokens first": Case(
        lambda folder: saved(folder / "a.npz", **{n: np.zeros((300, 2, 4), np.float16) for n in AS_K}),
        "--token-major",
        ("--token-major",),
        KV,
    ),
    "arrays, batch": Case(
        lambda folder: saved(folder / "a.npz", **{f"layer_0.{part}": WORDS[:, 0] for part in ("key", "value")}),
        "--part batch",
        ("--part", "batch=1"),
        KV,
    ),
    "a saved cache, batch": Case(
        lambda folder: hf_files.save(folder / "c.pt", hf_files.pairs(1, shape=(2, 2, 5, 4))),
        "--part batch",
        ("--part", "batch=1"),
        KV,
    ),
    "a saved cache of integers, dtype": Case(integers, "--dtype", ("--dtype", "fp32"), ("encode", "measure")),
    "vLLM, axes": Case(
        lambda folder: safetensors(folder / "layers.0.attn.safetensors", "BF16", kv_cache=WORDS[0]).parent,
        "--axes",
        ("--axes", "2thd"),
        KV,
    ),
}
RUNS = [pytest.param(case, verb, id=f"{name} ({verb})") for name, case in CASES.items() for verb in case.verbs]
OUTPUTS = {
    "encode": ("-o", "made/"),
    "mnn unpack": ("-o", "made.npz"),
    "mnn pack": ("--backend", "x86-avx2", "--cast", "--name", "x", "-o", "made/"),
    "measure": (),
}


@pytest.mark.parametrize(("case", "verb"), RUNS)
def test_commands_missing_option_is_named(
    case: Case, verb: str, tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "out").mkdir()
    path = case.make(tmp_path / "in")
    monkeypatch.chdir(tmp_path / "out")
    words = [verb, path, *case.more, *(word for word in OUTPUTS[verb] if verb != "mnn pack" or word not in case.more)]
    said = run(*words, code=2).err
    first, *choices = said.splitlines()
    assert case.said in first and not list((tmp_path / "out").iterdir())
    assert all(line.startswith(f"  kvmnn {verb} ") for line in choices)
    run(*words, *case.option)


def test_missing_option_error_is_source_and_option_error(tmp_path: Path) -> None:
    """So that callers who catch either catch it."""
    assert issubclass(MissingOptionError, OptionError) and issubclass(MissingOptionError, SourceError)
    with pytest.raises(MissingOptionError):
        kvmnn.open(written(tmp_path / "a.bin", WORDS.tobytes()))


@pytest.mark.parametrize(
    ("name", "data"),
    [("a.onnx", WORDS.tobytes()), ("a.bin", b""), ("a.bin", b"a text\n"), ("a.bin", b"PK\x03\x04" * 9)],
)
def test_commands_other_files_are_bad_input(name: str, data: bytes, tmp_path: Path, run: Any) -> None:
    said = run("encode", written(tmp_path / name, data), "-o", tmp_path / "f/", code=1).err
    assert "not a file kvmnn knows" in said and said.count("\n") == 1
