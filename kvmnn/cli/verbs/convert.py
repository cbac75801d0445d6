"""``kvmnn convert``: a compressor's checkpoint to the weight file that the engine loads."""

from __future__ import annotations

import argparse
from typing import Any

from .. import printing, shared_options, weights_options

_TEXT = """Convert a KV-cache compressor's checkpoint (.pth, .pt, .safetensors) to a KVCM weight file (.bin).

The bytes are those of the published converter. Nothing in the checkpoint is ever executed, and torch is not needed.
Rounding to fp16 or bf16 is to the nearest; fp32 keeps every value of a float32 checkpoint.

Of a .safetensors file that kvmnn export made, whatever is not said is as in the weight file that was exported: type,
header fields and metadata. What kvmnn verify refuses is not written."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "convert", run, "a compressor's .pth to the engine's .bin", _TEXT)
    parser.add_argument("source", nargs="?", metavar="IN", help="checkpoint (- for standard input)")
    parser.add_argument(
        "target", nargs="?", metavar="OUT", help="weight file (- for standard output; default: IN as .bin)"
    )
    parser.add_argument("--input", metavar="IN", help="the same as the first argument")
    shared_options.add_output(parser, "the same as the second argument")
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), help="type of the weights (default: fp16)")
    shared_options.add_max_bytes(parser)
    weights_options.add_header_fields(parser)
    weights_options.add_orders(parser)
    parser.add_argument(
        "--as-reference",
        action="store_true",
        help="also write what no loader takes or kvmnn verify refuses, and leave out biases of another length",
    )


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...compressor import prepare

    source, target = _paths(arguments)
    if printing.is_directory(target):
        raise printing.UsageError(f"{target}: is a directory: expected the name of a weight file (.bin)")
    to_stdout = target == printing.STDIO
    if to_stdout and arguments.json:
        raise printing.UsageError("--json and the weights both want standard output: name an output file")
    prepared = prepare(
        source,
        weights_options.options(arguments, as_reference=arguments.as_reference),
        given=weights_options.given(arguments),
        max_bytes=arguments.max_bytes,
    )
    stdout = printing.Stdout()
    with printing.progress(arguments, prepared.nbytes, "convert") as step:
        conversion = prepared.write(stdout if to_stdout else target, force=arguments.force, progress=step)
        if to_stdout:
            stdout.flush()
    weights_options.report(arguments, conversion.warnings, conversion.notices)
    printing.show(arguments, "convert", conversion, data_on_stdout=to_stdout)
    return 0


def _paths(arguments: argparse.Namespace) -> tuple[str, str]:
    """Input and output, given by place or by name."""
    given = [path for path in (arguments.source, arguments.target) if path is not None]
    named = [path for path in (arguments.input, arguments.output) if path is not None]
    paths = named + given if arguments.input is not None else given + named
    if len(paths) == 1 and arguments.output is None:
        return paths[0], printing.output_or_beside(arguments, paths[0], ".bin")
    if len(paths) != 2:
        raise printing.UsageError("convert needs one input and at most one output: kvmnn convert IN [OUT]")
    return paths[0], paths[1]
