"""Open the inputs of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from . import console, packed_options, shared_options
from .console import STDIO, UsageError

if TYPE_CHECKING:
    from ..arrays.source import Source
    from ..bundle import DecodeOptions, FrameSet
    from ..files.mapped_file import MappedFile
    from ..packed.cache_info import CacheInfo


def load(
    paths: Sequence[str],
    arguments: argparse.Namespace,
    fallbacks: Sequence[str] = (),
    *,
    with_frames: bool = False,
    as_numbers: bool = False,
    used_options: Sequence[str] = (),
    cache_info: CacheInfo | None = None,
    any_heads: bool = False,
    is_whole_file: bool = False,
    is_one_of_several: bool = False,
    as_layers: bool = True,
    original_of: FrameSet | None = None,
    codes: bool = False,
    opened_input: MappedFile | None = None,
) -> Source:
    """Load all arrays of all inputs as one source.

    With `with_frames`, frames are inputs too; `as_numbers` and `codes` are as in `ReadOptions`, `any_heads` and
    `is_whole_file` as in `EngineOptions`. Options for packed files are refused if no input is one, except
    `used_options`. Properties that neither packed files nor the arguments specify are taken from `cache_info`. With
    `is_one_of_several`, axes options may be about another input. An original is read as for the frames `original_of`.
    With `as_layers` and ``--axes``, a note warns if heads and tokens seem to be swapped. `opened_input` is the only
    input, if it was opened already.
    """
    from ..arrays.axes import AxisSpec, apply_axis_spec
    from ..arrays.engine_transforms import invert_source_transforms
    from ..arrays.layers import suggest_token_major
    from ..arrays.source import merge_sources
    from ..formats import registry
    from ..formats.options import ReadOptions

    if list(paths).count(STDIO) > 1:
        raise UsageError("standard input can be read only once")
    packed_options.refuse_idle_packed_options(arguments, paths, used_options)
    axis_spec = shared_options.build_axis_spec(arguments, is_one_of_several=is_one_of_several)
    engine_read_options = packed_options.build_engine_options(
        arguments, any_heads=any_heads, is_whole_file=is_whole_file
    )
    profile = getattr(arguments, "profile", None)
    if profile is not None and not any(map(is_layer_streams, paths)):
        if not is_one_of_several and not getattr(arguments, "has_own_profile", False):
            refuse_idle_profile(arguments, paths)
        profile = None
    options = ReadOptions(
        dtype=arguments.dtype,
        forbid_reinterpretation=as_numbers,
        fallback_dtypes=tuple(fallbacks),
        tensors=tuple(arguments.tensor),
        skip_unsupported=arguments.skip_unsupported,
        packed=packed_options.build_packed_options(arguments, cache_info),
        decode_frames=with_frames,
        engine=engine_read_options if len(paths) == 1 else replace(engine_read_options, invert=None),
        axis_spec=axis_spec if len(paths) == 1 else AxisSpec(),
        codes=codes,
        profile=profile,
        max_bytes=getattr(arguments, "max_bytes", None),
    )
    if original_of is not None:
        options = registry.recover_original_options(original_of, options)
    source = merge_sources([registry.open(opened_input or path, options) for path in paths])
    if not is_one_of_several:
        packed_options.refuse_blocks_without_quantized(arguments, source)
    if len(paths) > 1:
        source = apply_axis_spec(source, axis_spec, " ".join(paths))
        source = (
            source
            if engine_read_options.invert is None
            else invert_source_transforms(source, engine_read_options.invert)
        )
    is_token_major = getattr(arguments, "token_major", False)
    if (as_layers or axis_spec.axes) and not is_token_major and (hint := suggest_token_major(source, axis_spec.axes)):
        source.notes.append(hint)
    return source


def is_layer_streams(path: str) -> bool:
    """Return whether an input is a folder of layer streams, or its ``layers.json``."""
    from ..formats import has_format
    from ..formats.layer_streams.reader import LAYER_STREAMS

    return has_format(path, LAYER_STREAMS)


def refuse_idle_profile(arguments: argparse.Namespace, paths: Sequence[str]) -> None:
    """Raise `UsageError` for ``--profile`` if no input is layer streams."""
    if not any(map(is_layer_streams, paths)):
        reason = f"is about layer streams, and {' '.join(paths)} holds none"
        shared_options.refuse_given(arguments, ["profile"], reason, paths)


def open_frame_set(path: str | MappedFile, arguments: argparse.Namespace, options: DecodeOptions) -> FrameSet:
    """Open the frames at a path; an error for anything else names the format that it resembles."""
    from ..bundle import open_frames
    from ..errors import KvmnnError
    from ..formats import explain_not_frames

    try:
        return open_frames(path, use_manifest=not arguments.no_manifest, options=options)
    except KvmnnError as error:
        raise explain_not_frames(path if isinstance(path, str) else path.path, error) from None


def check_dtype_matches(frames: FrameSet, arguments: argparse.Namespace) -> None:
    """Raise `UsageError` if ``--dtype`` contradicts the manifest of frames."""
    if frames.document is None or arguments.dtype is None:
        return
    mismatch = next((array for array in frames.arrays if (array.element or array.dtype) != arguments.dtype), None)
    if mismatch is not None:
        where = f" of {mismatch.name!r}" if len(frames.arrays) > 1 else ""
        raise UsageError(
            f"the manifest says {mismatch.element or mismatch.dtype}{where}, not {arguments.dtype} (--ignore "
            f"manifest reads the frames alone)"
        )


def report_skipped(source: Source, arguments: argparse.Namespace) -> None:
    """Print a line on standard error for each note and each skipped array."""
    report_notes(source.notes, arguments)
    report_notes(source.skipped_arrays, arguments, "skipped")


def report_notes(notes: Sequence[str], arguments: argparse.Namespace, kind: str = "note") -> None:
    """Print a line on standard error for each note."""
    for line in notes:
        console.print_note(arguments, line, kind)
