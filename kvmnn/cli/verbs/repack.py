"""``kvmnn repack``: a packed cache in the layout of another backend."""

from __future__ import annotations

import argparse
from typing import Any

from ...packed.backends import BACKENDS
from .. import loading, packed_options, printing, rerotate_options, shared_options

_TEXT = """Write a prefix cache in the layout of another backend, e.g. one computed on a PC for a phone:

  kvmnn repack sys/ -o phone/ --from x86-avx2 --to arm64-fp16 \\
      --kv-heads 2 --head-dim 64 --tokens 50

Where the backends' dtypes differ, words are converted, to nearest even: fp32 to fp16 is LOSSY and the line about it
says how many words changed; fp16 to fp32 is LOSSLESS."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "repack", run, "a packed cache for another backend", _TEXT)
    parser.add_argument("input", metavar="IN", help="the directory of a prefix cache, or one of its files")
    packed_options.add_target(parser)
    shared_options.add_source(parser, "what the words are, where the pack numbers do not say", axes=False)
    packed_options.add_packed(parser, backend="--from")
    parser.add_argument(
        "--to",
        required=True,
        choices=tuple(BACKENDS),
        metavar="NAME",
        help="backend whose layout is wanted; the flash block stays",
    )
    rerotate_options.add_rerotate(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...formats.mnn import repack

    rerotate_options.check(arguments)
    output = printing.output_or_beside(arguments, arguments.input, f".{arguments.to}/")
    source = loading.load([arguments.input], arguments, frames=True, used=("name",))
    loading.report_skipped(source, arguments)
    with printing.progress(arguments, source.nbytes, "repack") as step:
        packed = repack(
            source,
            output,
            arguments.to,
            name=arguments.name,
            capacity=arguments.capacity,
            model=arguments.model,
            rerotate=arguments.rerotate,
            rope=arguments.rope,
            force=arguments.force,
            progress=step,
        )
    loading.report_notes(packed.notes[len(source.notes) :], arguments)
    printing.show(arguments, "repack", packed)
    return 0
