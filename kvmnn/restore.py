"""Frame files and their manifest back to arrays: open, decode, prove."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import dtypes, frame, manifest
from .bundle import FRAME_SUFFIX, Progress
from .digests import Digester
from .errors import FrameError, LimitError, ManifestError, SourceError
from .manifest import ArrayEntry, FrameEntry, Manifest
from .pipeline import ordered
from .sources import STDIN, MappedFile, NamedArray, Piece


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """How frames become arrays.

    Parameters
    ----------
    dtype
        What a lone frame holds; None takes its container (fp16 or fp32). A manifest knows better.
    codecs, threads
        As for `kvmnn.decode`.
    max_bytes
        Refuse to decode more raw bytes than this in all; None for no limit.
    """

    dtype: str | None = None
    codecs: tuple[str, ...] = frame.CODECS
    max_bytes: int | None = None
    threads: int | None = None


class FrameSet:
    """Frames that can be read: one alone, or all that a manifest lists.

    Parameters
    ----------
    path
        What the user named.
    arrays
        What the frames hold.
    document
        The manifest, or None for a lone frame.
    """

    def __init__(
        self, path: str, arrays: Sequence[ArrayEntry], document: Manifest | None, files: dict[str, MappedFile]
    ) -> None:
        self.path = path
        self.arrays = tuple(arrays)
        self.document = document
        self._files = files
        self._root = Path(path if os.path.isdir(path) else os.path.dirname(path) or ".")

    @property
    def raw_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def stored_bytes(self) -> int:
        """Bytes of all frames."""
        return sum(array.stored_bytes for array in self.arrays)

    @property
    def paths(self) -> list[str]:
        """Every file that is read, the manifest left out."""
        names = {part.file for array in self.arrays for part in array.frames}
        return [self._files[name].path if name in self._files else str(self._root / name) for name in names]

    def only(self, array: ArrayEntry) -> FrameSet:
        """The frames of one of the arrays."""
        return FrameSet(self.path, [array], self.document, self._files)

    def frame(self, entry: FrameEntry) -> Piece:
        """The bytes of a frame.

        Raises
        ------
        ManifestError
            When its file is missing, too short, or outside the manifest's directory.
        """
        file = self._files.get(entry.file)
        if file is None:
            self._files.clear()
            file = self._files[entry.file] = self._open(entry.file)
        if entry.offset + entry.bytes > file.size:
            raise ManifestError(
                f"{file.label}: has {file.size} bytes, but the manifest puts a frame of {entry.bytes} bytes at offset "
                f"{entry.offset}"
            )
        return file.view(entry.offset, entry.bytes)

    def _open(self, name: str) -> MappedFile:
        path = self._root / name
        if not path.resolve().is_relative_to(self._root.resolve()):
            raise ManifestError(f"{self.path}: the frame file {name!r} leads out of the manifest's directory")
        if not path.is_file():
            raise ManifestError(f"{self.path}: the frame file {name!r} is missing")
        return MappedFile(path)


def open_frames(path: str, *, use_manifest: bool = True, options: DecodeOptions | None = None) -> FrameSet:
    """Open a frame, a manifest, or a bundle directory.

    Parameters
    ----------
    path
        A frame file (with its manifest, ``<path>.json``, where that exists), a manifest file (``.json``), a directory
        with a ``manifest.json``, or ``"-"`` for a lone frame on standard input.
    use_manifest
        False takes a frame file alone even if a manifest lies beside it.

    Raises
    ------
    KvmnnError
        `SourceError`, `ManifestError` or `FrameError`, by what is wrong.
    """
    options = options or DecodeOptions()
    if path == STDIN:
        return _lone(MappedFile(path), options)
    if os.path.isdir(path):
        index = Path(path, manifest.FILE_NAME)
        if not index.exists():
            raise ManifestError(f"{path}: has no {manifest.FILE_NAME}, so it is not a kvmnn bundle")
        document = manifest.load(index)
        return FrameSet(path, document.arrays, document, {})
    if path.endswith(".json") and os.path.exists(path):
        document = manifest.load(Path(path))
        return FrameSet(path, document.arrays, document, {})
    file = MappedFile(path)
    side = Path(path + manifest.SIDE_SUFFIX)
    if use_manifest and side.exists():
        document = manifest.load(side)
        names = {part.file for array in document.arrays for part in array.frames}
        # A frame and its manifest may have been renamed together: the pair is what belongs together, not the name.
        if len(names) == 1:
            return FrameSet(path, document.arrays, document, {names.pop(): file})
        raise ManifestError(f"{side}: lists {len(names)} frame files, so it is not the manifest of {path}")
    return _lone(file, options)


def _lone(file: MappedFile, options: DecodeOptions) -> FrameSet:
    """A frame without a manifest: a 1-D array of its words."""
    if file.size == 0:
        raise FrameError(f"{file.label}: is empty, not a frame")
    whole = file.view(0, file.size)
    try:
        info = frame.inspect(whole, dtype=options.dtype, codecs=options.codecs, entropy=False)
    except FrameError as exc:
        hint = _hint(file)
        raise FrameError(f"{file.label}: {exc}{hint}") from None
    entry = FrameEntry(file=file.label, offset=0, bytes=file.size, raw_bytes=info.raw_bytes, sha256=None)
    name = "stdin" if file.path == STDIN else os.path.basename(file.path).removesuffix(FRAME_SUFFIX)
    array = ArrayEntry(
        name=name,
        dtype=info.dtype,
        shape=(info.words,),
        array_dtype=dtypes.by_name(info.dtype).numpy.str,
        sha256=None,
        frames=(entry,),
    )
    return FrameSet(file.path, [array], None, {file.label: file})


def _hint(file: MappedFile) -> str:
    if file.head(6) == b"\x93NUMPY":
        return " (it is a .npy file)"
    if os.path.splitext(file.path)[1].lower() in (".npz", ".safetensors"):
        return " (it is a file of arrays, not of frames)"
    return ""


class Decoded(NamedTuple):
    """A run of an array's raw bytes, in order.

    Parameters
    ----------
    array_index
        Which array of the set.
    data
        uint8, little-endian words in memory order; good until the next run is asked for.
    """

    array_index: int
    data: Piece


class _Job(NamedTuple):
    array_index: int
    number: int
    entry: FrameEntry
    stored: Piece


def decode_frames(
    frames: FrameSet,
    options: DecodeOptions | None = None,
    *,
    check_frames: bool = False,
    progress: Progress | None = None,
) -> Iterator[Decoded]:
    """Decode every frame, array after array, in bounded memory.

    Where there is a manifest, each array's hash is compared when its last byte has been yielded, so a caller that keeps
    what it gets must wait for the end.

    Parameters
    ----------
    check_frames
        Compare the hash of each frame before it is decoded too.

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
    if options.max_bytes is not None and frames.raw_bytes > options.max_bytes:
        raise LimitError(f"{frames.path}: holds {frames.raw_bytes} raw bytes, above the limit of {options.max_bytes}")

    buffers = _Buffers()

    def work(job: _Job, threads: int | None) -> Piece:
        alone = threads != 1 or options.threads == 1
        return _decode_one(frames, job, options, check_frames, threads, buffers if alone else None)

    hashes = [hashlib.sha256() for _ in frames.arrays]
    decoded = ordered(work, _jobs(frames), lambda job: job.entry.raw_bytes, options.threads)
    with Digester() as digester:
        for job, data in decoded:
            array, digest = frames.arrays[job.array_index], hashes[job.array_index]
            if array.sha256 is not None:
                digester.update(digest, data)
            yield Decoded(job.array_index, data)
            if job.number + 1 == len(array.frames):
                digester.wait()
                if array.sha256 not in (None, digest.hexdigest()):
                    raise ManifestError(
                        f"{frames.path}: array {array.name!r}: its bytes do not match the manifest's sha256"
                    )
            if progress:
                progress(data.size)
            del job, data  # or they would live on while the next frame is decoded


