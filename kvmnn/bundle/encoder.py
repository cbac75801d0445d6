"""Encode a source into a frame file, a bundle or a stream: cut, encode, verify, hash, write.

Arrays that do not become smaller are stored raw: each array by itself, or K and V of a layer together, as MNN does.
"""

from __future__ import annotations

import hashlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import field, replace
from functools import lru_cache
from itertools import groupby
from typing import Any

from .. import dtypes
from .._util import parallel
from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from .._util.parallel import (
    MAX_IN_FLIGHT_BYTES,
    BackgroundHasher,
    Progress,
    is_cancelled,
    ordered_map,
    parallel_map,
    resolve_threads,
)
from .._util.text import LOSSLESS, LOSSY, compute_ratio, format_rate, pluralize
from ..arrays.array import Chunk, LazyArray
from ..arrays.completeness import Completeness, describe_scope, format_missing
from ..arrays.engine_metadata import add_completeness_metadata, dump_metadata
from ..arrays.naming import parse_layer, parse_part
from ..arrays.source import (
    DEQUANTIZED_KEY,
    FILE_KEY,
    LOSSY_KEY,
    Source,
    check_source,
    list_losses,
    qualify_label,
)
from ..dtypes import PARTS, Part
from ..errors import KvmnnError, ManifestError, OptionError, OutputError, SourceError
from ..files.atomic import BinaryStream, DirectoryOutput, FileOutput, StagedFile, is_device, refuse_input_folder
from ..files.file_names import describe_renamed_files, is_directory_output, make_file_names
from ..files.mapped_file import MappedFile
from ..files.schema import Record, json_key
from ..frames import CODECS, CodecOptions, verify_roundtrip, zstd
from ..frames.encoder import encode_for_file
from ..frames.options import PREDICTORS, resolve_predictors
from ..packed.cache_info import CacheInfo, build_cache_document, format_cache_summary
from . import manifest
from .dense import DenseOptions, DensePlan, compute_num_workers, encode_group, map_in_order, plan_arrays, plan_groups
from .manifest import (
    FRAME_SUFFIX,
    ArrayEntry,
    FrameEntry,
    Manifest,
    SizeStats,
    describe_storage,
    describe_unused_arrays,
    format_ratio,
)
from .passthrough import (
    PassthroughFile,
    count_bundle_bytes,
    count_valid_bytes,
    count_valid_bytes_by_array,
    describe_passthrough,
    describe_unused_bytes,
    parse_passthrough,
)


def pair_kv_blocks(arrays: Sequence[LazyArray]) -> list[tuple[int, ...]]:
    """Return the indices of K and V of each layer, or of each token range of one, paired by their names."""
    pairs: dict[str, dict[Part, int]] = {}
    for index, array in enumerate(arrays):
        try:
            part, role = parse_part("--joint-kv", array.name)
        except SourceError as error:
            raise OptionError(str(error)) from None
        if len(array.shape) == 4 and array.shape[0] > 1 and parse_layer(role) is None:
            raise OptionError(
                f"--joint-kv: array {array.name!r} of shape {list(array.shape)} holds {array.shape[0]} layers: "
                "expected one K and one V of each layer, such as 'layer_0.key' and 'layer_0.value'"
            )
        indices_by_part = pairs.setdefault(role, {})
        if part in indices_by_part:
            names = f"{arrays[indices_by_part[part]].name!r} and {array.name!r}"
            raise OptionError(f"--joint-kv: {names} are both the {part}s of one layer")
        indices_by_part[part] = index
    return [_require_pair(arrays, pair) for pair in pairs.values()]


def _require_pair(arrays: Sequence[LazyArray], pair: dict[Part, int]) -> tuple[int, ...]:
    for part, other_part in (PARTS, PARTS[::-1]):
        if part not in pair:
            raise OptionError(
                f"--joint-kv: array {arrays[pair[other_part]].name!r} has no partner: expected an array with its "
                f"{part}s "
                f"that "
                "is called the same but for the word that says K or V"
            )
    key, value = (arrays[pair[part]] for part in PARTS)
    if key.dtype != value.dtype:
        raise SourceError(
            f"--joint-kv: {key.name!r} is {key.dtype}, {value.name!r} is {value.dtype}: K and V of a block have "
            "one type"
        )
    return tuple(pair[part] for part in PARTS)


def store_incompressible_raw(
    arrays: Sequence[LazyArray],
    entries: Sequence[ArrayEntry],
    groups: Sequence[tuple[int, ...]],
    max_chunk_bytes: int,
    rewrite: Callable[[int], StagedFile],
) -> list[ArrayEntry]:
    """Return the manifest entries after raw storage of each group whose frames together do not save bytes."""
    stored_entries = list(entries)
    for group in groups:
        if sum(entries[index].stored_bytes for index in group) >= sum(entries[index].nbytes for index in group):
            for index in group:
                stored_entries[index] = _rewrite_raw(arrays[index], entries[index], max_chunk_bytes, rewrite(index))
    return stored_entries


