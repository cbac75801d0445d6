"""Small files of other engines and Zarr stores with huge claims: refused or read in time linear in their bytes."""

from __future__ import annotations

import json
import pickle
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import hf_files
import mlx_files
import numpy as np
import pytest
from fixtures.compressor_checkpoint import ORDERED_DICT, REBUILD, STORAGES, write_checkpoint

import kvmnn
from kvmnn.files.mapped_file import MappedFile
from kvmnn.formats import ReadOptions
from kvmnn.formats.llama import state as llama_state
from kvmnn.formats.zarr import reader as zarr_reading

HEAD = b"nsgg" + struct.pack("<II", 10, 0) + struct.pack("<I", 5) + b"llama"
OLD = b"nsgg" + struct.pack("<II", 9, 0) + struct.pack("<I", 5) + b"llama"
CELL = struct.pack("<iIi", 0, 1, 0)
ONE = struct.pack("<iQ", 1, 2) + b"ab"
SECONDS = 30
"""Far more than any of these takes on a busy machine, and far less than what they claim would take."""


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    started = time.process_time()
    yield
    assert time.process_time() - started < SECONDS


def one_line(run: Any, *argv: object) -> str:
    said = run(*argv, code=1).err
    assert said.startswith("kvmnn: error: ") and said.count("\n") == 1 and len(said) < 600
    return str(said)


def written(path: Path, *parts: bytes) -> Path:
    path.write_bytes(b"".join(parts))
    return path


# -- llama.cpp ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head", [HEAD, OLD], ids=["version 10", "version 9"])
def test_llama_state_million_empty_streams(tmp_path: Path, run: Any, head: bytes) -> None:
    path = written(tmp_path / "a.session", head, struct.pack("<I", 1 << 20), bytes(4 << 20))
    said = one_line(run, "inspect", path)
    assert "1,048,576 streams" in said or head == OLD


@pytest.mark.parametrize("head", [HEAD, OLD], ids=["version 10", "version 9"])
def test_llama_state_hundred_thousand_small_layers(tmp_path: Path, run: Any, head: bytes) -> None:
    layers = 100_000
    path = written(
        tmp_path / "a.session", head, struct.pack("<II", 1, 1), CELL, struct.pack("<II", 0, layers), ONE * 2 * layers
    )
    said = one_line(run, "measure", path)
    assert "100,000 layers" in said or head == OLD


def test_llama_state_wrong_field_never_exceeds_the_file(tmp_path: Path, run: Any) -> None:
    """One of three streams has another number of cells or layers, another type, row size or order of V."""
    good = struct.pack("<I", 1) + CELL + struct.pack("<II", 0, 1) + ONE * 2
    for place in range(0, len(good), 4):
        for number in (0, 2, 3, 31, 1 << 16, (1 << 31) - 1, 1 << 31, (1 << 32) - 1):
            lie = good[:place] + struct.pack("<I", number) + good[place + 4 :]
            if lie == good:
                continue
            for streams in (good + lie + good, lie + good + good, good + good + lie):
                path = written(tmp_path / "a.session", HEAD, struct.pack("<I", 3), streams)
                try:
                    source = kvmnn.open(path, ReadOptions())
                except kvmnn.KvmnnError:
                    continue
                assert source.nbytes <= path.stat().st_size


def test_llama_state_distinct_cells_take_linear_memory(tmp_path: Path) -> None:
    cells = 100_000
    parts = [struct.pack("<iIi", n, 1, 0) if n % 2 else struct.pack("<iIii", n, 2, 0, 1) for n in range(cells)]
    tensor = struct.pack("<iQ", 1, 2) + b"ab" * cells
    path = written(
        tmp_path / "a.session", HEAD, struct.pack("<II", 1, cells), *parts, struct.pack("<II", 0, 1), tensor * 2
    )
    found = llama_state.parse_structure(MappedFile(str(path))).caches[0][0]
    assert found.positions.tolist() == list(range(cells))
    assert found.seq_counts.tolist() == [2 - n % 2 for n in range(cells)]
    assert found.sequences_by_cell[:3] == [[0, 1], [0], [0, 1]] and len(found.seq_ids) == cells * 3 // 2
    source = kvmnn.open(path, ReadOptions(engine=kvmnn.formats.EngineOptions(allow_unknown_heads=True, sequence=1)))
    assert source.engine_cache.positions.tolist() == list(range(0, cells, 2))


