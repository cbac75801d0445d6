"""What each policy costs against the full cache, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from . import plot_style
from .columns import NO_EVICTION_MARK
from .figure_parts import Measure, NothingToShowError, format_interval_note, format_no_eviction_note, join_sentences
from .plot_style import INK_COLOUR, MUTED_COLOUR
from .results import EvaluationResultsProtocol
from .rows import find_full_row
from .series import (
    LineStyles,
    MeasuredPoint,
    RowSeries,
    accuracy,
    group_into_series,
    is_number,
    perplexity,
    select_policy_rows,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BudgetGroup = tuple[int, ...]

_MAX_PANELS = 4
_BAR_LABEL_SIZE = 7.5
"""Points of the letters at the ends of bars."""
_BAR_LABEL_GAP_INCHES = 8 / 72
"""Inches between a bar and the edge of its panel that are left beside the letters."""
_MAX_LAYOUT_ROUNDS = 30
_LINEAR_PERCENT = 10
"""Per cent of change up to which an axis is linear where it is not linear as a whole."""
_LOGARITHMIC_NOTE = f"\nlogarithmic beyond {_LINEAR_PERCENT} %"


def strategy_comparison(results: EvaluationResultsProtocol) -> Figure:
    """What each policy costs against the full cache, side by side for every budget."""
    full = find_full_row(results.rows)
    if full is None or not is_number(full.perplexity):
        raise NothingToShowError("the full cache was not measured")
    rows = [row for row in select_policy_rows(results.rows) if row.budget is not None]
    if not rows:
        raise NothingToShowError("no policy with a budget was measured")
    all_series = group_into_series(rows)
    counts = {panel: sum(row.budget in panel for row in rows) for panel in _group_similar_budgets(all_series)}
    panels = sorted(sorted(counts, key=lambda panel: (-counts[panel], -panel[0]))[:_MAX_PANELS])
    series = [entry for entry in all_series if any(row.budget in panel for row in entry.rows for panel in panels)]
    quantities = [("relative perplexity change (%)", perplexity, full.perplexity)]
    if is_number(full.accuracy) and all(is_number(row.accuracy) for row in rows):
        quantities.append(("relative accuracy change (%)", accuracy, 100 * full.accuracy))
    return _draw_comparison(series, panels, quantities, LineStyles(results.rows))


def _draw_comparison(
    series: Sequence[RowSeries],
    panels: Sequence[BudgetGroup],
    quantities: Sequence[tuple[str, Measure, float]],
    looks: LineStyles,
) -> Figure:
    from matplotlib.figure import Figure

    order = series[::-1]  # the first at the top, as in the tables
    left_margin = 0.3 + max(plot_style.measure_text_inches(entry.name, 9) for entry in order)
    panel, gap, tall = 2.1, 0.25, max(0.26 * len(order) + 0.2, 0.8)
    figure = Figure(figsize=(left_margin + len(panels) * (panel + gap) + 0.5, len(quantities) * (tall + 0.95) + 0.35))
    width, height = figure.get_size_inches()
    for number, (label, measure, reference) in enumerate(quantities):
        is_logarithmic = _has_outlier([measure(row, 0).y / reference - 1 for entry in series for row in entry.rows])
        bottom = 0.75 + (len(quantities) - 1 - number) * (tall + 0.95)
        first_axes: Axes | None = None
        labels: list[_BarLabel] = []
        for column, budgets in enumerate(panels):
            box = ((left_margin + column * (panel + gap)) / width, bottom / height, panel / width, tall / height)
            axes = figure.add_axes(box, sharex=first_axes)
            first_axes = first_axes or axes
            for row_index, entry in enumerate(order):
                labels += [
                    _draw_change_bar(axes, row_index, looks.get_style(row.label)["color"], measure(row, 0), reference)
                    for row in entry.rows
                    if row.budget in budgets
                ]
            axes.set_yticks(range(len(order)), [entry.name for entry in order] if column == 0 else [""] * len(order))
            axes.tick_params(axis="y", length=0, labelcolor=INK_COLOUR)
            axes.set_ylim(-0.6, len(order) - 0.4)
            axes.grid(axis="y", visible=False)
            axes.axvline(0, color=INK_COLOUR, linewidth=1.0)
            axes.set_xlabel(f"{label}{_LOGARITHMIC_NOTE}" if is_logarithmic else label)
            if number == 0:
                axes.set_title(
                    "budget " + " to ".join(f"{b:,}" for b in dict.fromkeys((budgets[0], budgets[-1]))) + " tokens"
                )
        if first_axes is not None:
            if is_logarithmic:
                first_axes.set_xscale("symlog", linthresh=_LINEAR_PERCENT)
            _fit_labels(first_axes, labels, panel)
            if is_logarithmic:
                _set_logarithmic_ticks(first_axes)
    rows = [row for entry in series for row in entry.rows]
    note_text = join_sentences(
        format_interval_note(rows, "Thin lines"), format_no_eviction_note(rows, NO_EVICTION_MARK)
    )
    plot_style.add_caption(figure, join_sentences("Against the full cache (line at 0).", note_text))
    return figure


def _has_outlier(changes: Sequence[float]) -> bool:
    """Whether one change is so large that the others could not be seen beside it."""
    sizes = sorted(100 * abs(change) for change in changes)
    return sizes[-1] > max(8 * sizes[len(sizes) // 2], 30)


def _fit_labels(axes: Axes, labels: Sequence[_BarLabel], width: float) -> None:
    """Set the limits so that every label lies inside its panel of `width` inches: the next one would hide the rest."""
    transform = axes.xaxis.get_transform()
    ends = [
        0.0,
        *(float(transform.transform(end)) for label in labels for end in (label.bar_end, *label.interval_ends)),
    ]
    low_end, high_end = min(ends), max(ends)
    low_end, high_end = (low_end, high_end) if high_end > low_end else (low_end - 0.5, high_end + 0.5)
    for _ in range(_MAX_LAYOUT_ROUNDS):  # each widens the axis, and so shortens the room that was made before
        inch = (high_end - low_end) / width
        for label in labels:
            end = float(transform.transform(label.bar_end))
            end += (
                label.side
                * inch
                * (_BAR_LABEL_GAP_INCHES + plot_style.measure_text_inches(label.text, _BAR_LABEL_SIZE))
            )
            low_end, high_end = min(low_end, end), max(high_end, end)
    inverse = transform.inverted()
    axes.set_xlim(float(inverse.transform(low_end)), float(inverse.transform(high_end)))


def _set_logarithmic_ticks(axes: Axes) -> None:
    """Ticks of an axis that is logarithmic beyond `_LINEAR_PERCENT` per cent."""
    ends = axes.get_xlim()
    ticks = [tick for tick in (-100, -10, 0, 10, 100, 1000, 10000) if ends[0] <= tick <= ends[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _group_similar_budgets(series: Sequence[RowSeries]) -> list[BudgetGroup]:
    """Budgets in ascending groups: those that hardly differ (256, and 8 + 256) are compared with each other."""
    groups: list[BudgetGroup] = []
    for budget in sorted({row.budget or 0 for entry in series for row in entry.rows}):
        is_in_both = any(
            budget in sizes and sizes & set(groups[-1] if groups else ())
            for sizes in ({row.budget or 0 for row in entry.rows} for entry in series)
        )
        if groups and budget <= 1.06 * groups[-1][0] and not is_in_both:
            groups[-1] = (*groups[-1], budget)
        else:
            groups.append((budget,))
    return groups


class _BarLabel(NamedTuple):
    """The text at the end of a bar: what it says, where the bar ends, on which side it lies, and where the bar's
    interval ends."""

    text: str
    bar_end: float
    side: int
    interval_ends: Sequence[float]


def _draw_change_bar(axes: Axes, row_index: int, colour: str, point: MeasuredPoint, reference: float) -> _BarLabel:
    change = 100 * (point.y / reference - 1)
    axes.barh([row_index], [change], height=0.62, color=colour, alpha=0.8)
    bar_end, ends = change, [change]
    if point.low is not None and point.high is not None:
        low, high = ends = [100 * (end / reference - 1) for end in (point.low, point.high)]
        axes.plot([low, high], [row_index, row_index], color=INK_COLOUR, linewidth=1.0)
        bar_end = max(high, change) if change >= 0 else min(low, change)
    side = 1 if change >= 0 else -1
    label = _BarLabel(f"{change:+.1f}{NO_EVICTION_MARK if point.has_no_eviction else ''}", bar_end, side, ends)
    axes.annotate(
        label.text,
        (bar_end, row_index),
        (4 * side, 0),
        textcoords="offset points",
        va="center",
        ha="left" if side > 0 else "right",
        fontsize=_BAR_LABEL_SIZE,
        color=MUTED_COLOUR,
    )
    return label
