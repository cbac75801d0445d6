"""The lossless runtime in tables: a line for each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .columns import ABSENT, Column, plain
from .rows import Row
from .runtime_figures import RuntimeFigures

_MIB = float(1 << 20)

_HEADINGS: tuple[tuple[str, Callable[[RuntimeFigures], str], int], ...] = (
    ("mode", lambda one: one.mode, 0),
    ("lossy", lambda one: _number(one.lossy_ratio), 0),
    ("lossless", lambda one: _number(one.lossless_ratio), 0),
    ("total", lambda one: _number(one.total_ratio), 0),
    ("encoded ratio", lambda one: _number(one.encoded_ratio), 1),
    ("held (MiB)", lambda one: f"{one.held_bytes / _MIB:.3f}", 2),
    ("blocks", lambda one: f"{sum(layer.blocks for layer in one.layers):,}", 3),
    ("encode (ms)", lambda one: f"{one.h2o_lossless_compress_us / 1e3:.1f}", 4),
    ("decode (ms)", lambda one: f"{one.h2o_lossless_decompress_us / 1e3:.1f}", 5),
    ("fallbacks", lambda one: f"{one.h2o_lossless_fallback_count:,}", 6),
)


RUNTIME_COLUMNS = (
    "Of the runtime: lossy: bytes of all tokens over those that the policy left; lossless: those over held, the bytes "
    "that hold them at the end, hot tokens and room to grow included; encoded ratio: raw over compressed bytes of what "
    "was encoded; encode, decode: sums of the run."
)


def runtime_title(texts: int = 1) -> str:
    """What stands above the table of runs over so many texts."""
    what = "of the same runs" if texts < 2 else f"sums over {texts:,} texts"
    return f"The lossless runtime around the cache, {what} (docs/runtime.md):"


def runtime_table(figures: Sequence[tuple[str, RuntimeFigures]]) -> tuple[list[Column], list[list[str]]] | None:
    """Columns and lines for runs with their labels; None without runs."""
    if not figures:
        return None
    columns = [Column("policy", _absent, 0, left=True)]
    columns += [Column(heading, _absent, rank, left=heading == "mode") for heading, _, rank in _HEADINGS]
    return columns, [[plain(label), *(text(found) for _, text, _ in _HEADINGS)] for label, found in figures]


def rows_with_runtime(rows: Sequence[Row]) -> list[tuple[str, RuntimeFigures]]:
    """The rows whose model ran with the runtime around its cache."""
    return [(row.label, row.runtime) for row in rows if row.runtime is not None]


def _number(value: float | None) -> str:
    return ABSENT if value is None else f"{value:.3f}"


def _absent(row: Row, full: Row | None) -> None:
    return None
