"""Write arrays to a Zarr store: each chunk is a frame, and the directory appears complete or not at all."""

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
from typing import Any

import numpy as np

from ..._util.named_tuple import NamedTuple
from ..._util.packages import get_version
from ..._util.parallel import BackgroundHasher, Progress, ordered_map
from ...arrays.array import Chunk, LazyArray
from ...arrays.source import DEQUANTIZED_KEY, LOSSY_KEY, Source
from ...bundle.encoder import EncodeOptions, EncodeResult
from ...bundle.manifest import ArrayEntry, FrameEntry, Manifest
from ...dtypes import Bytes
from ...errors import KvmnnError, LimitError, OptionError, OutputError
from ...files.atomic import DirectoryOutput
from ...files.file_names import describe_renamed_files, make_file_names
from ...files.mapped_file import FileHead
from ...files.urls import is_url
from ...frames import zstd
from ...frames.options import PREDICTORS, resolve_predictors
from ...integrations.chunk_codec import CODEC_NAME, MAX_CHUNK_BYTES
from ..options import ReadOptions
from . import metadata
from .metadata import MAX_CHUNKS, ChunkIndex, choose_chunk_shape, count_chunks, find_split_axis
from .reader import ZARR, read
from .stores import DOCUMENT_NAME, MAX_DOCUMENT_BYTES, Upload, ZarrStore

DEFAULT_CHUNK_BYTES = 4 << 20
"""Default raw bytes of a chunk."""
_DATA_TYPE_BY_DTYPE = {"fp16": "float16", "bf16": "uint16", "fp32": "float32"}
_READ_CHUNK_BYTES = 8 << 20


class EncodeStoreResult(EncodeResult):
    """Result of encoding arrays into a store; `EncodeResult.manifest` lists their chunks."""

    def _describe_renames(self) -> str:
        folders = [(array.name, array.frames[0].file.partition("/")[0]) for array in self.manifest.arrays]
        return describe_renamed_files(folders, "directories")


