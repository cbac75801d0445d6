"""Arrays into a Zarr store: each chunk a frame, in a directory that appears whole or not at all."""

from __future__ import annotations

import hashlib
import json
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any, NamedTuple

import numpy as np

from ...arrays.named_array import NamedArray, Piece
from ...arrays.source import Source
from ...bundle.encoding import EncodeOptions
from ...bundle.manifest import ArrayEntry, FrameEntry, Manifest
from ...bundle.writing import Encoded
from ...codecs.chunks import MAX_CHUNK_BYTES, NAME
from ...dtypes import Bytes
from ...errors import KvmnnError, LimitError, OptionError, OutputError
from ...files.names import file_names
from ...files.output import DirectoryOutput
from ...files.urls import is_url
from ...frames import predictors, zstd
from ...threads.digest import Digester
from ...threads.pipeline import Progress, ordered
from ..options import ReadOptions
from . import attributes
from .grid import MAX_CHUNKS, Index, chunk_shape, counts, cut_axis
from .places import DOCUMENT, MAX_DOCUMENT, Place
from .reading import is_store, read
from .uploading import Upload

CHUNK_BYTES = 4 << 20
"""Raw bytes of a chunk where nothing else is said."""
_TYPES = {"fp16": "float16", "bf16": "uint16", "fp32": "float32"}
_STEP = 8 << 20
_LISTED = 4


class EncodedStore(Encoded):
    """Arrays that were written as a store; `Encoded.manifest` lists their chunks."""

    def _renamed(self) -> str:
        folders = ((array.name, array.frames[0].file.partition("/")[0]) for array in self.manifest.arrays)
        changed = [f"{name!r} in {folder}" for name, folder in folders if name != folder]
        more = f" and {len(changed) - _LISTED:,} more" if len(changed) > _LISTED else ""
        return f"directories of other names than their arrays: {', '.join(changed[:_LISTED])}{more}" if changed else ""


def encode_store(
    source: Source,
    output: str | os.PathLike[str],
    options: EncodeOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> EncodedStore:
    """Encode all arrays of a source into a Zarr store (version 3) whose chunks are frames.

    Parameters
    ----------
    source
        What to encode: `kvmnn.open`.
    output
        The directory, which appears when all is written and, with `EncodeOptions.verify`, was read again and compared.
        Or a URL that fsspec opens (``s3://bucket/x.zarr``): the group's document is written there last, so that there
        is no store before.
    options
        `frame_bytes` is that of a chunk (default: 4 MiB; 0 makes an array one chunk). `block`, `allow_raw` and `dense`
        are refused: all chunks are frames.
    force
        Replace a store that exists, as a whole.
    progress
        Called with raw bytes.

    Raises
    ------
    OptionError
        For options that a store cannot have.
    KvmnnError
        When an input is damaged, the output exists or cannot be written, or does not read back. Nothing is left behind.
    """
    options = options or EncodeOptions()
    if options.block or options.allow_raw or options.dense:
        raise OptionError("--block, --allow-raw and --codec dense: every chunk of a Zarr store is a frame")
    started, path = time.perf_counter(), os.fspath(output).rstrip("/" + os.sep)
    if is_url(path):
        with Upload(path, force=force, protect=source.files) as upload:
            entries = _write(source, upload, options, progress)
            if options.verify:
                upload.flush()
                _read_back(upload.target, upload.place, entries, options.threads)
            upload.commit()
        return _encoded(source, upload.target, entries, options, started)
    if os.path.isdir(path) and os.listdir(path) and not is_store(path):
        raise OutputError(f"{path}: is a directory, and no Zarr store that could be replaced")
    with DirectoryOutput(path, force=force, protect=source.files, replaces=True) as directory:
        entries = _write(source, directory, options, progress)
        if options.verify:
            directory.flush()
            _read_back(str(directory.target), Place(str(directory.staged)), entries, options.threads)
        directory.commit()
    return _encoded(source, path, entries, options, started)


def _encoded(
    source: Source, path: str, entries: list[ArrayEntry], options: EncodeOptions, started: float
) -> EncodedStore:
    return EncodedStore(
        output=path,
        manifest=_manifest(entries, options, source),
        verified=options.verify,
        seconds=time.perf_counter() - started,
        cache=source.cache,
        completeness=source.completeness,
    )


def _write(
    source: Source, directory: DirectoryOutput | Upload, options: EncodeOptions, progress: Progress | None
) -> list[ArrayEntry]:
    folders = _folders([array.name for array in source.arrays])
    dimensions = attributes.dimension_names(source)
    entries, documents = [], {}
    for array, folder, names in zip(source.arrays, folders, dimensions, strict=True):
        array = _words(array)
        chunks = _chunks(array, CHUNK_BYTES if options.frame_bytes is None else options.frame_bytes)
        entry = _write_array(array, folder, chunks, directory, options, progress)
        documents[folder] = _array_document(array, chunks, names, options.effort, str(entry.sha256))
        directory.file(f"{folder}/{DOCUMENT}").write(_json(documents[folder], directory, folder))
        entries.append(entry)
    group = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": attributes.of_store(source),
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": documents},
    }
    directory.file(DOCUMENT).write(_json(group, directory, ""))
    return entries


