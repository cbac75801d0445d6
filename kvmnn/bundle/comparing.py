"""Frames compared with the arrays they should hold: the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays.named_array import NamedArray, Piece
from ..arrays.source import FILE_KEY
from ..errors import SourceError
from ..threads.pipeline import Progress
from .decoding import decode_frames
from .frame_set import DecodeOptions, FrameSet

_STEP = 1 << 20


class Difference(NamedTuple):
    """Where an array is not what it was compared with; `array` is None for what lies around those of a whole file."""

    array: str | None
    what: str

    def __str__(self) -> str:
        return self.what if self.array is None else f"array {self.array!r} {self.what}"


def compare(
    frames: FrameSet,
    others: Sequence[NamedArray],
    options: DecodeOptions | None = None,
    *,
    progress: Progress | None = None,
) -> Difference | None:
    """Decode and compare with arrays, byte for byte; returns the first difference.

    One array is compared with one array whatever their names; several are matched by name.

    Raises
    ------
    KvmnnError
        As `decode_frames`; when the frames themselves are damaged; and when what the others were read from is, by a
        checksum that lies behind their last byte as well.
    """
    pairs = _pairs(frames, others)
    if isinstance(pairs, Difference):
        return pairs
    document = frames.document
    has_shapes = document is not None and FILE_KEY not in document.metadata  # of a file kept whole only bytes count
    for entry, other in zip(frames.arrays, pairs, strict=True):
        if has_shapes and entry.shape != other.shape and not _flat(other):
            return Difference(entry.name, f"shape {list(other.shape)} became {list(entry.shape)}")
        if entry.nbytes != other.nbytes:
            return Difference(entry.name, f"has {entry.nbytes} bytes, {other.name!r} has {other.nbytes}")
        if entry.order != other.order and not _flat(other):
            return Difference(entry.name, f"order {other.order} became {entry.order}")
    current, expected = 0, _Reader(pairs[0])
    for index, data in decode_frames(frames, options, progress=progress):
        if index != current:
            expected.finish()
            current, expected = index, _Reader(pairs[index])
        offset = expected.first_difference(data)
        if offset is not None:
            entry = frames.arrays[index]
            return Difference(entry.name, f"first differs at element {list(entry.index_of(offset))} (byte {offset})")
        del data  # or it would live on while the next frame is decoded
    expected.finish()
    return None


class _Reader:
    """An array that is read along with bytes to compare it with."""

    def __init__(self, array: NamedArray) -> None:
        self._pieces = array.pieces(_STEP)
        self._rest: Piece = np.empty(0, np.uint8)
        self._position = 0

    def first_difference(self, data: Piece) -> int | None:
        """Compare the array's next bytes with `data`; the offset in the array of the first byte that differs."""
        for start in range(0, data.size, _STEP):
            run = data[start : start + _STEP]
            differs = np.flatnonzero(run != self._take(run.size))
            if differs.size:
                return self._position + int(differs[0])
            self._position += run.size
        return None

    def finish(self) -> None:
        """Ask for what comes behind the last byte: only then do readers compare checksums, and count."""
        for _ in self._pieces:
            pass

    def _take(self, nbytes: int) -> Piece:
        while self._rest.size < nbytes:
            piece = next(self._pieces, None)
            if piece is None:
                raise SourceError("the file to compare with ends early")
            self._rest = np.concatenate([self._rest, piece]) if self._rest.size else piece
        run, self._rest = self._rest[:nbytes], self._rest[nbytes:]
        return run


def _flat(array: NamedArray) -> bool:
    """Whether an array has one axis: raw words say nothing of a shape, so only their bytes count."""
    return len(array.shape) == 1


def _pairs(frames: FrameSet, others: Sequence[NamedArray]) -> list[NamedArray] | Difference:
    if len(frames.arrays) == len(others) == 1:
        return list(others)
    by_name = {other.name: other for other in others}
    for entry in frames.arrays:
        if entry.name not in by_name:
            none = not any(one.name in by_name for one in frames.arrays)
            hint = ", as are all: were arrays parted into layers, as by --axes, then part these, too" if none else ""
            return Difference(entry.name, f"is in the frames only{hint}")
    extra = sorted(set(by_name) - {entry.name for entry in frames.arrays})
    if extra:
        return Difference(extra[0], "is not in the frames")
    return [by_name[entry.name] for entry in frames.arrays]
