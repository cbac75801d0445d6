"""Arrays to frame files and their manifest: cut, encode, prove, hash, write."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

from .. import dtypes
from ..arrays.named_array import NamedArray, Piece
from ..arrays.names import part_of
from ..dtypes import PARTS
from ..errors import KvmnnError, OptionError
from ..files.names import file_names
from ..files.output import DirectoryOutput, FileOutput, StagedFile
from ..frames import CODECS, CodecOptions, matches, predictors, zstd
from ..frames.encoding import encode_for_file
from ..threads import pool
from ..threads.digest import Digester
from ..threads.helpers import is_given_up
from ..threads.pipeline import IN_FLIGHT, Progress, ordered
from . import manifest
from .dense_groups import at_once, encode_group, groups_of, side_by_side
from .dense_pieces import DenseOptions, DensePlan
from .manifest import FRAME_SUFFIX, ArrayEntry, FrameEntry, Manifest
from .no_gain import blocks_of, keep_raw
from .rereading import read_back

FRAME_BYTES = 16 << 20
"""Raw bytes above which an array is cut into several frames, where nothing else is said: two are made side by side."""
STREAM_BYTES = 64 << 20
"""The same for streams and devices, which are to carry one frame."""
MIN_FRAME_BYTES = 4

NO_PLANS: Mapping[str, DensePlan] = {}
"""Where no array becomes dense streams."""

_SCRATCH = 140 << 20
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
        for chosen in self.used_predictors:
            replace(CodecOptions(), predictors=chosen).check()
        self.check()

    @property
    def used_predictors(self) -> list[str | tuple[str, ...] | None]:
        """The sets that arrays may be encoded with."""
        if self.predictors_k is None and self.predictors_v is None:
            return [self.predictors]
        return [self.predictors if chosen is None else chosen for chosen in (self.predictors_k, self.predictors_v)]

    @property
    def says_of_frames(self) -> bool:
        """Whether anything is said of frames: their effort, predictors or codecs. Dense streams know none of these."""
        said = (self.effort, self.codecs, self.hi_predictors, self.predictors, self.predictors_k, self.predictors_v)
        return said != (CodecOptions.effort, CODECS, None, None, None, None)

    def for_array(self, name: str) -> EncodeOptions:
        """The options for one array, with predictors for K or V as its name says.

        Raises
        ------
        SourceError
            When it is neither by its name, and there are predictors of their own for K or V.
        """
        if self.predictors_k is None and self.predictors_v is None:
            return self
        part, _ = part_of("--predictors-k, --predictors-v", name)
        chosen = self.used_predictors[PARTS.index(part)]
        return replace(self, predictors=chosen, predictors_k=None, predictors_v=None)

    def judged(self, arrays: Sequence[NamedArray]) -> list[tuple[int, ...]]:
        """Indices of the arrays that are stored raw together where their frames do not gain; errors as `blocks_of`."""
        if self.block:
            return blocks_of(arrays)
        return [(index,) for index in range(len(arrays))] if self.allow_raw else []

    def check_has_manifest(self) -> None:
        """`OptionError` where words might be stored raw and there is no manifest that says so."""
        if self.block or self.allow_raw:
            raise OptionError(
                "--block and --allow-raw need a manifest, which says what is stored raw: write to a file (-o FILE) or "
                "a directory (-o DIR/)"
            )

    def for_stream(self) -> EncodeOptions:
        """The options where the frames go to a stream or device."""
        return replace(self, frame_bytes=STREAM_BYTES) if self.frame_bytes is None else self

    @property
    def cut_above(self) -> int:
        """Raw bytes above which an array is cut; 0: never."""
        return FRAME_BYTES if self.frame_bytes is None else self.frame_bytes

    def encode(self, piece: Piece, dtype: str, threads: int | None, progress: Progress | None = None) -> bytes:
        """The frame of one piece, proved if `verify` says so; `progress` as for `kvmnn.encode`.

        Raises
        ------
        KvmnnError
            If the frame does not decode to its input, which would be a defect of kvmnn or of the machine.
        """
        options = CodecOptions(
            predictors=self.predictors, hi_predictors=self.hi_predictors, codecs=self.codecs, effort=self.effort
        )
        made = encode_for_file(piece, dtype, options, threads, progress)
        if self.verify and not matches(made, piece, dtype=dtype, codecs=self.codecs, threads=threads):
            raise KvmnnError("a frame did not decode to its own input; nothing was written (please report this)")
        return made


def encode_to_file(
    arrays: Sequence[NamedArray],
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
        output.check_beside(manifest.SIDE_SUFFIX)
    else:
        options.check_has_manifest()
        options = options.for_stream()

    def write(index: int, made: bytes) -> str:
        output.file.write(made)
        return output.target.name

    def rewrite(index: int) -> StagedFile:
        output.file.rewrite()
        return output.file

    document = _document(_encode(arrays, options, plans, write, progress, rewrite), options, metadata)
    if not output.is_device:
        index = output.beside(manifest.SIDE_SUFFIX)
        index.write(manifest.to_json(document))
        if options.verify:
            read_back(document, index, {output.target.name: output.file}, options.threads)
    return document


def encode_to_directory(
    arrays: Sequence[NamedArray],
    output: DirectoryOutput,
    options: EncodeOptions,
    *,
    metadata: dict[str, str] | None = None,
    plans: Mapping[str, DensePlan] = NO_PLANS,
    progress: Progress | None = None,
) -> Manifest:
    """Write one frame file for each array, and ``manifest.json``. The caller commits `output`."""
    names = file_names([array.name for array in arrays], FRAME_SUFFIX)
    output.check_names([*names, manifest.FILE_NAME])
    files: dict[int, StagedFile] = {}

    def write(index: int, made: bytes) -> str:
        if index not in files:
            files[index] = output.file(names[index])
        files[index].write(made)
        return names[index]

    def rewrite(index: int) -> StagedFile:
        files[index].rewrite()
        return files[index]

    document = _document(_encode(arrays, options, plans, write, progress, rewrite), options, metadata)
    index = output.file(manifest.FILE_NAME)
    index.write(manifest.to_json(document))
    if options.verify:
        read_back(document, index, {names[number]: file for number, file in files.items()}, options.threads)
    return document


def encode_to_memory(
    array: NamedArray,
    options: EncodeOptions,
    progress: Progress | None = None,
    plans: Mapping[str, DensePlan] = NO_PLANS,
) -> tuple[bytes, Manifest]:
    """An array's frames, back to back, and their manifest, which names no file."""
    options.check_has_manifest()
    frames: list[bytes] = []

    def keep(index: int, made: bytes) -> str:
        frames.append(made)
        return ""

    entries = _encode([array], options, plans, keep, progress)
    return b"".join(frames), _document(entries, options, None)


