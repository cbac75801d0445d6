"""Options of ``kvmnn eval --from``: which cache texts begin with, and what it does not say itself."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from . import axes_options, engine_options, help, idle_options, loading, packed_options, shared_options

if TYPE_CHECKING:
    from ..lm.start import Start

_PACKED = ("backend", "lp", "hp", "flash_block", "int8", "name", "layer_order", "pid", "ignore_markers")
_OWN = ("token_ids", "undo", "dtype", "tensor", "skip_unsupported", "token_major")
_WITHOUT = (
    ("repeats", "nothing is timed"),
    ("store", "a prefix store says what texts begin with, too"),
    ("preset", "a preset measures texts from their beginning"),
)


def add_start(parser: Any) -> None:
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
    packed = parser.add_argument_group("packed files", "What MNN's prefix caches and live files do not say themselves.")
    packed_options.add_layout(packed, "--backend")
    packed_options.add_finding(packed)
    help.fold(parser, packed, "--help-packed")
    engine_options.add_engine(parser, "What llama.cpp's files hold several of.", blocks=False)


@contextmanager
def start(arguments: argparse.Namespace) -> Iterator[Start | None]:
    """The cache of ``--from``, ready to go on from; None without one. `UsageError` for options that do nothing."""
    if arguments.start is None:
        names = (*_OWN, *axes_options.NAMES, *_PACKED, *engine_options.CHOOSING)
        idle_options.refuse(arguments, names, "is about the cache of --from, which is missing")
        yield None
        return
    for name, why in _WITHOUT:
        idle_options.refuse(arguments, [name], f"has no effect with --from: {why}")
    from ..lm.start import model_interface, read_start

    model = model_interface(arguments.model)
    said = {"tokens": (), "model": None, "packed": False, "kv_heads": model.kv_heads, "head_dim": model.head_dim}
    asked = argparse.Namespace(**vars(arguments) | said | {"undo": None})
    source = loading.load(arguments.start, asked, frames=True, used=("token_ids", *said))
    loading.report_notes(source.skipped, arguments, "skipped")
    ids = None if arguments.token_ids is None else packed_options.loaded_ids(arguments)
    with read_start(source, model, ids, undo=arguments.undo or (), token_major=arguments.token_major) as found:
        yield found
