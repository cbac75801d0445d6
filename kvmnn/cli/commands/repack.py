"""``kvmnn repack``: a packed cache in the layout of another backend."""

from __future__ import annotations

import argparse
from typing import Any

from ...packed.backends import BACKENDS
from .. import console, dense_options, input_sources, packed_options, shared_options

_DESCRIPTION = """Write a prefix cache in the layout of another backend, e.g. one computed on a PC for a phone:

  kvmnn repack sys/ -o phone/ --from x86-avx2 --to arm64-fp16 \\
      --kv-heads 2 --head-dim 64 --tokens 50

Where the backends' dtypes differ, words are converted, to nearest even: fp32 to fp16 is LOSSY and the line about it
says how many words changed; fp16 to fp32 is LOSSLESS."""


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_command(subparsers, "repack", run, "a packed cache for another backend", _DESCRIPTION)
    parser.add_argument("input", metavar="IN", help="the directory of a prefix cache, or one of its files")
    packed_options.add_target_options(parser)
    shared_options.add_source(parser, "what the words are, where the pack numbers do not say", axes=False)
    packed_options.add_packed_options(parser, backend="--from")
    parser.add_argument(
        "--to",
        required=True,
        choices=tuple(BACKENDS),
        metavar="NAME",
        help="backend whose layout is wanted; the flash block stays",
    )
    dense_options.add_rerotate_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...formats.mnn import repack

    dense_options.check_rerotate_options(arguments)
    output = console.choose_output(arguments, arguments.input, f".{arguments.to}/")
    source = input_sources.load([arguments.input], arguments, with_frames=True, used_options=("name",))
    input_sources.report_skipped(source, arguments)
    with console.progress_bar(arguments, source.nbytes, "repack") as step:
        pack_result = repack(
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
    input_sources.report_notes(pack_result.notes[len(source.notes) :], arguments)
    console.show_result(arguments, "repack", pack_result)
    return 0