def _jobs(frames: FrameSet) -> Iterator[_Job]:
    for index, array in enumerate(frames.arrays):
        for number, entry in enumerate(array.frames):
            yield _Job(index, number, entry, frames.frame(entry))


class _Buffers:
    """Two buffers by turns: fresh memory costs as much as decoding, and the last run may still be being hashed."""

    def __init__(self) -> None:
        self._buffers: list[Piece] = [np.empty(0, np.uint8), np.empty(0, np.uint8)]

    def take(self, nbytes: int) -> Piece:
        buffer = self._buffers.pop(0)
        if buffer.size < nbytes:
            del buffer
            buffer = np.empty(nbytes, np.uint8)
        self._buffers.append(buffer)
        return buffer[:nbytes]


def _decode_one(
    frames: FrameSet, job: _Job, options: DecodeOptions, check: bool, threads: int | None, buffers: _Buffers | None
) -> Piece:
    array, entry = frames.arrays[job.array_index], job.entry
    part = f" frame {job.number} (offset {entry.offset})" if len(array.frames) > 1 else ""
    where = f"{frames.path}:{part}" if frames.document is None else f"{frames.path}: array {array.name!r}:{part}"
    if check and entry.sha256 not in (None, hashlib.sha256(job.stored.data).hexdigest()):
        raise ManifestError(f"{where} the frame does not match the manifest's sha256")
    try:
        info = frame.inspect(job.stored, dtype=array.dtype, codecs=options.codecs, entropy=False)
        if info.raw_bytes != entry.raw_bytes:
            raise FrameError(f"holds {info.raw_bytes} bytes, the manifest says {entry.raw_bytes}")
        out = buffers.take(entry.raw_bytes) if buffers else np.empty(entry.raw_bytes, np.uint8)
        frame.decode(job.stored, dtype=array.dtype, codecs=options.codecs, out=out, threads=threads)
    except FrameError as exc:
        raise FrameError(f"{where} {exc}") from None
    return out


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
