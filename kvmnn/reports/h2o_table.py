"""The engine's planner in tables: a line for each layer, under the engine's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..h2o.figures import H2OStats, PlannerLayerStats
from .columns import Column, to_single_line
from .rows import ResultRow

H2O_TITLE = "The H2O planner by layer, under the engine's names (docs/h2o.md):"

_H2O_COLUMNS: tuple[tuple[str, Callable[[PlannerLayerStats], str], int], ...] = (
    ("layer", lambda stats: f"{stats.layer}", 0),
    ("kept of seen", lambda stats: f"{stats.tokens_kept:,} of {stats.tokens_seen:,}", 0),
    ("lossy", lambda stats: f"{stats.lossy_ratio:.3f}", 0),
    ("h2o_lossy_ratio", lambda stats: f"{stats.h2o_lossy_ratio:.3f}", 1),
    ("h2o_keep_ratio", lambda stats: f"{stats.h2o_keep_ratio:.3f}", 2),
    ("h2o_total_evict_tokens", lambda stats: f"{stats.h2o_total_evict_tokens:,}", 3),
    ("plans", lambda stats: f"{stats.triggers:,}", 4),
    ("h2o_evict_us", lambda stats: f"{stats.h2o_evict_us:,}", 5),
    ("h2o_target_keep_effective", lambda stats: f"{stats.h2o_target_keep_effective:.3f}", 6),
    ("h2o_floor_keep_by_recent_sink", lambda stats: f"{stats.h2o_floor_keep_by_recent_sink:.3f}", 7),
    ("h2o_block_quantized_keep", lambda stats: f"{stats.h2o_block_quantized_keep:.3f}", 8),
)


def build_h2o_table(stats_by_label: Sequence[tuple[str, H2OStats]]) -> tuple[list[Column], list[list[str]]] | None:
    """Columns and lines for runs with their labels; None without runs. `lossy` is of the run, tokens seen over kept."""
    if not stats_by_label:
        return None
    lines = [
        [to_single_line(label), *(text(layer) for _, text, _ in _H2O_COLUMNS)]
        for label, stats in stats_by_label
        for layer in stats.layers
    ]
    columns = [Column("policy", _no_h2o_text, 0, is_left_aligned=True)]
    columns += [Column(heading, _no_h2o_text, rank) for heading, _, rank in _H2O_COLUMNS]
    if len(stats_by_label) == 1:
        return columns[1:], [line[1:] for line in lines]
    return columns, lines


def collect_h2o_stats(rows: Sequence[ResultRow]) -> list[tuple[str, H2OStats]]:
    """The rows in which the engine's planner evicted."""
    return [(row.label, row.h2o) for row in rows if row.h2o is not None]


def _no_h2o_text(row: ResultRow, full: ResultRow | None) -> None:
    return None
