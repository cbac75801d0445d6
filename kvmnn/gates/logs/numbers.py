"""Numbers out of cells, as the fork's analyser reads them."""

from __future__ import annotations

import re

_NUMBER_REGEX = re.compile(r"[-+]?[0-9]*\.?[0-9]+")
_DECODE_REGEX = re.compile(r"<br>\s*([0-9]+(?:\.[0-9]+)?)")


def parse_first_number(cell: object) -> float:
    """The first number in a cell such as ``3.114 ± 0.009``; 0 where there is none.

    An exponent is not read: ``1e-05`` is 1. A cell that is ``nan`` or ``inf`` and nothing else is that.
    """
    if isinstance(cell, bool | int | float):
        return _to_float(cell)
    if not isinstance(cell, str):
        return 0.0
    match = _NUMBER_REGEX.search(cell)
    return _to_float(match[0] if match else cell)


def parse_decode_speed(cell: str | None) -> float:
    """Tokens a second of decoding: what stands behind ``<br>``; 0 where nothing does."""
    match = _DECODE_REGEX.search(cell or "")
    return float(match[1]) if match else 0.0


def parse_deviation(cell: str | None) -> float | None:
    """What stands behind ``±`` of the last part of a cell; None where nothing does."""
    _, sign, text = (cell or "").rpartition("\N{PLUS-MINUS SIGN}")
    match = _NUMBER_REGEX.search(text) if sign else None
    return _to_float(match[0]) if match else None


def _to_float(value: str | float) -> float:
    try:
        return float(value)
    except (ValueError, OverflowError):
        return 0.0
