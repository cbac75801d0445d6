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

SELECTION_OPTIONS = ("stream", "sequence", "window", "blocks")
"""The options, as the namespace calls them."""
_FIELD_BY_OPTION = {
    "stream": "stream",
    "sequence": "sequence",
    "window": "window_cache",
    "blocks": "raw_blocks",
    "undo": "invert",
}
HEAD_OPTIONS = ("kv_heads", "head_dim", "model")
"""Those about packed files that caches of llama.cpp need as well."""
_LLAMA_OPTIONS = ("stream", "sequence", "window")
_PART_OPTIONS = ("tensor", "kv_axes", "kv_batch", "kv_half", *SELECTION_OPTIONS)
"""Those that choose arrays out of a file, or change them: frames of these are not the file."""


_HEADS_HINT = "Of a llama.cpp file --kv-heads N or --model FILE.gguf (--help-packed) says how many heads a row is of."


def add_engine_options(
    parser: Any, text: str | None = _HEADS_HINT, *, with_blocks: bool = True, with_undo: bool = False
) -> None:
    """``--stream``, ``--sequence``, ``--window``; unless numbers are needed, ``--blocks``; with `with_undo`,
    ``--undo``.
    """
    group = parser.add_argument_group("caches of other engines", text)
    group.add_argument(
        "--stream",
        type=shared_options.parse_whole,
        metavar="N",
        help="which stream of a llama.cpp file that holds several",
    )
    group.add_argument(
        "--sequence",
        type=shared_options.parse_whole,
        metavar="N",
        help="of a stream that several sequences share, the tokens of this one",
    )
    group.add_argument(
        "--window", action="store_true", help="of two caches in a file, only that of layers with a sliding window"
    )
    if with_blocks:
        group.add_argument(
            "--blocks", action="store_true", help="quantised blocks as their bytes [token, block, byte], not as numbers"
        )
    if with_undo:
        add_undo(group)
    help.fold_group(parser, group, "--help-engines")


def add_undo(parser: Any) -> None:
    """``--undo``."""
    parser.add_argument(
        "--undo",
        type=lambda text: tuple(text.split(",")),
        metavar="WHAT[,WHAT]",
        help="what llama.cpp did to K and V: k-rotation, v-rotation (of what it quantised), k-order (Llama models); or "
        "none",
    )


def build_engine_options(
    arguments: argparse.Namespace, *, is_whole_file: bool = False, any_heads: bool = False, any_stream: bool = False
) -> EngineOptions:
    """What the arguments say."""
    from ..formats.options import EngineOptions

    option_values = {
        field_name: getattr(arguments, name)
        for name, field_name in _FIELD_BY_OPTION.items()
        if hasattr(arguments, name)
    }
    is_by_heads = is_whole_file and getattr(arguments, "codec", None) == "dense"
    return EngineOptions(
        passthrough=is_whole_file,
        split_heads=is_by_heads,
        allow_unknown_heads=any_heads,
        default_to_first_stream=any_stream,
        **option_values,
    )


def refuse_idle_engine_options(arguments: argparse.Namespace, paths: Sequence[str]) -> None:
    """`UsageError` for an option where no input is a cache that it is about."""
    given_names = [name for name in SELECTION_OPTIONS if idle_options.was_given(arguments, name)]
    if given_names and not any(map(is_llama, paths)):
        reason = f"is about caches of llama.cpp, and {' '.join(paths)} holds none"
        idle_options.refuse_given(arguments, _LLAMA_OPTIONS, reason)
    if given_names and not any(map(is_engine_file, paths)):
        reason = f"is about quantised caches of llama.cpp and MLX, and {' '.join(paths)} holds none"
        idle_options.refuse_given(arguments, ["blocks"], reason)


def refuse_blocks_without_quantized(arguments: argparse.Namespace, source: Source) -> None:
    """`UsageError` for ``--blocks`` where nothing is quantised."""
    if getattr(arguments, "blocks", False) and not any(array.array_dtype == "|u1" for array in source.arrays):
        raise UsageError(f"--blocks is about quantised K and V, and {' '.join(source.inputs)} holds none")


def list_used_options(path: str) -> tuple[str, ...]:
    """Which of the options, and of those in `HEAD_OPTIONS`, have something to say of a path."""
    if is_llama(path):
        return (*HEAD_OPTIONS, *SELECTION_OPTIONS)
    return ("blocks",) if is_engine_file(path) else ()


def select_input_arguments(arguments: argparse.Namespace, path: str) -> argparse.Namespace:
    """The arguments without those of the options that say nothing of this input, but of another."""
    used_names = list_used_options(path)
    reset_values = {name: arguments.parser.get_default(name) for name in SELECTION_OPTIONS if name not in used_names}
    return argparse.Namespace(**vars(arguments) | reset_values)


def is_engine_file(path: str) -> bool:
    """Whether a path is a file of another engine that these options are about, frames of one, or a stream."""
    from ..files.mapped import is_stream
    from ..formats import detect_engine_name

    return is_stream(path) or detect_engine_name(path) not in (None, "torch-cache")


def is_llama(path: str) -> bool:
    """Whether a path is a llama.cpp file, frames of one, or a stream, which may be one."""
    from ..files.mapped import is_stream
    from ..formats import detect_engine_name
    from ..formats.llama import FORMAT_NAME

    return is_stream(path) or detect_engine_name(path) == FORMAT_NAME


def has_engine_file(path: str) -> bool:
    """Whether a path is a folder with such a file in it: only with ``--jobs`` is it read."""
    if not os.path.isdir(path):
        return False
    with suppress(OSError):
        return any(
            is_engine_file(os.path.join(path, name)) for name in islice(sorted(os.listdir(path)), _MAX_FILES_CHECKED)
        )
    return False


_MAX_FILES_CHECKED = 1000


def keeps_whole_file(arguments: argparse.Namespace, paths: Sequence[str]) -> bool:
    """Whether frames keep all of the only input, rather than arrays that were chosen out of it."""
    return len(paths) == 1 and not any(idle_options.was_given(arguments, name) for name in _PART_OPTIONS)


def note_arrays_only(arguments: argparse.Namespace, paths: Sequence[str]) -> None:
    """A note where a file could be kept whole, and what was asked for leaves its arrays only."""
    from . import printing

    files = [path for path in paths if os.path.isfile(path) and is_engine_file(path)]
    if files and not keeps_whole_file(arguments, paths):
        part_option = next((name for name in _PART_OPTIONS if idle_options.was_given(arguments, name)), None)
        reason = (
            "several inputs make one set of arrays"
            if part_option is None
            else idle_options.get_option_name(arguments, part_option)
        )
        printing.print_note(
            arguments, f"{' '.join(files)}: arrays are encoded, and decode will not write the file: {reason}"
        )


def is_gguf(path: str | None) -> bool:
    """Whether a model is one of llama.cpp."""
    from ..formats.llama import is_gguf

    return path is not None and is_gguf(path)
