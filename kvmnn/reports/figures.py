"""Figures of an evaluation (matplotlib): each function plots results, or raises why it cannot."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._util.named_tuple import NamedTuple
from ..policies.policy import FullCache
from . import plot_style
from .plot_style import FULL_CACHE_STYLE, INK_COLOUR, MUTED_COLOUR, LineEnd, PointLabel, label_points
from .records import DocumentRow, EvaluationResultsProtocol, KeepMap, ResultRow, find_full_row
from .series import (
    LineStyles,
    MeasuredPoint,
    RowSeries,
    accuracy,
    describe_untried,
    format_prompt_note,
    group_into_series,
    is_number,
    perplexity,
    select_memory_traces,
    select_policy_rows,
    to_float_or_nan,
)
from .table import NO_EVICTION_MARK

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Measure = Callable[[ResultRow, float], MeasuredPoint]


def format_interval_note(rows: Sequence[ResultRow], mark: str = "Bars") -> str:
    """Describe the intervals that `mark` stands for in a figure of these rows, with the number of documents.

    Empty if there are no intervals.
    """
    num_documents = [
        row.versus_full.documents for row in rows if row.versus_full is not None and row.versus_full.low is not None
    ]
    if not num_documents:
        return ""
    return f"{mark}: 95 % interval of the difference to the full cache, paired over {num_documents[0]:,} documents."


def format_no_eviction_note(rows: Sequence[ResultRow], mark: str = "Hollow") -> str:
    """Format the explanation of `mark` in a figure of these rows; empty if every policy and codec did something."""
    text = describe_untried(rows)
    return f"{mark}: {text}." if text else ""


def join_sentences(*texts: str) -> str:
    """Join the non-empty sentences on one line."""
    return " ".join(text for text in texts if text)


_MIN_TICKS, _MAX_TICKS = 5, 12
_TICK_STEPS = (
    (1.0, 2.0, 5.0),
    (1.0, 1.5, 2.0, 3.0, 5.0, 7.0),
    (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0),
)
"""Factors of powers of ten for the ticks of a logarithmic axis."""


class NothingToShowError(Exception):
    """The results contain no data for a plot; the message is the reason."""


def scale_axis(axes: Axes, name: str, values: Sequence[float]) -> None:
    """Set an axis (``"x"`` or ``"y"``) to plain numbers, logarithmic if the values are far apart."""
    if max(values) <= 3 * min(values):
        return
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter

    (axes.set_xscale if name == "x" else axes.set_yscale)("log")
    axis = axes.xaxis if name == "x" else axes.yaxis
    low, high = min(values), max(values)
    margin_factor = (high / low) ** 0.1
    axis.set_major_locator(FixedLocator(compute_log_ticks(low / margin_factor, high * margin_factor)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,g}"))
    axis.set_minor_formatter(NullFormatter())


def compute_log_ticks(low: float, high: float) -> list[float]:
    """Compute round numbers from `low` to `high`, at least five if possible."""
    ticks: list[float] = []
    for steps in _TICK_STEPS:
        powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        ticks = [step * 10.0**power for power in powers for step in steps if low <= step * 10.0**power <= high]
        if len(ticks) >= _MIN_TICKS:
            break
    return ticks[:: max(1, -(-len(ticks) // _MAX_TICKS))]


def thin_ticks(ticks: Sequence[int], factor: float) -> list[int]:
    """Drop ascending ticks that would touch the previous one."""
    kept_ticks: list[int] = []
    for tick in ticks:
        if not kept_ticks or tick > factor * kept_ticks[-1]:
            kept_ticks.append(tick)
    return kept_ticks


def compute_dodge(index: int, count: int) -> float:
    """Return the shift of a line (in octaves) that prevents error bars from overlapping."""
    step = min(0.045, 0.3 / count)
    return step * (index - (count - 1) / 2)


_PERPLEXITY_LABEL, _ACCURACY_LABEL = "perplexity (lower is better)", "next-token accuracy (%, higher is better)"


_POINTS_OF_DEFAULT_SIZE = 12
"""Number of points that the trade-off shows in a figure of default size."""


def perplexity_over_budget(results: EvaluationResultsProtocol) -> Figure:
    """Plot the perplexity of every policy over its budget."""
    return _draw_over_budget(results, "Perplexity over budget", _PERPLEXITY_LABEL, perplexity)


def accuracy_over_budget(results: EvaluationResultsProtocol) -> Figure:
    """Plot the accuracy of every policy over its budget."""
    return _draw_over_budget(results, "Accuracy over budget", _ACCURACY_LABEL, accuracy)


def perplexity_accuracy_tradeoff(results: EvaluationResultsProtocol) -> Figure:
    """Plot accuracy over perplexity; lines join the budgets of a policy, and a second panel omits distant points."""
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
    plot_style.add_caption(figure, join_sentences(note_text, format_no_eviction_note(rows), format_prompt_note(rows)))
    return figure


def keep_ratio_analysis(results: EvaluationResultsProtocol) -> Figure:
    """Plot perplexity and accuracy over the protected share of a fixed budget, or over the kept share."""
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
    """Return the perplexity that bounds most points, if outliers would hide their differences; else None."""
    best, middle = min(values), sorted(values)[len(values) // 2]
    near_limit = best + 3 * (middle - best)
    return near_limit if max(values) - best > 2 * (near_limit - best) > 0 else None


def _add_panel_above(figure: Figure, axes: Axes) -> Axes:
    """Add a panel of the same size above `axes`."""
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
    """Draw every line; label the points with a perplexity in `labelled_range`, and only these if it is finite."""
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
        untried_indices = [axis_index for axis_index, row in enumerate(members) if row.is_untried]
        _draw_hollow_points(
            axes,
            [xs[axis_index] for axis_index in untried_indices],
            [ys[axis_index] for axis_index in untried_indices],
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
    axes.set(xlabel="budget (tokens per layer)", ylabel=ylabel)
    axes.margins(y=0.08)
    if is_number(reference):
        axes.axhline(reference, **FULL_CACHE_STYLE)
        ends.append(LineEnd(f"full cache {reference:.2f}", axes.get_xlim()[1], reference, FULL_CACHE_STYLE))
    plot_style.add_line_labels(axes, ends)
    plot_style.add_caption(
        figure, join_sentences(format_interval_note(rows), format_no_eviction_note(rows), format_prompt_note(rows))
    )
    return figure


def _draw_hollow_points(axes: Axes, xs: Sequence[float], ys: Sequence[float], style: dict[str, Any]) -> None:
    """Draw points whose policies or codecs did nothing, over the filled ones."""
    if xs:
        hollow_style = {"markerfacecolor": "white", "markeredgecolor": style["color"], "markeredgewidth": 1.2}
        axes.plot(xs, ys, **style | {"linestyle": "none"} | hollow_style, zorder=4)


def _draw_line(axes: Axes, name: str, style: dict[str, Any], points: Sequence[MeasuredPoint]) -> LineEnd:
    """Draw a line with its error bars; return the data for its label."""
    xs, ys = [point.x for point in points], [point.y for point in points]
    if all(point.low is not None and point.high is not None for point in points):
        lower_errors = [max(point.y - (point.low or 0.0), 0.0) for point in points]
        upper_errors = [max((point.high or 0.0) - point.y, 0.0) for point in points]
        axes.errorbar(xs, ys, yerr=[lower_errors, upper_errors], fmt="none", ecolor=style["color"], elinewidth=0.9,
        capsize=2,
                      alpha=0.7)  # fmt: skip
    axes.plot(xs, ys, **style, markeredgecolor="white", markeredgewidth=0.5)
    untried_points = [point for point in points if point.is_untried]
    _draw_hollow_points(axes, [point.x for point in untried_points], [point.y for point in untried_points], style)
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
    for column, quantity in enumerate(quantities):
        panel_lines = [line for line in lines if line[0] == quantity]
        for number, (ylabel, measure) in enumerate(measures):
            bottom = 0.8 + (len(measures) - 1 - number) * cell_height
            axes = plot_style.add_axes(figure, column * cell_width + 0.75, bottom, 4.2, cell_height - 0.45)
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
        figure,
        join_sentences(
            format_interval_note(drawn_rows), format_no_eviction_note(drawn_rows), format_prompt_note(drawn_rows)
        ),
    )
    return figure


def _number_variants(
    styles: LineStyles, lines: Sequence[tuple[str, str, list[tuple[float, ResultRow]]]]
) -> dict[str, int]:
    """Number the lines of one colour, to give them different dashes."""
    variants: dict[str, int] = {}
    counts: dict[int, int] = {}
    for _, name, members in lines:
        family = styles.get_family(members[0][1].label)
        variants[name] = counts.get(family, 0)
        counts[family] = variants[name] + 1
    return variants


def _format_size(row: ResultRow) -> str:
    """Format the budget of a row, or its keep ratio if it has no budget."""
    if row.budget is not None:
        return f"{row.budget}"
    return "" if row.keep_ratio is None else f"{row.keep_ratio:g}"


def _get_share(row: ResultRow, option: str) -> float | None:
    share = row.keep_ratio if option == "keep_ratio" else row.options.get(option)
    return float(share) if is_number(share) else None


BudgetGroup = tuple[int, ...]

_MAX_PANELS = 4
_BAR_LABEL_SIZE = 7.5
"""Points of the letters at the ends of bars."""
_BAR_LABEL_GAP_INCHES = 8 / 72
"""Inches between a bar and the edge of its panel that are left next to the letters."""
_MAX_LAYOUT_ROUNDS = 30
_LINEAR_PERCENT = 10
"""Per cent of change up to which an axis is linear where it is not linear as a whole."""
_LOGARITHMIC_NOTE = f"\nlogarithmic beyond {_LINEAR_PERCENT} %"


def strategy_comparison(results: EvaluationResultsProtocol) -> Figure:
    """Plot the loss of each policy against the full cache, side by side for every budget."""
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
    for number, (label, measure, reference) in enumerate(quantities):
        is_logarithmic = _has_outlier([measure(row, 0).y / reference - 1 for entry in series for row in entry.rows])
        bottom = 0.75 + (len(quantities) - 1 - number) * (tall + 0.95)
        first_axes: Axes | None = None
        labels: list[_BarLabel] = []
        for column, budgets in enumerate(panels):
            left = left_margin + column * (panel + gap)
            axes = plot_style.add_axes(figure, left, bottom, panel, tall, sharex=first_axes)
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
        format_interval_note(rows, "Thin lines"),
        format_no_eviction_note(rows, NO_EVICTION_MARK),
        format_prompt_note(rows),
    )
    plot_style.add_caption(figure, join_sentences("Against the full cache (line at 0).", note_text))
    return figure


def _has_outlier(changes: Sequence[float]) -> bool:
    """Return whether one change is so large that the others would be invisible next to it."""
    sizes = sorted(100 * abs(change) for change in changes)
    return sizes[-1] > max(8 * sizes[len(sizes) // 2], 30)


def _fit_labels(axes: Axes, labels: Sequence[_BarLabel], width: float) -> None:
    """Set the limits so that every label is inside its panel of `width` inches."""
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
    """Set the ticks of an axis that is logarithmic beyond `_LINEAR_PERCENT` per cent."""
    ends = axes.get_xlim()
    ticks = [tick for tick in (-100, -10, 0, 10, 100, 1000, 10000) if ends[0] <= tick <= ends[1]]
    axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    axes.minorticks_off()


def _group_similar_budgets(series: Sequence[RowSeries]) -> list[BudgetGroup]:
    """Group budgets in ascending order: similar ones (256, and 8 + 256) are compared with each other."""
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
    """The label at the end of a bar: its text, the bar's end, the label's side, and the bar's interval."""

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
    label = _BarLabel(f"{change:+.1f}{NO_EVICTION_MARK if point.is_untried else ''}", bar_end, side, ends)
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


