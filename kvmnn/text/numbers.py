"""Numbers and rates for people."""

from __future__ import annotations

from collections.abc import Sequence


def compute_ratio(raw_bytes: int, stored_bytes: int) -> float:
    """Raw over stored bytes; 0 where nothing is stored."""
    return raw_bytes / stored_bytes if stored_bytes else 0.0


def pluralize(number: int, noun: str) -> str:
    """``1 frame``, ``2 frames``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


MIN_RATE_BYTES = 1 << 20
"""Bytes below which no rate is printed: what it would say is how long things take to begin."""


def format_rate(nbytes: int, seconds: float) -> str:
    """A rate behind other facts, such as ``, 187 MB/s`` (10^6 bytes a second); empty for few bytes."""
    return f", {format_mb_per_second(nbytes, seconds)} MB/s" if nbytes >= MIN_RATE_BYTES else ""


def format_mb_per_second(nbytes: int, seconds: float) -> str:
    """10^6 bytes a second: whole from 1 on, below with one digit that is not 0."""
    mb_per_second = nbytes / 1e6 / max(seconds, 1e-9)
    return f"{mb_per_second:.0f}" if mb_per_second >= 0.95 else f"{mb_per_second:.1g}"


def format_range(numbers: Sequence[int]) -> str:
    """``7`` or ``7 to 12``: the least and the greatest of ascending numbers."""
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"
