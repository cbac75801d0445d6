"""``--speed``: how fast the engine computes and the link is, for break-even and for ``store simulate``."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from . import shared_options
from .options import SpecField, add_spec_option

if TYPE_CHECKING:
    from ..reports.break_even import EngineTimes

SPEED_NAMES = ("prefill_speed", "load_speed")
"""Names of the values in the namespace."""


def _parse_prefill(text: str) -> int | str:
    """Parse a number; anything else is a file, which is read later."""
    return shared_options.parse_positive(text) if re.fullmatch(r"[-+\d.,_e]*", text) else text


def add_speed_option(parser: Any, title: str) -> None:
    """Add the option."""
    fields = [
        SpecField("prefill", "prefill_speed", "tokens a second, or a file of times", _parse_prefill, "TOKENS|FILE"),
        SpecField("load", "load_speed", "bytes a second from the store", shared_options.parse_byte_count, "BYTES"),
    ]
    add_spec_option(parser, "--speed", title, fields, metavar="KEY=VALUE,...")


def has_speed(arguments: argparse.Namespace) -> bool:
    """Return whether the option was given."""
    return arguments.prefill_speed is not None or arguments.load_speed is not None


def read_engine_times(arguments: argparse.Namespace) -> EngineTimes | None:
    """Return the times of the engine that the option specifies; None if it does not."""
    from ..reports.break_even import EngineTimes

    prefill = arguments.prefill_speed
    if prefill is None:
        return None
    return EngineTimes.read(prefill) if isinstance(prefill, str) else EngineTimes.from_speed(prefill)