class ImprovementStep(NamedTuple):
    """Two rows that differ in one improvement."""

    name: str
    baseline: ResultRow
    variant: ResultRow


def improvement_summary(results: EvaluationResultsProtocol) -> Figure:
    """Plot the gain of the threshold, the order and the hybrid, each against the row that lacks only this one."""
    from matplotlib.figure import Figure

    steps = find_improvements(results.rows)
    if not steps:
        raise NothingToShowError("no two rows differ in an improvement of l2_compress only (--preset knorm-ablation)")
    styles = LineStyles(results.rows)
    quantities: list[tuple[str, Callable[[ResultRow | DocumentRow], float | None]]] = [
        ("relative perplexity change (%)", lambda row: row.perplexity),
        ("relative accuracy change (%)", lambda row: row.accuracy),
    ]
    left_margin = 0.3 + max(plot_style.measure_text_inches(line, 9) for step in steps for line in step.name.split("\n"))
    tall, wide = 0.55 * len(steps) + 0.3, 3.0
    figure = Figure(figsize=(left_margin + len(quantities) * (wide + 0.5) + 0.2, tall + 1.35))
    for number, (label, get_value) in enumerate(quantities):
        axes = plot_style.add_axes(figure, left_margin + number * (wide + 0.5), 0.85, wide, tall)
        if number == 0:
            plot_style.set_title(axes, "What each improvement does by itself")
        for row_index, step in enumerate(reversed(steps)):
            _draw_improvement_bar(axes, row_index, step, get_value, styles.get_style(step.variant.label)["color"])
        names = [step.name for step in reversed(steps)] if number == 0 else [""] * len(steps)
        axes.set_yticks(range(len(steps)), names)
        axes.tick_params(axis="y", length=0, labelcolor=INK_COLOUR)
        axes.set_ylim(-0.6, len(steps) - 0.4)
        axes.grid(axis="y", visible=False)
        axes.axvline(0, color=INK_COLOUR, linewidth=1.0)
        axes.use_sticky_edges = False  # room on both sides of 0
        axes.margins(x=0.3)
        axes.set_xlabel(label)
    step_rows = [row for step in steps for row in (step.baseline, step.variant)]
    note_text = "Against the row that differs in this one thing. Points: documents."
    plot_style.add_caption(figure, join_sentences(note_text, format_no_eviction_note(step_rows, NO_EVICTION_MARK)))
    return figure


