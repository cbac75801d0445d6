"""Options of ``kvmnn eval --from``: which cache texts begin with, and what it does not say itself."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import axes_options, engine_options, help, idle_options, loading, packed_options, shared_options

if TYPE_CHECKING:
    from ..lm.start import InitialCache

_PACKED_NAMES = ("backend", "lp", "hp", "flash_block", "int8", "name", "layer_order", "pid", "ignore_markers")
_CACHE_OPTIONS = ("token_ids", "undo", "dtype", "tensor", "skip_unsupported", "token_major")
_EXCLUDED_OPTIONS = (
    ("repeats", "nothing is timed"),
    ("store", "a prefix store says what texts begin with, too"),
    ("preset", "a preset measures texts from their beginning"),
)


def add_start_options(parser: Any) -> None:
    """``--from`` and what goes with it."""
    group = parser.add_argument_group("going on from a cache that some engine saved")
    group.add_argument(
        "--from",
        dest="start",
        nargs="+",
        action="extend",
        metavar="CACHE",
        help="K and V of the beginning of the texts, of the same model: anything kvmnn reads; what follows is scored",
    )
    group.add_argument(
        "--token-ids",
        metavar="IDS",
        help="ids of its text, where it has none: 5,7,9 or a file: a JSON list, numbers, .npy",
    )
    group.add_argument(
        "--undo",
        type=lambda text: tuple(text.split(",")),
        metavar="WHAT[,WHAT]",
        help="what llama.cpp did to K and V: k-rotation, v-rotation (of what it quantised), k-order (Llama models); "
        "auto tries all, and takes what is nearest to the model's own K and V; none takes them as they lie",
    )
    shared_options.add_dtype(group, "what its raw words are")
    group.add_argument("--tensor", action="append", default=[], metavar="NAME", help="take this array (repeatable)")
    group.add_argument("--skip-unsupported", action="store_true", help="leave out its arrays that are no K and V")
    group.add_argument("--token-major", action="store_true", help="its arrays are [token, kv_head, head_dim]")
    axes_options.add_axes(parser)
    packed_group = parser.add_argument_group(
        "packed files", "What MNN's prefix caches and live files do not say themselves."
    )
    packed_options.add_layout_options(packed_group, "--backend")
    packed_options.add_discovery_options(packed_group)
    help.fold_group(parser, packed_group, "--help-packed")
    engine_options.add_engine_options(parser, "What llama.cpp's files hold several of.", with_blocks=False)


@contextmanager
def open_initial_cache(arguments: argparse.Namespace) -> Iterator[InitialCache | None]:
    """The cache of ``--from``, ready to go on from; None without one. `UsageError` for options that do nothing."""
    if arguments.start is None:
        names = (*_CACHE_OPTIONS, *axes_options.AXES_OPTION_NAMES, *_PACKED_NAMES, *engine_options.SELECTION_OPTIONS)
        idle_options.refuse_given(arguments, names, "is about the cache of --from, which is missing")
        yield None
        return
    for name, reason in _EXCLUDED_OPTIONS:
        idle_options.refuse_given(arguments, [name], f"has no effect with --from: {reason}")
    from ..lm.start import read_initial_cache, read_model_interface

    model = read_model_interface(arguments.model)
    fixed_values = {
        "tokens": (),
        "model": None,
        "packed": False,
        "kv_heads": model.kv_heads,
        "head_dim": model.head_dim,
    }
    cache_arguments = argparse.Namespace(**vars(arguments) | fixed_values | {"undo": None})
    source = loading.load(arguments.start, cache_arguments, with_frames=True, used_options=("token_ids", *fixed_values))
    loading.report_notes(source.skipped_arrays, arguments, "skipped")
    ids = None if arguments.token_ids is None else packed_options.load_ids(arguments)
    with read_initial_cache(
        source, model, ids, inverted_transforms=arguments.undo or (), token_major=arguments.token_major
    ) as initial_cache:
        yield initial_cache