@pytest.mark.parametrize("sequences", [1 << 10, 1 << 19, (1 << 32) - 1])
def test_llama_state_cell_of_many_sequences(tmp_path: Path, run: Any, sequences: int) -> None:
    """As many sequences as a window holds, more than that, and more than the file has bytes."""
    there = min(sequences, 1 << 19)
    cells = CELL * 3 + struct.pack("<iI", 1, sequences) + bytes(4 * there) + CELL * 3
    tensor = struct.pack("<iQ", 1, 2) + b"ab" * 7
    path = written(tmp_path / "a.session", HEAD, struct.pack("<II", 1, 7), cells, struct.pack("<II", 0, 1), tensor * 2)
    if there < sequences:
        one_line(run, "inspect", path)
    else:
        found = llama_state.parse_structure(MappedFile(str(path))).caches[0][0]
        assert found.seq_counts.tolist() == [1, 1, 1, sequences, 1, 1, 1] and found.positions.tolist() == [
            0,
            0,
            0,
            1,
            0,
            0,
            0,
        ]


# -- MLX ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("classes", [1 << 16, 1 << 17])
def test_mlx_metadata_of_missing_layers_is_refused(tmp_path: Path, run: Any, classes: int) -> None:
    words = np.zeros(64, np.float16).tobytes()
    tensors = {f"0.{side}": ("F16", [1, 1, 1, 64], words) for side in range(2)}
    tensors["0.2"] = ("I32", [], struct.pack("<i", 1))
    data = mlx_files.safetensors(Random(1), tensors, {f"1.{layer}": "KVCache" for layer in range(classes)})
    said = one_line(run, "inspect", written(tmp_path / "a.safetensors", data))
    assert "has no state '1.0'" in said or "above the limit of 16777216 bytes and 65536 entries" in said


@pytest.mark.parametrize(
    ("states", "said"),
    [
        ((1 << 31) - 1, "tokens: expected at least 1 and at most 8"),
        (-1, "tokens: expected at least 1 and at most 8"),
        (0, "tokens: expected at least 1 and at most 8"),
    ],
)
def test_mlx_wrong_token_count_is_refused(tmp_path: Path, run: Any, states: int, said: str) -> None:
    data, _ = mlx_files.cache(Random(1), mlx_files.Shape(tokens=5))
    assert data.count(struct.pack("<i", 5)) >= 2
    lie = data.replace(struct.pack("<i", 5), struct.pack("<i", states))
    assert said in one_line(run, "measure", written(tmp_path / "a.safetensors", lie))


# -- torch -------------------------------------------------------------------------------------------------------------


class _Empty(hf_files.CachePickler):
    """Pickles the array of seven as an empty tensor of `shape`."""

    shape: tuple[int, ...] = ()

    def _save_array(self, array: np.ndarray) -> None:
        if array.shape != (7,):
            super()._save_array(array)
            return
        key = str(len(self.storages))
        self.storages.append(array[:0])
        self.save(REBUILD)
        self.write(pickle.MARK)
        self.save(("storage", STORAGES[array.dtype.str], key, "cpu", 0))
        self.write(pickle.BINPERSID)
        for value in (0, self.shape, (0,) * len(self.shape), False):
            self.save(value)
        self.save(ORDERED_DICT)
        self.write(pickle.EMPTY_TUPLE + pickle.REDUCE + pickle.TUPLE + pickle.REDUCE)


@pytest.mark.parametrize("shape", [(1 << 70, 0, 2, 2), (1 << 62, 0, 2, 2), (2, 0, 1 << 70, 4), (0,) + (1 << 9,) * 20])
@pytest.mark.parametrize("place", ["keys", "length", "pair", "beside"])
def test_torch_empty_tensor_of_huge_shape(
    tmp_path: Path, run: Any, monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], place: str
) -> None:
    monkeypatch.setattr(_Empty, "shape", shape)
    words, empty = np.ones((1, 2, 3, 4), "<f2"), np.ones(7, "<i8" if place == "length" else "<f2")
    layer = {"keys": empty if place == "keys" else words, "values": words, "max_cache_len": 3}
    layer |= {"cumulative_length": empty} if place == "length" else {}
    value: Any = hf_files.cache_object("StaticCache", "StaticLayer", [layer])
    if place == "pair":
        value = [(empty, words)]
    if place == "beside":
        value = {"cache": [(words, words)], "input_ids": empty}
    write_checkpoint(tmp_path / "a.pt", value, name="a", pickler_class=_Empty)
    one_line(run, "inspect", tmp_path / "a.pt")
    assert "a tensor of the shape" in one_line(run, "measure", tmp_path / "a.pt")


