"""Frames to read: those of a bare file, or all that a manifest lists."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from .. import dtypes
from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from .._util.text import pluralize
from ..arrays.array import Chunk
from ..arrays.completeness import Completeness
from ..arrays.naming import array_name_from_path
from ..arrays.source import PACKED_FILES_KEY, list_losses, parse_cache_info, parse_completeness
from ..dense import inspect
from ..errors import FrameError, LimitError, ManifestError, OptionError
from ..files.atomic import refuse_two_encodings
from ..files.file_info import file_id
from ..files.mapped_file import STDIN, MappedFile
from ..frames import CODECS
from ..frames.api import split_frames
from ..packed.cache_info import CacheInfo
from . import manifest
from .manifest import FRAME_SUFFIX, ArrayEntry, FrameEntry, Manifest, PackedRecord, parse_packed_record

_DENSE_MAGIC = b"KVMD"
"""Magic number of dense streams; no frame starts with it, as its second stream header would not match its words."""


@dataclass(frozen=True, kw_only=True)
class DecodeOptions:
    """Options of decoding."""

    #: Element type of frames without a manifest; None takes their container (fp16 or fp32).
    dtype: str | None = None
    #: `codecs`, `threads`: As for `kvmnn.decode`.
    codecs: tuple[str, ...] = CODECS
    #: Maximum total raw bytes to decode; None for no limit.
    max_bytes: int | None = None
    threads: int | None = None


class FrameFile(NamedTuple):
    """An open file of frames, and its name in the manifest."""

    name: str
    file: MappedFile


class FrameSet:
    """Frames to read: those of a single file, or all that a manifest lists. `open_frames` creates it.

    Parameters
    ----------
    path
        The path that the user specified.
    arrays
        The arrays in the frames.
    document
        The manifest, or None for a file of frames without one.
    open_file
        A file of frames that is already open, or None.
    manifest_path
        The file of the manifest.
    file_ends
        The offset at which the last frame of each file ends; None computes it.
    is_assumed_fp16
        Whether frames of two-byte words are read as fp16 because the dtype, fp16 or bf16, is not recorded or specified.
    """

    def __init__(
        self,
        path: str,
        arrays: Sequence[ArrayEntry],
        document: Manifest | None,
        open_file: FrameFile | None = None,
        manifest_path: Path | None = None,
        file_ends: dict[str, int] | None = None,
        *,
        is_assumed_fp16: bool = False,
    ) -> None:
        self.path = path
        self._is_assumed_fp16 = is_assumed_fp16
        self._manifest_path = manifest_path
        self.arrays = tuple(arrays)
        self.document = document
        self._open_file = open_file
        self._file_ends = _find_file_ends(document) if file_ends is None else file_ends
        self._root = Path(path if os.path.isdir(path) else os.path.dirname(path) or ".")

    def __repr__(self) -> str:
        names = [f"{entry.name:.40}" for entry in self.arrays[:4]]
        more_text = f", {len(self.arrays) - len(names)} more" if len(self.arrays) > len(names) else ""
        sizes_text = f"{self.stored_bytes:,} bytes for {self.raw_bytes:,}"
        return f"<FrameSet {self.path[-80:]} ({sizes_text}) {', '.join(names)}{more_text}>"

    @property
    def raw_bytes(self) -> int:
        """Return the raw bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def stored_bytes(self) -> int:
        """Return the number of bytes of all frames."""
        return sum(array.stored_bytes for array in self.arrays)

    @property
    def num_chunks(self) -> int:
        """Return the number of frames, dense streams and raw pieces of all arrays."""
        return sum(len(array.frames) for array in self.arrays)

    @property
    def unknown_properties(self) -> str:
        """Return text that lists what frames without a manifest do not record; empty for all others."""
        if self.document is not None:
            return ""
        lines = []
        if self.num_chunks > 1:
            frame_count_text = pluralize(self.num_chunks, "frame")
            lines.append(f"{frame_count_text} one after another: shape and names are unknown")
        if self._is_assumed_fp16:
            lines.append("fp16 is assumed, bf16 frames look the same (--dtype)")
        return "; ".join(lines)

    @property
    def losses(self) -> tuple[str, ...]:
        """Return a line about what K and V had lost before they were encoded; none without a record of it."""
        return tuple(list_losses(self.document.metadata)) if self.document else ()

    @property
    def completeness(self) -> Completeness | None:
        """Return how much of the model's state the arrays contain; None if the manifest does not record it.

        Raises
        ------
        KvmnnError
            When the record is malformed.
        """
        names = [array.name for array in self.arrays]
        return parse_completeness(self.document.metadata, names, self.path) if self.document else None

    @property
    def cache(self) -> CacheInfo | None:
        """Return the packed cache that the arrays were read from, as the manifest describes it; None if it does not.

        Raises
        ------
        ManifestError
            When the description is malformed.
        """
        return parse_cache_info(self.document.metadata, self.path) if self.document else None

    @property
    def files(self) -> list[str]:
        """Return every file that is read, the manifest included."""
        names = {entry.file for array in self.arrays for entry in array.frames}
        open_file = self._open_file
        frame_paths = [
            open_file.file.path if open_file and open_file.name == name else str(self._root / name) for name in names
        ]
        return frame_paths if self._manifest_path is None else [str(self._manifest_path), *frame_paths]

    @property
    def packed_record(self) -> PackedRecord | None:
        """Return the packed files that the frames were made from, as the manifest describes them; None if it does not.

        Raises
        ------
        ManifestError
            When it is malformed, or names arrays that are not there.
        """
        record = parse_packed_record(self.document.metadata, self.path) if self.document else None
        missing_names = (
            record.unused_names - {array.name for array in self.document.arrays} if record and self.document else ()
        )
        if missing_names:
            raise ManifestError(
                f"{self.path}: metadata {PACKED_FILES_KEY!r}: there is no array {min(missing_names)!r:.200}"
            )
        return record

    def without_unused_arrays(self) -> FrameSet:
        """Return this frame set without the arrays that contain only the unused regions of packed files."""
        record = self.packed_record
        if record is None or not record.unused_names:
            return self
        arrays = [array for array in self.arrays if array.name not in record.unused_names]
        return FrameSet(self.path, arrays, self.document, self._open_file, self._manifest_path, self._file_ends)

    def check_size(self, options: DecodeOptions) -> None:
        """Raise `LimitError` if there are more raw bytes than `options` allow."""
        if options.max_bytes is not None and self.raw_bytes > options.max_bytes:
            raise LimitError(f"{self.path}: holds {self.raw_bytes} raw bytes, above the limit of {options.max_bytes}")

    def select_array(self, array: ArrayEntry) -> FrameSet:
        """Return a frame set with the frames of one of the arrays."""
        return FrameSet(self.path, [array], self.document, self._open_file, self._manifest_path, self._file_ends)

    def read_frame(self, entry: FrameEntry) -> Chunk:
        """Read the bytes of a frame.

        Raises
        ------
        ManifestError
            When its file is missing, too short, longer than the manifest says, or outside the manifest's directory.
        """
        file = self._get_file(entry.file)
        if entry.offset + entry.bytes > file.size:
            raise ManifestError(
                f"{file.label}: has {file.size} bytes, but the manifest puts a frame of {entry.bytes} bytes at offset "
                f"{entry.offset}"
            )
        if (num_extra_bytes := file.size - self._file_ends.get(entry.file, file.size)) > 0:
            raise ManifestError(
                f"{file.label}: {pluralize(num_extra_bytes, 'byte')} after the last frame that the manifest lists"
            )
        return file.view(entry.offset, entry.bytes)

    def _get_file(self, name: str) -> MappedFile:
        """Return a file of frames; only the latest stays mapped, as a bundle may have more files than can be mapped."""
        if self._open_file is None or self._open_file.name != name:
            self._open_file = None
            self._open_file = FrameFile(name, self._open_frame_file(name))
        return self._open_file.file

    def _open_frame_file(self, name: str) -> MappedFile:
        path = self._root / name
        if not path.resolve().is_relative_to(self._root.resolve()):
            raise ManifestError(f"{self.path}: the frame file {name!r} leads out of the manifest's directory")
        if not path.is_file():
            problem = "no regular file" if path.exists() else "missing"
            raise ManifestError(f"{self.path}: the frame file {name!r} is {problem}")
        return MappedFile(path)


