"""Safetensors without the package: read what others write, refuse what the format forbids, write what others read."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from kvmnn.arrays.named_array import ArrayInfo
from kvmnn.errors import OutputError, SourceError
from kvmnn.files.mapped import MappedFile
from kvmnn.formats import open as open_source
from kvmnn.formats.options import ReadOptions
from kvmnn.formats.safetensors import layout, read_header


def pack(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return str(path)


def tensor(kind: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


def test_read(tmp_path):
    data = np.arange(20, dtype=np.uint8).tobytes()
    header = {
        "__metadata__": {"format": "pt"},
        "b": tensor("F32", [2, 1], 12, 20),
        "a": tensor("F16", [4], 0, 8),
        "c": tensor("BF16", [2], 8, 12),
    }
    source = open_source(pack(tmp_path / "x.safetensors", header, data))
    assert source.metadata == {"format": "pt"}
    found = [(a.name, a.dtype, a.array_dtype, a.shape, b"".join(map(bytes, a.pieces()))) for a in source.arrays]
    assert found == [
        ("a", "fp16", "<f2", (4,), data[:8]),
        ("c", "bf16", "<u2", (2,), data[8:12]),
        ("b", "fp32", "<f4", (2, 1), data[12:]),
    ]


def test_other_types_are_refused_or_left_out(tmp_path):
    header = {"k": tensor("F16", [4], 0, 8), "ids": tensor("I64", [1], 8, 16), "w": tensor("U16", [2], 16, 20)}
    path = pack(tmp_path / "x.safetensors", header, bytes(20))
    with pytest.raises(SourceError, match="tensor 'ids': type I64"):
        open_source(path)
    source = open_source(path, ReadOptions(skip_unsupported=True))
    assert [a.name for a in source.arrays] == ["k"]
    assert ["U16" in line for line in source.skipped] == [False, True]
    (words,) = open_source(path, ReadOptions(tensors=("w",), dtype="fp16")).arrays
    assert (words.dtype, words.array_dtype) == ("fp16", "<u2")


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"", b"", "not valid JSON"),
        (b"[]", b"", "not a JSON object"),
        (b"{" * 100_000, b"", "not valid JSON"),
        (b'{"a": 1, "a": 2}', b"", "twice"),
        ({"__metadata__": {"n": 1}}, b"", "not an object of strings"),
        ({"a": []}, b"", "shape is not a list"),
        ({"a": tensor("F16", [-1], 0, 2)}, bytes(2), "shape is not a list of non-negative"),
        ({"a": tensor("F16", [True], 0, 2)}, bytes(2), "shape is not a list of non-negative"),
        ({"a": tensor("F16", [1], 2, 0)}, bytes(2), "bad dtype or data_offsets"),
        ({"a": tensor("F16", [2], 0, 2)}, bytes(2), "needs 4 bytes, its data_offsets give 2"),
        ({"a": tensor("F16", [1 << 62, 4], 0, 2)}, bytes(2), "data_offsets give 2"),
        ({"a": tensor("F16", [1], 2, 4)}, bytes(4), "expected 0: data must have no holes"),
        ({"a": tensor("F16", [2], 0, 4), "b": tensor("F16", [2], 2, 6)}, bytes(6), "no overlaps"),
        ({"a": tensor("F16", [2], 0, 4)}, bytes(3), "is truncated"),
        ({"a": tensor("F16", [2], 0, 4)}, bytes(5), "has trailing bytes"),
        ({"a": tensor("F16", [0], 0, 0)}, b"", "is empty"),
        ({}, b"", "holds no array"),
    ],
)
def test_bad_files(tmp_path, header, data, message):
    with pytest.raises(SourceError) as caught:
        open_source(pack(tmp_path / "x.safetensors", header, data))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("length", "message"), [(1 << 63, "above the limit of 16777216"), (100_000, "is truncated: the header needs")]
)
def test_lying_header_length(tmp_path, length, message):
    with pytest.raises(SourceError, match=message):
        open_source(pack(tmp_path / "x.safetensors", {}, length=length))
    (tmp_path / "x.safetensors").write_bytes(b"1234567")
    with pytest.raises(SourceError, match="too few"):
        open_source(str(tmp_path / "x.safetensors"))


def test_a_header_above_the_limit_is_refused_before_it_is_read(tmp_path):
    """84 MiB took 16 seconds and 1.3 GB; a hole in a file costs who sends it nothing."""
    path = tmp_path / "x.safetensors"
    path.write_bytes((84 << 20).to_bytes(8, "little") + b"{")
    os.truncate(path, 100 << 20)
    start = time.process_time()
    with pytest.raises(SourceError, match="above the limit"):
        open_source(str(path))
    assert time.process_time() - start < 0.5


def test_a_header_of_many_tensors_takes_little(tmp_path):
    count = 20_000
    header = {f"layers.{number}.w": tensor("F16", [2], 4 * number, 4 * number + 4) for number in range(count)}
    path = Path(pack(tmp_path / "x.safetensors", header, bytes(4 * count)))
    tracemalloc.start()
    try:
        found, _, _ = read_header(MappedFile(path))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(found) == count
    assert most < 14 * path.stat().st_size  # 16 MiB, the limit: less than a quarter of a gigabyte


def info(name: str, dtype: str, array_dtype: str, *shape: int, order: str = "C") -> ArrayInfo:
    return ArrayInfo(name=name, dtype=dtype, shape=shape, array_dtype=array_dtype, order=order)  # type: ignore[arg-type]


def test_layout_is_aligned_and_read_back(tmp_path):
    arrays = [
        info("a", "fp16", "<f2", 3),
        info("b", "bf16", "<u2", 1),
        info("c", "fp32", "<f4", 2, 2),
        info("i", "fp16", "<i2", 1),
        info("u", "fp16", "<u2", 1),
        info("r", "fp16", "|u1", 2),
    ]
    head, begins = layout(arrays, {"who": "me"})
    assert len(head) % 8 == 0
    assert all(begins[a.name] % a.itemsize == 0 for a in arrays)
    kinds = {name: value["dtype"] for name, value in json.loads(head[8:]).items() if name != "__metadata__"}
    assert kinds == {"a": "F16", "b": "BF16", "c": "F32", "i": "I16", "u": "U16", "r": "U8"}
    (tmp_path / "x.safetensors").write_bytes(head + bytes(sum(a.nbytes for a in arrays)))
    source = open_source(str(tmp_path / "x.safetensors"), ReadOptions(skip_unsupported=True))
    assert {a.name: (a.dtype, a.array_dtype, a.shape) for a in source.arrays} == {
        a.name: (a.dtype, a.array_dtype, a.shape) for a in arrays[:3]
    }
    assert source.metadata == {"who": "me"}


def test_what_the_format_cannot_hold():
    with pytest.raises(OutputError, match="Fortran order"):
        layout([info("a", "fp16", "<f2", 2, 2, order="F")], {})
    with pytest.raises(OutputError, match="__metadata__"):
        layout([info("__metadata__", "fp16", "<f2", 2)], {})
