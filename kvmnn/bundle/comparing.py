"""Frames compared with the arrays they should hold: the first difference."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays.named_array import Chunk, LazyArray
from ..arrays.source import FILE_KEY
from ..errors import SourceError
from ..threads.pipeline import Progress
from .decoding import decode_frames
from .frame_set import DecodeOptions, FrameSet

_COMPARE_CHUNK_BYTES = 1 << 20


class BundleDifference(NamedTuple):
    """Where an array is not what it was compared with; `array` is None for what lies around those of a whole file."""

    array: str | None
    what: str

    def __str__(self) -> str:
        return self.what if self.array is None else f"array {self.array!r} {self.what}"


def compare_frame_set(
    frames: FrameSet,
    originals: Sequence[LazyArray],
    options: DecodeOptions | None = None,
    *,
    progress: Progress | None = None,
) -> BundleDifference | None:
    """Decode and compare with arrays, byte for byte; returns the first difference.

    One array is compared with one array whatever their names; several are matched by name.

    Raises
    ------
    KvmnnError
        As `decode_frames`; when the frames themselves are damaged; and when what the others were read from is, by a
        checksum that lies behind their last byte as well.
    """
    pairs = _match_originals(frames, originals)
    if isinstance(pairs, BundleDifference):
        return pairs
    document = frames.document
    has_shapes = document is not None and FILE_KEY not in document.metadata  # of a file kept whole only bytes count
    for entry, original in zip(frames.arrays, pairs, strict=True):
        if has_shapes and entry.shape != original.shape and not _is_flat(original):
            return BundleDifference(entry.name, f"shape {list(original.shape)} became {list(entry.shape)}")
        if entry.nbytes != original.nbytes:
            return BundleDifference(entry.name, f"has {entry.nbytes} bytes, {original.name!r} has {original.nbytes}")
        if entry.order != original.order and not _is_flat(original):
            return BundleDifference(entry.name, f"order {original.order} became {entry.order}")
    current_index, reader = 0, _ComparingReader(pairs[0])
    for index, data in decode_frames(frames, options, progress=progress):
        if index != current_index:
            reader.read_to_end()
            current_index, reader = index, _ComparingReader(pairs[index])
        offset = reader.find_first_difference(data)
        if offset is not None:
            entry = frames.arrays[index]
            return BundleDifference(
                entry.name, f"first differs at element {list(entry.index_at_offset(offset))} (byte {offset})"
            )
        del data  # or it would live on while the next frame is decoded
    reader.read_to_end()
    return None


class _ComparingReader:
    """An array that is read along with bytes to compare it with."""

    def __init__(self, array: LazyArray) -> None:
        self._chunks = array.iter_chunks(_COMPARE_CHUNK_BYTES)
        self._remainder: Chunk = np.empty(0, np.uint8)
        self._position = 0

    def find_first_difference(self, data: Chunk) -> int | None:
        """Compare the array's next bytes with `data`; the offset in the array of the first byte that differs."""
        for start in range(0, data.size, _COMPARE_CHUNK_BYTES):
            block = data[start : start + _COMPARE_CHUNK_BYTES]
            differs = np.flatnonzero(block != self._read(block.size))
            if differs.size:
                return self._position + int(differs[0])
            self._position += block.size
        return None

    def read_to_end(self) -> None:
        """Ask for what comes behind the last byte: only then do readers compare checksums, and count."""
        for _ in self._chunks:
            pass

    def _read(self, nbytes: int) -> Chunk:
        while self._remainder.size < nbytes:
            chunk = next(self._chunks, None)
            if chunk is None:
                raise SourceError("the file to compare with ends early")
            self._remainder = np.concatenate([self._remainder, chunk]) if self._remainder.size else chunk
        block, self._remainder = self._remainder[:nbytes], self._remainder[nbytes:]
        return block


def _is_flat(array: LazyArray) -> bool:
    """Whether an array has one axis: raw words say nothing of a shape, so only their bytes count."""
    return len(array.shape) == 1


def _match_originals(frames: FrameSet, originals: Sequence[LazyArray]) -> list[LazyArray] | BundleDifference:
    if len(frames.arrays) == len(originals) == 1:
        return list(originals)
    by_name = {original.name: original for original in originals}
    for entry in frames.arrays:
        if entry.name not in by_name:
            has_no_match = not any(array_entry.name in by_name for array_entry in frames.arrays)
            hint = (
                ", as are all: were arrays parted into layers, as by --axes, then part these, too"
                if has_no_match
                else ""
            )
            return BundleDifference(entry.name, f"is in the frames only{hint}")
    unmatched = sorted(set(by_name) - {entry.name for entry in frames.arrays})
    if unmatched:
        return BundleDifference(unmatched[0], "is not in the frames")
    return [by_name[entry.name] for entry in frames.arrays]
