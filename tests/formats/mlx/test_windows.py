"""Sliding windows of mlx-lm: rows in the order of the text, with true positions."""

from __future__ import annotations

import struct
from pathlib import Path
from random import Random

import mlx_files
import numpy as np
import pytest
from kept_files import there_and_back

import kvmnn
from kvmnn.errors import SourceError

HEADS, DIMS = 2, 4
GROWTH = 256


class Window:
    """mlx-lm's RotatingKVCache with one number a row: the token in it, -1 for none."""

    def __init__(self, most: int, keep: int) -> None:
        self.most, self.keep, self.seen, self.index = most, keep, 0, 0
        self.rows: list[int] = []

    def ordered(self) -> list[int]:
        if self.index == len(self.rows):
            return self.rows
        if self.index < self.seen:
            return [*self.rows[: self.keep], *self.rows[self.index :], *self.rows[self.keep : self.index]]
        return self.rows[: self.index]

    def several(self, count: int) -> None:
        """A prompt: in order, and cut in front."""
        new = list(range(self.seen, self.seen + count))
        if not self.rows:
            self.rows = new
        else:
            self.rows = self.ordered()
            over = len(self.rows) - self.most + 1
            if over > 0:
                self.rows = [*self.rows[: self.keep], *self.rows[over + self.keep :]]
            self.rows = [*self.rows, *new]
        self.seen += count
        self.index = len(self.rows)

    def one(self) -> None:
        """A token: over the oldest, once the window is full."""
        if not self.rows or (self.seen >= len(self.rows) and len(self.rows) < self.most):
            self.rows = [*self.rows, *[-1] * min(GROWTH, self.most - self.seen)]
            self.index = self.seen
        over = len(self.rows) - self.most
        if over > 0:
            self.rows = [*self.rows[: self.keep], *self.rows[over + self.keep :]]
            self.index = self.most
        if self.index == self.most:
            self.index = self.keep
        self.rows[self.index] = self.seen
        self.seen += 1
        self.index += 1


def words(layer: int, part: int, token: int) -> np.ndarray:
    """[head, dimension] of a token; of an empty row, values that must not be read."""
    number = 7 * token + 1000 * part + 3000 * layer
    return np.arange(number, number + HEADS * DIMS).reshape(HEADS, DIMS).astype("<f2")


def file_of(windows: list[Window | None], tokens: int, *, new: bool = True) -> bytes:
    """Layers with a window, and (None) such that hold all tokens."""
    tensors: dict[str, tuple[str, list[int], bytes]] = {}
    metadata: dict[str, str] = {}
    for layer, window in enumerate(windows):
        rows = list(range(tokens)) if window is None else window.rows
        for part in (0, 1):
            data = np.stack([words(layer, part, token) for token in rows], axis=1)
            tensors[f"{layer}.{part}"] = ("F16", [1, HEADS, len(rows), DIMS], data.tobytes())
        said = [tokens] if window is None else [window.seen, window.keep, window.most, window.index]
        name = "KVCache" if window is None else "RotatingKVCache"
        if new:
            for number, value in enumerate(said):
                tensors[f"{layer}.{2 + number}"] = ("I32", [], struct.pack("<i", value))
            metadata[f"1.{layer}"] = name
        else:
            settings = [] if window is None else [window.keep, window.most, window.seen, window.index]
            metadata |= {f"0.{layer}.{number}": str(value) for number, value in enumerate(settings)}
            metadata[f"2.{layer}"] = name
    return mlx_files.safetensors(Random(1), tensors, metadata | ({"2.0": ""} if new else {"1.model": "tiny"}))