# -- Zarr --------------------------------------------------------------------------------------------------------------

GROUP = {"zarr_format": 3, "node_type": "group"}


def array_document(shape: list[int], chunks: list[int], **changes: Any) -> str:
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": shape,
        "data_type": "float16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": chunks}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
    }
    return json.dumps({**document, **changes})


@pytest.mark.slow
@pytest.mark.parametrize("separator", ["/", "."])
def test_zarr_sixteen_million_missing_chunks(tmp_path: Path, run: Any, separator: str) -> None:
    path = tmp_path / "a.zarr"
    path.mkdir()
    keys = {"name": "default", "configuration": {"separator": separator}}
    (path / "zarr.json").write_text(array_document([1 << 20, 16], [1, 1], chunk_key_encoding=keys))
    chunk = path / "c/7/3" if separator == "/" else path / "c.7.3"
    chunk.parent.mkdir(parents=True, exist_ok=True)
    chunk.write_bytes(b"ab")
    for name in ("c/7/16", "c/07/3", "c/7/3/1") if separator == "/" else ("c.7.16", "c.07.3", "c.7"):
        if name != "c/7/3/1":
            (path / name).parent.mkdir(parents=True, exist_ok=True)
            (path / name).write_bytes(b"no chunk of the array")
    said = run("inspect", path).out
    assert "16,777,216 chunks (16,777,215 not there)" in said and "-> 2 bytes" in said
    assert "expected at most 16,384 chunks" in one_line(run, "encode", path, "-o", tmp_path / "a.frame")
    assert not (tmp_path / "a.frame").exists()


def test_zarr_groups_linked_to_each_other(tmp_path: Path, run: Any) -> None:
    """Eight links to the previous folder at each of ten levels (a billion groups), and a link to the folder itself."""
    for floor in range(10):
        folder = tmp_path / f"d{floor}"
        folder.mkdir()
        (folder / "zarr.json").write_text(json.dumps(GROUP))
        for name in "abcdefgh" if floor else ():
            (folder / name).symlink_to(tmp_path / f"d{floor - 1}")
    (tmp_path / "d0/k").mkdir()
    (tmp_path / "d0/k/zarr.json").write_text(array_document([2], [2]))
    (tmp_path / "d0/k/c").mkdir()
    (tmp_path / "d0/k/c/0").write_bytes(b"abcd")
    assert len(kvmnn.open(tmp_path / "d2")) == 64
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zarr_reading, "MAX_ENTRIES", 2000)
        assert "holds more than 2,000 groups and arrays" in one_line(run, "inspect", tmp_path / "d9")
    (tmp_path / "d0/self").symlink_to(tmp_path / "d0")
    assert "lies below more than 16 groups" in one_line(run, "inspect", tmp_path / "d0")


# -- pages -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "code"),
    [
        ("2,-1,999999999999,8", 2),
        ("99999999999999999999,-1,1,1", 2),
        ("2,9223372036854775807,1,1", 2),
        ("1,-1,0,8", 2),
        ("2,-1,-1,8", 2),
    ],
)
def test_page_shape_out_of_range_is_refused(tmp_path: Path, run: Any, shape: str, code: int) -> None:
    path = written(tmp_path / "m@1@0@1a@half.pt", np.ones(64, np.float16).tobytes())
    said = run("measure", path, f"--shape={shape}", "--axes", "2thd", code=code).err
    assert said.startswith("kvmnn: error: ") and said.count("\n") == 1


@pytest.mark.parametrize(
    "name", ["m@1@0@1a@half@99999999999999999999.pt", "m@1@0@1a@float7.pt", "@@@@.pt", "a@1@0@1a@half@-1.pt"]
)
def test_page_with_misleading_name_is_read(tmp_path: Path, run: Any, name: str) -> None:
    path = written(tmp_path / name, np.ones(64, np.float16).tobytes())
    found = run("measure", path, "--shape", "2,-1,2,4", "--axes", "2thd", "--dtype", "fp16")
    assert "LOSSLESS" in found.out or "layer" in found.out
