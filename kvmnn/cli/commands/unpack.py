"""``kvmnn unpack``: packed files to plain arrays."""

from __future__ import annotations

import argparse
from typing import Any

from .. import console, input_sources, packed_options, shared_options

_DESCRIPTION = """\
Turn packed K and V into plain arrays [kv_head, token, head_dim], called layer_<n>.key and layer_<n>.value.

IN is the directory of a prefix cache, of live cache files or of a packed KV dump, or one of their .k or .v files;
anything else that kvmnn reads will do as well.

  -o X.npz, X.safetensors  all arrays; .safetensors keeps what pack needs to
                           restore the files
  -o DIR/                  one .npy file for each array
  -o X.npy, -o X           one array (--tensor layer_0.key chooses); -o X
                           writes its raw words
  --as dump -o DIR/        a KV dump as the engine writes it,
                           [token, kv_head, head_dim]
  --as packed-dump -o DIR/ its packed variant

Live elements only: padding and room are left out. Of caches that the engine keeps in int8 (--int8) the codes times
their scales plus biases come back as fp32, and what cannot be recovered is said."""


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_command(subparsers, "unpack", run, "packed files to plain arrays", _DESCRIPTION)
    parser.add_argument("input", metavar="IN", help="the directory of a cache, one of its files, arrays")
    shared_options.add_output(parser, "file or directory (default: IN.safetensors, a dump: IN.dump/)")
    shared_options.add_raw(parser)
    shared_options.add_source(parser, "what the words are, where the pack numbers do not say")
    parser.add_argument(
        "--as",
        dest="form",
        choices=("arrays", "dump", "packed-dump"),
        default="arrays",
        help="what to write (default: arrays)",
    )
    parser.add_argument("--run-id", default="kvmnn", metavar="ID", help="of a dump (default: kvmnn)")
    packed_options.add_packed_options(parser, with_undo=True)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...formats.mnn import unpack

    suffix = ".safetensors" if arguments.form == "arrays" else f".{arguments.form}/"
    output = console.choose_output(arguments, arguments.input, suffix)
    source = input_sources.load([arguments.input], arguments, with_frames=True)
    input_sources.report_skipped(source, arguments)
    if arguments.form == "arrays":
        console.check_output_suffix(arguments, output, source.arrays)
    else:
        shared_options.refuse_given(arguments, ["raw"], "is about one array, and a dump is written")
    with console.progress_bar(arguments, source.nbytes, "unpack") as step:
        unpack_result = unpack(
            source,
            output,
            form=arguments.form,
            run_id=arguments.run_id,
            force=arguments.force,
            progress=step,
        )
    input_sources.report_notes(unpack_result.notes[len(source.notes) :], arguments)
    console.show_result(arguments, "unpack", unpack_result)
    return 0
