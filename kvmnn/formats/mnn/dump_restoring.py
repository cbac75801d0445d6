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
from ...files.json_document import parse_object, read_bounded
from ...files.output import DirectoryOutput, StagedFile
from ...text import pluralize
from ...threads.pipeline import Progress
from ..beside import write_sidecars
from ..rereading import WrittenFile, verify_written
from ..restoring import RestoreResult
from ..sinks import mark_first_chunks
from . import dump_metadata
from .dump import MAX_META_BYTES, META_GLOB, escapes_root, iter_meta_tensors


@dataclass(frozen=True, kw_only=True)
class RestoreDumpResult(RestoreResult):
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
        counts = pluralize(len(self.arrays), "array"), pluralize(len(self.metadata_files), "metadata file")
        return self.format_summary(f"a KV dump of {' and '.join(counts)}")


class _DumpPlan(NamedTuple):
    """The files of a dump: one for each array, in their order, and the bytes of the metadata files, by name."""

    files: list[str]
    metadata_by_name: dict[str, bytes]


def restore_dump(
    frames: FrameSet,
    output: str,
    options: DecodeOptions | None = None,
    *,
    force: bool = False,
    progress: Progress | None = None,
) -> RestoreDumpResult:
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
    start_time = time.perf_counter()
    options = options or DecodeOptions()
    frames.check_size(options)
    plan = _plan_dump(frames, Path(output))
    with DirectoryOutput(output, force=force, exclude=frames.files) as directory:
        directory.check_names([*plan.files, *plan.metadata_by_name])
        _write_dump_files(frames, plan, directory, options, progress)
        sidecar_names = write_sidecars(directory, frames.document.metadata if frames.document else None)
        directory.commit()
    return RestoreDumpResult(
        input=frames.path,
        output=output,
        arrays=frames.arrays,
        is_verified=True,
        is_read_back=True,
        files=tuple(plan.files),
        metadata_files=(*plan.metadata_by_name, *sidecar_names),
        stored_bytes=frames.stored_bytes,
        seconds=time.perf_counter() - start_time,
    )


def _plan_dump(frames: FrameSet, root: Path) -> _DumpPlan:
    document_text = frames.document.metadata.get(DUMP_KEY) if frames.document else None
    if document_text is None:
        raise SourceError(
            f"{frames.path}: was not made from a whole KV dump, or by a kvmnn that did not keep its metadata "
            "(kvmnn unpack --as dump makes a dump of any K and V)"
        )
    label = f"{frames.path}: metadata {DUMP_KEY!r}"
    metadata_by_name = dump_metadata.load_metadata_files(document_text, label)
    arrays = {array.name: array for array in frames.arrays}
    files: dict[str, str] = {}
    for name, content in metadata_by_name.items():
        if (
            not fnmatchcase(PurePath(name).name, META_GLOB)
            or len(content) > MAX_META_BYTES
            or escapes_root(root, root / name)
        ):
            raise ManifestError(f"{label}: {name!r:.200} is no metadata file of a dump")
        try:
            for tensor in iter_meta_tensors(root, root / name, parse_object(content, f"{name!r:.200}")):
                if tensor.name in files:
                    raise SourceError(f"{name!r:.200}: {tensor.name!r} is of another metadata file, too")
                _check_tensor_matches(label, tensor.name, arrays.get(tensor.name), tensor.shape, tensor.dtype.itemsize)
                files[tensor.name] = tensor.file.relative_to(root).as_posix()
        except SourceError as error:
            raise ManifestError(f"{label}: {error}") from None
    for array in arrays:
        if array not in files:
            raise ManifestError(f"{label}: no metadata file says in which file the array {array!r} lay")
    return _DumpPlan([files[array.name] for array in frames.arrays], metadata_by_name)


def _check_tensor_matches(label: str, name: str, array: ArrayEntry | None, shape: Sequence[int], itemsize: int) -> None:
    actual_form = (array.shape, array.itemsize, array.order) if array else None
    if actual_form != (tuple(shape), itemsize, "C"):
        actual_text = f"has shape {list(array.shape)}, {array.itemsize} bytes each" if array else "is not there"
        raise ManifestError(
            f"{label}: does not fit the arrays: {name!r:.200} {actual_text}, expected {list(shape)}, {itemsize} bytes "
            f"each"
        )


def _write_dump_files(
    frames: FrameSet, plan: _DumpPlan, directory: DirectoryOutput, options: DecodeOptions, progress: Progress | None
) -> None:
    files: list[StagedFile] = []
    for index, data, is_first in mark_first_chunks(decode_frames(frames, options, progress=progress)):
        if is_first:
            files.append(directory.open_file(plan.files[index]))
        files[-1].write(data.data)
        del data
    metadata_files = []
    for name, content in plan.metadata_by_name.items():
        metadata_files.append(directory.open_file(name))
        metadata_files[-1].write(content)
        metadata_files[-1].close()
    written_files = [
        WrittenFile(file.path, file.target, None, [array]) for file, array in zip(files, frames.arrays, strict=True)
    ]
    verify_written(written_files, [array.sha256 or "" for array in frames.arrays], options.threads)
    for file, content in zip(metadata_files, plan.metadata_by_name.values(), strict=True):
        if read_bounded(file.path, MAX_META_BYTES) != content:
            raise OutputError(f"{file.target}: does not read back as it was written")
