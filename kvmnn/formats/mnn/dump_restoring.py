"""Frames back into the KV dump that they were made from."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from ...arrays.source import DUMP_KEY
from ...bundle.decoding import decode_frames
from ...bundle.frame_set import DecodeOptions, FrameSet
from ...bundle.manifest import ArrayEntry
from ...errors import ManifestError, OutputError, SourceError
from ...files.json_document import as_object, read_bounded
from ...files.output import DirectoryOutput, StagedFile
from ...text import count
from ...threads.pipeline import Progress
from ..beside import write_beside
from ..rereading import Written, read_back
from ..restoring import Restored
from ..sinks import beginnings
from . import dump_metadata
from .dump import GLOB, MAX_META_BYTES, leaves, tensors


@dataclass(frozen=True, kw_only=True)
class RestoredDump(Restored):
    """A KV dump that was written from frames.

    Parameters
    ----------
    metadata_files
        Their names in the dump; `files` has those of the arrays.
    """

    metadata_files: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {**super().to_dict(), "metadata_files": list(self.metadata_files)}

    def __str__(self) -> str:
        parts = count(len(self.arrays), "array"), count(len(self.metadata_files), "metadata file")
        return self.said_of(f"a KV dump of {' and '.join(parts)}")


class _Plan(NamedTuple):
    """The files of a dump: one for each array, in their order, and the bytes of the metadata files, by name."""

    files: list[str]
    texts: dict[str, bytes]


def restore_dump(
    frames: FrameSet,
    output: str,
    options: DecodeOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> RestoredDump:
    """Decode frames into the files of the KV dump that they were made from, byte for byte; all are read back.

    Parameters
    ----------
    frames
        `kvmnn.bundle.open_frames`, of one whole KV dump.
    output
        The directory.
    options
        Limits, codecs, threads.
    force
        Replace files that exist; the frames are never replaced.
    progress
        Called with raw bytes.

    Raises
    ------
    SourceError
        When the frames are not of a whole KV dump.
    ManifestError
        When the metadata files do not fit the arrays, or name files outside the directory.
    KvmnnError
        As `kvmnn.formats.restore`. Nothing is left behind then.
    """
    started = time.perf_counter()
    options = options or DecodeOptions()
    frames.check_size(options)
    plan = _plan(frames, Path(output))
    with DirectoryOutput(output, force=force, protect=frames.files) as directory:
        directory.check_names([*plan.files, *plan.texts])
        _write(frames, plan, directory, options, progress)
        beside = write_beside(directory, frames.document.metadata if frames.document else None)
        directory.commit()
    return RestoredDump(
        input=frames.path,
        output=output,
        arrays=frames.arrays,
        verified=True,
        reread=True,
        files=tuple(plan.files),
        metadata_files=(*plan.texts, *beside),
        stored_bytes=frames.stored_bytes,
        seconds=time.perf_counter() - started,
    )


def _plan(frames: FrameSet, root: Path) -> _Plan:
    text = frames.document.metadata.get(DUMP_KEY) if frames.document else None
    if text is None:
        raise SourceError(
            f"{frames.path}: was not made from a whole KV dump, or by a kvmnn that did not keep its metadata "
            "(kvmnn unpack --as dump makes a dump of any K and V)"
        )
    where = f"{frames.path}: metadata {DUMP_KEY!r}"
    texts = dump_metadata.from_json(text, where)
    arrays = {array.name: array for array in frames.arrays}
    files: dict[str, str] = {}
    for name, content in texts.items():
        if not fnmatchcase(PurePath(name).name, GLOB) or len(content) > MAX_META_BYTES or leaves(root, root / name):
            raise ManifestError(f"{where}: {name!r:.200} is no metadata file of a dump")
        try:
            for tensor in tensors(root, root / name, as_object(content, f"{name!r:.200}")):
                if tensor.name in files:
                    raise SourceError(f"{name!r:.200}: {tensor.name!r} is of another metadata file, too")
                _check_fits(where, tensor.name, arrays.get(tensor.name), tensor.shape, tensor.dtype.itemsize)
                files[tensor.name] = tensor.file.relative_to(root).as_posix()
        except SourceError as error:
            raise ManifestError(f"{where}: {error}") from None
    for array in arrays:
        if array not in files:
            raise ManifestError(f"{where}: no metadata file says in which file the array {array!r} lay")
    return _Plan([files[array.name] for array in frames.arrays], texts)


def _check_fits(where: str, name: str, array: ArrayEntry | None, shape: Sequence[int], itemsize: int) -> None:
    found = (array.shape, array.itemsize, array.order) if array else None
    if found != (tuple(shape), itemsize, "C"):
        held = f"has shape {list(array.shape)}, {array.itemsize} bytes each" if array else "is not there"
        raise ManifestError(
            f"{where}: does not fit the arrays: {name!r:.200} {held}, expected {list(shape)}, {itemsize} bytes each"
        )


def _write(
    frames: FrameSet, plan: _Plan, directory: DirectoryOutput, options: DecodeOptions, progress: Progress | None
) -> None:
    files: list[StagedFile] = []
    for index, data, begins in beginnings(decode_frames(frames, options, progress=progress)):
        if begins:
            files.append(directory.file(plan.files[index]))
        files[-1].write(data.data)
        del data
    metadata = []
    for name, text in plan.texts.items():
        metadata.append(directory.file(name))
        metadata[-1].write(text)
        metadata[-1].close()
    written = [Written(file.path, file.target, None, [array]) for file, array in zip(files, frames.arrays, strict=True)]
    read_back(written, [array.sha256 or "" for array in frames.arrays], options.threads)
    for file, text in zip(metadata, plan.texts.values(), strict=True):
        if read_bounded(file.path, MAX_META_BYTES) != text:
            raise OutputError(f"{file.target}: does not read back as it was written")