def _find_file_ends(document: Manifest | None) -> dict[str, int]:
    """Return the byte offset at which the last frame of each file ends."""
    ends: dict[str, int] = {}
    for entry in (entry for array in (document.arrays if document else ()) for entry in array.frames):
        ends[entry.file] = max(ends.get(entry.file, 0), entry.offset + entry.bytes)
    return ends


def open_frames(path: str | MappedFile, *, use_manifest: bool = True, options: DecodeOptions | None = None) -> FrameSet:
    """Open a frame, a manifest, or a bundle directory.

    Parameters
    ----------
    path
        A frame file (with its manifest, ``<path>.json``, if that exists), a manifest file (``.json``), a directory with
        a ``manifest.json``, or ``"-"`` for standard input. A file without a manifest contains one or more concatenated
        frames: an array of their words without name and shape. An opened file is read without its manifest.
    use_manifest
        False ignores a manifest next to a frame file.
    options
        Element type of frames without a manifest, and allowed codecs.

    Raises
    ------
    KvmnnError
        `SourceError`, `ManifestError` or `FrameError`.
    """
    options = options or DecodeOptions()
    if isinstance(path, MappedFile):
        return _open_bare_file(path, options)
    if path == STDIN:
        return _open_bare_file(MappedFile(path), options)
    if os.path.isdir(path):
        manifest_path = Path(path, manifest.MANIFEST_NAME)
        if not manifest_path.exists():
            raise ManifestError(
                f"{path}: has no {manifest.MANIFEST_NAME}, so it is not a kvmnn bundle; "
                f"to read frames without one, name the files ({Path(path, '*')})"
            )
        refuse_two_encodings(path)
        return _open_manifest(path, manifest_path)
    if path.endswith(".json") and os.path.exists(path):
        return _open_manifest(path, Path(path))
    file = MappedFile(path)
    manifest_path_of_file = Path(path + manifest.SIDECAR_SUFFIX)
    if use_manifest and manifest_path_of_file.exists():
        document = manifest.load_manifest(manifest_path_of_file)
        names = {entry.file for array in document.arrays for entry in array.frames}
        # A frame and its manifest may have been renamed together: the pair is what belongs together, not the name.
        if len(names) == 1:
            return FrameSet(path, document.arrays, document, FrameFile(names.pop(), file), manifest_path_of_file)
        raise ManifestError(
            f"{manifest_path_of_file}: lists {len(names)} frame files, so it is not the manifest of {path}"
        )
    return _open_bare_file(file, options)


