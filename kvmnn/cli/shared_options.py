"""Options that several verbs have, and types of their values."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from typing import Any

from . import axes_options

EFFORT_CHOICES = ("exact", "balanced", "fast", "max")


def parse_byte_count(text: str) -> int:
    """A size such as ``4096``, ``64M`` or ``1G`` (powers of 1024), in bytes."""
    match = re.fullmatch(r"(\d{1,15})\s*([KMGT]?)(i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size: expected a number of bytes, K, M or G")
    return int(match[1]) << {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}[match[2].upper()]


def parse_positive(text: str) -> int:
    """A whole number above zero."""
    if not re.fullmatch(r"\d{1,9}", text) or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above zero")
    return int(text)


def parse_whole(text: str) -> int:
    """A whole number, zero included."""
    if not re.fullmatch(r"\d{1,9}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def add_command(subparsers: Any, name: str, run: Callable[[argparse.Namespace], int], summary: str, text: str) -> Any:
    """A sub-parser with the options that every verb has."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=text,
    )
    parser.set_defaults(run=run, parser=parser)
    parser.add_argument("--json", action="store_true", help="print one JSON document on standard output")
    parser.add_argument("-q", "--quiet", action="store_true", help="print results and errors, no notes and no bars")
    parser.add_argument("-v", "--verbose", action="store_true", help="say more")
    return parser


def add_threads(parser: Any) -> None:
    """``--threads`` and ``--no-zstd``."""
    parser.add_argument("--threads", type=parse_positive, metavar="N", help="threads to use (default: all processors)")
    parser.add_argument("--no-zstd", action="store_true", help="behave as an engine without libzstd: RLE only")


def add_max_bytes(parser: Any) -> None:
    """``--max-bytes``."""
    parser.add_argument(
        "--max-bytes",
        type=parse_byte_count,
        metavar="SIZE",
        help="refuse an input of more raw bytes (default: what its files can hold)",
    )


def add_output(parser: Any, text: str) -> None:
    """``-o`` and ``-f``."""
    parser.add_argument("-o", "--output", metavar="OUT", help=text)
    add_force(parser)


def add_raw(parser: Any) -> None:
    """``--raw``."""
    parser.add_argument(
        "--raw", action="store_true", help="write the raw words of one array to OUT, whose suffix is no format's"
    )


def has_option(parser: Any, option: str) -> bool:
    """Whether a parser knows an option already."""
    return any(option in action.option_strings for action in parser._actions)


def add_force(parser: Any) -> None:
    """``-f``."""
    parser.add_argument("-f", "--force", action="store_true", help="replace files that exist")


def add_provider(parser: Any) -> None:
    """``--provider``."""
    parser.add_argument(
        "--provider",
        action="append",
        default=[],
        metavar="NAME",
        help="of onnxruntime, the preferred first (repeatable; default: CPUExecutionProvider)",
    )


ELEMENT_TYPES = ("fp16", "bf16", "fp32")
_FLOAT8_CODE_TYPES = (
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
)  # numpy takes long to import


def add_source(parser: Any, dtype_help: str, *, axes: bool = True) -> None:
    """``--dtype``, ``--tensor`` and ``--skip-unsupported``; with `axes` what says how arrays lie."""
    add_dtype(parser, dtype_help, with_float8=True)
    parser.add_argument("--tensor", action="append", default=[], metavar="NAME", help="take this array (repeatable)")
    parser.add_argument(
        "--skip-unsupported",
        action="store_true",
        help="leave out arrays that no frame holds (float64, int64, empty ...) instead of refusing the file",
    )
    if axes:
        axes_options.add_axes(parser)


def add_dtype(parser: Any, text: str, *, with_float8: bool = False) -> None:
    """``--dtype``, with `with_float8` also what codes of one byte are."""
    names = (*ELEMENT_TYPES, *(_FLOAT8_CODE_TYPES if with_float8 else ()))
    parser.add_argument("--dtype", choices=names, metavar="TYPE", help=f"{text}: {', '.join(names)}")


def select_codecs(arguments: argparse.Namespace) -> tuple[str, ...]:
    """What ``--no-zstd`` leaves."""
    return ("rle",) if arguments.no_zstd else ("rle", "zstd")
