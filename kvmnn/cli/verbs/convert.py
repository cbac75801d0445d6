"""``kvmnn convert``: a compressor's checkpoint to the weight file that the engine loads."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ...text import LOSSLESS, LOSSY
from .. import printing, shared_options, weights_options

if TYPE_CHECKING:
    from ...compressor.conversion.convert import Conversion
    from ...compressor.conversion.selection import Options

_TEXT = """Convert a KV-cache compressor's checkpoint (.pth, .pt, .safetensors) to a KVCM weight file (.bin).

The bytes are those of the published converter. Nothing in the checkpoint is ever executed, and torch is not needed.
Rounding to fp16 or bf16 is to the nearest; fp32 keeps every value of a float32 checkpoint."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "convert", run, "a compressor's .pth to the engine's .bin", _TEXT)
    parser.add_argument("source", nargs="?", metavar="IN", help="checkpoint (- for standard input)")
    parser.add_argument("target", nargs="?", metavar="OUT", help="weight file (- for standard output)")
    parser.add_argument("--input", metavar="IN", help="the same as the first argument")
    shared_options.add_output(parser, "the same as the second argument")
    parser.add_argument("--dtype", choices=("fp16", "bf16", "fp32"), help="type of the weights (default: fp16)")
    weights_options.add_header_fields(parser)
    weights_options.add_orders(parser)
    parser.add_argument(
        "--as-reference", action="store_true", help="also write what no loader takes, such as weights without rows"
    )


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    source, target = _paths(arguments)
    options = weights_options.options(arguments, as_reference=arguments.as_reference)
    conversion = _converted(source, target, options, arguments)
    _report(source, target, conversion, arguments)
    return 0


def _paths(arguments: argparse.Namespace) -> tuple[str, str]:
    """Input and output, given by place or by name."""
    given = [path for path in (arguments.source, arguments.target) if path is not None]
    named = [path for path in (arguments.input, arguments.output) if path is not None]
    paths = named + given if arguments.input is not None else given + named
    if len(paths) != 2:
        raise printing.UsageError("convert needs one input and one output: kvmnn convert IN OUT")
    return paths[0], paths[1]


def _converted(source: str, target: str, options: Options, arguments: argparse.Namespace) -> Conversion:
    from ...compressor.conversion.convert import prepare, write_file, write_selection

    if target == printing.STDIO and arguments.json:
        raise printing.UsageError("--json and the weights both want standard output: name an output file")
    checkpoint, selection = prepare(source, options)
    with printing.progress(arguments, selection.nbytes, "convert") as step:
        if target != printing.STDIO:
            return write_file(checkpoint, selection, target, force=arguments.force, progress=step)
        stdout = printing.Stdout()
        conversion = write_selection(checkpoint, selection, stdout, step)
        stdout.flush()
        return conversion


def _report(source: str, target: str, conversion: Conversion, arguments: argparse.Namespace) -> None:
    weights_options.report(arguments, conversion.warnings, conversion.notices)
    header = conversion.header
    label = LOSSY if conversion.rounded_types else LOSSLESS
    how = f" ({_rounded(conversion)})" if conversion.rounded_types else ""
    if arguments.json:
        printing.print_json(
            {
                "verb": "convert",
                "input": source,
                "output": target,
                "bytes": conversion.nbytes,
                "sha256": conversion.sha256,
                "label": label,
                "dtype": header.dtype.name,
                "rounded_types": conversion.rounded_types,
                "header": header.to_dict(),
                "non_finite": conversion.non_finite,
                "warnings": conversion.warnings,
                "notices": conversion.notices,
                "unused": conversion.unused,
            }
        )
    printing.say(
        arguments,
        f"Wrote {target} (layers={header.num_layers}, weights/layer={header.weight_count_per_layer}, "
        f"dtype={header.dtype.name}, factor={header.compression_factor}, hidden_size={header.hidden_size}, "
        f"head_dim={header.head_dim})\nsha256 {conversion.sha256}, {conversion.nbytes:,} bytes, {label}{how}",
        data_on_stdout=target == printing.STDIO,
    )


def _rounded(conversion: Conversion) -> str:
    names = [f"the real part of {name}" if name.startswith("complex") else name for name in conversion.rounded_types]
    return f"{', '.join(names)} rounded to {conversion.header.dtype.name}"
