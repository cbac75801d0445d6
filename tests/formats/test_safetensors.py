"""Safetensors without the package: files of others are read, invalid ones refused, written ones readable by others."""

from __future__ import annotations

import json
import os
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from kvmnn.arrays.array import ArrayInfo
from kvmnn.errors import OutputError, SourceError
from kvmnn.files.mapped_file import MappedFile
from kvmnn.formats import open as open_source
from kvmnn.formats.options import ReadOptions
from kvmnn.formats.safetensors import build_header, read_header


def pack(path: Path, header: object, data: bytes = b"", *, length: int | None = None) -> str:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return str(path)


def tensor(kind: str, shape: list[int], begin: int, end: int) -> dict[str, object]:
    return {"dtype": kind, "shape": shape, "data_offsets": [begin, end]}


def test_safetensors_arrays_and_metadata_are_read(tmp_path):
    data = np.arange(20, dtype=np.uint8).tobytes()
    header = {
        "__metadata__": {"format": "pt"},
        "b": tensor("F32", [2, 1], 12, 20),
        "a": tensor("F16", [4], 0, 8),
        "c": tensor("BF16", [2], 8, 12),
    }
    source = open_source(pack(tmp_path / "x.safetensors", header, data))
    assert source.metadata == {"format": "pt"}
    found = [(a.name, a.dtype, a.array_dtype, a.shape, b"".join(map(bytes, a.iter_chunks()))) for a in source.arrays]
    assert found == [
        ("a", "fp16", "<f2", (4,), data[:8]),
        ("c", "bf16", "<u2", (2,), data[8:12]),
        ("b", "fp32", "<f4", (2, 1), data[12:]),
    ]


def test_safetensors_other_types_are_refused_or_skipped(tmp_path):
    header = {"k": tensor("F16", [4], 0, 8), "ids": tensor("I64", [1], 8, 16), "w": tensor("U16", [2], 16, 20)}
    path = pack(tmp_path / "x.safetensors", header, bytes(20))
    with pytest.raises(SourceError, match="tensor 'ids': type I64"):
        open_source(path)
    source = open_source(path, ReadOptions(skip_unsupported=True))
    assert [a.name for a in source.arrays] == ["k"]
    assert ["U16" in line for line in source.skipped_arrays] == [False, True]
    (words,) = open_source(path, ReadOptions(tensors=("w",), dtype="fp16")).arrays
    assert (words.dtype, words.array_dtype) == ("fp16", "<u2")


def test_safetensors_conflicting_dtype_is_refused(tmp_path):
    header = {"a": tensor("F16", [2], 0, 4), "b": tensor("BF16", [2], 4, 8)}
    path = pack(tmp_path / "x.safetensors", header, bytes(8))

    def taken(name: str, dtype: str) -> str:
        (array,) = open_source(path, ReadOptions(tensors=(name,), dtype=dtype)).arrays
        return array.dtype

    assert taken("b", "bf16") == "bf16"
    assert taken("a", "fp16") == "fp16"
    for name, own, other in (("a", "fp16", "bf16"), ("b", "bf16", "fp16"), ("a", "fp16", "fp32")):
        said = rf"tensor '{name}': holds {own} numbers, and {other} \(--dtype\) would make others of them: leave"
        with pytest.raises(SourceError, match=said):
            taken(name, other)


EMPTY = b'"a": {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}'


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        (b"", b"", "not valid JSON"),
        (b"[]", b"", "not a JSON object"),
        (b"{" * 100_000, b"", "not valid JSON"),
        (b'{"a": 1, "a": 2}', b"", "tensor 'a': is not an object of dtype"),
        (b"{%b, %b}" % (EMPTY, EMPTY), b"", "twice"),
        ({"__metadata__": {"n": 1}}, b"", "not an object of strings"),
        ({"a": []}, b"", "is not an object of dtype, shape and data_offsets"),
        ({"a": {"dtype": "U8", "data_offsets": [0, 0]}}, b"", "lacks its dtype, shape or data_offsets"),
        ({"a": tensor("U8", [0], 0, 0) | {"x": 1}}, b"", "has 'x', which tensors do not have"),
        ({"a": tensor("U8", {}, 0, 0)}, b"", "shape is not a list"),
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
def test_safetensors_malformed_header_is_refused(tmp_path, header, data, message):
    with pytest.raises(SourceError) as caught:
        open_source(pack(tmp_path / "x.safetensors", header, data))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("length", "message"), [(1 << 63, "above the limit of 100000000"), (100_000, "is truncated: the header needs")]
)
def test_safetensors_wrong_header_length_is_refused(tmp_path, length, message):
    with pytest.raises(SourceError, match=message):
        open_source(pack(tmp_path / "x.safetensors", {}, length=length))
    (tmp_path / "x.safetensors").write_bytes(b"1234567")
    with pytest.raises(SourceError, match="too few"):
        open_source(str(tmp_path / "x.safetensors"))


