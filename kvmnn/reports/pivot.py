"""Perplexities of a run as a table of policies by sizes, and which policy is best at each size."""

from __future__ import annotations

from collections.abc import Sequence

from .columns import ABSENT, UNCUT_MARK, Column, marked
from .rows import Row
from .series import Series, cut_rows, grouped, is_number

TITLE = "Perplexity by size; best: the lowest of the line, - for a tie (the intervals above say how sure that is)."
_UNCUT = f" Numbers marked {UNCUT_MARK} are of policies that evicted nothing, which are never the best."

_Key = tuple[int | float, float | None]


def title(rows: Sequence[Row]) -> str:
    """Return what stands above the table of these rows."""
    return TITLE + (_UNCUT if any(row.is_uncut for row in rows) else "")


def pivot_table(rows: Sequence[Row]) -> tuple[list[Column], list[list[str]]] | None:
    """A line for each size, and for each protected share where it differs; a column for each policy; None for less.

    The sizes are budgets, or shares where there are no budgets. A policy without a protected share has the same number
    in all lines of its size. Sizes at which a single policy ran have no line.
    """
    rows = [row for row in cut_rows(rows) if _size(row) is not None]
    shares = {_share(row) for row in rows} - {None}
    series = grouped(rows, without=("recent_ratio",) if len(shares) > 1 else ())
    found = {(_size(row) or 0, _share(row) if len(shares) > 1 else None) for row in rows}
    parted = {size for size, share in found if share is not None}
    keys = sorted((key for key in found if key[1] is not None or key[0] not in parted), key=_order)
    keys = [key for key in keys if sum(_row(entry, key) is not None for entry in series) > 1]
    if len(keys) < 2:
        return None
    headings = ["budget", *(["recent"] if len(shares) > 1 else []), *(entry.name for entry in series), "best"]
    last = len(headings) - 1
    columns = [
        Column(heading, _nothing, 0 if i in (0, last) else i, left=i == last) for i, heading in enumerate(headings)
    ]
    return columns, [_line(key, series, len(shares) > 1) for key in keys]


def _line(key: _Key, series: Sequence[Series], with_share: bool) -> list[str]:
    found = [_row(entry, key) for entry in series]
    size, share = key
    first = f"{size:,}" if isinstance(size, int) else f"{100 * size:g} %"
    head = [first, *([ABSENT if share is None else f"{share:g}"] if with_share else [])]
    texts = [ABSENT if row is None else marked(f"{row.perplexity:.2f}", row) for row in found]
    return [*head, *texts, _best(found, texts, series)]


def _best(found: Sequence[Row | None], texts: Sequence[str], series: Sequence[Series]) -> str:
    """The policy of the lowest number of those that evicted; none where the table shows another one as low."""
    rivals = [(row.perplexity, place) for place, row in enumerate(found) if row is not None and not row.is_uncut]
    numbers = [(value, place) for value, place in rivals if value is not None]
    if not numbers:
        return ABSENT
    place = min(numbers)[1]
    return series[place].name if texts.count(texts[place]) == 1 else ABSENT


def _row(entry: Series, key: _Key) -> Row | None:
    for row in entry.rows:
        if _size(row) == key[0] and (key[1] is None or _share(row) in (None, key[1])):
            return row
    return None


def _size(row: Row) -> int | float | None:
    return row.keep_ratio if row.budget is None else row.budget


def _share(row: Row) -> float | None:
    value = row.options.get("recent_ratio")
    return float(value) if is_number(value) else None


def _order(key: _Key) -> tuple[bool, float, float]:
    return isinstance(key[0], int), key[0], -1.0 if key[1] is None else key[1]


def _nothing(row: Row, full: Row | None) -> None:
    """Pivots have texts of their own."""
