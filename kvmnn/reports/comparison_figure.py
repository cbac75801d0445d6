"""What each policy costs against the full cache, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from . import plot_style
from .columns import UNCUT_MARK
from .figure_parts import Measure, NothingToShowError, interval_text, sentences, uncut_text
from .plot_style import INK, MUTED
from .results import Results
from .rows import full_row
from .series import Looks, Point, Series, accuracy, cut_rows, grouped, is_number, perplexity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Budgets = tuple[int, ...]

_FACETS = 4
_SIZE = 7.5
"""Points of the letters at the ends of bars."""
_GAP = 8 / 72
"""Inches between a bar and the edge of its panel that are left beside the letters."""
_ROUNDS = 30
_LINEAR = 10
"""Per cent of change up to which an axis is linear where it is not linear as a whole."""
_LOGARITHMIC = f"\nlogarithmic beyond {_LINEAR} %"


def strategy_comparison(results: Results) -> Figure:
    """What each policy costs against the full cache, side by side for every budget."""
    full = full_row(results.rows)
    if full is None or not is_number(full.perplexity):
        raise NothingToShowError("the full cache was not measured")
    rows = [row for row in cut_rows(results.rows) if row.budget is not None]
    if not rows:
        raise NothingToShowError("no policy with a budget was measured")
    every = grouped(rows)
    counts = {panel: sum(row.budget in panel for row in rows) for panel in _alike(every)}
    panels = sorted(sorted(counts, key=lambda panel: (-counts[panel], -panel[0]))[:_FACETS])
    series = [entry for entry in every if any(row.budget in panel for row in entry.rows for panel in panels)]
    quantities = [("relative perplexity change (%)", perplexity, full.perplexity)]
    if is_number(full.accuracy) and all(is_number(row.accuracy) for row in rows):
        quantities.append(("relative accuracy change (%)", accuracy, 100 * full.accuracy))
    return _comparison(series, panels, quantities, Looks(results.rows))


def _comparison(
    series: Sequence[Series],
    panels: Sequence[Budgets],
    quantities: Sequence[tuple[str, Measure, float]],
    looks: Looks,
) -> Figure:
    from matplotlib.figure import Figure

    order = series[::-1]  # the first at the top, as in the tables
    left = 0.3 + max(plot_style.text_width(entry.name, 9) for entry in order)
    panel, gap, tall = 2.1, 0.25, max(0.26 * len(order) + 0.2, 0.8)
    made = Figure(figsize=(left + len(panels) * (panel + gap) + 0.5, len(quantities) * (tall + 0.95) + 0.35))
    width, height = made.get_size_inches()
    for number, (label, measure, reference) in enumerate(quantities):
        far = _far_apart([measure(row, 0).y / reference - 1 for entry in series for row in entry.rows])
        bottom = 0.75 + (len(quantities) - 1 - number) * (tall + 0.95)
        first: Axes | None = None
        labels: list[_Label] = []
        for column, budgets in enumerate(panels):
            box = ((left + column * (panel + gap)) / width, bottom / height, panel / width, tall / height)
            axes = made.add_axes(box, sharex=first)
            first = first or axes
            for place, entry in enumerate(order):
                labels += [
                    _bar(axes, place, looks.of(row.label)["color"], measure(row, 0), reference)
                    for row in entry.rows
                    if row.budget in budgets
                ]
            axes.set_yticks(range(len(order)), [entry.name for entry in order] if column == 0 else [""] * len(order))
            axes.tick_params(axis="y", length=0, labelcolor=INK)
            axes.set_ylim(-0.6, len(order) - 0.4)
            axes.grid(axis="y", visible=False)
            axes.axvline(0, color=INK, linewidth=1.0)
            axes.set_xlabel(f"{label}{_LOGARITHMIC}" if far else label)
            if number == 0:
                axes.set_title(
                    "budget " + " to ".join(f"{b:,}" for b in dict.fromkeys((budgets[0], budgets[-1]))) + " tokens"
                )
        if first is not None:
            if far:
                first.set_xscale("symlog", linthresh=_LINEAR)
            _make_room(first, labels, panel)
            if far:
                _set_ticks(first)
    rows = [row for entry in series for row in entry.rows]
    said = sentences(interval_text(rows, "Thin lines"), uncut_text(rows, UNCUT_MARK))
    plot_style.caption(made, sentences("Against the full cache (line at 0).", said))
    return made


def _far_apart(changes: Sequence[float]) -> bool:
    """Whether one change is so large that the others could not be seen beside it."""
    sizes = sorted(100 * abs(change) for change in changes)
    return sizes[-1] > max(8 * sizes[len(sizes) // 2], 30)


def _make_room(axes: Axes, labels: Sequence[_Label], width: float) -> None:
    """Set the limits so that every label lies inside its panel of `width` inches: the next one would hide the rest."""
    transform = axes.xaxis.get_transform()
    ends = [0.0, *(float(transform.transform(end)) for label in labels for end in (label.far, *label.ends))]
    low, high = min(ends), max(ends)
    low, high = (low, high) if high > low else (low - 0.5, high + 0.5)
    for _ in range(_ROUNDS):  # each widens the axis, and so shortens the room that was made before
        inch = (high - low) / width
        for label in labels:
            end = float(transform.transform(label.far))
            end += label.side * inch * (_GAP + plot_style.text_width(label.text, _SIZE))
            low, high = min(low, end), max(high, end)
    inverse = transform.inverted()
    axes.set_xlim(float(inverse.transform(low)), float(inverse.transform(high)))


def _set_ticks(axes: Axes) -> None:
    """Ticks of an axis that is logarithmic beyond `_LINEAR` per cent."""
    ends = axes.get_xlim()
    ticks = [tick for tick in (-100, -10, 0, 10, 100, 1000, 10000) if ends[0] <= tick <= ends[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _alike(series: Sequence[Series]) -> list[Budgets]:
    """Budgets in ascending groups: those that hardly differ (256, and 8 + 256) are compared with each other."""
    groups: list[Budgets] = []
    for budget in sorted({row.budget or 0 for entry in series for row in entry.rows}):
        of_both = any(
            budget in sizes and sizes & set(groups[-1] if groups else ())
            for sizes in ({row.budget or 0 for row in entry.rows} for entry in series)
        )
        if groups and budget <= 1.06 * groups[-1][0] and not of_both:
            groups[-1] = (*groups[-1], budget)
        else:
            groups.append((budget,))
    return groups


class _Label(NamedTuple):
    """The text at the end of a bar: what it says, where the bar ends, on which side it lies, and where the bar's
    interval ends."""

    text: str
    far: float
    side: int
    ends: Sequence[float]


def _bar(axes: Axes, place: int, colour: str, point: Point, reference: float) -> _Label:
    change = 100 * (point.y / reference - 1)
    axes.barh([place], [change], height=0.62, color=colour, alpha=0.8)
    far, ends = change, [change]
    if point.low is not None and point.high is not None:
        low, high = ends = [100 * (end / reference - 1) for end in (point.low, point.high)]
        axes.plot([low, high], [place, place], color=INK, linewidth=1.0)
        far = max(high, change) if change >= 0 else min(low, change)
    side = 1 if change >= 0 else -1
    label = _Label(f"{change:+.1f}{UNCUT_MARK if point.is_uncut else ''}", far, side, ends)
    axes.annotate(
        label.text,
        (far, place),
        (4 * side, 0),
        textcoords="offset points",
        va="center",
        ha="left" if side > 0 else "right",
        fontsize=_SIZE,
        color=MUTED,
    )
    return label
