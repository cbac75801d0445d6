"""The lossless runtime in tables: a line for each run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .columns import ABSENT_TEXT, Column, to_single_line
from .rows import ResultRow
from .runtime_figures import RuntimeStats

_RUNTIME_BYTES_PER_MIB = float(1 << 20)

_RUNTIME_COLUMNS: tuple[tuple[str, Callable[[RuntimeStats], str], int], ...] = (
    ("mode", lambda stats: stats.mode, 0),
    ("lossy", lambda stats: _format_ratio(stats.lossy_ratio), 0),
    ("lossless", lambda stats: _format_ratio(stats.lossless_ratio), 0),
    ("total", lambda stats: _format_ratio(stats.total_ratio), 0),
    ("encoded ratio", lambda stats: _format_ratio(stats.encoded_ratio), 1),
    ("held (MiB)", lambda stats: f"{stats.held_bytes / _RUNTIME_BYTES_PER_MIB:.3f}", 2),
    ("blocks", lambda stats: f"{sum(layer.blocks for layer in stats.layers):,}", 3),
    ("encode (ms)", lambda stats: f"{stats.h2o_lossless_compress_us / 1e3:.1f}", 4),
    ("decode (ms)", lambda stats: f"{stats.h2o_lossless_decompress_us / 1e3:.1f}", 5),
    ("fallbacks", lambda stats: f"{stats.h2o_lossless_fallback_count:,}", 6),
)


RUNTIME_COLUMNS_NOTE = (
    "Of the runtime: lossy: bytes of all tokens over those that the policy left; lossless: those over held, the bytes "
    "that hold them at the end, hot tokens and room to grow included; encoded ratio: raw over compressed bytes of what "
    "was encoded; encode, decode: sums of the run."
)


def format_runtime_title(texts: int = 1) -> str:
    """What stands above the table of runs over so many texts."""
    scope_text = "of the same runs" if texts < 2 else f"sums over {texts:,} texts"
    return f"The lossless runtime around the cache, {scope_text} (docs/runtime.md):"


def build_runtime_table(
    stats_by_label: Sequence[tuple[str, RuntimeStats]],
) -> tuple[list[Column], list[list[str]]] | None:
    """Columns and lines for runs with their labels; None without runs."""
    if not stats_by_label:
        return None
    columns = [Column("policy", _no_runtime_text, 0, is_left_aligned=True)]
    columns += [
        Column(heading, _no_runtime_text, rank, is_left_aligned=heading == "mode")
        for heading, _, rank in _RUNTIME_COLUMNS
    ]
    return columns, [
        [to_single_line(label), *(text(stats) for _, text, _ in _RUNTIME_COLUMNS)] for label, stats in stats_by_label
    ]


def collect_runtime_stats(rows: Sequence[ResultRow]) -> list[tuple[str, RuntimeStats]]:
    """The rows whose model ran with the runtime around its cache."""
    return [(row.label, row.runtime) for row in rows if row.runtime is not None]


def _format_ratio(value: float | None) -> str:
    return ABSENT_TEXT if value is None else f"{value:.3f}"


def _no_runtime_text(row: ResultRow, full: ResultRow | None) -> None:
    return None