def _rewrite_raw(array: LazyArray, entry: ArrayEntry, max_chunk_bytes: int, file: StagedFile) -> ArrayEntry:
    digest = hashlib.sha256()
    frames = tuple(_write_raw_frames(array, entry.frames[0].file, max_chunk_bytes, file, digest))
    file.close()
    if digest.hexdigest() != entry.sha256:
        raise SourceError(f"array {array.name!r}: changed while it was read")
    return replace(entry, frames=frames)


def _write_raw_frames(
    array: LazyArray, name: str, max_chunk_bytes: int, file: StagedFile, digest: hashlib._Hash
) -> Iterator[FrameEntry]:
    offset = 0
    for chunk in array.iter_chunks(max_chunk_bytes):
        file.write(chunk.data)
        digest.update(chunk.data)
        yield FrameEntry(
            file=name,
            offset=offset,
            bytes=chunk.size,
            raw_bytes=chunk.size,
            sha256=hashlib.sha256(chunk.data).hexdigest(),
            stored="raw",
        )
        offset += chunk.size
        del chunk  # or an inflated piece would live on while the next is inflated


_READBACK_CHUNK_BYTES = 8 << 20
_MAX_OPEN_FILES = 16


def verify_written(
    document: Manifest, manifest_file: StagedFile, files: Mapping[str, StagedFile], threads: int | None
) -> None:
    """Compare the written files with what was to be written; raise `OutputError` if they differ."""
    for file in (manifest_file, *files.values()):
        file.close()
    try:
        is_equal = manifest.load_manifest(manifest_file.path) == document
    except ManifestError as error:
        raise OutputError(f"{manifest_file.target}: does not read back: {error}") from None
    if not is_equal:
        raise OutputError(f"{manifest_file.target}: does not read back as it was written")

    @lru_cache(maxsize=_MAX_OPEN_FILES)
    def open_file(name: str) -> MappedFile:
        return MappedFile(files[name].path)

    def verify_frame(frame: FrameEntry) -> None:
        digest = hashlib.sha256()
        for block in open_file(frame.file).iter_chunks(frame.offset, frame.bytes, _READBACK_CHUNK_BYTES):
            digest.update(block.data)
        if digest.hexdigest() != frame.sha256:
            target = files[frame.file].target
            raise OutputError(
                f"{target}: {frame.description} at offset {frame.offset} does not read back as it was written"
            )

    parallel_map(verify_frame, [frame for array in document.arrays for frame in array.frames], resolve_threads(threads))


DEFAULT_FRAME_BYTES = 16 << 20
"""Default raw bytes above which an array is cut into several frames: two are encoded in parallel."""
DEFAULT_STREAM_FRAME_BYTES = 64 << 20
"""The same limit for streams and devices, which carry one frame."""
MIN_FRAME_BYTES = 4

NO_PLANS: Mapping[str, DensePlan] = {}
"""Plans if no array is encoded as dense streams."""

_MAX_SCRATCH_BYTES = 140 << 20
"""Bytes of working memory for the pieces in flight; keeps the command under 300 MiB on any number of processors."""


