"""Inputs named on the command line, opened."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import packed_options
from .printing import STDIO, UsageError

if TYPE_CHECKING:
    from ..arrays.source import Source
    from ..packed.cache_info import CacheInfo


def load(
    paths: Sequence[str],
    arguments: argparse.Namespace,
    fallbacks: Sequence[str] = (),
    *,
    frames: bool = False,
    known: CacheInfo | None = None,
) -> Source:
    """All arrays of all inputs as one source, with distinct names: a taken name gets ``~2``, ``~3`` ... appended.

    With `frames`, frames are inputs too; what packed files do not say and the arguments neither is taken from `known`.
    What describes a packed cache is kept only if it is the only input.
    """
    from dataclasses import replace

    from ..arrays.source import Source
    from ..formats.opening import open_any, open_source
    from ..formats.options import ReadOptions
    from ..packed.cache_info import METADATA_KEY

    if list(paths).count(STDIO) > 1:
        raise UsageError("standard input can be read only once")
    options = ReadOptions(
        dtype=arguments.dtype,
        fallbacks=tuple(fallbacks),
        tensors=tuple(arguments.tensor),
        skip_unsupported=arguments.skip_unsupported,
        packed=packed_options.options(arguments, known),
    )
    whole = Source([])
    taken: set[str] = set()
    for path in paths:
        source = open_any(path, options) if frames else open_source(path, options)
        if len(paths) == 1:
            return source
        for array in source.arrays:
            name, count = array.name, 1
            while name in taken:
                count += 1
                name = f"{array.name}~{count}"
            taken.add(name)
            whole.arrays.append(replace(array, name=name))
        for key, value in source.metadata.items():
            if key != METADATA_KEY:
                whole.metadata.setdefault(key, value)
        whole.skipped.extend(source.skipped)
        whole.notes.extend(source.notes)
        whole.token_major |= source.token_major
    return whole


def report_skipped(source: Source, arguments: argparse.Namespace) -> None:
    """One line on standard error for each array that was left out, and for each thing that was inferred."""
    if not arguments.quiet:
        for line in source.notes:
            print(f"kvmnn: note: {line}", file=sys.stderr)
        for line in source.skipped:
            print(f"kvmnn: skipped: {line}", file=sys.stderr)