@pytest.mark.parametrize(
    ("length", "message"), [(100_000_001, "above the limit of 100000000"), (84 << 20, "not valid JSON: offset 1: ")]
)
def test_safetensors_long_empty_header_is_refused_at_once(tmp_path, length, message):
    """84 MiB took 16 seconds and 1.3 GB; a hole in a file costs who sends it nothing."""
    path = tmp_path / "x.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + b"{")
    os.truncate(path, 110 << 20)
    start = time.process_time()
    with pytest.raises(SourceError, match=message):
        open_source(str(path))
    assert time.process_time() - start < 0.5


@pytest.mark.slow
def test_safetensors_million_tensors_open_in_seconds(tmp_path):
    """Under two on an idle machine; all are checked, and only selected ones are built."""
    count = 1_000_000
    path = tmp_path / "x.safetensors"
    text = ",".join(
        f'"layers.{number}.w":{{"dtype":"BF16","shape":[2],"data_offsets":[{4 * number},{4 * number + 4}]}}'
        for number in range(count)
    )
    path.write_bytes((len(text) + 2).to_bytes(8, "little") + b"{" + text.encode() + b"}")
    os.truncate(path, 10 + len(text) + 4 * count)
    start = time.process_time()
    source = open_source(str(path))
    assert time.process_time() - start < 5
    assert (len(source), source.nbytes) == (count, 4 * count)
    last = source["layers.999999.w"]
    assert (last.dtype, last.shape, last.to_numpy().tolist()) == ("bf16", (2,), [0, 0])
    assert [array.name for array in source.arrays[:2]] == ["layers.0.w", "layers.1.w"]
    with pytest.raises(KeyError, match=r"there are 'layers\.0\.w'"):
        source["layers.1000000.w"]


def test_safetensors_many_tensors_take_little_memory(tmp_path):
    count = 20_000
    header = {f"layers.{number}.w": tensor("F16", [2], 4 * number, 4 * number + 4) for number in range(count)}
    path = Path(pack(tmp_path / "x.safetensors", header))
    nbytes = path.stat().st_size
    os.truncate(path, nbytes + 4 * count)
    open_source(str(path))
    tracemalloc.start()
    try:
        source = open_source(str(path))
        _, most = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(source) == len(read_header(MappedFile(path)).tensors) == count
    assert most < 2.5 * nbytes + 100_000  # 100 MB, the limit: a quarter of a gigabyte


def test_safetensors_arrays_are_found_after_skipping(tmp_path):
    header = {f"t{n}": tensor("F16" if n % 3 else "I64", [8 if n % 3 else 2], 16 * n, 16 * n + 16) for n in range(9)}
    path = pack(tmp_path / "x.safetensors", header, bytes(range(144)))
    source = open_source(path, ReadOptions(skip_unsupported=True))
    assert list(source) == [name for n, name in enumerate(header) if n % 3]
    assert [source[name].name for name in source] == list(source)
    assert [line.split(": ")[1] for line in source.skipped_arrays] == ["tensor 't0'", "tensor 't3'", "tensor 't6'"]
    assert source["t4"].to_numpy().tobytes() == bytes(range(64, 80))
    assert source.nbytes == sum(array.nbytes for array in source.arrays) == 96
    with pytest.raises(KeyError):
        source["t3"]
    assert open_source(path, ReadOptions(tensors=("t5", "t2", "t5"))).names == ("t2", "t5")
    with pytest.raises(SourceError, match=r"no array named 'u'; it has 't0', .* and 1 more"):
        open_source(path, ReadOptions(tensors=("t2", "u")))


def info(name: str, dtype: str, array_dtype: str, *shape: int, order: str = "C") -> ArrayInfo:
    return ArrayInfo(name=name, dtype=dtype, shape=shape, array_dtype=array_dtype, order=order)  # type: ignore[arg-type]


def test_build_header_is_aligned_and_read_back(tmp_path):
    arrays = [
        info("a", "fp16", "<f2", 3),
        info("b", "bf16", "<u2", 1),
        info("c", "fp32", "<f4", 2, 2),
        info("i", "fp16", "<i2", 1),
        info("u", "fp16", "<u2", 1),
        info("r", "fp16", "|u1", 2),
    ]
    head, begins = build_header(arrays, {"who": "me"})
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


def test_build_header_unsupported_arrays_are_refused():
    with pytest.raises(OutputError, match="Fortran order"):
        build_header([info("a", "fp16", "<f2", 2, 2, order="F")], {})
    with pytest.raises(OutputError, match="__metadata__"):
        build_header([info("__metadata__", "fp16", "<f2", 2)], {})


def test_inspect_safetensors_lists_a_thousand_by_default(tmp_path, run):
    header = {f"t{n}": tensor("F16", [1], 2 * n, 2 * n + 2) for n in range(1002)}
    header |= {f"w{n}": tensor("I64", [1], 2004 + 8 * n, 2012 + 8 * n) for n in range(1003)}
    path = pack(tmp_path / "x.safetensors", header, bytes(2004 + 8 * 1003))
    lines = run("inspect", path).out.splitlines()
    assert lines[0] == f"{path}: 1,002 arrays to encode"
    assert lines[1000:1002] == ["  t999: fp16 [1] C, 2 bytes", "  and 2 more: -v lists all"]
    assert len(lines) == 2003 and lines[2002] == "  and 3 more: -v lists all"
    found = json.loads(run("inspect", path, "--json").out)["inputs"][0]
    assert (len(found["arrays"]), found["arrays_left_out"]) == (1000, 2)
    assert (len(found["skipped"]), found["skipped_left_out"]) == (1000, 3)
    every = json.loads(run("inspect", path, "--json", "-v").out)["inputs"][0]
    assert (len(every["arrays"]), every["arrays_left_out"], every["skipped_left_out"]) == (1002, 0, 0)
    text = run("inspect", path, "-v").out
    assert len(text.splitlines()) == 2006 and "more:" not in text
    few = dict(list(header.items())[:1000])
    assert "more:" not in run("inspect", pack(tmp_path / "few.safetensors", few, bytes(2000))).out
