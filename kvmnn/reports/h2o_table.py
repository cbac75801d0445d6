"""The engine's planner in tables: a line for each layer, under the engine's names."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from ..h2o.figures import H2OFigures, LayerFigures
from .columns import Column, plain
from .rows import Row

H2O_TITLE = "The H2O planner by layer, under the engine's names (docs/h2o.md):"

_HEADINGS: tuple[tuple[str, Callable[[LayerFigures], str], int], ...] = (
    ("layer", lambda one: f"{one.layer}", 0),
    ("kept of seen", lambda one: f"{one.tokens_kept:,} of {one.tokens_seen:,}", 0),
    ("lossy", lambda one: f"{one.lossy_ratio:.3f}", 0),
    ("h2o_lossy_ratio", lambda one: f"{one.h2o_lossy_ratio:.3f}", 1),
    ("h2o_keep_ratio", lambda one: f"{one.h2o_keep_ratio:.3f}", 2),
    ("h2o_total_evict_tokens", lambda one: f"{one.h2o_total_evict_tokens:,}", 3),
    ("plans", lambda one: f"{one.triggers:,}", 4),
    ("h2o_evict_us", lambda one: f"{one.h2o_evict_us:,}", 5),
    ("h2o_target_keep_effective", lambda one: f"{one.h2o_target_keep_effective:.3f}", 6),
    ("h2o_floor_keep_by_recent_sink", lambda one: f"{one.h2o_floor_keep_by_recent_sink:.3f}", 7),
    ("h2o_block_quantized_keep", lambda one: f"{one.h2o_block_quantized_keep:.3f}", 8),
)


def h2o_table(figures: Sequence[tuple[str, H2OFigures]]) -> tuple[list[Column], list[list[str]]] | None:
    """Columns and lines for runs with their labels; None without runs. `lossy` is of the run, tokens seen over kept."""
    if not figures:
        return None
    lines = [
        [plain(label), *(text(layer) for _, text, _ in _HEADINGS)] for label, found in figures for layer in found.layers
    ]
    columns = [Column("policy", _absent, 0, left=True)]
    columns += [Column(heading, _absent, rank) for heading, _, rank in _HEADINGS]
    if len(figures) == 1:
        return columns[1:], [line[1:] for line in lines]
    return columns, lines


def rows_with_figures(rows: Sequence[Row]) -> list[tuple[str, H2OFigures]]:
    """The rows in which the engine's planner evicted."""
    return [(row.label, row.h2o) for row in rows if row.h2o is not None]


def _absent(row: Row, full: Row | None) -> None:
    return None