@dataclass(frozen=True, kw_only=True)
class EncodeOptions(CodecOptions):
    """Options for encoding arrays.

    Parameters
    ----------
    predictors, hi_predictors, codecs, effort, threads
        As for `kvmnn.encode`; collections are tuples.
    predictors_k, predictors_v
        Predictors for arrays that are K and V by their names; None uses `predictors`.
    frame_bytes
        An array of more raw bytes than this is cut along its leading axes into several frames; 0 never cuts. None is 16
        MiB, or 64 MiB for a stream or device.
    verify
        Decode every frame and compare it with its input before it is stored, and read the output back.
    block
        Store K and V of a layer, paired by their names, raw if their frames together do not save bytes: MNN's rule
        (`kvmnn.encode_block`).
    allow_raw
        Store an array raw if its frames do not save bytes. Raw words require a manifest. A file of another engine that
        is stored whole is always encoded so, unless `block` is set.
    dense
        Encode K and V of layers as dense streams, which MNN does not read (docs/format-v2.md): one for each layer, at
        any `frame_bytes`. None encodes frames only.
    """

    predictors: str | tuple[str, ...] | None = None
    hi_predictors: str | tuple[str, ...] | None = None
    predictors_k: str | tuple[str, ...] | None = None
    predictors_v: str | tuple[str, ...] | None = None
    codecs: tuple[str, ...] = CODECS
    frame_bytes: int | None = None
    threads: int | None = None
    verify: bool = True
    block: bool = False
    allow_raw: bool = False
    dense: DenseOptions | None = None

    def __post_init__(self) -> None:
        if self.frame_bytes and self.frame_bytes < MIN_FRAME_BYTES:
            raise KvmnnError(f"frame_bytes is {self.frame_bytes}: expected 0 (never cut) or at least {MIN_FRAME_BYTES}")
        if self.block and self.allow_raw:
            raise OptionError("--joint-kv and --allow-raw: an array is judged with its partner or by itself")
        for predictor_set in self.predictor_sets:
            replace(CodecOptions(), predictors=predictor_set).check()
        self.check()

    @property
    def predictor_sets(self) -> list[str | tuple[str, ...] | None]:
        """Return the predictor options that arrays may be encoded with."""
        if self.predictors_k is None and self.predictors_v is None:
            return [self.predictors]
        return [
            self.predictors if predictor_set is None else predictor_set
            for predictor_set in (self.predictors_k, self.predictors_v)
        ]

    @property
    def has_frame_options(self) -> bool:
        """Return whether effort, predictors or codecs are specified, which dense streams do not have."""
        frame_options = (
            self.effort,
            self.codecs,
            self.hi_predictors,
            self.predictors,
            self.predictors_k,
            self.predictors_v,
        )
        return frame_options != (CodecOptions.effort, CODECS, None, None, None, None)

    def resolve_for_array(self, name: str) -> EncodeOptions:
        """Return the options for one array, with the predictors for K or V by its name.

        Raises
        ------
        SourceError
            When it is neither by its name, and there are predictors of their own for K or V.
        """
        if self.predictors_k is None and self.predictors_v is None:
            return self
        part, _ = parse_part("--predictors k:SPEC, --predictors v:SPEC", name)
        predictor_set = self.predictor_sets[PARTS.index(part)]
        return replace(self, predictors=predictor_set, predictors_k=None, predictors_v=None)

    def list_raw_candidates(self, arrays: Sequence[LazyArray]) -> list[tuple[int, ...]]:
        """Return the indices of arrays stored raw together if frames save nothing; errors as `pair_kv_blocks`."""
        if self.block:
            return pair_kv_blocks(arrays)
        return [(index,) for index in range(len(arrays))] if self.allow_raw else []

    def require_manifest(self) -> None:
        """Raise `OptionError` if words might be stored raw, which only a manifest records."""
        if self.block or self.allow_raw:
            raise OptionError(
                "--joint-kv and --allow-raw need a manifest, which says what is stored raw: write to a file (-o "
                "FILE) or "
                "a directory (-o DIR/)"
            )

    def resolve_for_stream(self) -> EncodeOptions:
        """Return the options for output to a stream or device."""
        return replace(self, frame_bytes=DEFAULT_STREAM_FRAME_BYTES) if self.frame_bytes is None else self

    @property
    def max_frame_bytes(self) -> int:
        """Return the raw bytes above which an array is cut; 0: never."""
        return DEFAULT_FRAME_BYTES if self.frame_bytes is None else self.frame_bytes

    def encode_chunk(self, chunk: Chunk, dtype: str, threads: int | None, progress: Progress | None = None) -> bytes:
        """Return the frame of one piece, verified with `verify`; `progress` as for `kvmnn.encode`.

        Raises
        ------
        KvmnnError
            If the frame does not decode to its input, which would be a defect of kvmnn or of the machine.
        """
        options = CodecOptions(
            predictors=self.predictors, hi_predictors=self.hi_predictors, codecs=self.codecs, effort=self.effort
        )
        frame = encode_for_file(chunk, dtype, options, threads, progress)
        if self.verify and not verify_roundtrip(frame, chunk, dtype=dtype, codecs=self.codecs, threads=threads):
            raise KvmnnError("a frame did not decode to its own input; nothing was written (please report this)")
        return frame


def encode_to_file(
    arrays: Sequence[LazyArray],
    output: FileOutput,
    options: EncodeOptions,
    *,
    metadata: dict[str, str] | None = None,
    plans: Mapping[str, DensePlan] = NO_PLANS,
    progress: Progress | None = None,
) -> Manifest:
    """Write one array's frames, back to back, into a file, and its manifest next to it (not next to a device).

    The caller commits `output`.
    """
    if len(arrays) != 1:
        raise KvmnnError(f"a frame file holds one array, not {len(arrays)}: encode into a directory")
    if not output.is_device:
        output.check_sidecar(manifest.SIDECAR_SUFFIX)
    else:
        options.require_manifest()
        options = options.resolve_for_stream()

    def write(index: int, frame: bytes) -> str:
        output.file.write(frame)
        return output.target.name

    def rewrite(index: int) -> StagedFile:
        output.file.rewrite()
        return output.file

    document = _build_manifest(_encode_arrays(arrays, options, plans, write, progress, rewrite), options, metadata)
    if not output.is_device:
        index = output.open_sidecar(manifest.SIDECAR_SUFFIX)
        index.write(manifest.dump_manifest(document))
        if options.verify:
            verify_written(document, index, {output.target.name: output.file}, options.threads)
    return document


