"""Perplexities of a run as a table of policies by sizes, and which policy is best at each size."""

from __future__ import annotations

from collections.abc import Sequence

from .columns import ABSENT_TEXT, NO_EVICTION_MARK, Column, add_no_eviction_mark
from .rows import ResultRow
from .series import RowSeries, group_into_series, is_number, select_policy_rows

PIVOT_TITLE = (
    "Perplexity by size; best: the lowest of the line, - for a tie (the intervals above say how sure that is)."
)
_NO_EVICTION_NOTE = (
    f" Numbers marked {NO_EVICTION_MARK} are of policies that evicted nothing, which are never the best."
)

_PivotKey = tuple[int | float, float | None]


def format_pivot_title(rows: Sequence[ResultRow]) -> str:
    """Return what stands above the table of these rows."""
    return PIVOT_TITLE + (_NO_EVICTION_NOTE if any(row.has_no_eviction for row in rows) else "")


def build_pivot_table(rows: Sequence[ResultRow]) -> tuple[list[Column], list[list[str]]] | None:
    """A line for each size, and for each protected share where it differs; a column for each policy; None for less.

    The sizes are budgets, or shares where there are no budgets. A policy without a protected share has the same number
    in all lines of its size. Sizes at which a single policy ran have no line.
    """
    rows = [row for row in select_policy_rows(rows) if _get_row_size(row) is not None]
    shares = {_get_recent_share(row) for row in rows} - {None}
    series = group_into_series(rows, ignored_options=("recent_ratio",) if len(shares) > 1 else ())
    size_keys = {(_get_row_size(row) or 0, _get_recent_share(row) if len(shares) > 1 else None) for row in rows}
    sizes_with_share = {size for size, share in size_keys if share is not None}
    keys = sorted(
        (key for key in size_keys if key[1] is not None or key[0] not in sizes_with_share), key=_make_sort_key
    )
    keys = [key for key in keys if sum(_find_pivot_row(entry, key) is not None for entry in series) > 1]
    if len(keys) < 2:
        return None
    headings = ["budget", *(["recent"] if len(shares) > 1 else []), *(entry.name for entry in series), "best"]
    last_index = len(headings) - 1
    columns = [
        Column(heading, _no_pivot_text, 0 if i in (0, last_index) else i, is_left_aligned=i == last_index)
        for i, heading in enumerate(headings)
    ]
    return columns, [_build_pivot_line(key, series, len(shares) > 1) for key in keys]


def _build_pivot_line(key: _PivotKey, series: Sequence[RowSeries], with_share: bool) -> list[str]:
    series_rows = [_find_pivot_row(entry, key) for entry in series]
    size, share = key
    size_text = f"{size:,}" if isinstance(size, int) else f"{100 * size:g} %"
    leading_cells = [size_text, *([ABSENT_TEXT if share is None else f"{share:g}"] if with_share else [])]
    texts = [ABSENT_TEXT if row is None else add_no_eviction_mark(f"{row.perplexity:.2f}", row) for row in series_rows]
    return [*leading_cells, *texts, _find_best(series_rows, texts, series)]


def _find_best(series_rows: Sequence[ResultRow | None], texts: Sequence[str], series: Sequence[RowSeries]) -> str:
    """The policy of the lowest number of those that evicted; none where the table shows another one as low."""
    candidates = [
        (row.perplexity, series_index)
        for series_index, row in enumerate(series_rows)
        if row is not None and not row.has_no_eviction
    ]
    numbers = [(value, series_index) for value, series_index in candidates if value is not None]
    if not numbers:
        return ABSENT_TEXT
    series_index = min(numbers)[1]
    return series[series_index].name if texts.count(texts[series_index]) == 1 else ABSENT_TEXT


def _find_pivot_row(entry: RowSeries, key: _PivotKey) -> ResultRow | None:
    for row in entry.rows:
        if _get_row_size(row) == key[0] and (key[1] is None or _get_recent_share(row) in (None, key[1])):
            return row
    return None


def _get_row_size(row: ResultRow) -> int | float | None:
    return row.keep_ratio if row.budget is None else row.budget


def _get_recent_share(row: ResultRow) -> float | None:
    value = row.options.get("recent_ratio")
    return float(value) if is_number(value) else None


def _make_sort_key(key: _PivotKey) -> tuple[bool, float, float]:
    return isinstance(key[0], int), key[0], -1.0 if key[1] is None else key[1]


def _no_pivot_text(row: ResultRow, full: ResultRow | None) -> None:
    """Pivots have texts of their own."""
