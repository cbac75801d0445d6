"""Files of other engines, known by what they hold rather than by their names. A new one is a line in the table."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

from ..arrays.source import FILE_KEY, Source, parse_completeness
from ..bundle import manifest
from ..bundle.frame_set import FrameSet, open_frames
from ..bundle.kept_file import parse_passthrough
from ..errors import KvmnnError, ManifestError
from ..files.mapped import STDIN, MappedFile
from . import llama, mlx
from .file_bytes import FileBytes
from .hf import saved
from .keeping import apply_recorded_options, reopen_original
from .options import ReadOptions


class EngineFormat(NamedTuple):
    """A kind of file.

    Parameters
    ----------
    name
        In documents.
    detect
        Whether the file at a path is one, by its first bytes.
    detect_stream
        The same of what was read from a stream.
    read
        K and V of every layer.
    capture
        All that the file holds (`EngineOptions.passthrough`); None where the same file is not written again.
    """

    name: str
    detect: Callable[[str], bool]
    detect_stream: Callable[[MappedFile], bool]
    read: Callable[[FileBytes, ReadOptions], Source]
    capture: Callable[[MappedFile, ReadOptions], Source] | None


def _is_saved_cache_stream(file: MappedFile) -> bool:
    return saved.is_torch_head(file.read_head(saved.DETECT_HEAD_BYTES))


def _read_saved_cache(file: FileBytes, options: ReadOptions) -> Source:
    if not isinstance(file, MappedFile):
        raise ManifestError(f"{file.label}: metadata {FILE_KEY!r}: a file of torch's is never kept whole")
    return saved.read(file, options)


ENGINE_FORMATS = (
    EngineFormat(llama.FORMAT_NAME, llama.is_state_file, llama.is_state_stream, llama.read, llama.capture),
    EngineFormat(mlx.FORMAT_NAME, mlx.is_prompt_cache_file, mlx.is_prompt_cache_stream, mlx.read, mlx.capture),
    EngineFormat("torch-cache", saved.contains_cache, _is_saved_cache_stream, _read_saved_cache, None),
)


def find_engine_format(path: str) -> EngineFormat | None:
    """What a file is; None for all others, for directories and for standard input."""
    if path == STDIN or not os.path.isfile(path):
        return None
    return next((engine_format for engine_format in ENGINE_FORMATS if engine_format.detect(path)), None)


def find_stream_format(stream: MappedFile) -> EngineFormat | None:
    """What was read from a stream; None for all others."""
    return next((engine_format for engine_format in ENGINE_FORMATS if engine_format.detect_stream(stream)), None)


def detect_engine_name(path: str) -> str | None:
    """The name of the kind of a file, or of the file that frames were made from."""
    engine_format = find_engine_format(path)
    if engine_format is not None:
        return engine_format.name
    try:
        document = open_frames(path).document if _has_manifest(path) else None
        passthrough = document and parse_passthrough(document.metadata, path)
        return passthrough.format if passthrough else None
    except (KvmnnError, OSError):
        return None  # and what is wrong with it is said when it is read


def _has_manifest(path: str) -> bool:
    """Whether there is a manifest at a path."""
    return any(os.path.isfile(path + suffix) for suffix in (f"/{manifest.MANIFEST_NAME}", manifest.SIDECAR_SUFFIX))


def read_engine_file(path: str, engine_format: EngineFormat, options: ReadOptions) -> Source:
    """The arrays of such a file."""
    return read_mapped_engine_file(engine_format, MappedFile(path, max_bytes=options.max_bytes), options)


def read_mapped_engine_file(engine_format: EngineFormat, file: MappedFile, options: ReadOptions) -> Source:
    """The same of an open file."""
    return (
        engine_format.capture(file, options)
        if engine_format.capture and options.engine.passthrough
        else engine_format.read(file, options)
    )


def recover_original_options(frames: FrameSet, options: ReadOptions) -> ReadOptions:
    """Return the options that read a file as it was read for frames of it: their manifest has what was specified.

    Raises
    ------
    ManifestError
        For a manifest that does not describe such a file as it must.
    """
    metadata = dict(frames.document.metadata) if frames.document else {}
    passthrough = parse_passthrough(metadata, frames.path)
    if passthrough is None or passthrough.layer_numbers is None:
        return options
    names = [array.name for array in frames.arrays]
    options = apply_recorded_options(options, passthrough, parse_completeness(metadata, names, frames.path))
    split_heads = not any(name.startswith("window.") for name in names)
    return replace(options, engine=replace(options.engine, split_heads=split_heads))


def read_original_arrays(frames: Source, path: str, options: ReadOptions) -> Source:
    """K and V of such a file again, where frames are of one that was kept whole; else what the frames decode to."""
    file = None if options.engine.passthrough else reopen_original(frames, path)
    if file is None:
        return frames
    engine_format = next(
        (engine_format for engine_format in ENGINE_FORMATS if engine_format.name == file.passthrough.format), None
    )
    if engine_format is None:
        raise ManifestError(f"{path}: metadata {FILE_KEY!r}: the format {file.passthrough.format!r:.80} is not known")
    completeness = parse_completeness(frames.metadata, frames, path)
    original = engine_format.read(file, apply_recorded_options(options, file.passthrough, completeness))
    original.opened_files = frames.opened_files
    return original
