"""The plots of an evaluation. Each takes results and gives a figure, or says why there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import plot_style
from .figure_parts import (
    Measure,
    NothingToShowError,
    compute_dodge,
    format_interval_note,
    format_no_eviction_note,
    join_sentences,
    scale_axis,
    thin_ticks,
)
from .plot_style import FULL_CACHE_STYLE, INK_COLOUR, LineEnd
from .point_labels import PointLabel, label_points
from .results import EvaluationResultsProtocol
from .rows import ResultRow, find_full_row
from .series import (
    LineStyles,
    MeasuredPoint,
    RowSeries,
    accuracy,
    group_into_series,
    is_number,
    perplexity,
    select_policy_rows,
    to_float_or_nan,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PERPLEXITY_LABEL, _ACCURACY_LABEL = "perplexity (lower is better)", "next-token accuracy (%, higher is better)"


_POINTS_OF_DEFAULT_SIZE = 12
"""Points of which the trade-off shows so many in a figure of the usual size."""


def perplexity_over_budget(results: EvaluationResultsProtocol) -> Figure:
    """Perplexity of every policy over its budget."""
    return _draw_over_budget(results, "Perplexity over budget", _PERPLEXITY_LABEL, perplexity)


def accuracy_over_budget(results: EvaluationResultsProtocol) -> Figure:
    """Accuracy of every policy over its budget."""
    return _draw_over_budget(results, "Accuracy over budget", _ACCURACY_LABEL, accuracy)


def perplexity_accuracy_tradeoff(results: EvaluationResultsProtocol) -> Figure:
    """Accuracy over perplexity; a line joins the budgets of a policy. Far points get a second panel without them."""
    rows = [row for row in select_policy_rows(results.rows) if is_number(row.accuracy)]
    if not rows:
        raise NothingToShowError("no policy has both a perplexity and an accuracy")
    series, styles = group_into_series(rows), LineStyles(results.rows)
    growth = min(max(len(rows) / _POINTS_OF_DEFAULT_SIZE, 1.0) ** 0.5, 1.5)  # room for the numbers of many points
    figure, axes = plot_style.make_figure(5.6 * growth, 4.0 * growth, [entry.name for entry in series])
    full = find_full_row(results.rows)
    if full is not None and not (is_number(full.perplexity) and is_number(full.accuracy)):
        full = None
    values = [to_float_or_nan(row.perplexity) for row in (*rows, *([full] if full is not None else []))]
    near_limit = _find_near_limit(values)
    if near_limit is not None:
        upper_axes = _add_panel_above(figure, axes)
        _draw_tradeoff_lines(upper_axes, series, styles, full, (-math.inf, near_limit))
        upper_axes.set_title("Near the full cache")
    ends = _draw_tradeoff_lines(axes, series, styles, full, (-math.inf if near_limit is None else near_limit, math.inf))
    plot_style.set_title(axes, "Perplexity against accuracy")
    plot_style.add_line_labels(axes, ends)
    note_text = "Numbers, in the colour of their line: budget in tokens, or share of the cache. Better is up and left."
    plot_style.add_caption(figure, join_sentences(note_text, format_no_eviction_note(rows)))
    return figure


def keep_ratio_analysis(results: EvaluationResultsProtocol) -> Figure:
    """Perplexity and accuracy over the protected share of a fixed size, or over the share that is kept."""
    rows = select_policy_rows(results.rows)
    lines: list[tuple[str, str, list[tuple[float, ResultRow]]]] = []
    for option, quantity in (("recent_ratio", "share of the budget that is recent"), ("keep_ratio", "share kept")):
        option_rows = [row for row in rows if _get_share(row, option) is not None]
        for entry in (
            group_into_series(option_rows, ignored_options=(option,))
            if option == "recent_ratio"
            else group_into_series(option_rows)
        ):
            for budget in sorted({row.budget or 0 for row in entry.rows}):
                members = sorted(
                    (
                        (to_float_or_nan(_get_share(row, option)), row)
                        for row in entry.rows
                        if (row.budget or 0) == budget
                    ),
                    key=lambda pair: pair[0],
                )
                if len({x for x, _ in members}) > 1:
                    lines.append((quantity, f"{entry.name} {budget}" if budget else entry.name, members))
    if not lines:
        raise NothingToShowError("no policy ran with two values of recent_ratio or keep_ratio and all else equal")
    quantities = list(dict.fromkeys(quantity for quantity, _, _ in lines))
    return _draw_ratio_panels(results, quantities, lines)


# -- parts of the trade-off -------------------------------------------------------------------------------------------


def _find_near_limit(values: Sequence[float]) -> float | None:
    """The perplexity up to which points lie close together, where others lie so far away that they cannot be told."""
    best, middle = min(values), sorted(values)[len(values) // 2]
    near_limit = best + 3 * (middle - best)
    return near_limit if max(values) - best > 2 * (near_limit - best) > 0 else None


def _add_panel_above(figure: Figure, axes: Axes) -> Axes:
    """Another panel of the same size."""
    height = float(figure.get_size_inches()[1])
    left_position, bottom, wide, tall = axes.get_position().bounds
    extra_height = tall * height + 0.8
    plot_style.grow_figure(figure, extra_above=extra_height)
    return figure.add_axes(
        (
            left_position,
            (bottom * height + extra_height) / (height + extra_height),
            wide,
            tall * height / (height + extra_height),
        )
    )


def _draw_tradeoff_lines(
    axes: Axes,
    series: Sequence[RowSeries],
    styles: LineStyles,
    full: ResultRow | None,
    labelled_range: tuple[float, float],
) -> list[LineEnd]:
    """Every line, and the numbers of its points above one perplexity and up to another, finite to show no others."""
    ends, sizes, lines = [], [], []
    full_points = [] if full is None else [(to_float_or_nan(full.perplexity), 100 * to_float_or_nan(full.accuracy))]
    for entry in series:
        members = sorted(entry.rows, key=lambda row: (row.budget or 0, row.keep_ratio or 0))
        xs, ys = (
            [to_float_or_nan(row.perplexity) for row in members],
            [100 * to_float_or_nan(row.accuracy) for row in members],
        )
        style = styles.get_style(entry.rows[0].label)
        axes.plot(xs, ys, **style, markeredgecolor="white", markeredgewidth=0.5)
        no_eviction_indices = [axis_index for axis_index, row in enumerate(members) if row.has_no_eviction]
        _draw_hollow_points(
            axes,
            [xs[axis_index] for axis_index in no_eviction_indices],
            [ys[axis_index] for axis_index in no_eviction_indices],
            style,
        )
        lines.append((xs, ys))
        for row, x, y in zip(members, xs, ys, strict=True):
            if labelled_range[0] < x <= labelled_range[1]:
                sizes.append(PointLabel(x, y, _format_size(row), style["color"]))
        ends.append(LineEnd(entry.name, xs[0], ys[0], style))
    for x, y in full_points:
        style = {"color": INK_COLOUR, "marker": "*", "markersize": 11, "linestyle": "none", "zorder": 5}
        axes.plot([x], [y], **style)
        ends.append(LineEnd("full cache", x, y, style))
    axes.set(xlabel=_PERPLEXITY_LABEL, ylabel=_ACCURACY_LABEL)
    axes.margins(0.08)
    if labelled_range[1] == math.inf:
        scale_axis(axes, "x", [x for xs, _ in lines for x in xs] + [x for x, _ in full_points])
    else:
        points = [*full_points, *((label.x, label.y) for label in sizes)]
        for axis_index, setting in enumerate((axes.set_xlim, axes.set_ylim)):
            low, high = min(point[axis_index] for point in points), max(point[axis_index] for point in points)
            margin = 0.08 * (high - low) or 1.0
            setting(low - margin, high + margin)
    axes.axis((*axes.get_xlim(), *axes.get_ylim()))  # final: what follows is placed by them
    label_points(axes, sizes, lines, full_points)
    return ends


# -- parts of the others ----------------------------------------------------------------------------------------------


def _draw_over_budget(results: EvaluationResultsProtocol, title: str, ylabel: str, measure: Measure) -> Figure:
    rows = [row for row in select_policy_rows(results.rows) if row.budget and is_number(measure(row, 0).y)]
    if not rows:
        raise NothingToShowError(f"no policy with a budget has a measured {measure.__name__}")
    series, styles = group_into_series(rows), LineStyles(results.rows)
    full = find_full_row(results.rows)
    reference = None if full is None else measure(full, 0).y
    names = [entry.name for entry in series]
    figure, axes = plot_style.make_figure(5.6, 4.0, [*names, "full cache 000.00"])
    budgets = sorted({row.budget or 0 for row in rows})
    ends = [
        _draw_line(axes, entry.name, styles.get_style(entry.rows[0].label), [
            measure(row, (row.budget or 0) * 2 ** compute_dodge(index, len(series)))
            for row in sorted(entry.rows, key=lambda row: row.budget or 0)
        ])
        for index, entry in enumerate(series)
    ]  # fmt: skip
    axes.set_xscale("log", base=2)
    low, high = budgets[0] * 2**-0.35, budgets[-1] * 2**0.35
    ticks = thin_ticks(budgets, (high / low) ** 0.08)
    axes.set_xticks(ticks, [f"{budget:,}" for budget in ticks])
    axes.minorticks_off()
    axes.set_xlim(low, high)
    if measure is perplexity:
        scale_axis(axes, "y", [measure(row, 0).y for row in rows] + ([reference] if is_number(reference) else []))
    plot_style.set_title(axes, title)
    axes.set(xlabel="budget (tokens kept per layer)", ylabel=ylabel)
    axes.margins(y=0.08)
    if is_number(reference):
        axes.axhline(reference, **FULL_CACHE_STYLE)
        ends.append(LineEnd(f"full cache {reference:.2f}", axes.get_xlim()[1], reference, FULL_CACHE_STYLE))
    plot_style.add_line_labels(axes, ends)
    plot_style.add_caption(figure, join_sentences(format_interval_note(rows), format_no_eviction_note(rows)))
    return figure


def _draw_hollow_points(axes: Axes, xs: Sequence[float], ys: Sequence[float], style: dict[str, Any]) -> None:
    """Draw points whose policies evicted nothing, over the filled ones."""
    if xs:
        hollow_style = {"markerfacecolor": "white", "markeredgecolor": style["color"], "markeredgewidth": 1.2}
        axes.plot(xs, ys, **style | {"linestyle": "none"} | hollow_style, zorder=4)


def _draw_line(axes: Axes, name: str, style: dict[str, Any], points: Sequence[MeasuredPoint]) -> LineEnd:
    """A line with its error bars; returns what its label needs."""
    xs, ys = [point.x for point in points], [point.y for point in points]
    if all(point.low is not None and point.high is not None for point in points):
        lower_errors = [max(point.y - (point.low or 0.0), 0.0) for point in points]
        upper_errors = [max((point.high or 0.0) - point.y, 0.0) for point in points]
        axes.errorbar(xs, ys, yerr=[lower_errors, upper_errors], fmt="none", ecolor=style["color"], elinewidth=0.9,
        capsize=2,
                      alpha=0.7)  # fmt: skip
    axes.plot(xs, ys, **style, markeredgecolor="white", markeredgewidth=0.5)
    no_eviction_points = [point for point in points if point.has_no_eviction]
    _draw_hollow_points(
        axes, [point.x for point in no_eviction_points], [point.y for point in no_eviction_points], style
    )
    return LineEnd(name, xs[-1], ys[-1], style)


def _draw_ratio_panels(
    results: EvaluationResultsProtocol,
    quantities: Sequence[str],
    lines: Sequence[tuple[str, str, list[tuple[float, ResultRow]]]],
) -> Figure:
    from matplotlib.figure import Figure

    full, styles = find_full_row(results.rows), LineStyles(results.rows)
    variants = _number_variants(styles, lines)
    measures: list[tuple[str, Measure]] = [(_PERPLEXITY_LABEL, perplexity)]
    if all(is_number(row.accuracy) for _, _, members in lines for _, row in members):
        measures.append((_ACCURACY_LABEL, accuracy))
    label_inches = plot_style.compute_label_inches([*(name for _, name, _ in lines), "full cache 000.00"])
    cell_width, cell_height = 0.75 + 4.2 + label_inches, max(3.1, 0.6 + 0.16 * len(lines))
    figure = Figure(figsize=(cell_width * len(quantities), cell_height * len(measures) + 0.75))
    width, height = figure.get_size_inches()
    for column, quantity in enumerate(quantities):
        panel_lines = [line for line in lines if line[0] == quantity]
        for number, (ylabel, measure) in enumerate(measures):
            bottom = 0.8 + (len(measures) - 1 - number) * cell_height
            box = ((column * cell_width + 0.75) / width, bottom / height, 4.2 / width, (cell_height - 0.45) / height)
            axes = figure.add_axes(box)
            ends = []
            for _, name, members in panel_lines:
                style = styles.get_style(members[0][1].label, variants[name])
                ends.append(_draw_line(axes, name, style, [measure(row, x) for x, row in members]))
            ticks = sorted({x for _, _, members in panel_lines for x, _ in members})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set(xlabel=quantity if number == len(measures) - 1 else "", ylabel=ylabel.split(" (")[0])
            axes.margins(0.06)
            if full is not None and is_number(reference := measure(full, 0).y):
                axes.axhline(reference, **FULL_CACHE_STYLE)
                ends.append(LineEnd(f"full cache {reference:.2f}", axes.get_xlim()[1], reference, FULL_CACHE_STYLE))
            if number == 0:
                plot_style.set_title(axes, f"Keep ratio: {quantity}")
            if measure is accuracy:
                axes.set_ylabel("accuracy (%)")
            plot_style.add_line_labels(axes, ends)
    drawn_rows = [row for _, _, members in lines for _, row in members]
    plot_style.add_caption(
        figure, join_sentences(format_interval_note(drawn_rows), format_no_eviction_note(drawn_rows))
    )
    return figure


def _number_variants(
    styles: LineStyles, lines: Sequence[tuple[str, str, list[tuple[float, ResultRow]]]]
) -> dict[str, int]:
    """Lines of one colour, told apart by a number."""
    variants: dict[str, int] = {}
    counts: dict[int, int] = {}
    for _, name, members in lines:
        family = styles.get_family(members[0][1].label)
        variants[name] = counts.get(family, 0)
        counts[family] = variants[name] + 1
    return variants


def _format_size(row: ResultRow) -> str:
    """The budget, or else the share."""
    if row.budget is not None:
        return f"{row.budget}"
    return "" if row.keep_ratio is None else f"{row.keep_ratio:g}"


def _get_share(row: ResultRow, option: str) -> float | None:
    share = row.keep_ratio if option == "keep_ratio" else row.options.get(option)
    return float(share) if is_number(share) else None
