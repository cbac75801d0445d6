"""Decode the frames of a file or a bundle in order, and check them against the manifest."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import numpy as np

from .._util.named_tuple import NamedTuple
from .._util.parallel import BackgroundHasher, Progress, ordered_map
from ..arrays.array import Chunk
from ..errors import FrameError, ManifestError
from ..frames import decoder, inspection
from .dense import decode_stream
from .frame_set import DecodeOptions, FrameSet
from .manifest import FrameEntry


class DecodedChunk(NamedTuple):
    """Consecutive raw bytes of an array.

    Parameters
    ----------
    array_index
        Index of the array in the frame set.
    data
        uint8, little-endian words in memory order; valid until the next chunk is requested; read-only.
    """

    array_index: int
    data: Chunk


class _DecodeJob(NamedTuple):
    array_index: int
    number: int
    entry: FrameEntry
    data: Chunk


def decode_frames(
    frames: FrameSet,
    options: DecodeOptions | None = None,
    *,
    check_arrays: bool = True,
    check_frames: bool = True,
    progress: Progress | None = None,
) -> Iterator[DecodedChunk]:
    """Decode every frame, array after array, in bounded memory.

    With a manifest, the hash of each frame is compared before it is decoded. The hash of an array is compared after its
    last byte was yielded, so a caller must not use the bytes for good before the end.

    Parameters
    ----------
    frames
        What to decode: `open_frame_set`.
    options
        Limits, codecs, threads.
    check_arrays, check_frames
        False skips the hashes of the arrays, which the caller then checks; and those of the frames, which are redundant
        if the arrays' are checked.
    progress
        Called with raw bytes.

    Raises
    ------
    FrameError
        When a frame does not decode, or not to the size it should.
    ManifestError
        When a hash differs.
    LimitError
        When there are more raw bytes than `options.max_bytes`.
    """
    options = options or DecodeOptions()
    frames.check_size(options)

    buffers = _BufferPool()

    def decode_job(job: _DecodeJob, threads: int | None) -> Chunk:
        can_reuse_buffers = threads != 1 or options.threads == 1
        if check_frames:
            _verify_frame_hash(frames, job)
        return _decode_frame(frames, job, options, threads, buffers if can_reuse_buffers else None)

    hashes = [hashlib.sha256() for _ in frames.arrays]
    results = ordered_map(decode_job, _iter_decode_jobs(frames), lambda job: job.entry.raw_bytes, options.threads)
    with BackgroundHasher() as digester:
        for job, data in results:
            array, digest = frames.arrays[job.array_index], hashes[job.array_index]
            has_hash = check_arrays and array.sha256 is not None
            if has_hash:
                digester.update(digest, data)
            yield DecodedChunk(job.array_index, data)
            if has_hash and job.number + 1 == len(array.frames):
                digester.wait()
                if array.sha256 != digest.hexdigest():
                    raise ManifestError(
                        f"{frames.path}: array {array.name!r}: its bytes do not match the manifest's sha256"
                    )
            if progress:
                progress(data.size)
            del job, data  # or they would live on while the next frame is decoded


def _iter_decode_jobs(frames: FrameSet) -> Iterator[_DecodeJob]:
    for index, array in enumerate(frames.arrays):
        for number, entry in enumerate(array.frames):
            yield _DecodeJob(index, number, entry, frames.read_frame(entry))


class _BufferPool:
    """Two alternating buffers: fresh memory costs as much as decoding, and the last chunk may still be being hashed."""

    def __init__(self) -> None:
        self._buffers: list[Chunk] = [np.empty(0, np.uint8), np.empty(0, np.uint8)]

    def acquire(self, nbytes: int) -> Chunk:
        buffer = self._buffers.pop(0)
        if buffer.size < nbytes:
            del buffer
            buffer = np.empty(nbytes, np.uint8)
        self._buffers.append(buffer)
        return buffer[:nbytes]


def _decode_frame(
    frames: FrameSet, job: _DecodeJob, options: DecodeOptions, threads: int | None, buffers: _BufferPool | None
) -> Chunk:
    array, entry = frames.arrays[job.array_index], job.entry
    if entry.is_raw:
        return job.data
    try:
        if entry.is_dense:
            return decode_stream(job.data, array, entry)
        info = inspection.inspect(job.data, dtype=array.dtype, codecs=options.codecs, entropy=False)
        if info.raw_bytes != entry.raw_bytes:
            raise FrameError(f"holds {info.raw_bytes} bytes, the manifest says {entry.raw_bytes}")
        target = buffers.acquire(entry.raw_bytes) if buffers else np.empty(entry.raw_bytes, np.uint8)
        decoder.decode(job.data, dtype=array.dtype, codecs=options.codecs, out=target, threads=threads)
    except FrameError as exc:
        raise FrameError(f"{_format_location(frames, job)} {exc}") from None
    return target


def _verify_frame_hash(frames: FrameSet, job: _DecodeJob) -> None:
    if job.entry.sha256 not in (None, hashlib.sha256(job.data.data).hexdigest()):
        raise ManifestError(
            f"{_format_location(frames, job)} {job.entry.description} does not match the manifest's sha256"
        )


def _format_location(frames: FrameSet, job: _DecodeJob) -> str:
    array = frames.arrays[job.array_index]
    frame_text = f" frame {job.number} (offset {job.entry.offset})" if len(array.frames) > 1 else ""
    return (
        f"{frames.path}:{frame_text}"
        if frames.document is None
        else f"{frames.path}: array {array.name!r}:{frame_text}"
    )