def find_improvements(rows: Sequence[ResultRow]) -> list[ImprovementStep]:
    """Find all pairs of rows that differ in one improvement.

    The paper's code that cuts from ``n + 1`` tokens on has the project's threshold of ``n``: next to the project's row
    it shows the order alone, and next to the paper's from ``n`` on the threshold alone.
    """
    policy_rows = select_policy_rows(rows)
    steps = []
    for row in policy_rows:
        for variant in policy_rows:
            step = (
                _describe_threshold_step(row, variant)
                or _describe_order_step(row, variant)
                or _describe_hybrid_step(row, variant)
            )
            if step is not None:
                steps.append(ImprovementStep(step, row, variant))
    return steps


def _describe_threshold_step(row: ResultRow, variant: ResultRow) -> str | None:
    threshold, other_threshold = row.options.get("prune_after"), variant.options.get("prune_after")
    row_forms = (row.options.get("form"), variant.options.get("form"))
    if row_forms != ("original", "original") or not (is_number(threshold) and other_threshold == threshold + 1):
        return None
    return (
        f"threshold\nfrom {threshold:,} -> above {threshold:,}"
        if _differ_only_in(row, variant, "prune_after")
        else None
    )


def _describe_order_step(row: ResultRow, variant: ResultRow) -> str | None:
    threshold, other_threshold = row.options.get("prune_after"), variant.options.get("prune_after")
    row_forms = (row.options.get("form"), variant.options.get("form"))
    if row_forms != ("original", "seed") or not (is_number(other_threshold) and threshold == other_threshold + 1):
        return None
    return "order\nby norm -> in time" if _differ_only_in(row, variant, "prune_after", "form") else None


