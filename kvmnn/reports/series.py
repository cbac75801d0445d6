"""What plots of an evaluation show: rows in series, and what is on their axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass, field, fields
from typing import Any, TypeGuard

from ..policies.full import Full
from ..policies.registry import MODEL_POLICIES, POLICIES
from .plot_style import look
from .rows import Row

_SIZES = ("budget", "keep_ratio")


@dataclass(frozen=True)
class Point:
    """A measured value: where, what, and the ends of its interval, None where there is none.

    `is_uncut`: it is of a row whose policy evicted nothing (`Row.is_uncut`).
    """

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    is_uncut: bool = False


@dataclass
class Series:
    """Rows of one policy that differ in the size of the cache and in options that follow from it."""

    name: str
    rows: list[Row] = field(default_factory=list)


def cut_rows(rows: Sequence[Row]) -> list[Row]:
    """All rows but the full cache's, those whose perplexity is no number left out."""
    return [row for row in rows if not row.is_full and is_number(row.perplexity)]


def grouped(rows: Sequence[Row], without: Sequence[str] = ()) -> list[Series]:
    """Rows by policy, and by those options that differ where policy and size are equal.

    An option that only changes with the budget (half of it recent, say) does not part a series; nor do options named
    in `without`, which are an axis of the plot.
    """
    found: dict[tuple[object, ...], Series] = {}
    for row in rows:
        alike = [other for other in rows if other.policy == row.policy]
        options = [_told(name, row, alike) for name in _parting(alike, without)]
        name = " ".join(_words(row, options))
        key = (row.policy, *options)
        series = found.setdefault(key, Series(name))
        if any(_size(row, without) == _size(other, without) for other in series.rows):
            # The options do not say what differs: the label does.
            series = found.setdefault((*key, row.label), Series(row.label))
        series.rows.append(row)
    return list(found.values())


def _words(row: Row, options: Sequence[str]) -> list[str]:
    """What a series of a row is called: policy, options that part it, and what it goes on from."""
    start = [] if row.start is None else [f"from {row.start}"]
    policy = [] if start and row.policy == Full.name else [row.policy]
    return [*policy, *(text for text in options if text), *start]


class Looks:
    """How the policies of a run are drawn: one colour each in all figures, whatever else a figure shows.

    Policies that run with several values of an option that is a word (``strategy``, ``form``) are told apart by it;
    what differs in numbers only has the same colour, and dashes and markers of its own.

    Parameters
    ----------
    rows
        All rows of the run, whose order gives the colours.
    """

    def __init__(self, rows: Sequence[Row]) -> None:
        cut = cut_rows(rows)
        self._families: dict[tuple[object, ...], int] = {}
        self._of: dict[str, tuple[int, int]] = {}
        variants: dict[int, int] = {}
        members: dict[str, int] = {}
        for entry in grouped(cut):
            for row in entry.rows:
                members.setdefault(row.label, id(entry))
        known: dict[int, tuple[int, int]] = {}
        for row in cut:
            family = self._families.setdefault(_family(row, cut), len(self._families))
            if members[row.label] not in known:
                known[members[row.label]] = (family, variants.get(family, 0))
                variants[family] = variants.get(family, 0) + 1
            self._of[row.label] = known[members[row.label]]

    def of(self, label: str, variant: int | None = None) -> dict[str, Any]:
        """How the row called `label` is drawn; with `variant`, that of its figure instead of the run's."""
        family, own = self._of.get(label, (len(self._families), 0))
        return look(family, own if variant is None else variant)

    def family(self, label: str) -> int:
        """Which colour the row called `label` has, as a number."""
        return self._of.get(label, (len(self._families), 0))[0]


def perplexity(row: Row, x: float) -> Point:
    """Its perplexity at `x`; the interval is that of the difference to the full cache."""
    value, versus = measured(row.perplexity), row.versus_full
    if versus is None or versus.nll is None or versus.low is None or versus.high is None:
        return Point(x, value, is_uncut=row.is_uncut)
    low, high = value * math.exp(versus.low - versus.nll), value * math.exp(versus.high - versus.nll)
    return Point(x, value, low, high, row.is_uncut)


def accuracy(row: Row, x: float) -> Point:
    """Its accuracy in per cent at `x`, likewise."""
    value, versus = 100 * measured(row.accuracy), row.versus_full
    if versus is None or versus.accuracy is None or versus.accuracy_low is None or versus.accuracy_high is None:
        return Point(x, value, is_uncut=row.is_uncut)
    mean, low, high = versus.accuracy, versus.accuracy_low, versus.accuracy_high
    return Point(x, value, value + 100 * (low - mean), value + 100 * (high - mean), row.is_uncut)


def measured(value: float | None) -> float:
    """A value, NaN where nothing was measured."""
    return math.nan if value is None else float(value)


def is_number(value: object) -> TypeGuard[float]:
    """Whether something was measured and is finite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _parting(rows: Sequence[Row], without: Sequence[str]) -> list[str]:
    names = dict.fromkeys(key for row in rows for key in _options(row) if key not in (*_SIZES, *without))
    return [name for name in names if _differs(rows, name)]


def _family(row: Row, rows: Sequence[Row]) -> tuple[object, ...]:
    """The policy, and its options that are words and differ."""
    alike = [other for other in rows if other.policy == row.policy]
    values = [_options(row).get(name) for name in _parting(alike, ())]
    return (row.policy, *(value for value in values if isinstance(value, str)))


def _differs(rows: Sequence[Row], name: str) -> bool:
    """Whether two rows of the same size differ in the option."""
    values: dict[object, set[str]] = {}
    for row in rows:
        values.setdefault(_size(row), set()).add(repr(_options(row).get(name)))
    return any(len(found) > 1 for found in values.values())


def _options(row: Row) -> dict[str, object]:
    """The policy's options, those that a row leaves out because they are the defaults included."""
    policy = (POLICIES | MODEL_POLICIES).get(row.policy)
    defaults: dict[str, object] = (
        {} if policy is None else {entry.name: entry.default for entry in fields(policy) if entry.repr}
    )
    options: dict[str, object] = {name: value for name, value in defaults.items() if value is not MISSING} | dict(
        row.options
    )
    options["positions"] = "stored positions" if row.positions == "stored" else None
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def _size(row: Row, axes: Sequence[str] = ()) -> tuple[object, ...]:
    return (row.budget, row.keep_ratio, *(repr(_options(row).get(axis)) for axis in axes))


def _told(name: str, row: Row, alike: Sequence[Row]) -> str:
    """An option as names have it; recent tokens as a share of the budget where more rows agree on the share."""
    value = _options(row).get(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return value  # keep_low says enough, 0.5 does not
    if isinstance(value, list):
        return f"{name}={'+'.join(map(str, value))}" if value else ""
    share = _share(name, row)
    if share is not None:
        equal = sum(_options(other).get(name) == value for other in alike)
        if sum(_share(name, other) == share for other in alike) > equal:
            return f"{name}={100 * share:.3g}%"
    return f"{name}={value}"


def _share(name: str, row: Row) -> float | None:
    """What is recent as a share of the row's budget; other numbers of tokens do not grow with it."""
    value, budget = _options(row).get(name), row.budget
    return value / budget if name == "recent" and type(value) is int and budget else None