class _Job(NamedTuple):
    array_index: int
    piece: Piece


class _Made(NamedTuple):
    frame: bytes
    sha256: str

    @classmethod
    def of(cls, frame: bytes) -> _Made:
        return cls(frame, hashlib.sha256(frame).hexdigest())


def _encode(
    arrays: Sequence[NamedArray],
    options: EncodeOptions,
    plans: Mapping[str, DensePlan],
    write: Callable[[int, bytes], str],
    progress: Progress | None,
    rewrite: Callable[[int], StagedFile] | None = None,
) -> list[ArrayEntry]:
    """Encode all pieces and `write(array index, frame)` them in order; it returns the name of the frame's file.

    `rewrite(array index)` gives that file emptied, for the words of an array that is stored raw.
    """

    def make(job: _Job, threads: int | None) -> _Made:
        dtype = arrays[job.array_index].dtype
        allowed = threads if options.threads else _affordable(threads, job.piece.size, dtype)
        return _Made.of(chosen[job.array_index].encode(job.piece, dtype, allowed, step))

    def make_group(group: list[_Job]) -> list[_Made]:
        pieces = [(plan, job.piece) for job in group if (plan := planned[job.array_index])]
        streams = encode_group(pieces, verify=options.verify)
        step(sum(piece.size for _, piece in pieces))
        return [_Made.of(stream) for stream in streams]

    def is_dense(job: _Job) -> bool:
        return planned[job.array_index] is not None

    def step(done: int) -> None:
        with lock:  # pieces are encoded side by side
            if progress and not is_given_up():
                progress(done)

    def done() -> Iterator[tuple[_Job, _Made]]:
        """All jobs in order: frames as `ordered` has it, groups of dense streams a thread each."""
        workers = at_once(groups.largest, options.threads)
        for dense, run in groupby(groups.gathered(jobs, is_dense), lambda group: is_dense(group[0])):
            if dense:
                for group, streams in side_by_side(make_group, run, workers):
                    yield from zip(group, streams, strict=True)
                    group.clear()  # `groupby` holds on to it
                    del streams
            else:
                yield from ordered(make, (job.pop() for job in run), lambda job: job.piece.size, options.threads)

    lock = threading.Lock()
    judged = options.judged(arrays) if rewrite else []
    planned = [plans.get(array.name) for array in arrays]
    chosen = [options if plan else options.for_array(array.name) for array, plan in zip(arrays, planned, strict=True)]
    hashes = [hashlib.sha256() for _ in arrays]
    frames: list[list[FrameEntry]] = [[] for _ in arrays]
    limits = [plan.nbytes if plan else options.cut_above for plan in planned]
    groups = groups_of(zip(arrays, planned, strict=True))
    jobs = _jobs(arrays, limits, hashes)
    for job, made in done():
        file = write(job.array_index, made.frame)
        before, plan = frames[job.array_index], planned[job.array_index]
        frames[job.array_index].append(
            FrameEntry(
                file=file,
                offset=before[-1].offset + before[-1].bytes if before else 0,
                bytes=len(made.frame),
                raw_bytes=job.piece.size,
                sha256=made.sha256,
                stored="dense" if plan else "frame",
                axes=plan.axes if plan else None,
                rope=str(plan.rotary) if plan and plan.rotary else None,
            )
        )
        del job, made  # or they would live on while the next piece is encoded
    made_entries = [
        ArrayEntry(
            name=array.name,
            dtype=array.dtype,
            shape=array.shape,
            array_dtype=array.array_dtype,
            order=array.order,
            element=array.element if array.itemsize == 1 else "",
            sha256=sha.hexdigest(),
            frames=tuple(entries),
        )
        for array, sha, entries in zip(arrays, hashes, frames, strict=True)
    ]
    return keep_raw(arrays, made_entries, judged, options.cut_above, rewrite) if rewrite else made_entries