def encode_to_directory(
    arrays: Sequence[LazyArray],
    output: DirectoryOutput,
    options: EncodeOptions,
    *,
    metadata: dict[str, str] | None = None,
    plans: Mapping[str, DensePlan] = NO_PLANS,
    progress: Progress | None = None,
) -> Manifest:
    """Write one frame file for each array, and ``manifest.json``. The caller commits `output`."""
    names = make_file_names([array.name for array in arrays], FRAME_SUFFIX)
    output.check_names([*names, manifest.MANIFEST_NAME])
    files: dict[int, StagedFile] = {}

    def write(index: int, frame: bytes) -> str:
        if index not in files:
            files[index] = output.open_file(names[index])
        files[index].write(frame)
        return names[index]

    def rewrite(index: int) -> StagedFile:
        files[index].rewrite()
        return files[index]

    document = _build_manifest(_encode_arrays(arrays, options, plans, write, progress, rewrite), options, metadata)
    index = output.open_file(manifest.MANIFEST_NAME)
    index.write(manifest.dump_manifest(document))
    if options.verify:
        verify_written(document, index, {names[number]: file for number, file in files.items()}, options.threads)
    return document


def encode_to_memory(
    array: LazyArray,
    options: EncodeOptions,
    progress: Progress | None = None,
    plans: Mapping[str, DensePlan] = NO_PLANS,
) -> tuple[bytes, Manifest]:
    """Return the frames of an array, concatenated, and their manifest, which names no file."""
    options.require_manifest()
    frames: list[bytes] = []

    def collect_frame(index: int, frame: bytes) -> str:
        frames.append(frame)
        return ""

    entries = _encode_arrays([array], options, plans, collect_frame, progress)
    return b"".join(frames), _build_manifest(entries, options, None)


class _EncodeJob(NamedTuple):
    array_index: int
    chunk: Chunk


class _EncodedChunk(NamedTuple):
    frame: bytes
    sha256: str

    @classmethod
    def from_frame(cls, frame: bytes) -> _EncodedChunk:
        return cls(frame, hashlib.sha256(frame).hexdigest())


def _encode_arrays(
    arrays: Sequence[LazyArray],
    options: EncodeOptions,
    plans: Mapping[str, DensePlan],
    write: Callable[[int, bytes], str],
    progress: Progress | None,
    rewrite: Callable[[int], StagedFile] | None = None,
) -> list[ArrayEntry]:
    """Encode all pieces and pass them in order to `write(array index, frame)`, which returns the name of the file.

    `rewrite(array index)` returns that file emptied, for the words of an array that is stored raw.
    """

    def encode_job(job: _EncodeJob, threads: int | None) -> _EncodedChunk:
        dtype = arrays[job.array_index].dtype
        num_threads = threads if options.threads else _limit_threads(threads, job.chunk.size, dtype)
        return _EncodedChunk.from_frame(
            array_options[job.array_index].encode_chunk(job.chunk, dtype, num_threads, report_progress)
        )

    def encode_job_group(group: list[_EncodeJob]) -> list[_EncodedChunk]:
        chunks = [(plan, job.chunk) for job in group if (plan := array_plans[job.array_index])]
        streams = encode_group(chunks, verify=options.verify)
        report_progress(sum(chunk.size for _, chunk in chunks))
        return [_EncodedChunk.from_frame(stream) for stream in streams]

    def is_dense(job: _EncodeJob) -> bool:
        return array_plans[job.array_index] is not None

    def report_progress(num_bytes: int) -> None:
        with lock:  # pieces are encoded side by side
            if progress and not is_cancelled():
                progress(num_bytes)

    def iter_encoded() -> Iterator[tuple[_EncodeJob, _EncodedChunk]]:
        """Yield all jobs in order with results: frames by `ordered_map`, groups of dense streams on a thread each."""
        workers = compute_num_workers(groups.max_group_bytes, options.threads)
        for is_dense_run, group_run in groupby(groups.collect(jobs, is_dense), lambda group: is_dense(group[0])):
            if is_dense_run:
                for group, streams in map_in_order(encode_job_group, group_run, workers):
                    yield from zip(group, streams, strict=True)
                    group.clear()  # `groupby` holds on to it
                    del streams
            else:
                yield from ordered_map(
                    encode_job, (job.pop() for job in group_run), lambda job: job.chunk.size, options.threads
                )

    lock = threading.Lock()
    raw_candidates = options.list_raw_candidates(arrays) if rewrite else []
    array_plans = [plans.get(array.name) for array in arrays]
    array_options = [
        options if plan else options.resolve_for_array(array.name)
        for array, plan in zip(arrays, array_plans, strict=True)
    ]
    hashes = [hashlib.sha256() for _ in arrays]
    frames: list[list[FrameEntry]] = [[] for _ in arrays]
    max_chunk_bytes = [plan.nbytes if plan else options.max_frame_bytes for plan in array_plans]
    groups = plan_groups(zip(arrays, array_plans, strict=True))
    jobs = _iter_encode_jobs(arrays, max_chunk_bytes, hashes)
    for job, encoded in iter_encoded():
        file = write(job.array_index, encoded.frame)
        earlier_frames, plan = frames[job.array_index], array_plans[job.array_index]
        frames[job.array_index].append(
            FrameEntry(
                file=file,
                offset=earlier_frames[-1].offset + earlier_frames[-1].bytes if earlier_frames else 0,
                bytes=len(encoded.frame),
                raw_bytes=job.chunk.size,
                sha256=encoded.sha256,
                stored="dense" if plan else "frame",
                axes=plan.axes if plan else None,
                rope=str(plan.rotary) if plan and plan.rotary else None,
            )
        )
        del job, encoded  # or they would live on while the next piece is encoded
    array_entries = [
        ArrayEntry(
            name=array.name,
            dtype=array.dtype,
            shape=array.shape,
            array_dtype=array.array_dtype,
            order=array.order,
            element=array.element if array.itemsize == 1 else "",
            sha256=digest.hexdigest(),
            frames=tuple(entries),
        )
        for array, digest, entries in zip(arrays, hashes, frames, strict=True)
    ]
    return (
        store_incompressible_raw(arrays, array_entries, raw_candidates, options.max_frame_bytes, rewrite)
        if rewrite
        else array_entries
    )


