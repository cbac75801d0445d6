"""Frames back into the file of another engine that they were made from, byte for byte."""

from __future__ import annotations

import hashlib
import os
import time
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from ..bundle.frame_set import DecodeOptions, FrameSet
from ..bundle.kept_file import PassthroughFile, count_bundle_bytes, describe_passthrough, parse_passthrough
from ..bundle.manifest import count_chunks
from ..bundle.verifying import VerifyResult
from ..errors import LimitError, OptionError, OutputError
from ..files.changes import InputGuard
from ..files.mapped import MappedFile
from ..files.names import is_directory_output
from ..files.output import BinaryStream, FileOutput, is_device
from ..text import pluralize
from ..threads.pipeline import Progress
from .array_formats import find_array_format
from .frames import make_frame_source
from .keeping import PassthroughBytes, iter_part_chunks
from .restoring import RestoreResult
from .sinks import Sink

_HASH_CHUNK_BYTES = 8 << 20


@dataclass(frozen=True, kw_only=True)
class RestoreFileResult(RestoreResult):
    """A file that was written from frames.

    Parameters
    ----------
    passthrough
        What it is.
    bundle_bytes
        Of frames and manifest, which it is made of.
    """

    passthrough: PassthroughFile
    bundle_bytes: int

    @property
    def raw_bytes(self) -> int:
        """Bytes of the file."""
        return self.passthrough.nbytes

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {**super().to_dict(), "format": self.passthrough.format, "sha256": self.passthrough.sha256}

    def __str__(self) -> str:
        contents_text = f"the file {self.passthrough.name} of {pluralize(len(self.arrays), 'array')}"
        line = self.format_summary(contents_text, f"frames and manifest of {self.bundle_bytes:,} bytes")
        return line.replace("sha256 of the manifest", "sha256 of the file")


def can_restore_file(frames: FrameSet, output: str | None = None) -> bool:
    """Whether frames are of a file that was kept whole, and `output` is a place for it: no other file of arrays."""
    if frames.document is None:
        return False
    passthrough = parse_passthrough(frames.document.metadata, frames.path)
    if passthrough is None or output is None:
        return passthrough is not None
    is_array_output = (
        find_array_format(output) is not None
        and PurePath(output).suffix.lower() != PurePath(passthrough.name).suffix.lower()
    )
    return not is_array_output and not is_directory_output(output)


def restore_file(
    frames: FrameSet,
    output: str | os.PathLike[str] | BinaryStream,
    options: DecodeOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> RestoreFileResult:
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
    start_time = time.perf_counter()
    options = options or DecodeOptions()
    passthrough = parse_passthrough(frames.document.metadata, frames.path) if frames.document else None
    if passthrough is None or frames.document is None:
        raise OptionError(f"{frames.path}: was not made from a file that is kept whole")
    frames.check_size(options)
    if options.max_bytes is not None and passthrough.nbytes > options.max_bytes:
        raise LimitError(
            f"{frames.path}: its file has {passthrough.nbytes} bytes, above the limit of {options.max_bytes}"
        )
    file = PassthroughBytes(make_frame_source(frames, options), passthrough, frames.path)
    if isinstance(output, str | os.PathLike):
        path, is_read_back = os.fspath(output), not is_device(output)
        with FileOutput(path, force=force, exclude=frames.files) as output_file:
            _write_parts(file, output_file.file, progress)
            output_file.file.close()
            if is_read_back:
                _verify_written_file(output_file, passthrough)
            output_file.commit()
    else:
        path, is_read_back = None, False
        with InputGuard():
            _write_parts(file, output, progress)
        output.flush()
    return RestoreFileResult(
        input=frames.path,
        output=path,
        arrays=frames.arrays,
        is_verified=True,
        is_read_back=is_read_back,
        files=(),
        stored_bytes=frames.stored_bytes,
        seconds=time.perf_counter() - start_time,
        passthrough=passthrough,
        bundle_bytes=count_bundle_bytes(frames.document),
    )


def verify_file(
    frames: FrameSet, options: DecodeOptions | None = None, *, progress: Progress | None = None
) -> VerifyResult:
    """Put the file together that frames were made from, without writing it, and compare its hash.

    Parameters and errors are those of `restore_file`: a difference is one.
    """
    restore_result = restore_file(frames, _NullStream(), options, progress=progress)
    return VerifyResult(
        input=frames.path,
        against=(),
        proof="sha256",
        difference=None,
        raw_bytes=frames.raw_bytes,
        stored_bytes=frames.stored_bytes,
        arrays=len(frames.arrays),
        **count_chunks(frames.arrays)._asdict(),
        seconds=restore_result.seconds,
        restored_file_name=restore_result.passthrough.name,
        notes=tuple(describe_passthrough(frames.document, frames.path)) if frames.document else (),
        room_bytes=restore_result.passthrough.room_bytes,
    )


class _NullStream:
    """A stream that keeps nothing."""

    def write(self, data: bytes | memoryview, /) -> int:
        return len(data)

    def flush(self) -> None:
        pass


def _write_parts(file: PassthroughBytes, sink: Sink, progress: Progress | None) -> None:
    """All parts in order; `OutputError` where they are not the file, whose hash is noted down."""
    digest = hashlib.sha256()
    for part in file.passthrough.parts:
        for chunk in iter_part_chunks(file.source, part):
            digest.update(chunk.data)
            sink.write(chunk.data)
            if progress and part.arrays:
                progress(chunk.size)
            del chunk
    if digest.hexdigest() != file.passthrough.sha256:
        raise OutputError(f"{file.label}: what its parts make up does not match the sha256 of the file")


def _verify_written_file(output_file: FileOutput, passthrough: PassthroughFile) -> None:
    digest, written_file = hashlib.sha256(), MappedFile(output_file.file.path)
    for chunk in written_file.iter_chunks(0, written_file.size, _HASH_CHUNK_BYTES):
        digest.update(chunk.data)
    if digest.hexdigest() != passthrough.sha256:
        raise OutputError(f"{output_file.target}: does not read back as it was written")
