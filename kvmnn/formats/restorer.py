"""Decode frames to the original arrays, written as files of any format or as raw elements on a stream."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import field
from itertools import zip_longest
from typing import Any, Literal

from .._util.dataclass import dataclass
from .._util.parallel import Progress
from .._util.text import LOSSLESS, LOSSY, format_rate, pluralize
from ..arrays import engine_metadata
from ..arrays.array import ArrayInfo
from ..arrays.completeness import Completeness, describe_scope, format_missing
from ..arrays.source import DEQUANTIZED_KEY, ENGINE_KEY, Source, parse_completeness, qualify_label
from ..bundle.decoder import decode_frames
from ..bundle.frame_set import DecodeOptions, FrameSet
from ..bundle.passthrough import PassthroughFile
from ..errors import OptionError
from ..files.atomic import BinaryStream, is_device
from ..files.change_detection import InputGuard
from ..files.file_names import describe_renamed_files
from ..files.schema import Record, json_key
from .base import ArrayChunks
from .frames import make_frame_source
from .raw import write_raw
from .sidecars import collect_folder_sidecars
from .writer import ReadBackError, build_output_metadata, list_lost_information, list_stale_files, write_arrays


@dataclass(frozen=True, kw_only=True)
class RestoreResult(Record):
    """Arrays that were decoded or read from a store, and written as arrays, a whole file or a dump."""

    #: The frames.
    input: str
    #: File or directory; None for a stream.
    output: str | None
    #: Size of all frames.
    stored_bytes: int
    #: Elapsed time.
    seconds: float
    #: Names of the sidecar files written to a directory.
    sidecars: tuple[str, ...] = field(default=(), metadata={"omit": True})
    #: One line for each thing about another engine's cache that the output has no place for.
    notes: tuple[str, ...] = ()
    #: Lines of `notes` about what K and V had lost before.
    losses: tuple[str, ...] = field(default=(), metadata={"json": False})
    #: Which part of the model's state the arrays contain; None if unknown.
    completeness: Completeness | None = field(default=None, metadata={"omit": True})
    #: Names of the other files of a KV dump; `files` has those of the arrays.
    metadata_files: tuple[str, ...] = field(default=(), metadata={"omit": True})
    #: The arrays that were written.
    arrays: tuple[ArrayInfo, ...] = field(metadata={"json": False})
    #: Whether hashes were available and compared.
    is_verified: bool = field(metadata={"json": False})
    #: Whether the compared data was read back from the output, not only sent to a stream or device.
    is_read_back: bool = field(metadata={"json": False})
    #: Names of the files in a directory, one for each array; else none.
    files: tuple[str, ...] = field(metadata={"json": False})
    #: Human-readable list of properties that frames without a manifest do not record; else empty.
    unknown_properties: str = field(default="", metadata={"json": False})
    #: Where the hashes come from: ``"manifest"``, ``"store"`` of Zarr, or the whole ``"file"``.
    hash_source: Literal["manifest", "store", "file"] = field(default="manifest", metadata={"json": False})
    #: The whole file that was written; None for arrays.
    passthrough: PassthroughFile | None = field(default=None, metadata={"json": False})
    #: Size of the frames and the manifest of such a file.
    bundle_bytes: int = field(default=0, metadata={"json": False})
    #: Whether the words were dequantised from MNN's int8 codes, which the frames lack.
    is_dequantized: bool = field(default=False, metadata={"json": False})

    @property
    @json_key(after="output")
    def raw_bytes(self) -> int:
        """Return the size of the file, or of all arrays, in bytes."""
        return sum(array.nbytes for array in self.arrays) if self.passthrough is None else self.passthrough.nbytes

    @property
    @json_key(after="output")
    def label(self) -> str | None:
        """Return ``LOSSLESS`` if the manifest proved it, ``LOSSY`` for words dequantised from int8, else None.

        Where K and V had lost something before, ``LOSSLESS copy of LOSSY K and V``, or ``LOSSY`` if nothing proved it.
        """
        return LOSSY if self.is_dequantized else qualify_label(LOSSLESS if self.is_verified else None, self.losses)

    @property
    @json_key("arrays")
    def _array_documents(self) -> list[dict[str, Any]]:
        return [{**build_array_document(array), "file": file} for array, file in zip_longest(self.arrays, self.files)]

    @property
    @json_key(omit=True)
    def format(self) -> str | None:
        """Return the format of the whole file; None for arrays."""
        return None if self.passthrough is None else self.passthrough.format

    @property
    @json_key(omit=True)
    def sha256(self) -> str | None:
        """Return the SHA-256 of the whole file; None for arrays."""
        return None if self.passthrough is None else self.passthrough.sha256

    def __str__(self) -> str:
        arrays_text = pluralize(len(self.arrays), "array")
        if self.passthrough is not None:
            contents_text = f"the file {self.passthrough.name} of {arrays_text}"
            return self._format_summary(contents_text, f"frames and manifest of {self.bundle_bytes:,} bytes")
        if self.metadata_files:
            metadata_text = pluralize(len(self.metadata_files), "metadata file")
            line = self._format_summary(f"a KV dump of {arrays_text} and {metadata_text}")
        else:
            *first_texts, last_text = arrays_text, *self.sidecars
            line = self._format_summary(" and ".join(filter(None, [", ".join(first_texts), last_text])))
        renames_text = describe_renamed_files(zip((array.name for array in self.arrays), self.files, strict=False))
        lines = [*format_missing(self.completeness), *self.losses, *([renames_text] if renames_text else [])]
        return "\n  ".join([line, *lines])

    def _format_summary(self, contents_text: str, decoded_text: str = "") -> str:
        """Format one line: where `contents_text` was written, its size, and whether it was verified.

        `decoded_text` names the data that was decoded.
        """
        check_text = f"{'read back, ' if self.is_read_back else ''}sha256 of the {self.hash_source}"
        missing_text = (
            f"no manifest to check it against{'; ' if self.unknown_properties else ''}{self.unknown_properties}"
        )
        if self.is_dequantized:
            check_text += ", of the words dequantised from int8"
        is_part = self.passthrough is None and bool(format_missing(self.completeness))
        scope = describe_scope(len(self.arrays)) if is_part else ""
        verification_text = f"{self.label}{scope} ({check_text})" if self.is_verified else missing_text
        return (
            f"{self.output or 'standard output'}: {contents_text}, {decoded_text or f'{self.stored_bytes:,}'} -> "
            f"{self.raw_bytes:,} bytes, {verification_text}{format_rate(self.raw_bytes, self.seconds)}"
        )


def restore_arrays(
    frames: FrameSet,
    output: str | os.PathLike[str] | BinaryStream,
    options: DecodeOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> RestoreResult:
    """Decode frames and write the arrays they were made from; the hashes of the manifest are compared.

    Parameters
    ----------
    frames
        `kvmnn.bundle.open_frames`.
    output
        A ``.npz`` or ``.safetensors`` file; a directory (ends in a slash, or is one) for a ``.npy`` file of each array;
        for one array also a ``.npy`` file, any other file for its raw words, or a binary stream for those.
    options
        Limits, codecs, threads.
    force
        Replace files that exist; the frames are never replaced.
    progress
        Called with raw bytes.

    Raises
    ------
    OptionError
        When a stream would have to carry more than one array.
    KvmnnError
        When a frame does not decode, a hash differs, or the output cannot hold the arrays, exists or cannot be written.
        No file is left after then.
    """
    start_time = time.perf_counter()
    frames = frames.without_unused_arrays()
    source = _read_description(frames)
    sidecar_names = tuple(collect_folder_sidecars(frames.document.metadata, frames.path)) if frames.document else ()
    if isinstance(output, str | os.PathLike):
        path, is_read_back = os.fspath(output), not is_device(output)
        metadata = build_output_metadata(source, path) if frames.document else None
        files = _write_to_path(frames, path, metadata, options or DecodeOptions(), force, progress)
    else:
        path, is_read_back, files = None, False, []
        write_to_stream(output, frames.arrays, decode_frames(frames, options, progress=progress))
    return RestoreResult(
        input=frames.path,
        output=path,
        arrays=frames.arrays,
        is_verified=frames.document is not None,
        is_dequantized=frames.document is not None and DEQUANTIZED_KEY in frames.document.metadata,
        is_read_back=is_read_back,
        files=tuple(files),
        stored_bytes=frames.stored_bytes,
        seconds=time.perf_counter() - start_time,
        unknown_properties=frames.unknown_properties,
        losses=frames.losses,
        sidecars=sidecar_names if files else (),
        notes=(
            *frames.losses,
            *list_lost_information(source, path),
            *_list_lost_types(frames, path),
            *list_stale_files(path, files, metadata),
        )
        if path
        else frames.losses,
        completeness=parse_completeness(source.metadata, [array.name for array in frames.arrays], frames.path),
    )


def write_to_stream(stream: BinaryStream, arrays: Sequence[ArrayInfo], chunks: ArrayChunks) -> None:
    """Write the words of one array to a stream; `OptionError` for several arrays."""
    if len(arrays) > 1:
        raise OptionError(f"a stream carries one array, not {len(arrays)}: use -o DIR/ or -o X.npz")
    with InputGuard():
        write_raw(stream, arrays, chunks, {})
    stream.flush()


def _list_lost_types(frames: FrameSet, path: str) -> list[str]:
    """List a note about codes written as bytes without a type: only one format has one-byte types."""
    element_types = dict.fromkeys(array.element for array in frames.arrays if array.element)
    if not element_types or path.lower().endswith(".safetensors"):
        return []
    return [
        f"{path} has codes of {' and '.join(element_types)} as bytes: --dtype reads them, and .safetensors has the type"
    ]


def _read_description(frames: FrameSet) -> Source:
    """Return a source without arrays that describes an engine's cache; an empty one for other frames."""
    metadata = dict(frames.document.metadata) if frames.document else {}
    if ENGINE_KEY not in metadata:
        return Source([], metadata)
    source = make_frame_source(frames, DecodeOptions())
    engine_metadata.restore_metadata(source, frames.path)
    return source


def _write_to_path(
    frames: FrameSet,
    path: str,
    metadata: dict[str, str] | None,
    options: DecodeOptions,
    force: bool,
    progress: Progress | None,
) -> list[str]:
    """Write the files of the arrays, and compare their hashes with the manifest; return file names in a folder."""
    hashes = [array.sha256 for array in frames.arrays if array.sha256]
    has_hashes = bool(hashes) and not is_device(path)
    try:
        return write_arrays(
            path,
            frames.arrays,
            decode_frames(frames, options, check_arrays=not has_hashes, progress=progress),
            metadata,
            hashes=hashes if has_hashes else None,
            force=force,
            exclude=frames.files,
            threads=options.threads,
        )
    except ReadBackError as error:
        # Either the frames do not hold what the manifest says, which is an error of its own, or the file does not.
        deque(decode_frames(frames.select_array(frames.arrays[error.index]), options), maxlen=0)
        raise


def build_array_document(array: ArrayInfo) -> dict[str, Any]:
    """Describe an array as JSON values."""
    return {
        "name": array.name,
        "dtype": array.dtype,
        "shape": list(array.shape),
        "array_dtype": array.array_dtype,
    }