def encode_store(
    source: Source,
    output: str | os.PathLike[str],
    options: EncodeOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> EncodeStoreResult:
    """Encode all arrays of a source into a Zarr store (version 3) whose chunks are frames.

    Parameters
    ----------
    source
        The source to encode: `kvmnn.open`.
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
        When an input is damaged, the output exists or cannot be written, or does not read back. Nothing remains.
    """
    options = options or EncodeOptions()
    if options.block or options.allow_raw or options.dense:
        raise OptionError("--joint-kv, --allow-raw and --codec dense: every chunk of a Zarr store is a frame")
    start_time, path = time.perf_counter(), os.fspath(output).rstrip("/" + os.sep)
    is_remote = is_url(path)
    if not is_remote and os.path.isdir(path) and os.listdir(path) and not ZARR.detect(FileHead.from_path(path)):
        raise OutputError(f"{path}: is a directory, and no Zarr store that could be replaced")
    with (
        Upload(path, force=force, exclude=source.files)
        if is_remote
        else DirectoryOutput(path, force=force, exclude=source.files, replace_existing=True)
    ) as directory:
        entries = _write_store(source, directory, options, progress)
        if options.verify:
            directory.finish_files()
            store = directory.store if isinstance(directory, Upload) else ZarrStore(str(directory.staging_folder))
            _verify_written(str(directory.target), store, entries, options.threads)
        directory.commit()
    return EncodeStoreResult(
        output=str(directory.target) if is_remote else path,
        manifest=_build_manifest(source, entries, options),
        is_verified=options.verify,
        seconds=time.perf_counter() - start_time,
        cache=source.cache,
        completeness=source.completeness,
    )


def _write_store(
    source: Source, directory: DirectoryOutput | Upload, options: EncodeOptions, progress: Progress | None
) -> list[ArrayEntry]:
    folders = _choose_folder_names([array.name for array in source.arrays])
    dimensions = metadata.choose_dimension_names(source)
    entries, documents = [], {}
    for array, folder, axis_names in zip(source.arrays, folders, dimensions, strict=True):
        array = _to_element_array(array)
        chunk_shape = _choose_array_chunk_shape(
            array, DEFAULT_CHUNK_BYTES if options.frame_bytes is None else options.frame_bytes
        )
        entry = _write_array(array, folder, chunk_shape, directory, options, progress)
        documents[folder] = _build_array_document(array, chunk_shape, axis_names, options.effort, str(entry.sha256))
        directory.open_file(f"{folder}/{DOCUMENT_NAME}").write(_dump_json(documents[folder], directory, folder))
        entries.append(entry)
    group = {
        "zarr_format": 3,
        "node_type": "group",
        "attributes": metadata.build_group_attributes(source),
        "consolidated_metadata": {"kind": "inline", "must_understand": False, "metadata": documents},
    }
    directory.open_file(DOCUMENT_NAME).write(_dump_json(group, directory, ""))
    return entries


def _dump_json(document: dict[str, Any], directory: DirectoryOutput | Upload, folder: str) -> bytes:
    try:
        text = json.dumps(document, indent=1, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise OutputError(f"{directory.target}: {folder or 'the store'}: attributes are no JSON: {error}") from None
    if len(text) > MAX_DOCUMENT_BYTES:
        raise LimitError(f"{directory.target}: the attributes of {folder or 'the store'} have {len(text):,} bytes")
    return text


def _choose_folder_names(names: Sequence[str]) -> list[str]:
    """Choose directory names for arrays that Zarr accepts as node names."""
    return make_file_names(
        [f"array_{name}" if name.startswith("__") or name == DOCUMENT_NAME else name for name in names], ""
    )


def _to_element_array(array: LazyArray) -> LazyArray:
    """Convert raw bytes, and integers that represent floats, to elements of the type that the store records."""
    if array.itemsize == array.coded_itemsize:
        return array
    if array.element:
        raise OutputError(
            f"array {array.name!r}: codes of {array.element} have no type in a Zarr store: encode -o DIR/ keeps "
            "them, and unpack writes their fp32 numbers"
        )
    if len(array.shape) != 1:
        raise OutputError(f"array {array.name!r}: raw bytes in {len(array.shape)} axes have no place in a Zarr store")
    return replace(array, shape=(array.nbytes // array.coded_itemsize,), array_dtype=f"<u{array.coded_itemsize}")


def _choose_array_chunk_shape(array: LazyArray, max_bytes: int) -> ChunkIndex:
    """Choose the shape of chunks in memory order."""
    shape = array.shape if array.order == "C" else array.shape[::-1]
    chunk_shape = choose_chunk_shape(shape, array.itemsize, max_bytes)
    if (chunk_bytes := math.prod(chunk_shape) * array.itemsize) > MAX_CHUNK_BYTES:
        raise LimitError(
            f"array {array.name!r}: a chunk would have {chunk_bytes:,} bytes, above the limit of {MAX_CHUNK_BYTES:,} "
            "(--chunk-bytes cuts smaller ones)"
        )
    if (num_chunks := math.prod(count_chunks(shape, chunk_shape))) > MAX_CHUNKS:
        raise LimitError(f"array {array.name!r}: would have {num_chunks:,} chunks, above the limit of {MAX_CHUNKS:,}")
    return chunk_shape


def _build_array_document(
    array: LazyArray, chunk_shape: ChunkIndex, axis_names: list[str], effort: str, sha256: str
) -> dict[str, Any]:
    codecs: list[dict[str, Any]] = [{"name": CODEC_NAME, "configuration": {"effort": effort}}]
    if array.order == "F":
        reversed_axes = list(range(len(array.shape)))[::-1]
        codecs.insert(0, {"name": "transpose", "configuration": {"order": reversed_axes}})
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(array.shape),
        "data_type": _DATA_TYPE_BY_DTYPE[array.dtype],
        "chunk_grid": {
            "name": "regular",
            "configuration": {"chunk_shape": list(chunk_shape if array.order == "C" else chunk_shape[::-1])},
        },
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": 0 if array.dtype == "bf16" else 0.0,
        "codecs": codecs,
        "attributes": metadata.build_array_attributes(array, sha256),
        "dimension_names": axis_names,
        "storage_transformers": [],
    }


class _ChunkJob(NamedTuple):
    chunk_index: ChunkIndex
    data: Chunk


def _write_array(
    array: LazyArray,
    folder: str,
    chunk_shape: ChunkIndex,
    directory: DirectoryOutput | Upload,
    options: EncodeOptions,
    progress: Progress | None,
) -> ArrayEntry:
    array_options = replace(options.resolve_for_array(array.name), verify=False)  # all is read back from the files
    digest, lock = hashlib.sha256(), threading.Lock()
    frames = []

    def encode_job(job: _ChunkJob, threads: int | None) -> bytes:
        return array_options.encode_chunk(_pad_chunk(job.data, nbytes), array.dtype, threads, report_progress)

    def report_progress(num_bytes: int) -> None:
        with lock:  # chunks are encoded side by side
            if progress:
                progress(num_bytes)

    nbytes = math.prod(chunk_shape) * array.itemsize
    for job, frame in ordered_map(
        encode_job, _iter_jobs(array, chunk_shape, digest), lambda _: nbytes, options.threads
    ):
        index = job.chunk_index if array.order == "C" else job.chunk_index[::-1]
        name = "/".join([folder, "c", *map(str, index)])
        directory.open_file(name).write(frame)
        sha256 = hashlib.sha256(frame).hexdigest()
        frames.append(FrameEntry(file=name, offset=0, bytes=len(frame), raw_bytes=job.data.size, sha256=sha256))
        del job, frame
    return ArrayEntry(
        name=array.name,
        dtype=array.dtype,
        shape=array.shape,
        array_dtype=array.array_dtype,
        order=array.order,
        sha256=digest.hexdigest(),
        frames=tuple(frames),
    )


def _iter_jobs(array: LazyArray, chunk_shape: ChunkIndex, digest: hashlib._Hash) -> Iterator[_ChunkJob]:
    """Yield the chunks in memory order, each with its bytes of the array, hashed while they are encoded."""
    shape = array.shape if array.order == "C" else array.shape[::-1]
    split_axis = find_split_axis(chunk_shape)
    row_bytes = array.itemsize * math.prod(shape[split_axis + 1 :])
    stream = _ByteStream(array)
    with BackgroundHasher() as hasher:
        for index in product(*map(range, count_chunks(shape, chunk_shape))):
            num_rows = (
                min(chunk_shape[split_axis], shape[split_axis] - index[split_axis] * chunk_shape[split_axis])
                if shape
                else 1
            )
            chunk = stream.read(num_rows * row_bytes)
            hasher.update(digest, chunk)
            yield _ChunkJob(index, chunk)
            hasher.wait()
            del chunk
        stream.finish()


class _ByteStream:
    """The bytes of an array in memory order, read in portions of any size."""

    def __init__(self, array: LazyArray) -> None:
        self._chunks = array.iter_chunks(_READ_CHUNK_BYTES)
        self._remainder: Bytes = np.empty(0, np.uint8)

    def read(self, nbytes: int) -> Bytes:
        self._remainder = self._remainder if self._remainder.size else next(self._chunks)
        if self._remainder.size >= nbytes:
            head, self._remainder = self._remainder[:nbytes], self._remainder[nbytes:]
            return head
        data, num_filled = np.empty(nbytes, np.uint8), 0
        while num_filled < nbytes:
            if not self._remainder.size:
                self._remainder = next(self._chunks)
            num_copied = min(self._remainder.size, nbytes - num_filled)
            data[num_filled : num_filled + num_copied] = self._remainder[:num_copied]
            self._remainder, num_filled = self._remainder[num_copied:], num_filled + num_copied
        return data

    def finish(self) -> None:
        """Read to the end; raise `SourceError` if the array contains other bytes than it declared."""
        for _ in self._chunks:
            pass


def _pad_chunk(chunk: Chunk, nbytes: int) -> Chunk:
    """Return the bytes of a chunk at the array's edge, padded with zeros: all chunks have one shape."""
    if chunk.size == nbytes:
        return chunk
    padded_chunk = np.zeros(nbytes, np.uint8)
    padded_chunk[: chunk.size] = chunk
    return padded_chunk


def _verify_written(target: str, store: ZarrStore, entries: Sequence[ArrayEntry], threads: int | None) -> None:
    """Read the store again and compare documents and elements, by their hashes, with the originals."""
    try:
        source = read(store.label, ReadOptions(fallback_dtypes=("fp16", "fp32"), threads=threads), store)
        if [array.name for array in source.arrays] != [entry.name for entry in entries]:
            raise OutputError("the arrays are not those that were written")
        for array, entry in zip(source.arrays, entries, strict=True):
            order = entry.order if len(entry.shape) > 1 else "C"
            if (array.shape, array.order, array.dtype) != (entry.shape, order, entry.dtype):
                raise OutputError(f"array {entry.name!r} is not what was written")
            for chunk in array.iter_chunks(_READ_CHUNK_BYTES):
                del chunk
    except KvmnnError as error:
        message = str(error).replace(store.label, target)
        raise OutputError(f"{target}: does not read back as written: {message}") from None


def _build_manifest(source: Source, entries: Sequence[ArrayEntry], options: EncodeOptions) -> Manifest:
    """Build a manifest of the written arrays for the report; the store itself contains none."""
    losses = {key: text for key, text in source.metadata.items() if key == LOSSY_KEY}
    losses |= {DEQUANTIZED_KEY: "int8"} if source.lossy else {}
    predictor_names = frozenset[str]().union(*map(resolve_predictors, options.predictor_sets))
    return Manifest(
        kvmnn_version=get_version(),
        zstd_version=zstd.get_version(),
        zstd_byte_exact=zstd.is_byte_exact(),
        effort=options.effort,
        codecs=options.codecs,
        predictors=tuple(name for name in PREDICTORS if name in predictor_names),
        hi_predictors=None,
        arrays=tuple(entries),
        metadata=losses,
    )