def _describe_hybrid_step(row: ResultRow, variant: ResultRow) -> str | None:
    share = variant.options.get("recent_ratio")
    if row.options.get("recent_ratio") != 0 or row.options.get("strategy") != "keep_low":
        return None
    if not is_number(share) or share <= 0 or not _differ_only_in(row, variant, "recent_ratio"):
        return None
    return f"hybrid, {row.budget:,} tokens\nrecent 0 -> {share:g}" if row.budget else f"hybrid\nrecent 0 -> {share:g}"


def _differ_only_in(row: ResultRow, variant: ResultRow, *option_names: str) -> bool:
    """Return whether rows are of one policy and agree in all other options."""
    if (row.policy, row.positions) != (variant.policy, variant.positions):
        return False
    names = {*row.options, *variant.options} - {*option_names}
    return all(row.options.get(name) == variant.options.get(name) for name in names)


def _draw_improvement_bar(
    axes: Axes,
    row_index: int,
    step: ImprovementStep,
    get_value: Callable[[ResultRow | DocumentRow], float | None],
    colour: str,
) -> None:
    change = _compute_percent_change(get_value(step.baseline), get_value(step.variant))
    if change is None:
        return
    axes.barh([row_index], [change], height=0.5, color=colour, alpha=0.8)
    pairs = zip(step.baseline.documents, step.variant.documents, strict=False)
    points = [
        document_change
        for baseline_document, variant_document in pairs
        if (document_change := _compute_percent_change(get_value(baseline_document), get_value(variant_document)))
        is not None
    ]
    axes.plot(
        points, [row_index] * len(points), linestyle="none", marker="o", markersize=3, color=INK_COLOUR, alpha=0.6
    )
    bar_end = max([change, *points]) if change >= 0 else min([change, *points])
    axes.annotate(
        f"{change:+.2f}{NO_EVICTION_MARK if step.baseline.is_untried or step.variant.is_untried else ''}",
        (bar_end, row_index),
        (6 if change >= 0 else -6, 0),
        textcoords="offset points",
        va="center",
        ha="left" if change >= 0 else "right",
        fontsize=7.5,
        color=MUTED_COLOUR,
    )