def check(path: Path, windows: list[Window | None], tokens: int) -> kvmnn.arrays.Source:
    source = kvmnn.open(path)
    cache = source.engine_cache
    assert cache is not None
    assert cache.is_ascending
    for layer, window in enumerate(windows):
        held = list(range(tokens)) if window is None else window.ordered()
        said = cache.positions if cache.layer_positions is None else cache.layer_positions[layer]
        assert said.tolist() == held
        for part, name in enumerate(("key", "value")):
            array = source[f"layer_{layer}.{name}"]
            expected = np.stack([words(layer, part, token) for token in held], axis=1)
            assert np.array_equal(array.to_numpy(), expected)
            for limit in (2 * DIMS, 2 * DIMS * 3, 2 * DIMS * 50):
                assert b"".join(map(bytes, array.iter_chunks(limit))) == expected.tobytes()
    return source


STEPS = {
    "fewer than are kept": [2],
    "not full": [3, 1, 1],
    "just full": [6, 1, 1],
    "turned": [5, *[1] * 9],
    "turned to the end": [8, *[1] * 8],
    "a long prompt": [20],
    "a long prompt, then tokens": [20, 1, 1, 1],
    "prompts and tokens": [3, 9, 1, 1, 4, 1],
    "tokens alone": [1] * 30,
}


@pytest.mark.parametrize("new", [True, False], ids=["new", "old"])
@pytest.mark.parametrize("keep", [0, 3])
@pytest.mark.parametrize("steps", STEPS)
def test_mlx_windows_are_in_text_order(tmp_path: Path, run, steps: str, keep: int, new: bool) -> None:
    windows = [Window(8, keep), Window(8, keep)]
    for window in windows:
        for count in STEPS[steps]:
            window.several(count) if count > 1 else window.one()
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of(windows, 0, new=new))
    check(path, windows, 0)
    there_and_back(run, path)


def test_mlx_layers_with_and_without_window(tmp_path: Path, run) -> None:
    window = Window(8, 2)
    for _ in range(13):
        window.one()
    path = tmp_path / "x.safetensors"
    path.write_bytes(file_of([None, window, None], 13))
    source = check(path, [None, window, None], 13)
    cache = source.engine_cache
    assert cache is not None
    assert not cache.is_contiguous_prefix
    assert cache.to_dict()["layer_positions"] == [[[0, 13]], [[0, 2], [7, 6]], [[0, 13]]]
    assert "13 tokens, float16, of which layers hold 8 to 13" in run("inspect", path).out
    pack = ("mnn", "pack", path, "--backend", "arm64-fp16", "--name", "s", "--capacity", 64, "-o", tmp_path / "p")
    assert "layers with a window contain 8 of 13 tokens" in run(*pack, code=1).err
    assert not (tmp_path / "p").exists()
    run("encode", path, "-o", tmp_path / "x.zarr")
    again = kvmnn.open(tmp_path / "x.zarr").engine_cache
    assert again is not None
    assert again.to_dict() == cache.to_dict()
    with pytest.raises(SourceError, match="no beginning of a text"):
        from kvmnn.store.adapters import read_layer_caches

        read_layer_caches(source)


@pytest.mark.parametrize("wrong", [{"keep": 9}, {"keep": -1}, {"index": 9}, {"index": -1}, {"seen": 0}, {"most": -1}])
def test_mlx_inconsistent_windows_are_refused(tmp_path: Path, wrong: dict[str, int]) -> None:
    window = Window(8, 2)
    window.several(8)
    vars(window).update(wrong)
    (tmp_path / "x.safetensors").write_bytes(file_of([window], 0))
    with pytest.raises(SourceError, match=r"do not fit 8 rows|rows hold tokens"):
        kvmnn.open(tmp_path / "x.safetensors")


def test_mlx_layers_of_different_texts_are_refused(tmp_path: Path) -> None:
    first, second = Window(8, 2), Window(8, 2)
    first.several(8)
    second.several(7)
    (tmp_path / "x.safetensors").write_bytes(file_of([first, second], 0))
    with pytest.raises(SourceError, match="its layers have seen 7 to 8 tokens"):
        kvmnn.open(tmp_path / "x.safetensors")
