"""Options that the commands for compressor weights share."""

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
"""Names of the conversion options in the namespace, except the type of the weights."""


def split_names(text: str) -> tuple[str, ...]:
    """Split a comma-separated list; ignore blanks around names and empty names."""
    return tuple(name for item in text.split(",") if (name := item.strip()))


def parse_slots(text: str) -> tuple[int, ...]:
    """Parse three comma-separated numbers."""
    try:
        slot_numbers = tuple(int(name) for name in split_names(text))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers such as 0,3,6") from None
    if len(slot_numbers) != 3:
        raise argparse.ArgumentTypeError(f"{text!r} has {len(slot_numbers)} numbers: expected three, such as 0,3,6")
    return slot_numbers


def parse_entry(text: str) -> tuple[str, str]:
    """Parse ``KEY=VALUE``."""
    key, separator, value = text.partition("=")
    if not (key and separator):
        raise argparse.ArgumentTypeError(f"{text!r} is no entry: expected KEY=VALUE")
    return key, value


def add_order_options(parser: Any) -> None:
    """Add ``--prefix-order`` and ``--slot-order``."""
    parser.add_argument(
        "--prefix-order",
        type=split_names,
        metavar="NAMES",
        help="compressors in file order (default: compress_tk,compress_tv,compress_ik,compress_iv)",
    )
    parser.add_argument(
        "--slot-order", type=parse_slots, metavar="SLOTS", help="Linear layers in file order (default: 0,3,6)"
    )


def add_header_options(parser: Any) -> None:
    """Add the options that set header fields, as the published converter names them, and ``--metadata``."""
    for name, text in (
        ("compression-factor", "tokens that become one (default: columns / head_dim of the first weight)"),
        ("min-seq-len", "least number of groups that is compressed (default: 2)"),
        ("num-heads", "for information (default: 0, not given)"),
        ("head-dim", "for information (default: rows of the first weight)"),
    ):
        parser.add_argument(f"--{name}", type=int, metavar="N", help=text)
    parser.add_argument(
        "--metadata",
        type=parse_entry,
        action="append",
        metavar="KEY=VALUE",
        help="an entry of the section that loaders skip (repeatable; default: none)",
    )


def build_convert_options(arguments: argparse.Namespace, **overrides: Any) -> ConvertOptions:
    """Build the conversion options from the specified ones; `overrides` take precedence."""
    from ..compressor import ConvertOptions

    values = {field: getattr(arguments, dest, None) for field, dest in _DEST_BY_FIELD.items()}
    values["metadata"] = _parse_metadata(arguments)
    return ConvertOptions(**{name: value for name, value in {**values, **overrides}.items() if value is not None})


def list_given_options(arguments: argparse.Namespace) -> list[str]:
    """List the specified conversion options by their names in `ConvertOptions`."""
    return [field for field, dest in _DEST_BY_FIELD.items() if getattr(arguments, dest, None) is not None]


_DEST_BY_FIELD = {
    "dtype": "dtype",
    "prefixes": "prefix_order",
    "slots": "slot_order",
    **{name: name for name in ("compression_factor", "min_seq_len", "num_heads", "head_dim", "metadata")},
}


def _parse_metadata(arguments: argparse.Namespace) -> dict[str, str] | None:
    metadata_entries = getattr(arguments, "metadata", None) or ()
    entries = dict(metadata_entries)
    if len(entries) < len(metadata_entries):
        raise console.UsageError("--metadata has a key twice")
    return entries or None


def check_is_weight_file(path: str) -> None:
    """Raise `SourceError` for a file that is not a weight file and does not look like one."""
    from ..compressor import is_weight_file
    from ..errors import SourceError
    from ..files.mapped_file import HEAD_BYTES, read_head
    from ..formats.detection_errors import explain_unknown_file

    if path == console.STDIO or not os.path.isfile(path) or is_weight_file(path):
        return
    content_text = explain_unknown_file(path, read_head(path, HEAD_BYTES)).partition(": ")[2]
    raise SourceError(
        f"{path}: expected a compressor's weight file (.bin), which kvmnn compressor convert makes of a checkpoint"
        f"{'; ' if content_text else ''}{content_text}"
    )


def report_notices(arguments: argparse.Namespace, warnings: Sequence[str], notices: Sequence[str]) -> None:
    """Print one line to standard error for each notice."""
    for kind, lines in (("note", notices), ("warning", warnings)):
        for line in lines:
            console.print_note(arguments, line, kind)