def _compute_percent_change(baseline: float | None, variant: float | None) -> float | None:
    """Compute the change in per cent."""
    if not is_number(baseline) or not is_number(variant) or baseline == 0:
        return None
    return 100 * (variant / baseline - 1)


MAX_KEEP_MAPS = 9
_MAX_MAP_CELLS = 400
_MIB = float(1 << 20)
_EVICTED_COLOUR = "#e3e3e3"
_LIVE, _EVICTED, _NOT_SEEN = 0, 1, 2


def memory_over_time(results: EvaluationResultsProtocol) -> Figure:
    """Plot the bytes in the cache over the tokens seen; not of codecs, whose numbers are held dequantised."""
    traces, note = select_memory_traces(results)
    traces = [trace for trace in traces if trace.document == traces[0].document]
    if not traces:
        raise NothingToShowError("no run recorded the bytes of its cache")
    figure, axes = plot_style.make_figure(5.6, 4.0, [trace.label for trace in traces])
    styles = _make_line_styles(results)
    curves = [(*trace.step_tokens, *trace.cache_bytes) for trace in traces]
    ends, has_shared_line = [], False
    for number, (trace, curve) in enumerate(zip(traces, curves, strict=True)):
        steps, sizes = trace.step_tokens, [size / _MIB for size in trace.cache_bytes]
        style, dash_style = styles[trace.label], {}
        num_equal, num_earlier = curves.count(curve), curves[:number].count(curve)
        if num_equal > 1 and style["color"] != FULL_CACHE_STYLE["color"]:
            dash_style = {"linestyle": (4 * num_earlier, (4, 4 * (num_equal - 1)))}
            has_shared_line = True
        axes.plot(steps, sizes, **style | dash_style)
        ends.append(LineEnd(trace.label, steps[-1], sizes[-1], style))
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    plot_style.set_title(axes, "Memory over time")
    axes.set(xlabel="tokens seen", ylabel="K and V held, all layers (MiB)")
    plot_style.add_line_labels(axes, ends)
    shared_text = (
        " One line in several colours: these policies hold the same, their colours take turns."
        if has_shared_line
        else ""
    )
    plot_style.add_caption(figure, f"Document: {traces[0].document}. {note}{shared_text}")
    return figure


