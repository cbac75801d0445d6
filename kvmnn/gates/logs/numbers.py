"""Numbers out of cells, as the fork's analyser reads them."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"[-+]?[0-9]*\.?[0-9]+")
_DECODE = re.compile(r"<br>\s*([0-9]+(?:\.[0-9]+)?)")


def number(cell: object) -> float:
    """The first number in a cell such as ``3.114 ± 0.009``; 0 where there is none.

    An exponent is not read: ``1e-05`` is 1. A cell that is ``nan`` or ``inf`` and nothing else is that.
    """
    if isinstance(cell, bool | int | float):
        return _float(cell)
    if not isinstance(cell, str):
        return 0.0
    found = _NUMBER.search(cell)
    return _float(found[0] if found else cell)


def decode_speed(cell: str | None) -> float:
    """Tokens a second of decoding: what stands behind ``<br>``; 0 where nothing does."""
    found = _DECODE.search(cell or "")
    return float(found[1]) if found else 0.0


def deviation(cell: str | None) -> float | None:
    """What stands behind ``±`` of the last part of a cell; None where nothing does."""
    _, sign, text = (cell or "").rpartition("\N{PLUS-MINUS SIGN}")
    found = _NUMBER.search(text) if sign else None
    return _float(found[0]) if found else None


def _float(value: str | float) -> float:
    try:
        return float(value)
    except (ValueError, OverflowError):
        return 0.0
