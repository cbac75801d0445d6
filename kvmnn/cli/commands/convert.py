"""``kvmnn convert``: a compressor's checkpoint to the weight file that the engine loads."""

from __future__ import annotations

import argparse
from typing import Any

from .. import console, shared_options, weights_options

_DESCRIPTION = """Convert a KV-cache compressor's checkpoint (.pth, .pt, .safetensors) to a KVCM weight file (.bin).

The bytes are those of the published converter. Nothing in the checkpoint is ever executed, and torch is not needed.
Rounding to fp16 or bf16 is to the nearest; fp32 keeps every value of a float32 checkpoint.

Of a .safetensors file that kvmnn export made, whatever is not said is as in the weight file that was exported: type,
header fields and metadata. What kvmnn verify refuses is not written."""


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_command(
        subparsers, "convert", run, "a compressor's .pth to the engine's .bin", _DESCRIPTION
    )
    parser.add_argument("source", nargs="?", metavar="IN", help="checkpoint (- for standard input)")
    parser.add_argument(
        "target", nargs="?", metavar="OUT", help="weight file (- for standard output; default: IN as .bin)"
    )
    parser.add_argument("--input", metavar="IN", help="the same as the first argument")
    shared_options.add_output(parser, "the same as the second argument")
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), help="type of the weights (default: fp16)")
    shared_options.add_max_bytes(parser)
    weights_options.add_header_options(parser)
    weights_options.add_order_options(parser)
    parser.add_argument(
        "--as-reference",
        action="store_true",
        help="also write what no loader takes or kvmnn verify refuses, and leave out biases of another length",
    )


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...compressor import prepare_conversion

    source, target = _resolve_paths(arguments)
    if console.is_directory_output(target):
        raise console.UsageError(f"{target}: is a directory: expected the name of a weight file (.bin)")
    to_stdout = target == console.STDIO
    if to_stdout and arguments.json:
        raise console.UsageError("--json and the weights both want standard output: name an output file")
    weight_plan = prepare_conversion(
        source,
        weights_options.build_convert_options(arguments, as_reference=arguments.as_reference),
        specified_options=weights_options.list_given_options(arguments),
        max_bytes=arguments.max_bytes,
    )
    stdout = console.Stdout()
    with console.progress_bar(arguments, weight_plan.nbytes, "convert") as step:
        convert_result = weight_plan.write_weight_file(
            stdout if to_stdout else target, overwrite=arguments.force, progress=step
        )
        if to_stdout:
            stdout.flush()
    weights_options.report_notices(arguments, convert_result.warnings, convert_result.notices)
    console.show_result(arguments, "convert", convert_result, data_on_stdout=to_stdout)
    return 0


def _resolve_paths(arguments: argparse.Namespace) -> tuple[str, str]:
    """Input and output, given by place or by name."""
    positional_paths = [path for path in (arguments.source, arguments.target) if path is not None]
    option_paths = [path for path in (arguments.input, arguments.output) if path is not None]
    paths = option_paths + positional_paths if arguments.input is not None else positional_paths + option_paths
    if len(paths) == 1 and arguments.output is None:
        return paths[0], console.choose_output(arguments, paths[0], ".bin")
    if len(paths) != 2:
        raise console.UsageError("convert needs one input and at most one output: kvmnn convert IN [OUT]")
    return paths[0], paths[1]
