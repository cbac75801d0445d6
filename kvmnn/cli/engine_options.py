"""What the verbs share that read caches of other engines: the arguments that say which part, and in what form."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import TYPE_CHECKING, Any

from . import help, idle_options, shared_options
from .printing import UsageError

if TYPE_CHECKING:
    from ..arrays.source import Source
    from ..formats.options import EngineOptions

CHOOSING = ("stream", "sequence", "window", "blocks")
"""The options, as the namespace calls them."""
HEADS = ("kv_heads", "head_dim", "model")
"""Those about packed files that caches of llama.cpp need as well."""
_OF_LLAMA = ("stream", "sequence", "window")
_OF_A_PART = ("tensor", "kv_axes", "kv_batch", "kv_half", *CHOOSING)
"""Those that choose arrays out of a file, or change them: frames of these are not the file."""


_HEADS_SAID = "Of a llama.cpp file --kv-heads N or --model FILE.gguf (--help-packed) says how many heads a row is of."


def add_engine(parser: Any, text: str | None = _HEADS_SAID, *, blocks: bool = True, undo: bool = False) -> None:
    """``--stream``, ``--sequence``, ``--window``; unless numbers are needed, ``--blocks``; with `undo`, ``--undo``."""
    group = parser.add_argument_group("caches of other engines", text)
    group.add_argument(
        "--stream", type=shared_options.whole, metavar="N", help="which stream of a llama.cpp file that holds several"
    )
    group.add_argument(
        "--sequence",
        type=shared_options.whole,
        metavar="N",
        help="of a stream that several sequences share, the tokens of this one",
    )
    group.add_argument(
        "--window", action="store_true", help="of two caches in a file, only that of layers with a sliding window"
    )
    if blocks:
        group.add_argument(
            "--blocks", action="store_true", help="quantised blocks as their bytes [token, block, byte], not as numbers"
        )
    if undo:
        add_undo(group)
    help.fold(parser, group, "--help-engines")


def add_undo(parser: Any) -> None:
    """``--undo``."""
    parser.add_argument(
        "--undo",
        type=lambda text: tuple(text.split(",")),
        metavar="WHAT[,WHAT]",
        help="what llama.cpp did to K and V: k-rotation, v-rotation (of what it quantised), k-order (Llama models); or "
        "none",
    )


def options(
    arguments: argparse.Namespace, *, whole: bool = False, any_heads: bool = False, any_stream: bool = False
) -> EngineOptions:
    """What the arguments say."""
    from ..formats.options import EngineOptions

    said = {name: getattr(arguments, name) for name in (*CHOOSING, "undo") if hasattr(arguments, name)}
    by_heads = whole and getattr(arguments, "codec", None) == "dense"
    return EngineOptions(whole=whole, by_heads=by_heads, any_heads=any_heads, any_stream=any_stream, **said)


def refuse_idle(arguments: argparse.Namespace, paths: Sequence[str]) -> None:
    """`UsageError` for an option where no input is a cache that it is about."""
    idle = [name for name in CHOOSING if idle_options.given(arguments, name)]
    if idle and not any(map(is_llama, paths)):
        why = f"is about caches of llama.cpp, and {' '.join(paths)} holds none"
        idle_options.refuse(arguments, _OF_LLAMA, why)
    if idle and not any(map(is_engine_file, paths)):
        why = f"is about quantised caches of llama.cpp and MLX, and {' '.join(paths)} holds none"
        idle_options.refuse(arguments, ["blocks"], why)


def refuse_no_blocks(arguments: argparse.Namespace, source: Source) -> None:
    """`UsageError` for ``--blocks`` where nothing is quantised."""
    if getattr(arguments, "blocks", False) and not any(array.array_dtype == "|u1" for array in source.arrays):
        raise UsageError(f"--blocks is about quantised K and V, and {' '.join(source.inputs)} holds none")


def used(path: str) -> tuple[str, ...]:
    """Which of the options, and of those in `HEADS`, have something to say of a path."""
    if is_llama(path):
        return (*HEADS, *CHOOSING)
    return ("blocks",) if is_engine_file(path) else ()


def of_input(arguments: argparse.Namespace, path: str) -> argparse.Namespace:
    """The arguments without those of the options that say nothing of this input, but of another."""
    known = used(path)
    others = {name: arguments.parser.get_default(name) for name in CHOOSING if name not in known}
    return argparse.Namespace(**vars(arguments) | others)


def is_engine_file(path: str) -> bool:
    """Whether a path is a file of another engine that these options are about, frames of one, or a stream."""
    from ..files.mapped import is_stream
    from ..formats import engine_kind

    return is_stream(path) or engine_kind(path) not in (None, "torch-cache")


def is_llama(path: str) -> bool:
    """Whether a path is a llama.cpp file, frames of one, or a stream, which may be one."""
    from ..files.mapped import is_stream
    from ..formats import engine_kind
    from ..formats.llama import NAME

    return is_stream(path) or engine_kind(path) == NAME


def has_engine_file(path: str) -> bool:
    """Whether a path is a folder with such a file in it: only with ``--jobs`` is it read."""
    if not os.path.isdir(path):
        return False
    with suppress(OSError):
        return any(is_engine_file(os.path.join(path, name)) for name in islice(sorted(os.listdir(path)), _MOST_FILES))
    return False


_MOST_FILES = 1000


def is_whole(arguments: argparse.Namespace, paths: Sequence[str]) -> bool:
    """Whether frames keep all of the only input, rather than arrays that were chosen out of it."""
    return len(paths) == 1 and not any(idle_options.given(arguments, name) for name in _OF_A_PART)


def note_arrays(arguments: argparse.Namespace, paths: Sequence[str]) -> None:
    """A note where a file could be kept whole, and what was asked for leaves its arrays only."""
    from . import printing

    files = [path for path in paths if os.path.isfile(path) and is_engine_file(path)]
    if files and not is_whole(arguments, paths):
        asked = next((name for name in _OF_A_PART if idle_options.given(arguments, name)), None)
        why = "several inputs make one set of arrays" if asked is None else idle_options.option(arguments, asked)
        printing.note(arguments, f"{' '.join(files)}: arrays are encoded, and decode will not write the file: {why}")


def is_gguf(path: str | None) -> bool:
    """Whether a model is one of llama.cpp."""
    from ..formats.llama import is_gguf

    return path is not None and is_gguf(path)
