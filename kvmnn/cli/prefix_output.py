"""What the verbs that write prefix caches share: layout, name, output, and the line about it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from ..text import megabytes_per_second
from . import packed_options, printing, shared_options
from .printing import UsageError

if TYPE_CHECKING:
    from ..arrays.layers import LayerArray
    from ..arrays.source import Source
    from ..formats.mnn.prefix_writing import Packed
    from ..packed.cache_info import CacheInfo
    from ..packed.layout import PackLayout


def add_target(parser: Any) -> None:
    """``-o``, ``-f`` and ``--capacity``."""
    shared_options.add_output(parser, "directory to write the files to")
    parser.add_argument(
        "--capacity",
        type=shared_options.positive,
        metavar="N",
        help="tokens to leave room for (default: as before, else no more than there are: the engine makes room itself)",
    )


def required_output(arguments: argparse.Namespace) -> str:
    """The directory that was named; `UsageError` if none was."""
    output: str | None = arguments.output
    if output is None or output == printing.STDIO:
        raise UsageError("no output given: use -o DIR/")
    return output


def prefix_name(arguments: argparse.Namespace, info: CacheInfo | None) -> str:
    """The name that was given, or the one that the cache had."""
    name: str = arguments.name or (info.name if info else "")
    if not name:
        raise UsageError("the prefix needs a name: --name NAME")
    return name


def layers_of(source: Source, arguments: argparse.Namespace) -> list[LayerArray]:
    """The source's arrays as K and V of layers."""
    from ..arrays.layers import sort

    return sort(source.arrays, token_major=source.token_major or getattr(arguments, "token_major", False))


def only_layout(
    arguments: argparse.Namespace, arrays: Sequence[LayerArray], known: PackLayout | None, dtype: str
) -> PackLayout:
    """The one layout that the arguments name, completed by the `known` one and by the arrays.

    Raises
    ------
    UsageError
        When they leave several, or none.
    """
    from ..arrays.layers import common_geometry
    from ..packed.addressing import FLASH_BLOCK
    from ..packed.fitting import Geometry, of_layout

    heads, dims, _ = common_geometry(arrays)
    said = packed_options.geometry(arguments)
    if known and said == Geometry():
        return known
    block = FLASH_BLOCK if known is None else of_layout(known).flash_block
    full = said.or_else(Geometry(kv_heads=heads, head_dim=dims, flash_block=block))
    if full.backend is None:
        full = full.or_else(Geometry(dtype=dtype))
    found = full.candidates()
    if len(found) != 1:
        raise UsageError(
            f"{len(found)} layouts are known for what was said: name one (--backend NAME, or --lp N --hp N)"
        )
    return found[0][1]


def write(
    arguments: argparse.Namespace,
    arrays: Sequence[LayerArray],
    info: CacheInfo,
    protect: Iterable[str],
    label: str,
) -> Packed:
    """Write the files, with a progress bar."""
    from ..files.output import DirectoryOutput
    from ..formats.mnn.prefix_writing import write_prefix
    from ..packed.cache_info import SIDE_SUFFIX

    directory = DirectoryOutput(
        required_output(arguments),
        force=arguments.force,
        protect=with_contents(protect),
        index=info.name + SIDE_SUFFIX,
    )
    total = sum(entry.array.nbytes for entry in arrays)
    with printing.progress(arguments, total, label) as step, directory:
        packed = write_prefix(arrays, info, directory, step)
        directory.commit()
    return packed


def with_contents(paths: Iterable[str]) -> list[str]:
    """Inputs, and the files directly in those that are directories."""
    found = list(paths)
    for path in list(found):
        if os.path.isdir(path):
            found.extend(entry.path for entry in os.scandir(path))
    return found


def report(
    arguments: argparse.Namespace,
    verb: str,
    packed: Packed,
    seconds: float,
    notes: Sequence[str] = (),
    more: dict[str, Any] | None = None,
) -> None:
    """What was written, for people or as JSON; `more` goes into the latter."""
    cast, info = packed.cast, packed.info
    if arguments.json:
        printing.print_json(
            {
                "verb": verb,
                "output": arguments.output,
                "label": packed.label,
                "seconds": seconds,
                "notes": list(notes),
                "cast": {
                    "from": cast.source,
                    "to": cast.target,
                    "words": cast.words,
                    "changed": cast.changed,
                    "largest_error": cast.largest_error,
                },
                "cache": printing.cache_document(info),
                **(more or {}),
            }
        )
    printing.say(
        arguments,
        f"{arguments.output}: prefix {info.name!r}, {printing.summary(info)}\n"
        f"  {printing.share(info.live_bytes, info.file_bytes)}\n"
        f"  {what_happened(packed)}, {megabytes_per_second(info.live_bytes, seconds)}",
    )


def what_happened(packed: Packed) -> str:
    """The label and its reason."""
    cast = packed.cast
    if cast.source == cast.target:
        return f"{packed.label} (every file read back and compared)"
    return (
        f"{packed.label} ({cast.source} -> {cast.target}: {cast.changed:,} of {cast.words:,} words changed, largest "
        f"error {cast.largest_error:.3g})"
    )