def _open_manifest(path: str, manifest_path: Path) -> FrameSet:
    """Open the frames that a manifest lists, each in a file of its own."""
    document = manifest.load_manifest(manifest_path)
    name_by_id: dict[tuple[int, int], str] = {}
    for name in sorted({entry.file for array in document.arrays for entry in array.frames}):
        name_id = file_id(manifest_path.parent / name)
        if name_id is not None and name_by_id.setdefault(name_id, name) != name:
            raise ManifestError(f"{path}: {name!r} and {name_by_id[name_id]!r} are one file of frames under two names")
    return FrameSet(path, document.arrays, document, manifest_path=manifest_path)


def _open_bare_file(file: MappedFile, options: DecodeOptions) -> FrameSet:
    """Open a file of one or more concatenated frames without a manifest, as a 1-D array of their words."""
    if file.size == 0:
        raise FrameError(f"{file.label}: is empty, not a frame")
    name = "stdin" if file.path == STDIN else array_name_from_path(file.path.removesuffix(FRAME_SUFFIX) + FRAME_SUFFIX)
    if file.read_head(len(_DENSE_MAGIC)) == _DENSE_MAGIC:
        return _open_bare_dense_stream(file, name, options)
    try:
        element_type, spans = split_frames(file.view(0, file.size), dtype=options.dtype, codecs=options.codecs)
    except FrameError as exc:
        raise FrameError(f"{file.label}: {exc}{_hint_other_format(file)}") from None
    entries = [
        FrameEntry(
            file=file.label,
            offset=frame.offset,
            bytes=frame.nbytes,
            raw_bytes=frame.num_elements * element_type.itemsize,
            sha256=None,
        )
        for frame in spans
    ]
    array = ArrayEntry(
        name=name,
        dtype=element_type.name,
        shape=(sum(frame.num_elements for frame in spans),),
        array_dtype=element_type.numpy_dtype.str,
        sha256=None,
        frames=tuple(entries),
    )
    is_assumed_fp16 = options.dtype is None and element_type is dtypes.FP16
    return FrameSet(file.path, [array], None, FrameFile(file.label, file), is_assumed_fp16=is_assumed_fp16)


def _open_bare_dense_stream(file: MappedFile, name: str, options: DecodeOptions) -> FrameSet:
    """Open a dense stream without a manifest; the stream itself records its type and shape."""
    try:
        info = inspect(file.view(0, file.size))
    except FrameError as exc:
        raise FrameError(f"{file.label}: {exc}") from None
    if options.dtype not in (None, info.dtype):
        raise OptionError(f"{file.label}: the dense stream says {info.dtype}, not {options.dtype} (--dtype)")
    entry = FrameEntry(
        file=file.label,
        offset=0,
        bytes=file.size,
        raw_bytes=info.raw_bytes,
        sha256=None,
        stored="dense",
        axes="htd",
    )
    array = ArrayEntry(
        name=name,
        dtype=info.dtype,
        shape=(info.kv_heads, info.tokens, info.head_dim),
        array_dtype=dtypes.parse_dtype(info.dtype).numpy_dtype.str,
        sha256=None,
        frames=(entry,),
    )
    return FrameSet(file.path, [array], None, FrameFile(file.label, file))


def _hint_other_format(file: MappedFile) -> str:
    if file.read_head(6) == b"\x93NUMPY":
        return " (it is a .npy file)"
    if os.path.splitext(file.path)[1].lower() in (".npz", ".safetensors"):
        return " (it is a file of arrays, not of frames)"
    return ""
