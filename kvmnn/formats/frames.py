"""Frames as a source of arrays, decoded as their pieces are asked for."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from ..arrays.named_array import Chunk, LazyArray, rechunk
from ..arrays.source import Source
from ..bundle.decoding import decode_frames
from ..bundle.frame_set import DecodeOptions, FrameSet
from ..bundle.manifest import ArrayEntry


def make_frame_source(frames: FrameSet, options: DecodeOptions, *, check: bool = True) -> Source:
    """Frames as a source: each array is decoded when its pieces are asked for.

    Parameters
    ----------
    check
        Compare the hashes of the manifest; False leaves them to a caller that hashes what becomes of the arrays.
    """
    arrays = [_make_frame_array(frames, entry, options, check) for entry in frames.arrays]
    metadata = dict(frames.document.metadata) if frames.document else {}
    return Source(arrays, metadata, inputs=(frames.path,), opened_files=tuple(frames.files))


def _make_frame_array(frames: FrameSet, entry: ArrayEntry, options: DecodeOptions, check: bool) -> LazyArray:
    """An array whose pieces are decoded as they are asked for; its words are little-endian whatever they were."""
    return LazyArray(
        name=entry.name,
        dtype=entry.dtype,
        shape=entry.shape,
        array_dtype=entry.array_dtype.replace(">", "<"),
        order=entry.order,
        element=entry.element,
        reader=partial(_iter_decoded_chunks, frames.select_array(entry), options, check),
    )


def _iter_decoded_chunks(frames: FrameSet, options: DecodeOptions, check: bool, chunk_bytes: int) -> Iterator[Chunk]:
    indexed_chunks = decode_frames(frames, options, check_arrays=check, check_frames=check)
    chunks = (data for _, data in indexed_chunks)
    if frames.num_chunks == 1 and frames.raw_bytes <= chunk_bytes:
        yield from chunks  # as it is: the hash of the array is compared when the next run is asked for
        return
    yield from rechunk(chunks, chunk_bytes, frames.raw_bytes)
