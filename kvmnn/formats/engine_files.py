"""Files of other engines, known by what they hold rather than by their names. A new one is a line in the table."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ..arrays.source import FILE_KEY, Source, completeness_in
from ..bundle import manifest
from ..bundle.frame_set import FrameSet, open_frames
from ..bundle.kept_file import kept_file
from ..errors import KvmnnError, ManifestError
from ..files.mapped import STDIN, MappedFile
from . import llama, mlx
from .file_bytes import FileBytes
from .hf import saved
from .keeping import as_noted, reopened
from .options import ReadOptions


class EngineFile(NamedTuple):
    """A kind of file.

    Parameters
    ----------
    name
        In documents.
    is_one
        Whether the file at a path is one, by its first bytes.
    holds_one
        The same of what was read from a stream.
    read
        K and V of every layer.
    keep
        All that the file holds (`EngineOptions.whole`); None where the same file is not written again.
    """

    name: str
    is_one: Callable[[str], bool]
    holds_one: Callable[[MappedFile], bool]
    read: Callable[[FileBytes, ReadOptions], Source]
    keep: Callable[[MappedFile, ReadOptions], Source] | None


def _holds_saved(file: MappedFile) -> bool:
    return saved.is_saved(file.head(saved.HEAD_BYTES))


def _saved_cache(file: FileBytes, options: ReadOptions) -> Source:
    if not isinstance(file, MappedFile):
        raise ManifestError(f"{file.label}: metadata {FILE_KEY!r}: a file of torch's is never kept whole")
    return saved.read(file, options)


ENGINE_FILES = (
    EngineFile(llama.NAME, llama.is_state, llama.holds_state, llama.read, llama.keep),
    EngineFile(mlx.NAME, mlx.is_prompt_cache, mlx.holds_prompt_cache, mlx.read, mlx.keep),
    EngineFile("torch-cache", saved.holds_cache, _holds_saved, _saved_cache, None),
)


def engine_file(path: str) -> EngineFile | None:
    """What a file is; None for all others, for directories and for standard input."""
    if path == STDIN or not os.path.isfile(path):
        return None
    return next((kind for kind in ENGINE_FILES if kind.is_one(path)), None)


def engine_of(stream: MappedFile) -> EngineFile | None:
    """What was read from a stream; None for all others."""
    return next((kind for kind in ENGINE_FILES if kind.holds_one(stream)), None)


def engine_kind(path: str) -> str | None:
    """The name of the kind of a file, or of the file that frames were made from."""
    kind = engine_file(path)
    if kind is not None:
        return kind.name
    try:
        document = open_frames(path).document if _has_manifest(path) else None
        kept = document and kept_file(document.metadata, path)
        return kept.format if kept else None
    except (KvmnnError, OSError):
        return None  # and what is wrong with it is said when it is read


def _has_manifest(path: str) -> bool:
    """Whether there is a manifest at a path."""
    return any(os.path.isfile(path + suffix) for suffix in (f"/{manifest.FILE_NAME}", manifest.SIDE_SUFFIX))


def read(path: str, kind: EngineFile, options: ReadOptions) -> Source:
    """The arrays of such a file."""
    return read_mapped(kind, MappedFile(path, max_bytes=options.max_bytes), options)


def read_mapped(kind: EngineFile, file: MappedFile, options: ReadOptions) -> Source:
    """The same of an open file."""
    return kind.keep(file, options) if kind.keep and options.engine.whole else kind.read(file, options)


def options_of_original(frames: FrameSet, options: ReadOptions) -> ReadOptions:
    """Return the options that read a file as it was read for frames of it: their manifest has what was specified.

    Raises
    ------
    ManifestError
        For a manifest that does not describe such a file as it must.
    """
    metadata = dict(frames.document.metadata) if frames.document else {}
    kept = kept_file(metadata, frames.path)
    if kept is None or kept.layer_numbers is None:
        return options
    names = [array.name for array in frames.arrays]
    options = as_noted(options, kept, completeness_in(metadata, names, frames.path))
    by_heads = not any(name.startswith("window.") for name in names)
    return replace(options, engine=replace(options.engine, by_heads=by_heads))


def reread(frames: Source, path: str, options: ReadOptions) -> Source:
    """K and V of such a file again, where frames are of one that was kept whole; else what the frames decode to."""
    file = None if options.engine.whole else reopened(frames, path)
    if file is None:
        return frames
    kind = next((kind for kind in ENGINE_FILES if kind.name == file.kept.format), None)
    if kind is None:
        raise ManifestError(f"{path}: metadata {FILE_KEY!r}: the format {file.kept.format!r:.80} is not known")
    completeness = completeness_in(frames.metadata, frames, path)
    found = kind.read(file, as_noted(options, file.kept, completeness))
    found.opened = frames.opened
    return found
