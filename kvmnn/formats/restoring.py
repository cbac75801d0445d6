"""Restore: frames into the arrays they were made from, as files of any format or as raw words on a stream."""

from __future__ import annotations

import os
import time
from collections import deque
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from ..arrays import engine_notes
from ..arrays.completeness import Completeness, completeness_document, report_missing
from ..arrays.named_array import ArrayInfo
from ..arrays.source import ENGINE_KEY, Source, completeness_in
from ..bundle.decoding import decode_frames
from ..bundle.frame_set import DecodeOptions, FrameSet
from ..errors import OptionError
from ..files.changes import Reading
from ..files.names import renamed
from ..files.output import Stream, is_device
from ..text import LOSSLESS, at_rate, count
from ..threads.pipeline import Progress
from .beside import folder_files
from .frames import of_frames
from .raw import write_raw
from .rereading import ReadBackError
from .writing import left_there, lost, metadata_for, write_arrays


@dataclass(frozen=True, kw_only=True)
class Restored:
    """Arrays that were decoded and written.

    Parameters
    ----------
    input
        The frames.
    output
        File or directory; None for a stream.
    arrays
        What was written.
    verified
        Whether there was a manifest, whose hashes were compared.
    reread
        Whether that was done with what the output reads back as; else with what went to a stream or device.
    files
        Names of the files in a directory, one for each array; else none.
    stored_bytes
        Of all frames.
    seconds
        Time that it took.
    unknown
        What nothing says of several frames without a manifest, for people; else empty.
    beside
        Names of further files in a directory, which lay beside the arrays.
    notes
        One line for each thing about another engine's cache that the output has no place for.
    completeness
        The state of the model that the arrays contain, where that is known.
    """

    input: str
    output: str | None
    arrays: tuple[ArrayInfo, ...]
    verified: bool
    reread: bool
    files: tuple[str, ...]
    stored_bytes: int
    seconds: float
    unknown: str = ""
    beside: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    completeness: Completeness | None = None

    @property
    def raw_bytes(self) -> int:
        """Bytes of all arrays."""
        return sum(array.nbytes for array in self.arrays)

    @property
    def label(self) -> str | None:
        """``LOSSLESS`` if the manifest proved it, else None."""
        return LOSSLESS if self.verified else None

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {
            "input": self.input,
            "output": self.output,
            "label": self.label,
            "raw_bytes": self.raw_bytes,
            "stored_bytes": self.stored_bytes,
            "seconds": self.seconds,
            **({"beside": list(self.beside)} if self.beside else {}),
            "notes": list(self.notes),
            **completeness_document(self.completeness),
            "arrays": [{**array_document(array), "file": file} for array, file in zip_longest(self.arrays, self.files)],
        }

    def __str__(self) -> str:
        held = [count(len(self.arrays), "array"), *self.beside]
        line = self.said_of(" and ".join([", ".join(held[:-1]), held[-1]] if held[1:] else held))
        others = renamed(zip((array.name for array in self.arrays), self.files, strict=False))
        lines = [*report_missing(self.completeness), *([others] if others else [])]
        return "\n  ".join([line, *lines])

    def said_of(self, held: str, read: str = "") -> str:
        """One line: where `held` was written, the sizes (`read`: of what was decoded), and what is proved."""
        how = "read back, sha256 of the manifest" if self.reread else "sha256 of the manifest"
        missing = f"no manifest to check it against{'; ' if self.unknown else ''}{self.unknown}"
        proof = f"{LOSSLESS} ({how})" if self.verified else missing
        return (
            f"{self.output or 'standard output'}: {held}, {read or f'{self.stored_bytes:,}'} -> "
            f"{self.raw_bytes:,} bytes, {proof}{at_rate(self.raw_bytes, self.seconds)}"
        )


def restore(
    frames: FrameSet,
    output: str | os.PathLike[str] | Stream,
    options: DecodeOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> Restored:
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
        No file is left behind then.
    """
    started = time.perf_counter()
    frames = frames.without_room()
    source = _described(frames)
    beside = tuple(folder_files(frames.document.metadata, frames.path)) if frames.document else ()
    if isinstance(output, str | os.PathLike):
        path, reread = os.fspath(output), not is_device(output)
        metadata = metadata_for(source, path) if frames.document else None
        files = _to_path(frames, path, metadata, options or DecodeOptions(), force, progress)
    else:
        path, reread, files = None, False, []
        if len(frames.arrays) > 1:
            raise OptionError(f"a stream carries one array, not {len(frames.arrays)}: use -o DIR/ or -o X.npz")
        with Reading():
            write_raw(output, frames.arrays, decode_frames(frames, options, progress=progress), {})
        output.flush()
    return Restored(
        input=frames.path,
        output=path,
        arrays=frames.arrays,
        verified=frames.document is not None,
        reread=reread,
        files=tuple(files),
        stored_bytes=frames.stored_bytes,
        seconds=time.perf_counter() - started,
        unknown=frames.unknown,
        beside=beside if files else (),
        notes=(*lost(source, path), *_lost_types(frames, path), *left_there(path, files, metadata)) if path else (),
        completeness=completeness_in(source.metadata, [array.name for array in frames.arrays], frames.path),
    )


def _lost_types(frames: FrameSet, path: str) -> list[str]:
    """Say where codes become bytes without a type: only one of the formats has types of one byte."""
    elements = dict.fromkeys(array.element for array in frames.arrays if array.element)
    if not elements or path.lower().endswith(".safetensors"):
        return []
    return [f"{path} has codes of {' and '.join(elements)} as bytes: --dtype reads them, and .safetensors has the type"]


def _described(frames: FrameSet) -> Source:
    """What is known of frames beyond their arrays, there only where an engine's cache is described."""
    metadata = dict(frames.document.metadata) if frames.document else {}
    if ENGINE_KEY not in metadata:
        return Source([], metadata)
    source = of_frames(frames, DecodeOptions())
    engine_notes.apply(source, frames.path)
    return source


def _to_path(
    frames: FrameSet,
    path: str,
    metadata: dict[str, str] | None,
    options: DecodeOptions,
    force: bool,
    progress: Progress | None,
) -> list[str]:
    """Files of the arrays; what reads back is compared with the hashes of the manifest. Names of files in a folder."""
    hashes = [array.sha256 for array in frames.arrays if array.sha256]
    known = bool(hashes) and not is_device(path)
    try:
        return write_arrays(
            path,
            frames.arrays,
            decode_frames(frames, options, check_arrays=not known, progress=progress),
            metadata,
            hashes=hashes if known else None,
            force=force,
            protect=frames.files,
            threads=options.threads,
        )
    except ReadBackError as error:
        # Either the frames do not hold what the manifest says, which is an error of its own, or the file does not.
        deque(decode_frames(frames.only(frames.arrays[error.index]), options), maxlen=0)
        raise


def array_document(array: ArrayInfo) -> dict[str, Any]:
    """What an array is, for JSON."""
    return {
        "name": array.name,
        "dtype": array.dtype,
        "shape": list(array.shape),
        "array_dtype": array.array_dtype,
    }
