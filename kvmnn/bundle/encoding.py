"""Arrays to frame files and their manifest: cut, encode, prove, hash, write."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from .. import dtypes
from ..arrays.named_array import Chunk, LazyArray
from ..arrays.names import parse_part
from ..dtypes import PARTS
from ..errors import KvmnnError, OptionError
from ..files.names import make_file_names
from ..files.output import DirectoryOutput, FileOutput, StagedFile
from ..frames import CODECS, CodecOptions, predictors, verify_roundtrip, zstd
from ..frames.encoding import encode_for_file
from ..threads import pool
from ..threads.digest import BackgroundHasher
from ..threads.helpers import is_cancelled
from ..threads.pipeline import MAX_IN_FLIGHT_BYTES, Progress, ordered_map
from . import manifest
from .dense_groups import compute_num_workers, encode_group, map_in_order, plan_groups
from .dense_pieces import DenseOptions, DensePlan
from .manifest import FRAME_SUFFIX, ArrayEntry, FrameEntry, Manifest
from .no_gain import pair_kv_blocks, store_incompressible_raw
from .rereading import verify_written

DEFAULT_FRAME_BYTES = 16 << 20
"""Raw bytes above which an array is cut into several frames, where nothing else is said: two are made side by side."""
DEFAULT_STREAM_FRAME_BYTES = 64 << 20
"""The same for streams and devices, which are to carry one frame."""
MIN_FRAME_BYTES = 4

NO_PLANS: Mapping[str, DensePlan] = {}
"""Where no array becomes dense streams."""

_MAX_SCRATCH_BYTES = 140 << 20
"""Bytes of working memory for the pieces in flight, which keep the tool under 300 MiB on any number of processors."""


@dataclass(frozen=True, kw_only=True)
class EncodeOptions(CodecOptions):
    """How arrays become frames.

    Parameters
    ----------
    predictors, hi_predictors, codecs, effort, threads
        As for `kvmnn.encode`; collections are tuples.
    predictors_k, predictors_v
        Others for arrays that are K and for those that are V by their names; None takes `predictors`.
    frame_bytes
        An array of more raw bytes than this is cut along its leading axes into several frames; 0 never cuts. None is
        16 MiB, and 64 MiB where a stream or device is written.
    verify
        Decode every frame and compare it with its input before anything is kept, and read what was written again.
    block
        Store K and V of a layer, paired by their names, raw where their frames together are no smaller than they are:
        the engine's rule (`kvmnn.encode_block`).
    allow_raw
        The same for every array by itself. Files that hold words rather than frames need their manifest. A file of
        another engine that is kept whole is always encoded so, unless `block` says otherwise.
    dense
        Make dense streams, which MNN does not read, of K and V of layers (docs/format-v2.md): one for each layer,
        whatever `frame_bytes` says. None makes frames of everything.
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
            raise OptionError("--block and --allow-raw: an array is judged with its partner or by itself")
        for predictor_set in self.predictor_sets:
            replace(CodecOptions(), predictors=predictor_set).check()
        self.check()

    @property
    def predictor_sets(self) -> list[str | tuple[str, ...] | None]:
        """The sets that arrays may be encoded with."""
        if self.predictors_k is None and self.predictors_v is None:
            return [self.predictors]
        return [
            self.predictors if predictor_set is None else predictor_set
            for predictor_set in (self.predictors_k, self.predictors_v)
        ]

    @property
    def has_frame_options(self) -> bool:
        """Whether anything is said of frames: their effort, predictors or codecs. Dense streams know none of these."""
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
        """The options for one array, with predictors for K or V as its name says.

        Raises
        ------
        SourceError
            When it is neither by its name, and there are predictors of their own for K or V.
        """
        if self.predictors_k is None and self.predictors_v is None:
            return self
        part, _ = parse_part("--predictors-k, --predictors-v", name)
        predictor_set = self.predictor_sets[PARTS.index(part)]
        return replace(self, predictors=predictor_set, predictors_k=None, predictors_v=None)

    def list_raw_candidates(self, arrays: Sequence[LazyArray]) -> list[tuple[int, ...]]:
        """Indices of the arrays that are stored raw together where their frames do not gain; errors as
        `pair_kv_blocks`.
        """
        if self.block:
            return pair_kv_blocks(arrays)
        return [(index,) for index in range(len(arrays))] if self.allow_raw else []

    def require_manifest(self) -> None:
        """`OptionError` where words might be stored raw and there is no manifest that says so."""
        if self.block or self.allow_raw:
            raise OptionError(
                "--block and --allow-raw need a manifest, which says what is stored raw: write to a file (-o FILE) or "
                "a directory (-o DIR/)"
            )

    def resolve_for_stream(self) -> EncodeOptions:
        """The options where the frames go to a stream or device."""
        return replace(self, frame_bytes=DEFAULT_STREAM_FRAME_BYTES) if self.frame_bytes is None else self

    @property
    def max_frame_bytes(self) -> int:
        """Raw bytes above which an array is cut; 0: never."""
        return DEFAULT_FRAME_BYTES if self.frame_bytes is None else self.frame_bytes

    def encode_chunk(self, chunk: Chunk, dtype: str, threads: int | None, progress: Progress | None = None) -> bytes:
        """The frame of one piece, proved if `verify` says so; `progress` as for `kvmnn.encode`.

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
    """Write one array's frames, back to back, into a file, and its manifest beside it (not beside a device).

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
    """An array's frames, back to back, and their manifest, which names no file."""
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
    """Encode all pieces and `write(array index, frame)` them in order; it returns the name of the frame's file.

    `rewrite(array index)` gives that file emptied, for the words of an array that is stored raw.
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
        """All jobs in order: frames as `ordered_map` has it, groups of dense streams a thread each."""
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
    """Threads for one of the pieces in flight: each works on a stream and its payload, and all stay in
    `_MAX_SCRATCH_BYTES`.
    """
    stream_bytes, num_chunks = nbytes // dtypes.parse_dtype(dtype).itemsize, max(1, MAX_IN_FLIGHT_BYTES // nbytes)
    return max(1, min(threads or pool.cpu_count(), _MAX_SCRATCH_BYTES // (num_chunks * 2 * stream_bytes + 1)))


def _iter_encode_jobs(
    arrays: Sequence[LazyArray], max_chunk_bytes: Sequence[int], hashes: Sequence[hashlib._Hash]
) -> Iterator[_EncodeJob]:
    """All pieces of all arrays, of at most so many bytes; each is hashed while it is being encoded."""
    with BackgroundHasher() as digester:
        for index, (array, max_bytes) in enumerate(zip(arrays, max_chunk_bytes, strict=True)):
            for chunk in array.iter_chunks(max_bytes):
                digester.update(hashes[index], chunk)
                yield _EncodeJob(index, chunk)
                digester.wait()
                del chunk  # or an inflated piece would live on while the next is inflated


def _build_manifest(entries: list[ArrayEntry], options: EncodeOptions, metadata: dict[str, str] | None) -> Manifest:
    from ..version import get_version

    def resolve_predictor_names(*predictor_sets: str | tuple[str, ...] | None) -> tuple[str, ...]:
        predictor_names = frozenset[str]().union(
            *(predictors.resolve_predictors(predictor_set) for predictor_set in predictor_sets)
        )
        return tuple(name for name in predictors.PREDICTORS if name in predictor_names)

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
