"""Frames back into the file of another engine that they were made from, byte for byte."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ..bundle.frame_set import DecodeOptions, FrameSet
from ..bundle.kept_file import KeptFile, kept_file, notes_of, whole_bytes
from ..bundle.manifest import count_pieces
from ..bundle.verifying import Verified
from ..errors import LimitError, OptionError, OutputError
from ..files.changes import Reading
from ..files.mapped import MappedFile
from ..files.names import is_directory
from ..files.output import FileOutput, Stream, is_device
from ..text import count
from ..threads.pipeline import Progress
from .array_formats import array_format
from .frames import of_frames
from .keeping import KeptBytes, part_runs
from .restoring import Restored
from .sinks import Sink

_STEP = 8 << 20


@dataclass(frozen=True, kw_only=True)
class RestoredFile(Restored):
    """A file that was written from frames.

    Parameters
    ----------
    kept
        What it is.
    whole_bytes
        Of frames and manifest, which it is made of.
    """

    kept: KeptFile
    whole_bytes: int

    @property
    def raw_bytes(self) -> int:
        """Bytes of the file."""
        return self.kept.nbytes

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {**super().to_dict(), "format": self.kept.format, "sha256": self.kept.sha256}

    def __str__(self) -> str:
        held = f"the file {self.kept.name} of {count(len(self.arrays), 'array')}"
        line = self.said_of(held, f"frames and manifest of {self.whole_bytes:,} bytes")
        return line.replace("sha256 of the manifest", "sha256 of the file")


def is_kept(frames: FrameSet, output: str | None = None) -> bool:
    """Whether frames are of a file that was kept whole, and `output` is a place for it: no other file of arrays."""
    if frames.document is None:
        return False
    kept = kept_file(frames.document.metadata, frames.path)
    if kept is None or output is None:
        return kept is not None
    of_arrays = (
        array_format(output) is not None and PurePath(output).suffix.lower() != PurePath(kept.name).suffix.lower()
    )
    return not of_arrays and not is_directory(output)


def restore_file(
    frames: FrameSet,
    output: str | os.PathLike[str] | Stream,
    options: DecodeOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> RestoredFile:
    """Decode frames and write the file that they were made from; what was written is read back and its hash compared.

    Parameters
    ----------
    frames
        `kvmnn.bundle.open_frames`, of a file that was kept whole.
    output
        The file, or a binary stream.
    options
        Limits, codecs, threads.
    force
        Replace a file that exists; the frames are never replaced.
    progress
        Called with raw bytes.

    Raises
    ------
    OptionError
        When the frames are not of such a file.
    ManifestError
        When the manifest's account of it does not fit the arrays.
    KvmnnError
        As `kvmnn.formats.restore`. Nothing is left behind then.
    """
    started = time.perf_counter()
    options = options or DecodeOptions()
    kept = kept_file(frames.document.metadata, frames.path) if frames.document else None
    if kept is None or frames.document is None:
        raise OptionError(f"{frames.path}: was not made from a file that is kept whole")
    frames.check_size(options)
    if options.max_bytes is not None and kept.nbytes > options.max_bytes:
        raise LimitError(f"{frames.path}: its file has {kept.nbytes} bytes, above the limit of {options.max_bytes}")
    file = KeptBytes(of_frames(frames, options), kept, frames.path)
    if isinstance(output, str | os.PathLike):
        path, reread = os.fspath(output), not is_device(output)
        with FileOutput(path, force=force, protect=frames.files) as out:
            _write(file, out.file, progress)
            out.file.close()
            if reread:
                _check(out, kept)
            out.commit()
    else:
        path, reread = None, False
        with Reading():
            _write(file, output, progress)
        output.flush()
    return RestoredFile(
        input=frames.path,
        output=path,
        arrays=frames.arrays,
        verified=True,
        reread=reread,
        files=(),
        stored_bytes=frames.stored_bytes,
        seconds=time.perf_counter() - started,
        kept=kept,
        whole_bytes=whole_bytes(frames.document),
    )


def verify_file(
    frames: FrameSet, options: DecodeOptions | None = None, *, progress: Progress | None = None
) -> Verified:
    """Put the file together that frames were made from, without writing it, and compare its hash.

    Parameters and errors are those of `restore_file`: a difference is one.
    """
    made = restore_file(frames, _Nowhere(), options, progress=progress)
    return Verified(
        input=frames.path,
        against=(),
        proof="sha256",
        difference=None,
        raw_bytes=frames.raw_bytes,
        stored_bytes=frames.stored_bytes,
        arrays=len(frames.arrays),
        **count_pieces(frames.arrays)._asdict(),
        seconds=made.seconds,
        file=made.kept.name,
        notes=tuple(notes_of(frames.document, frames.path)) if frames.document else (),
        room_bytes=made.kept.room_bytes,
    )


class _Nowhere:
    """A stream that keeps nothing."""

    def write(self, data: bytes | memoryview, /) -> int:
        return len(data)

    def flush(self) -> None:
        pass


def _write(file: KeptBytes, sink: Sink, progress: Progress | None) -> None:
    """All parts in order; `OutputError` where they are not the file, whose hash is noted down."""
    digest = hashlib.sha256()
    for part in file.kept.parts:
        for run in part_runs(file.source, part):
            digest.update(run.data)
            sink.write(run.data)
            if progress and part.arrays:
                progress(run.size)
            del run
    if digest.hexdigest() != file.kept.sha256:
        raise OutputError(f"{file.label}: what its parts make up does not match the sha256 of the file")


def _check(out: FileOutput, kept: KeptFile) -> None:
    digest, written = hashlib.sha256(), MappedFile(out.file.path)
    for run in written.runs(0, written.size, _STEP):
        digest.update(run.data)
    if digest.hexdigest() != kept.sha256:
        raise OutputError(f"{out.target}: does not read back as it was written")