def _json(document: dict[str, Any], directory: DirectoryOutput | Upload, folder: str) -> bytes:
    try:
        text = json.dumps(document, indent=1, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise OutputError(f"{directory.target}: {folder or 'the store'}: attributes are no JSON: {error}") from None
    if len(text) > MAX_DOCUMENT:
        raise LimitError(f"{directory.target}: the attributes of {folder or 'the store'} have {len(text):,} bytes")
    return text


def _folders(names: Sequence[str]) -> list[str]:
    """Names of directories for arrays: such as Zarr takes for nodes."""
    return file_names([f"array_{name}" if name.startswith("__") or name == DOCUMENT else name for name in names], "")


def _words(array: NamedArray) -> NamedArray:
    """The array as words of its type: raw bytes, and integers that stand for them, are numbers in a store."""
    if array.itemsize == array.word_bytes:
        return array
    if array.element:
        raise OutputError(
            f"array {array.name!r}: codes of {array.element} have no type in a Zarr store: encode -o DIR/ keeps "
            "them, and unpack writes their fp32 numbers"
        )
    if len(array.shape) != 1:
        raise OutputError(f"array {array.name!r}: raw bytes in {len(array.shape)} axes have no place in a Zarr store")
    return replace(array, shape=(array.nbytes // array.word_bytes,), array_dtype=f"<u{array.word_bytes}")


def _chunks(array: NamedArray, limit: int) -> Index:
    """Chunks in memory order."""
    shape = array.shape if array.order == "C" else array.shape[::-1]
    found = chunk_shape(shape, array.itemsize, limit)
    if (size := math.prod(found) * array.itemsize) > MAX_CHUNK_BYTES:
        raise LimitError(
            f"array {array.name!r}: a chunk would have {size:,} bytes, above the limit of {MAX_CHUNK_BYTES:,} "
            "(--frame-bytes cuts smaller ones)"
        )
    if (number := math.prod(counts(shape, found))) > MAX_CHUNKS:
        raise LimitError(f"array {array.name!r}: would have {number:,} chunks, above the limit of {MAX_CHUNKS:,}")
    return found


def _array_document(array: NamedArray, chunks: Index, names: list[str], effort: str, sha256: str) -> dict[str, Any]:
    codecs: list[dict[str, Any]] = [{"name": NAME, "configuration": {"effort": effort}}]
    if array.order == "F":
        turned = list(range(len(array.shape)))[::-1]
        codecs.insert(0, {"name": "transpose", "configuration": {"order": turned}})
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": _TYPES[array.dtype],
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(chunks if array.order == "C" else chunks[::-1])},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0 if array.dtype == "bf16" else 0.0,
        "codecs": codecs,
        "attributes": attributes.of_array(array, sha256),
        "dimension_names": names,
        "storage_transformers": [],
    }


class _Job(NamedTuple):
    chunk: Index
    piece: Piece


def _write_array(
    array: NamedArray,
    folder: str,
    chunks: Index,
    directory: DirectoryOutput | Upload,
    options: EncodeOptions,
    progress: Progress | None,
) -> ArrayEntry:
    chosen = replace(options.for_array(array.name), verify=False)  # all is read back from the files
    digest, lock = hashlib.sha256(), threading.Lock()
    frames = []

    def make(job: _Job, threads: int | None) -> bytes:
        return chosen.encode(_padded(job.piece, nbytes), array.dtype, threads, step)

    def step(done: int) -> None:
        with lock:  # chunks are encoded side by side
            if progress:
                progress(done)

    nbytes = math.prod(chunks) * array.itemsize
    for job, made in ordered(make, _jobs(array, chunks, digest), lambda _: nbytes, options.threads):
        index = job.chunk if array.order == "C" else job.chunk[::-1]
        name = "/".join([folder, "c", *map(str, index)])
        directory.file(name).write(made)
        sha256 = hashlib.sha256(made).hexdigest()
        frames.append(FrameEntry(file=name, offset=0, bytes=len(made), raw_bytes=job.piece.size, sha256=sha256))
        del job, made
    return ArrayEntry(
        name=array.name,
        dtype=array.dtype,
        shape=array.shape,
        array_dtype=array.array_dtype,
        order=array.order,
        sha256=digest.hexdigest(),
        frames=tuple(frames),
    )


def _jobs(array: NamedArray, chunks: Index, digest: hashlib._Hash) -> Iterator[_Job]:
    """The chunks in memory order, each with the bytes of the array in it, hashed while they are encoded."""
    shape = array.shape if array.order == "C" else array.shape[::-1]
    cut = cut_axis(chunks)
    row = array.itemsize * math.prod(shape[cut + 1 :])
    words = _Stream(array)
    with Digester() as digester:
        for index in product(*map(range, counts(shape, chunks))):
            rows = min(chunks[cut], shape[cut] - index[cut] * chunks[cut]) if shape else 1
            piece = words.take(rows * row)
            digester.update(digest, piece)
            yield _Job(index, piece)
            digester.wait()
            del piece
        words.finish()


class _Stream:
    """The bytes of an array in memory order, taken in any portions."""

    def __init__(self, array: NamedArray) -> None:
        self._pieces = array.pieces(_STEP)
        self._rest: Bytes = np.empty(0, np.uint8)

    def take(self, nbytes: int) -> Bytes:
        if not self._rest.size:
            self._rest = next(self._pieces)
        if self._rest.size >= nbytes:
            found, self._rest = self._rest[:nbytes], self._rest[nbytes:]
            return found
        made, filled = np.empty(nbytes, np.uint8), 0
        while filled < nbytes:
            if not self._rest.size:
                self._rest = next(self._pieces)
            count = min(self._rest.size, nbytes - filled)
            made[filled : filled + count] = self._rest[:count]
            self._rest, filled = self._rest[count:], filled + count
        return made

    def finish(self) -> None:
        """`SourceError` where the array turns out to have other bytes than it said."""
        for _ in self._pieces:
            pass


def _padded(piece: Piece, nbytes: int) -> Piece:
    """The bytes of a chunk at the edge of its array, zeros behind them: all chunks have one shape."""
    if piece.size == nbytes:
        return piece
    made = np.zeros(nbytes, np.uint8)
    made[: piece.size] = piece
    return made


def _read_back(target: str, place: Place, entries: Sequence[ArrayEntry], threads: int | None) -> None:
    """Compare what the files hold with what was to be written: documents, and every word by its hash."""
    try:
        found = read(place.label, ReadOptions(fallbacks=("fp16", "fp32"), threads=threads), place)
        if [array.name for array in found.arrays] != [entry.name for entry in entries]:
            raise OutputError("the arrays are not those that were written")
        for array, entry in zip(found.arrays, entries, strict=True):
            order = entry.order if len(entry.shape) > 1 else "C"
            if (array.shape, array.order, array.dtype) != (entry.shape, order, entry.dtype):
                raise OutputError(f"array {entry.name!r} is not what was written")
            for piece in array.pieces(_STEP):
                del piece
    except KvmnnError as error:
        said = str(error).replace(place.label, target)
        raise OutputError(f"{target}: does not read back as written: {said}") from None


def _manifest(entries: Sequence[ArrayEntry], options: EncodeOptions, source: Source) -> Manifest:
    """What was written, for its account; no file of a store is a manifest."""
    from ...version import version

    known = frozenset[str]().union(*(predictors.resolve(chosen) for chosen in options.used_predictors))
    return Manifest(
        kvmnn_version=version(),
        zstd_version=zstd.version(),
        zstd_byte_exact=zstd.byte_exact(),
        effort=options.effort,
        codecs=options.codecs,
        predictors=tuple(name for name in predictors.NAMES if name in known),
        hi_predictors=None,
        arrays=tuple(entries),
        metadata={},
    )
