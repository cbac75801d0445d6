"""``kvmnn export``: a compressor's weight file back to tensors with names."""

from __future__ import annotations

import argparse
from typing import Any

from . import _common, _weights

_TEXT = """Write the weights and biases of a KVCM weight file (.bin) under the names that a checkpoint gives them.

The words are copied as they are: LOSSLESS. In .npz, which has no bf16, bf16 words become uint16."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = _common.add_verb(verbs, "export", run, "a compressor's .bin to .safetensors or .npz", _TEXT)
    parser.add_argument("weights", metavar="WEIGHTS", help="weight file (- for standard input)")
    _common.add_output(parser, "OUT.safetensors or OUT.npz")
    _weights.add_orders(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ..compressor.export import export
    from ..compressor.format import SLOTS, read

    if arguments.output is None:
        raise _common.UsageError("export needs an output: -o OUT.safetensors or -o OUT.npz")
    file = read(arguments.weights)
    tensors = export(
        file,
        arguments.output,
        prefixes=arguments.prefix_order,
        slots=arguments.slot_order or SLOTS,
        force=arguments.force,
    )
    if arguments.json:
        _common.print_json(
            {
                "verb": "export",
                "input": arguments.weights,
                "output": arguments.output,
                "label": _common.LOSSLESS,
                "tensors": tensors,
                "dtype": file.header.dtype.name,
            }
        )
    _common.say(
        arguments,
        f"{arguments.output}: {_common.count(tensors, 'tensor')} of {file.header.dtype.name}, "
        f"{_common.LOSSLESS} (copied)",
    )
    return 0
