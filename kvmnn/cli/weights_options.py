"""What the verbs share that work on compressor weights."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import console

if TYPE_CHECKING:
    from ..compressor import ConvertOptions


CONVERSION_OPTION_NAMES = (
    "compression_factor",
    "min_seq_len",
    "num_heads",
    "head_dim",
    "metadata",
    "prefix_order",
    "slot_order",
)
"""What a conversion is told, as the namespace calls it, but for the type of the weights."""


def split_names(text: str) -> tuple[str, ...]:
    """A comma-separated list; blanks around the names and empty names do not count."""
    return tuple(name for item in text.split(",") if (name := item.strip()))


def parse_slots(text: str) -> tuple[int, ...]:
    """Three numbers, comma-separated."""
    try:
        slot_numbers = tuple(int(name) for name in split_names(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,3,6") from None
    if len(slot_numbers) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(slot_numbers)} numbers: expected three, such as 0,3,6")
    return slot_numbers


def parse_entry(text: str) -> tuple[str, str]:
    """``KEY=VALUE``."""
    key, separator, value = text.partition("=")
    if not (key and separator):
        raise argparse.ArgumentTypeError(f"{text!r} is no entry: expected KEY=VALUE")
    return key, value


def add_order_options(parser: Any) -> None:
    """``--prefix-order`` and ``--slot-order``."""
    parser.add_argument(
        "--prefix-order",
        type=split_names,
        metavar="NAMES",
        help="compressors in file order (default: compress_tk,compress_tv,compress_ik,compress_iv)",
    )
    parser.add_argument(
        "--slot-order", type=parse_slots, metavar="SLOTS", help="Linear layers in file order (default: 0,3,6)"
    )


def add_header_options(parser: Any, *, with_head_dim: bool = True) -> None:
    """The options that set header fields and metadata."""
    for name, text in (
        ("compression-factor", "tokens that become one (default: columns / head_dim of the first weight)"),
        ("min-seq-len", "least number of groups that is compressed (default: 2)"),
        ("num-heads", "for information (default: 0, not given)"),
        ("head-dim", "for information (default: rows of the first weight)"),
    ):
        if with_head_dim or name != "head-dim":
            parser.add_argument(f"--{name}", type=int, metavar="N", help=text)
    parser.add_argument(
        "--metadata",
        type=parse_entry,
        action="append",
        metavar="KEY=VALUE",
        help="an entry of the section that loaders skip (repeatable; default: none)",
    )


def add_weights_group(parser: Any, *, with_trailing: bool = False) -> None:
    """For verbs that take caches too, and have ``--head-dim`` from them: the other options of a conversion.

    With `with_trailing` also ``--allow-trailing`` and ``--as-reference``.
    """
    group = parser.add_argument_group("compressor weights", "what kvmnn convert was told, where it was told something")
    add_header_options(group, with_head_dim=False)
    add_order_options(group)
    if with_trailing:
        group.add_argument(
            "--allow-trailing",
            action="store_true",
            help="only warn of bytes behind the last weight, as loaders take them",
        )
        group.add_argument(
            "--as-reference",
            action="store_true",
            help="with --against: accept what convert --as-reference leaves out (biases of another length)",
        )


def build_convert_options(arguments: argparse.Namespace, **overrides: Any) -> ConvertOptions:
    """The conversion options that were given; `overrides` overrides."""
    from ..compressor import ConvertOptions

    given_values = {
        "dtype": arguments.dtype,
        "prefixes": arguments.prefix_order,
        "slots": arguments.slot_order,
        "compression_factor": arguments.compression_factor,
        "min_seq_len": arguments.min_seq_len,
        "num_heads": arguments.num_heads,
        "head_dim": arguments.head_dim,
        "metadata": _parse_metadata(arguments),
    }
    return ConvertOptions(**{name: value for name, value in {**given_values, **overrides}.items() if value is not None})


def list_given_options(arguments: argparse.Namespace) -> list[str]:
    """The conversion options that were given, as `ConvertOptions` calls them."""
    dest_by_field = {"dtype": "dtype", "prefixes": "prefix_order", "slots": "slot_order"}
    dest_by_field |= {name: name for name in ("compression_factor", "min_seq_len", "num_heads", "head_dim", "metadata")}
    return [name for name, dest in dest_by_field.items() if getattr(arguments, dest) is not None]


def _parse_metadata(arguments: argparse.Namespace) -> dict[str, str] | None:
    entries = dict(arguments.metadata or ())
    if len(entries) < len(arguments.metadata or ()):
        raise console.UsageError("--metadata has a key twice")
    return entries or None


def check_is_weight_file(path: str) -> None:
    """`SourceError` for a file that is no weight file and does not pretend to be one."""
    from ..compressor import is_weight_file
    from ..errors import SourceError
    from ..files.mapped_file import read_head
    from ..formats.detection_errors import HEAD_BYTES, explain_unknown_file

    if path == console.STDIO or not os.path.isfile(path) or is_weight_file(path):
        return
    content_text = explain_unknown_file(path, read_head(path, HEAD_BYTES)).partition(": ")[2]
    raise SourceError(
        f"{path}: expected a compressor's weight file (.bin), which kvmnn convert makes of a checkpoint"
        f"{'; ' if content_text else ''}{content_text}"
    )


def report_notices(arguments: argparse.Namespace, warnings: Sequence[str], notices: Sequence[str]) -> None:
    """One line on standard error for each."""
    for kind, lines in (("note", notices), ("warning", warnings)):
        for line in lines:
            console.print_note(arguments, line, kind)
