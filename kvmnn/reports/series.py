"""What plots of an evaluation show: rows in series, and what is on their axes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any

from ..policies.registry import POLICIES

Row = Mapping[str, Any]

_SIZES = ("budget", "keep_ratio")


@dataclass(frozen=True)
class Point:
    """A measured value: where, what, and the ends of its interval, None where there is none."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None


@dataclass
class Series:
    """Rows of one policy that differ in the size of the cache and in options that follow from it."""

    name: str
    rows: list[Row] = field(default_factory=list)


def full_row(rows: Sequence[Row]) -> Row | None:
    """The row of the full cache."""
    return next((row for row in rows if row["policy"] == "full"), None)


def cut_rows(rows: Sequence[Row]) -> list[Row]:
    """All others, those whose perplexity is no number left out."""
    return [row for row in rows if row["policy"] != "full" and is_number(row.get("perplexity"))]


def grouped(rows: Sequence[Row], without: Sequence[str] = ()) -> list[Series]:
    """Rows by policy, and by those options that differ where policy and size are equal.

    An option that only changes with the budget (half of it recent, say) does not part a series; nor do options named
    in `without`, which are an axis of the plot.
    """
    found: dict[tuple[object, ...], Series] = {}
    for row in rows:
        alike = [other for other in rows if other["policy"] == row["policy"]]
        options = [_told(name, row, alike) for name in _parting(alike, without)]
        name = " ".join([str(row["policy"]), *(text for text in options if text)])
        key = (row["policy"], *options)
        series = found.setdefault(key, Series(name))
        if any(_size(row, without) == _size(other, without) for other in series.rows):
            # The options do not say what differs (a preset's own way, say): the label does.
            series = found.setdefault((*key, row["label"]), Series(row["label"]))
        series.rows.append(row)
    return list(found.values())


def perplexity(row: Row, x: float) -> Point:
    """Its perplexity at `x`; the interval is that of the difference to the full cache."""
    versus = row.get("versus_full") or {}
    mean, low, high = (versus.get(key) for key in ("nll", "low", "high"))
    value = float(row["perplexity"])
    if mean is None or low is None or high is None:
        return Point(x, value)
    return Point(x, value, value * math.exp(low - mean), value * math.exp(high - mean))


def accuracy(row: Row, x: float) -> Point:
    """Its accuracy in per cent at `x`, likewise."""
    versus = row.get("versus_full") or {}
    mean, low, high = (versus.get(key) for key in ("accuracy", "accuracy_low", "accuracy_high"))
    value = 100 * float(row["accuracy"])
    if mean is None or low is None or high is None:
        return Point(x, value)
    return Point(x, value, value + 100 * (low - mean), value + 100 * (high - mean))


def is_number(value: object) -> bool:
    """Whether something was measured and is finite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _parting(rows: Sequence[Row], without: Sequence[str]) -> list[str]:
    names = dict.fromkeys(key for row in rows for key in _options(row) if key not in (*_SIZES, *without))
    return [name for name in names if _differs(rows, name)]


def _differs(rows: Sequence[Row], name: str) -> bool:
    """Whether two rows of the same size differ in the option."""
    values: dict[object, set[str]] = {}
    for row in rows:
        values.setdefault(_size(row), set()).add(repr(_options(row).get(name)))
    return any(len(found) > 1 for found in values.values())


def _options(row: Row) -> dict[str, Any]:
    """The policy's options, those that a row leaves out because they are the defaults included."""
    policy = POLICIES.get(row["policy"])
    defaults = {} if policy is None else {entry.name: entry.default for entry in fields(policy) if entry.repr}
    options = {name: value for name, value in defaults.items() if value is not MISSING} | dict(row["options"])
    options["positions"] = "stored positions" if row.get("positions") == "stored" else None
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def _size(row: Row, axes: Sequence[str] = ()) -> tuple[object, ...]:
    return (row.get("budget"), row.get("keep_ratio"), *(repr(_options(row).get(axis)) for axis in axes))


def _told(name: str, row: Row, alike: Sequence[Row]) -> str:
    """An option as names have it; recent tokens as a share of the budget where more rows agree on the share."""
    value = _options(row).get(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return value  # keep_low says enough, 0.5 does not
    if isinstance(value, list):
        return f"{name}={'+'.join(map(str, value)) or 'none'}"
    share = _share(name, row)
    if share is not None:
        equal = sum(_options(other).get(name) == value for other in alike)
        if sum(_share(name, other) == share for other in alike) > equal:
            return f"{name}={100 * share:.3g}%"
    return f"{name}={value}"


def _share(name: str, row: Row) -> float | None:
    """What is recent as a share of the row's budget; other numbers of tokens do not grow with it."""
    value, budget = _options(row).get(name), row.get("budget")
    return value / budget if name == "recent" and type(value) is int and budget else None
