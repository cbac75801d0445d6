"""Numbers and rates for people."""

from __future__ import annotations

from collections.abc import Sequence


def ratio(raw_bytes: int, stored_bytes: int) -> float:
    """Raw over stored bytes; 0 where nothing is stored."""
    return raw_bytes / stored_bytes if stored_bytes else 0.0


def count(number: int, what: str) -> str:
    """``1 frame``, ``2 frames``."""
    return f"{number:,} {what}" + ("" if number == 1 else "s")


LEAST_RATE_BYTES = 1 << 20
"""Bytes below which no rate is printed: what it would say is how long things take to begin."""


def at_rate(nbytes: int, seconds: float) -> str:
    """A rate behind other facts, such as ``, 187 MB/s`` (10^6 bytes a second); empty for few bytes."""
    return f", {rate(nbytes, seconds)} MB/s" if nbytes >= LEAST_RATE_BYTES else ""


def rate(nbytes: int, seconds: float) -> str:
    """10^6 bytes a second: whole from 1 on, below with one digit that is not 0."""
    found = nbytes / 1e6 / max(seconds, 1e-9)
    return f"{found:.0f}" if found >= 0.95 else f"{found:.1g}"


def span(numbers: Sequence[int]) -> str:
    """``7`` or ``7 to 12``: the least and the greatest of ascending numbers."""
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"