def _limit_threads(threads: int | None, nbytes: int, dtype: str) -> int:
    """Return the threads for one of the pieces in flight, so that all stay within `_MAX_SCRATCH_BYTES`."""
    stream_bytes, num_chunks = nbytes // dtypes.parse_dtype(dtype).itemsize, max(1, MAX_IN_FLIGHT_BYTES // nbytes)
    return max(1, min(threads or parallel.cpu_count(), _MAX_SCRATCH_BYTES // (num_chunks * 2 * stream_bytes + 1)))


def _iter_encode_jobs(
    arrays: Sequence[LazyArray], max_chunk_bytes: Sequence[int], hashes: Sequence[hashlib._Hash]
) -> Iterator[_EncodeJob]:
    """Yield all pieces of all arrays, cut at the maximum bytes; each is hashed while it is being encoded."""
    with BackgroundHasher() as digester:
        for index, (array, max_bytes) in enumerate(zip(arrays, max_chunk_bytes, strict=True)):
            for chunk in array.iter_chunks(max_bytes):
                digester.update(hashes[index], chunk)
                yield _EncodeJob(index, chunk)
                digester.wait()
                del chunk  # or an inflated piece would live on while the next is inflated


def _build_manifest(entries: list[ArrayEntry], options: EncodeOptions, metadata: dict[str, str] | None) -> Manifest:
    from .._util.packages import get_version

    def resolve_predictor_names(*predictor_sets: str | tuple[str, ...] | None) -> tuple[str, ...]:
        predictor_names = frozenset[str]().union(
            *(resolve_predictors(predictor_set) for predictor_set in predictor_sets)
        )
        return tuple(name for name in PREDICTORS if name in predictor_names)

    has_frame_settings = options.has_frame_options or any(
        not frame.is_dense for array in entries for frame in array.frames
    )
    hi_predictors = options.hi_predictors
    return Manifest(
        kvmnn_version=get_version(),
        zstd_version=zstd.get_version(),
        zstd_byte_exact=zstd.is_byte_exact(),
        effort=options.effort if has_frame_settings else None,
        codecs=options.codecs if has_frame_settings else (),
        predictors=resolve_predictor_names(*options.predictor_sets) if has_frame_settings else (),
        hi_predictors=resolve_predictor_names(hi_predictors)
        if has_frame_settings and hi_predictors is not None
        else None,
        arrays=tuple(entries),
        metadata=metadata or {},
    )


@dataclass(frozen=True, kw_only=True)
class EncodeResult(SizeStats, Record):
    """Result of an encoding."""

    json_keys = (
        "output label raw_bytes stored_bytes valid_bytes ratio notes seconds effort=manifest.effort "
        "rope=manifest.rope kvmnn_version=manifest.kvmnn_version zstd_version=manifest.zstd_version "
        "byte_exact cache packed_files=_packed_files_document file=_file_document completeness "
        "arrays=_array_documents"
    )

    #: Output file or directory; None for a stream.
    output: str | None
    #: The manifest; without an output it names no files.
    manifest: Manifest
    #: Whether every frame was decoded and compared with its input.
    is_verified: bool
    #: Duration.
    seconds: float
    #: The packed cache that the arrays were read from, if it was one.
    cache: CacheInfo | None = field(default=None, metadata={"convert": build_cache_document})
    #: Quantised types that the words were dequantised from.
    dequantized_types: tuple[str, ...] = ()
    #: How much of the model's state the arrays contain; None if unknown.
    completeness: Completeness | None = field(default=None, metadata={"omit": True})
    #: Sentences about what was inferred of packed files.
    inference_notes: tuple[str, ...] = ()

    @property
    def passthrough(self) -> PassthroughFile | None:
        """Return the file that is stored whole; None if there is none."""
        return parse_passthrough(self.manifest.metadata, self.output or "frames")

    @property
    def valid_bytes(self) -> int:
        """Return the number of bytes of all arrays without unused capacity after the valid tokens."""
        return count_valid_bytes(self.manifest)

    @property
    def bundle_bytes(self) -> int:
        """Return the number of bytes of frames and manifest together."""
        return count_bundle_bytes(self.manifest)

    @property
    def byte_exact(self) -> bool | None:
        """Return whether all frames are byte-identical to MNN's; None if there are only dense streams and raw words."""
        bundle_manifest = self.manifest
        has_frames = any(frame.stored == "frame" for array in bundle_manifest.arrays for frame in array.frames)
        return bundle_manifest.zstd_byte_exact and bundle_manifest.effort == "exact" if has_frames else None

    @property
    def label(self) -> str | None:
        """Return the label of the result.

        ``LOSSLESS`` if that was verified, ``LOSSY`` if a part of packed files was left out, or if the words were
        dequantised from MNN's int8 codes, which the frames lack; else None. Where K and V had lost something before,
        ``LOSSLESS copy of LOSSY K and V``, or ``LOSSY`` if unverified.
        """
        record, losses = self.manifest.packed_record, list_losses(self.manifest.metadata)
        if (record is not None and record.left_out) or DEQUANTIZED_KEY in self.manifest.metadata:
            return LOSSY
        return qualify_label(LOSSLESS if self.is_verified else None, losses)

    @property
    def verification_text(self) -> str:
        """Return what was compared, as text."""
        record = self.manifest.packed_record
        if record is not None and record.left_out:
            return "live elements, decoded and compared; the files are not covered"
        if DEQUANTIZED_KEY in self.manifest.metadata:
            compared_text = "decoded and compared" if self.is_verified else "not verified"
            return f"int8 times scale plus bias; of the dequantised words, {compared_text}"
        if not self.is_verified:
            return "not verified"
        if record is not None:
            return f"decoded and compared; {pluralize(len(record.files), 'packed file')} rebuilt in memory, every byte"
        return "decoded and compared" if self.cache is None else "live elements, decoded and compared"

    @property
    def notes(self) -> list[str]:
        """Return lines about what qualifies the ratio."""
        notes = (
            self._dequantization_notes
            + describe_passthrough(self.manifest, self.output or "frames")
            + describe_unused_arrays(self.manifest)
            + self._zstd_notes
        )
        losses = list_losses(self.manifest.metadata)
        return [*self.inference_notes, *(line for line in losses if line not in self.inference_notes), *notes]

    @property
    def _zstd_notes(self) -> list[str]:
        if self.byte_exact is not False or self.manifest.effort != "exact":
            return []
        first, last = (".".join(map(str, version)) for version in zstd.BYTE_EXACT_VERSIONS)
        return [
            f"MNN reads these frames, but not all are the bytes that MNN would store: libzstd is "
            f"{self.manifest.zstd_version}, and those are of {first} to {last}"
        ]

    @property
    def _dequantization_notes(self) -> list[str]:
        return [f"words dequantised from {', '.join(self.dequantized_types)}"] if self.dequantized_types else []

    @property
    def _array_documents(self) -> list[dict[str, Any]]:
        sizes = count_valid_bytes_by_array(self.manifest)
        return [
            {**array.to_dict(), "ratio": compute_ratio(sizes[array.name], array.stored_bytes)}
            for array in self.manifest.arrays
        ]

    def __str__(self) -> str:
        return self.text()

    @property
    @json_key(omit=True)
    def _packed_files_document(self) -> dict[str, Any] | None:
        record, unused_arrays = self.manifest.packed_record, self.manifest.unused_arrays
        return (
            None
            if record is None
            else {
                "files": len(record.files),
                "bytes": record.nbytes,
                "rebuilt": not record.left_out,
                "left_out": record.left_out,
                "room_bytes": sum(array.nbytes for array in unused_arrays),
                "room_stored_bytes": sum(array.stored_bytes for array in unused_arrays),
            }
        )

    @property
    @json_key(omit=True)
    def _file_document(self) -> dict[str, Any] | None:
        passthrough = self.passthrough
        return (
            None
            if passthrough is None
            else {
                "name": passthrough.name,
                "format": passthrough.format,
                "bytes": passthrough.nbytes,
                "stored_bytes": self.bundle_bytes,
                "room_bytes": passthrough.unused_bytes,
            }
        )

    def _describe_renames(self) -> str:
        arrays = self.manifest.arrays
        return describe_renamed_files((array.name, array.frames[0].file) for array in arrays if len(arrays) > 1)

    def _describe_contents(self) -> str:
        storage_kinds = {frame.stored for array in self.manifest.arrays for frame in array.frames}
        return (
            "the dense streams"
            if storage_kinds == {"dense"}
            else "the frames"
            if "dense" not in storage_kinds
            else "what is stored"
        )

    def text(self, *, verbose: bool = False) -> str:
        """Return the result as one line; with `verbose` one more for each array."""
        arrays, valid_bytes_by_name = self.manifest.token_arrays, count_valid_bytes_by_array(self.manifest)
        lines = []
        if verbose and self.output is not None:
            lines += [
                f"{array.name}: {array.type_name} {list(array.shape)}, "
                f"{array.nbytes:,} -> {array.stored_bytes:,} bytes, "
                f"{format_ratio(array.nbytes, valid_bytes_by_name[array.name], array.stored_bytes)}, "
                f"{describe_storage([array])}"
                for array in self.manifest.arrays
            ]
        rename_text = self._describe_renames()
        name = self.output or arrays[0].name
        if len(arrays) > 1:
            name += f" ({pluralize(len(arrays), 'array')})"
        missing_texts = format_missing(self.completeness)
        scope = describe_scope(len(arrays)) if missing_texts else ""
        verification_text = f"{self.label}{scope} ({self.verification_text})" if self.label else self.verification_text
        lines.append(
            f"{name}: {self.raw_bytes:,} -> {self.stored_bytes:,} bytes, {self.ratio_text}, "
            f"{describe_storage(arrays)}, {verification_text}"
            f"{format_rate(self.raw_bytes, self.seconds)}"
        )
        if rename_text:
            lines.append(f"  {rename_text}")
        lines += [
            f"  {line}"
            for line in (
                *missing_texts,
                *list_losses(self.manifest.metadata),
                *self._dequantization_notes,
                *describe_unused_arrays(self.manifest),
                *self._zstd_notes,
            )
        ]
        if self.passthrough:
            bundle_bytes = self.bundle_bytes
            lines += [f"  {line}" for line in describe_unused_bytes(self.passthrough, self.manifest)]
            lines.append(
                f"  {self.passthrough.name} has {self.passthrough.nbytes:,} bytes, frames and manifest have "
                f"{bundle_bytes:,}"
                f"{', which is more' if bundle_bytes > self.passthrough.nbytes else ''}; decode writes the same file "
                f"again"
            )
        if self.cache:
            packed_bytes = self.cache.file_bytes
            size_ratio = compute_ratio(packed_bytes, self.manifest.stored_bytes)
            inferred_text = " (partly inferred)" if any("inferred" in note for note in self.inference_notes) else ""
            lines.append(f"  read as {format_cache_summary(self.cache)}{inferred_text}")
            lines.append(
                f"  the packed files have {packed_bytes:,} bytes, {size_ratio:.2f} times as many as "
                f"{self._describe_contents()} ({self.manifest.stored_bytes:,}; {self.bundle_bytes:,} with the manifest)"
            )
        return "\n".join(lines)


def encode_source(
    source: Source,
    output: str | os.PathLike[str] | BinaryStream,
    options: EncodeOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
    accept: Callable[[Manifest], bool] | None = None,
) -> EncodeResult:
    """Encode all arrays of a source into frames or dense streams, and write the manifest that restores and proves them.

    Parameters
    ----------
    source
        What to encode: `kvmnn.open`.
    output
        For one array a file, which gets the frames, back to back, and its manifest next to it (``<output>.json``); a
        directory (several arrays, a name that ends in a slash, or a directory that exists), which gets one frame file
        for each array and ``manifest.json``; or a binary stream, which gets the one frame of one array and no manifest.
    options
        Predictors, codecs, effort, where arrays are cut (above 16 MiB; for a stream above 64 MiB, which it refuses),
        threads, verification.
    force
        Replace files that exist; the inputs of `source` are never replaced.
    progress
        Called with raw bytes.
    accept
        Called before the files of a directory get their names: where it returns False, none is written, and the result
        has no output.

    Raises
    ------
    OptionError
        When a stream would have to carry several frames, or raw words; when K or V of `options.block` has no partner;
        when `options.dense` is set and no array can be a dense stream.
    KvmnnError
        When an input is damaged, the output exists or cannot be written, or a frame does not decode to its input.
        Nothing remains then.
    """
    check_source(source, "kvmnn.bundle.encode")
    options = options or EncodeOptions()
    start_time = time.perf_counter()
    # A whole file records its engine, but not the layers of its caches.
    metadata = add_completeness_metadata(source) if FILE_KEY in source.metadata else dump_metadata(source)
    metadata.pop(DEQUANTIZED_KEY, None)  # of arrays that were decoded from such frames: their words are the input
    if source.lossy:
        metadata[DEQUANTIZED_KEY] = "int8"
    source = replace(source, metadata=metadata)
    plans = plan_arrays(source, options.dense) if options.dense else NO_PLANS
    if isinstance(output, str | os.PathLike):
        bundle_manifest, is_written = _write_to_path(source, os.fspath(output), options, plans, force, progress, accept)
        path = os.fspath(output) if is_written else None
    else:
        path = None
        bundle_manifest = _write_to_stream(source, output, options, plans, progress)
    seconds = time.perf_counter() - start_time
    return EncodeResult(
        output=path,
        manifest=bundle_manifest,
        is_verified=options.verify,
        seconds=seconds,
        cache=source.cache,
        dequantized_types=source.dequantized_types,
        completeness=source.completeness,
        inference_notes=tuple(source.notes) if source.cache else (),
    )


def check_encode_output(source: Source, path: str, *, force: bool = False) -> None:
    """Raise the errors of `encode_source` about an output that cannot be written, before any work is done.

    Raises
    ------
    OutputError
        As for `encode_source`.
    """
    if is_device(path):
        return
    refuse_input_folder(path, source.inputs)
    if len(source) > 1 or is_directory_output(path):
        with DirectoryOutput(path, force=force, exclude=source.files, index=manifest.MANIFEST_NAME) as directory:
            directory.check_names([*make_file_names(source.names, manifest.FRAME_SUFFIX), manifest.MANIFEST_NAME])
        return
    with FileOutput(path, force=force, exclude=source.files) as file:
        file.check_sidecar(manifest.SIDECAR_SUFFIX)


def _write_to_path(
    source: Source,
    path: str,
    options: EncodeOptions,
    plans: Mapping[str, DensePlan],
    force: bool,
    progress: Progress | None,
    accept: Callable[[Manifest], bool] | None,
) -> tuple[Manifest, bool]:
    if FILE_KEY in source.metadata and not options.block:  # no engine reads these frames: what counts are bytes
        options = replace(options, allow_raw=True)
    refuse_input_folder(path, source.inputs)
    if len(source) > 1 or is_directory_output(path):
        with DirectoryOutput(path, force=force, exclude=source.files, index=manifest.MANIFEST_NAME) as directory:
            bundle_manifest = encode_to_directory(
                source.arrays, directory, options, metadata=source.metadata, plans=plans, progress=progress
            )
            is_accepted = accept is None or accept(bundle_manifest)
            if is_accepted:
                directory.commit()
        return bundle_manifest, is_accepted
    with FileOutput(path, force=force, exclude=source.files) as file:
        bundle_manifest = encode_to_file(
            source.arrays, file, options, metadata=source.metadata, plans=plans, progress=progress
        )
        file.commit()
    return bundle_manifest, True


def _write_to_stream(
    source: Source,
    stream: BinaryStream,
    options: EncodeOptions,
    plans: Mapping[str, DensePlan],
    progress: Progress | None,
) -> Manifest:
    if len(source) > 1:
        raise OptionError(f"a stream carries one frame, not {len(source)}: write to a directory (-o DIR/)")
    (array,) = source.arrays
    plan = plans.get(array.name)
    if plan and array.nbytes > plan.nbytes:
        raise OptionError(f"a stream carries one layer, array {array.name!r} holds several: use -o FILE")
    options = options.resolve_for_stream()
    if not plan and array.count_chunks(options.max_frame_bytes) > 1:
        raise OptionError(
            f"a stream carries one frame, but {array.nbytes} bytes are above --chunk-bytes: "
            "use --chunk-bytes 0 or -o FILE"
        )
    frame, bundle_manifest = encode_to_memory(array, options, progress, plans)
    stream.write(frame)
    stream.flush()
    losses = {key: text for key, text in source.metadata.items() if key in (LOSSY_KEY, DEQUANTIZED_KEY)}
    return replace(bundle_manifest, metadata=losses)
