"""Frames as a source of arrays, decoded as their pieces are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ..arrays.named_array import NamedArray, Piece, rechunked
from ..arrays.source import Source
from ..bundle.decoding import decode_frames
from ..bundle.frame_set import DecodeOptions, FrameSet
from ..bundle.manifest import ArrayEntry


def of_frames(frames: FrameSet, options: DecodeOptions, *, check: bool = True) -> Source:
    """Frames as a source: each array is decoded when its pieces are asked for.

    Parameters
    ----------
    check
        Compare the hashes of the manifest; False leaves them to a caller that hashes what becomes of the arrays.
    """
    arrays = [_array(frames, entry, options, check) for entry in frames.arrays]
    metadata = dict(frames.document.metadata) if frames.document else {}
    return Source(arrays, metadata, inputs=(frames.path,), opened=tuple(frames.files))


def _array(frames: FrameSet, entry: ArrayEntry, options: DecodeOptions, check: bool) -> NamedArray:
    """An array whose pieces are decoded as they are asked for; its words are little-endian whatever they were."""
    return NamedArray(
        name=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        array_dtype=entry.array_dtype.replace(">", "<"),
        order=entry.order,
        element=entry.element,
        reader=partial(_decoded, frames.only(entry), options, check),
    )


def _decoded(frames: FrameSet, options: DecodeOptions, check: bool, step: int) -> Iterator[Piece]:
    decoded = decode_frames(frames, options, check_arrays=check, check_frames=check)
    runs = (data for _, data in decoded)
    if frames.piece_count == 1 and frames.raw_bytes <= step:
        yield from runs  # as it is: the hash of the array is compared when the next run is asked for
        return
    yield from rechunked(runs, step, frames.raw_bytes)
