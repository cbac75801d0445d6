"""Frames as a source of arrays that are decoded when read; frames transcoded to dense streams and back."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import field, replace
from functools import partial
from typing import cast

from .._util.dataclass import dataclass
from .._util.parallel import Progress
from ..arrays.array import Chunk, LazyArray, byteswap, rechunk
from ..arrays.engine_metadata import restore_completeness
from ..arrays.source import DEQUANTIZED_KEY, Source, parse_cache_info
from ..bundle import DecodeOptions, EncodeOptions, EncodeResult, FrameSet, encode_source
from ..bundle.decoder import decode_frames
from ..bundle.manifest import ArrayEntry, Manifest
from ..errors import KvmnnError, ManifestError
from ..files.atomic import BinaryStream
from ..files.mapped_file import STDIN
from ..files.schema import Record
from ..frames import Effort


def make_frame_source(frames: FrameSet, options: DecodeOptions, *, check: bool = True) -> Source:
    """Return frames as a source: each array is decoded when it is read."""
    arrays = [_make_frame_array(frames, entry, options, check) for entry in frames.arrays]
    metadata = dict(frames.document.metadata) if frames.document else {}
    source = Source(arrays, metadata, inputs=(frames.path,), opened_files=tuple(frames.files))
    source.lossy = DEQUANTIZED_KEY in metadata
    return source


def _make_frame_array(frames: FrameSet, entry: ArrayEntry, options: DecodeOptions, check: bool) -> LazyArray:
    """Return an array whose pieces are decoded on demand to little-endian words."""
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
        yield from chunks  # not copied: the hash of the array is compared when the next chunk is requested
        return
    yield from rechunk(chunks, chunk_bytes, frames.raw_bytes)


@dataclass(frozen=True, kw_only=True)
class TranscodeResult(Record):
    """Result of encoding frames again."""

    #: Path of the input frames.
    input: str
    #: Bytes of all input frames.
    input_bytes: int = field(metadata={"key": "input_stored_bytes"})
    #: Result of the encoding.
    encode_result: EncodeResult = field(metadata={"inline": True})

    def __str__(self) -> str:
        return self.text()

    def text(self, *, verbose: bool = False) -> str:
        """Return what was written, and from which frames; with `verbose` also a line for each array."""
        name = "standard input" if self.input == STDIN else self.input
        return (
            f"{self.encode_result.text(verbose=verbose)}\n  {name} has {self.input_bytes:,} bytes for the same arrays"
        )


def transcode(
    frames: FrameSet,
    output: str | os.PathLike[str] | BinaryStream,
    options: EncodeOptions | None = None,
    *,
    decode_options: DecodeOptions | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> TranscodeResult:
    """Encode the arrays of frames again: as dense streams with `options.dense`, as MNN's frames without.

    Arrays keep name, shape, type and order, and the manifest its metadata, so that the same files can be restored from
    the result. Effort `exact` with the same cuts reproduces the original frames.

    Parameters
    ----------
    output, options, force, progress
        As for `kvmnn.bundle.encode_source`; without `options` effort, predictors and codecs are those of the manifest
        (`read_encode_options`).
    decode_options
        Limits and threads.

    Raises
    ------
    KvmnnError
        When a frame does not decode or a hash differs from the manifest's, and for the errors of `encode_source`. No
        output remains then.
    """
    decode_options = decode_options or DecodeOptions()
    frames.check_size(decode_options)
    source = make_original_source(frames, decode_options)
    encode_result = encode_source(
        source, output, options or read_encode_options(frames), force=force, progress=progress
    )
    return TranscodeResult(input=frames.path, input_bytes=frames.stored_bytes, encode_result=encode_result)


def read_encode_options(frames: FrameSet) -> EncodeOptions:
    """Return the encoder options in the manifest; the defaults if there is none.

    Separate predictors for K and V are not in a manifest; both then get all of them.
    """
    document: Manifest | None = frames.document  # without an effort if there are only dense streams
    if document is None or document.effort is None:
        return EncodeOptions()
    try:
        return EncodeOptions(
            effort=cast("Effort", document.effort),
            predictors=document.predictors or None,
            hi_predictors=document.hi_predictors,
            codecs=document.codecs,
        )
    except KvmnnError as error:
        raise ManifestError(f"{frames.path}: the manifest's options: {error}") from None


def make_original_source(frames: FrameSet, options: DecodeOptions | None = None) -> Source:
    """Return the arrays of frames as they were before encoding, big-endian words included."""
    source = make_frame_source(frames, options or DecodeOptions())
    source.arrays = [
        _restore_byte_order(array, entry.array_dtype) for array, entry in zip(source.arrays, frames.arrays, strict=True)
    ]
    source.cache = parse_cache_info(source.metadata, frames.path)
    restore_completeness(source, frames.path)
    return source


def _restore_byte_order(array: LazyArray, array_dtype: str) -> LazyArray:
    if array.array_dtype == array_dtype:
        return array
    return replace(array, array_dtype=array_dtype, reader=partial(_iter_swapped_chunks, array))


def _iter_swapped_chunks(array: LazyArray, chunk_bytes: int) -> Iterator[Chunk]:
    for chunk in array.reader(chunk_bytes):
        yield byteswap(chunk, array.itemsize)