def _affordable(threads: int | None, nbytes: int, dtype: str) -> int:
    """Threads for one of the pieces in flight: each works on a stream and its payload, and all stay in `_SCRATCH`."""
    stream, pieces = nbytes // dtypes.by_name(dtype).itemsize, max(1, IN_FLIGHT // nbytes)
    return max(1, min(threads or pool.cpu_count(), _SCRATCH // (pieces * 2 * stream + 1)))


def _jobs(arrays: Sequence[NamedArray], limits: Sequence[int], hashes: Sequence[hashlib._Hash]) -> Iterator[_Job]:
    """All pieces of all arrays, of at most so many bytes; each is hashed while it is being encoded."""
    with Digester() as digester:
        for index, (array, limit) in enumerate(zip(arrays, limits, strict=True)):
            for piece in array.pieces(limit):
                digester.update(hashes[index], piece)
                yield _Job(index, piece)
                digester.wait()
                del piece  # or an inflated piece would live on while the next is inflated


def _document(entries: list[ArrayEntry], options: EncodeOptions, metadata: dict[str, str] | None) -> Manifest:
    from ..version import version

    def names(*sets: str | tuple[str, ...] | None) -> tuple[str, ...]:
        known = frozenset[str]().union(*(predictors.resolve(chosen) for chosen in sets))
        return tuple(name for name in predictors.NAMES if name in known)

    used = options.says_of_frames or any(not frame.is_dense for array in entries for frame in array.frames)
    hi = options.hi_predictors
    return Manifest(
        kvmnn_version=version(),
        zstd_version=zstd.version(),
        zstd_byte_exact=zstd.byte_exact(),
        effort=options.effort if used else None,
        codecs=options.codecs if used else (),
        predictors=names(*options.used_predictors) if used else (),
        hi_predictors=names(hi) if used and hi is not None else None,
        arrays=tuple(entries),
        metadata=metadata or {},
    )
