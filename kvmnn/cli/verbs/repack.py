"""``kvmnn repack``: a packed cache in the layout of another backend."""

from __future__ import annotations

import argparse
import time
from typing import Any

from ...packed.backends import BACKENDS
from .. import loading, packed_options, prefix_output, shared_options
from ..printing import UsageError

_TEXT = """Write a prefix cache in the layout of another backend, e.g. one computed on a PC for a phone:

  kvmnn repack sys/ --from x86-avx2 --to arm64-fp16 -o phone/ --kv-heads 2 --head-dim 64 --tokens 50

Where the backends' dtypes differ, words are converted, to nearest even: fp32 to fp16 is LOSSY and the line about it
says how many words changed; fp16 to fp32 is LOSSLESS."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "repack", run, "a packed cache for another backend", _TEXT)
    parser.add_argument("input", metavar="IN")
    prefix_output.add_target(parser)
    shared_options.add_source(parser, "what the words are, where the pack numbers do not say")
    packed_options.add_packed(parser, backend="--from")
    parser.add_argument(
        "--to",
        required=True,
        choices=tuple(BACKENDS),
        metavar="NAME",
        help="backend whose layout is wanted; the flash block stays",
    )


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...formats.mnn.prefix_writing import plan
    from ...packed.fitting import Geometry, of_layout

    prefix_output.required_output(arguments)
    source = loading.load([arguments.input], arguments, frames=True)
    loading.report_skipped(source, arguments)
    if source.cache is None:
        raise UsageError(f"{arguments.input}: is not a packed cache: use pack for plain arrays")
    arrays = prefix_output.layers_of(source, arguments)
    before = source.cache.layout
    target = Geometry(
        kv_heads=before.kv_heads,
        head_dim=before.head_dim,
        backend=arguments.to,
        flash_block=of_layout(before).flash_block,
    )
    ((_, layout),) = target.candidates()
    name = prefix_output.prefix_name(arguments, source.cache)
    info = plan(arrays, layout, name, capacity=arguments.capacity, like=source.cache)
    started = time.perf_counter()
    packed = prefix_output.write(arguments, arrays, info, [arguments.input], "repack")
    prefix_output.report(arguments, "repack", packed, time.perf_counter() - started, source.notes)
    return 0
