"""Frames compared with the arrays they should hold: the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays.named_array import NamedArray, Piece
from ..errors import SourceError
from ..threads.pipeline import Progress
from .decoding import decode_frames
from .frame_set import DecodeOptions, FrameSet


class Difference(NamedTuple):
    """Where an array is not what it was compared with."""

    array: str
    what: str


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
        As `decode_frames`; and when the frames themselves are damaged.
    """
    pairs = _pairs(frames, others)
    if isinstance(pairs, Difference):
        return pairs
    for entry, other in zip(frames.arrays, pairs, strict=True):
        if frames.document is not None and entry.shape != other.shape and not _flat(other):
            return Difference(entry.name, f"shape {list(entry.shape)} became {list(other.shape)}")
        if entry.nbytes != other.nbytes:
            return Difference(entry.name, f"has {entry.nbytes} bytes, {other.name!r} has {other.nbytes}")
        if entry.order != other.order and not _flat(other):
            return Difference(entry.name, f"order {entry.order} became {other.order}")
    current = -1
    for index, data in decode_frames(frames, options, check_frames=True, progress=progress):
        if index != current:
            current, position, expected = index, 0, _Reader(pairs[index])
        for start in range(0, data.size, _COMPARE_STEP):
            run = data[start : start + _COMPARE_STEP]
            differs = np.flatnonzero(run != expected.take(run.size))
            if differs.size:
                entry = frames.arrays[index]
                offset = position + start + int(differs[0])
                return Difference(
                    entry.name, f"first differs at element {list(entry.index_of(offset))} (byte {offset})"
                )
        position += data.size
        del data, run  # or they would live on while the next frame is decoded
    return None


_COMPARE_STEP = 1 << 20


class _Reader:
    """An array's bytes, taken in runs of any length."""

    def __init__(self, array: NamedArray) -> None:
        self._pieces = array.pieces(_COMPARE_STEP)
        self._rest: Piece = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> Piece:
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
            return Difference(entry.name, "is in the frames only")
    extra = sorted(set(by_name) - {entry.name for entry in frames.arrays})
    if extra:
        return Difference(extra[0], "is not in the frames")
    return [by_name[entry.name] for entry in frames.arrays]
