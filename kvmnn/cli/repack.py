"""``kvmnn repack``: a packed cache in the layout of another backend."""

from __future__ import annotations

import argparse
import time
from typing import Any

from ..backends import BACKENDS
from . import _common, _packed, _prefix_output
from ._common import UsageError

_TEXT = """Write a prefix cache in the layout of another backend, e.g. one computed on a PC for a phone:

  kvmnn repack sys/ --from x86-avx2 --to arm64-fp16 -o phone/ --kv-heads 2 --head-dim 64 --tokens 50

Where the backends' dtypes differ, words are converted, to nearest even: fp32 to fp16 is LOSSY and the line about it
says how many words changed; fp16 to fp32 is LOSSLESS."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = _common.add_verb(verbs, "repack", run, "a packed cache for another backend", _TEXT)
    parser.add_argument("input", metavar="IN")
    _prefix_output.add_target(parser)
    _common.add_source(parser, "what the words are, where the pack numbers do not say")
    _packed.add_packed(parser, backend="--from")
    parser.add_argument(
        "--to",
        required=True,
        choices=tuple(BACKENDS),
        metavar="NAME",
        help="backend whose layout is wanted; the flash block stays",
    )


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ..geometry import Geometry, of_layout
    from ..packing import plan

    _prefix_output.required_output(arguments)
    source = _common.load([arguments.input], arguments, frames=True)
    _common.report_skipped(source, arguments)
    if source.cache is None:
        raise UsageError(f"{arguments.input}: is not a packed cache: use pack for plain arrays")
    arrays = _prefix_output.layers_of(source, arguments)
    before = source.cache.layout
    target = Geometry(
        kv_heads=before.kv_heads,
        head_dim=before.head_dim,
        backend=arguments.to,
        flash_block=of_layout(before).flash_block,
    )
    ((_, layout),) = target.candidates()
    name = _prefix_output.prefix_name(arguments, source.cache)
    info = plan(arrays, layout, name, capacity=arguments.capacity, like=source.cache)
    started = time.perf_counter()
    packed = _prefix_output.write(arguments, arrays, info, [arguments.input], "repack")
    _prefix_output.report(arguments, "repack", packed, time.perf_counter() - started, source.notes)
    return 0
