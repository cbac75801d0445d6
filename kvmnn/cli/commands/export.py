"""``kvmnn export``: a compressor's weight file back to tensors with names."""

from __future__ import annotations

import argparse
from typing import Any

from .. import console, shared_options, weights_options

_DESCRIPTION = """\
Write the weights and biases of a KVCM weight file (.bin) under the names that a checkpoint gives them.

The words are copied as they are, and read back: LOSSLESS. In .npz, which has no bf16, bf16 words become uint16.

With --onnx, OUT is a directory that gets compress_tk.onnx and so on: graphs that turn groups of tokens into tokens, one
for each kind of compressor, with the weights of all layers (extra lm)."""


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_command(
        subparsers, "export", run, "a compressor's .bin to .safetensors or .npz", _DESCRIPTION
    )
    parser.add_argument("weights", metavar="WEIGHTS", help="weight file (- for standard input)")
    shared_options.add_output(parser, ".safetensors or .npz file, a directory with --onnx (default: beside WEIGHTS)")
    weights_options.add_order_options(parser)
    parser.add_argument("--onnx", action="store_true", help="write ONNX graphs that compute, not tensors")
    parser.add_argument(
        "--precision",
        choices=("fp32", "fp16"),
        help="with --onnx (default: fp32); fp16: round as an fp16 runtime does, after every Linear",
    )


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...compressor import export_onnx, export_weights

    if not arguments.onnx:
        shared_options.refuse_given(arguments, ["precision"], "needs --onnx: tensors are copied as they are")
    if arguments.onnx and (arguments.prefix_order or arguments.slot_order):
        raise console.UsageError("--prefix-order and --slot-order name tensors; the graphs of --onnx have none")
    weights_options.check_is_weight_file(arguments.weights)
    output = console.choose_output(arguments, arguments.weights, ".onnx/" if arguments.onnx else ".safetensors")
    if arguments.onnx:
        graphs = export_onnx(
            arguments.weights, output, precision=arguments.precision or "fp32", overwrite=arguments.force
        )
        console.show_result(arguments, "export", graphs)
        return 0
    tensors = export_weights(
        arguments.weights,
        output,
        prefixes=arguments.prefix_order,
        slots=arguments.slot_order,
        overwrite=arguments.force,
    )
    console.show_result(arguments, "export", tensors)
    return 0
