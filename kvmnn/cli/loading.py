"""Inputs named on the command line, opened."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from . import axes_options, engine_options, packed_options, printing
from .printing import STDIO, UsageError

if TYPE_CHECKING:
    from ..arrays.source import Source
    from ..bundle import DecodeOptions, FrameSet
    from ..files.mapped import MappedFile
    from ..packed.cache_info import CacheInfo


def load(
    paths: Sequence[str],
    arguments: argparse.Namespace,
    fallbacks: Sequence[str] = (),
    *,
    frames: bool = False,
    as_numbers: bool = False,
    used: Sequence[str] = (),
    known: CacheInfo | None = None,
    any_heads: bool = False,
    whole: bool = False,
    one_of_several: bool = False,
    as_layers: bool = True,
    original_of: FrameSet | None = None,
    codes: bool = False,
) -> Source:
    """All arrays of all inputs as one source.

    With `frames`, frames are inputs too; `as_numbers` and `codes` as in `ReadOptions`, `any_heads` and `whole` as in
    `EngineOptions`. Options about packed files are refused where no input is any, but for those that are `used`
    otherwise. What neither packed files nor the arguments say is taken from `known`. With `one_of_several` what is said
    of axes may be about another input. An original is read as it was for the frames `original_of`. With `as_layers`,
    and with ``--axes``, a note says where heads and tokens look as if they were swapped.
    """
    from ..arrays.axes import Laid, laid_out
    from ..arrays.layers import heads_hint
    from ..arrays.own_order import undo
    from ..arrays.source import joined
    from ..formats import engine_files, opening
    from ..formats.options import ReadOptions

    if list(paths).count(STDIO) > 1:
        raise UsageError("standard input can be read only once")
    packed_options.refuse_idle(arguments, paths, used)
    laid = axes_options.laid(arguments, one_of_several=one_of_several)
    engine = engine_options.options(arguments, any_heads=any_heads, whole=whole)
    options = ReadOptions(
        dtype=arguments.dtype,
        as_numbers=as_numbers,
        fallbacks=tuple(fallbacks),
        tensors=tuple(arguments.tensor),
        skip_unsupported=arguments.skip_unsupported,
        packed=packed_options.options(arguments, known),
        frames=frames,
        engine=engine if len(paths) == 1 else replace(engine, undo=None),
        laid=laid if len(paths) == 1 else Laid(),
        codes=codes,
        max_bytes=getattr(arguments, "max_bytes", None),
    )
    if original_of is not None:
        options = engine_files.options_of_original(original_of, options)
    source = joined([opening.open(path, options) for path in paths])
    if not one_of_several:
        engine_options.refuse_no_blocks(arguments, source)
    if len(paths) > 1:
        source = laid_out(source, laid, " ".join(paths))
        source = source if engine.undo is None else undo(source, engine.undo)
    turned = getattr(arguments, "token_major", False)
    if (as_layers or laid.axes) and not turned and (hint := heads_hint(source, laid.axes)):
        source.notes.append(hint)
    return source


def open_frames(path: str | MappedFile, arguments: argparse.Namespace, options: DecodeOptions) -> FrameSet:
    """The frames at a path; what is none is told of by what it looks like."""
    from ..bundle import open_frames
    from ..errors import KvmnnError
    from ..formats import not_a_frame

    try:
        return open_frames(path, use_manifest=not arguments.no_manifest, options=options)
    except KvmnnError as found:
        raise not_a_frame(path if isinstance(path, str) else path.path, found) from None


def check_dtype(frames: FrameSet, arguments: argparse.Namespace) -> None:
    """`UsageError` where ``--dtype`` says otherwise than the manifest of frames: it would do nothing."""
    if frames.document is None or arguments.dtype is None:
        return
    other = next((array for array in frames.arrays if (array.element or array.dtype) != arguments.dtype), None)
    if other is not None:
        where = f" of {other.name!r}" if len(frames.arrays) > 1 else ""
        raise UsageError(
            f"the manifest says {other.element or other.dtype}{where}, not {arguments.dtype} (--no-manifest ignores it)"
        )


def report_skipped(source: Source, arguments: argparse.Namespace) -> None:
    """One line on standard error for each array that was left out, and for each thing that was inferred."""
    report_notes(source.notes, arguments)
    report_notes(source.skipped, arguments, "skipped")


def report_notes(notes: Sequence[str], arguments: argparse.Namespace, kind: str = "note") -> None:
    """One line on standard error for each thing that was inferred, or worth a warning."""
    for line in notes:
        printing.note(arguments, line, kind)