def keep_map(results: EvaluationResultsProtocol) -> Figure:
    """Plot which tokens of one document are live, over the tokens seen: a panel for each policy."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    maps = [(trace, trace.keep_map) for trace in results.traces if trace.keep_map is not None and trace.keep_map.steps]
    maps = [entry for entry in maps if entry[0].document == maps[0][0].document]
    labels_by_map: dict[tuple[object, ...], list[str]] = {}
    for trace, recorded_map in maps:
        labels_by_map.setdefault(_make_map_key(recorded_map), []).append(trace.label)
    full = {row.label for row in results.rows if row.is_full} | {FullCache.name}
    # Where nothing is evicted, as in the full cache or behind a codec alone, the panel would be a triangle.
    cut_maps = [
        (trace, recorded_map)
        for trace, recorded_map in maps
        if labels_by_map[_make_map_key(recorded_map)][0] == trace.label and _has_evicted(recorded_map)
    ]
    shown_maps = cut_maps[:MAX_KEEP_MAPS]
    if not shown_maps:
        raise NothingToShowError("no run that cuts the cache recorded which tokens live")
    columns = min(len(shown_maps), 3)
    lines = -(-len(shown_maps) // columns)
    cell, left_margin, bottom_margin, row_gap = 2.9, 0.7, 0.85, 0.5
    figure = Figure(figsize=(left_margin + columns * (cell + 0.25) + 0.1, bottom_margin + lines * (cell + row_gap)))
    styles = LineStyles(results.rows)
    for number, (trace, recorded_map) in enumerate(shown_maps):
        line, column = divmod(number, columns)
        bottom = bottom_margin + (lines - 1 - line) * (cell + row_gap)
        axes = plot_style.add_axes(figure, left_margin + column * (cell + 0.25), bottom, cell, cell)
        image, tokens = _make_keep_image(recorded_map)
        colours = ListedColormap([styles.get_style(trace.label)["color"], _EVICTED_COLOUR, "white"])
        axes.imshow(
            image, cmap=colours, vmin=0, vmax=2, origin="lower", extent=(0, tokens, 0, tokens), interpolation="nearest"
        )
        axes.grid(False)
        title_lines = textwrap.wrap(trace.label, 36, max_lines=3, placeholder=" ...")
        axes.set_title("\n".join(title_lines), fontsize=9 if len(title_lines) < 3 else 8)
        map_text = f"layer {recorded_map.layer}, KV head {recorded_map.kv_head}"
        axes.text(0.03, 0.97, map_text, transform=axes.transAxes, va="top", fontsize=7.5, color=MUTED_COLOUR)
        if column == 0:
            axes.set_ylabel("position in the text (token)")
        else:
            axes.tick_params(labelleft=False)
        if number + columns >= len(shown_maps):
            axes.set_xlabel("tokens seen")
        else:
            axes.tick_params(labelbottom=False)
    sentences = ["Coloured: live. Grey: evicted.", f"Document: {shown_maps[0][0].document}."]
    for trace, recorded_map in shown_maps:
        _, *equal_labels = labels_by_map[_make_map_key(recorded_map)]
        if equal_labels:
            sentences.append(f"As {trace.label}: {', '.join(equal_labels)}.")
    hidden_labels = [
        label for _, recorded_map in cut_maps[MAX_KEEP_MAPS:] for label in labels_by_map[_make_map_key(recorded_map)]
    ]
    if hidden_labels:
        sentences.append(f"Not shown: {', '.join(hidden_labels)}.")
    whole_labels = [trace.label for trace, entry in maps if not _has_evicted(entry) and trace.label not in full]
    if whole_labels:
        sentences.append(f"Nothing evicted: {', '.join(whole_labels)}.")
    plot_style.add_caption(figure, " ".join(sentences))
    return figure


def _make_map_key(recorded_map: KeepMap) -> tuple[object, ...]:
    """Return a key that maps have in common in which the same tokens live."""
    return recorded_map.layer, recorded_map.kv_head, recorded_map.steps, recorded_map.kept


def _has_evicted(recorded_map: KeepMap) -> bool:
    """Return whether any sample lacks a token."""
    return any(
        len(positions) < num_seen for num_seen, positions in zip(recorded_map.steps, recorded_map.kept, strict=True)
    )


def _make_line_styles(results: EvaluationResultsProtocol) -> dict[str, dict[str, Any]]:
    """Return the line style of each row's trace, in its policy's colour; sizes differ by their height."""
    styles, style_by_label = LineStyles(results.rows), {FullCache.name: FULL_CACHE_STYLE}
    for trace in results.traces:
        row = next((row for row in results.rows if row.label == trace.label), None)
        full = row is not None and row.is_full
        style_by_label.setdefault(
            trace.label,
            FULL_CACHE_STYLE if full else styles.get_style(trace.label) | {"marker": None, "linestyle": "-"},
        )
    return style_by_label


def _make_keep_image(recorded_map: KeepMap) -> tuple[npt.NDArray[np.uint8], int]:
    """Return an image ``[position, step]`` of `_LIVE`, `_EVICTED` and `_NOT_SEEN`, and its number of tokens.

    Both axes are linear in tokens.
    """
    steps = np.asarray(recorded_map.steps, np.int64)
    tokens = int(steps[-1])
    cells = min(tokens, _MAX_MAP_CELLS)
    positions = (np.arange(cells) + 0.5) * tokens / cells
    image = np.full((cells, cells), _NOT_SEEN, np.uint8)
    for column, sample_index in enumerate(np.minimum(np.searchsorted(steps, positions), len(steps) - 1)):
        image[positions < steps[sample_index], column] = _EVICTED
        live_positions = np.asarray(recorded_map.kept[sample_index], np.int64)
        # A cell stands for several tokens: it lives if the nearest one does, so that shares look right.
        image[np.isin(positions.astype(np.int64), live_positions), column] = _LIVE
    return image, tokens
