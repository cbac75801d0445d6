"""The plots of an evaluation. Each takes results and gives a figure, or says why there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from . import plot_style
from .figure_parts import Measure, NothingToShowError, apart, dodge, interval_text, scale, sentences, uncut_text
from .plot_style import FULL, INK, LineEnd
from .point_labels import PointLabel, label_points
from .results import Results
from .rows import Row, full_row
from .series import Looks, Point, Series, accuracy, cut_rows, grouped, is_number, measured, perplexity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_PPL, _ACCURACY = "perplexity (lower is better)", "next-token accuracy (%, higher is better)"


_ROOMY = 12
"""Points of which the trade-off shows so many in a figure of the usual size."""


def perplexity_over_budget(results: Results) -> Figure:
    """Perplexity of every policy over its budget."""
    return _over_budget(results, "Perplexity over budget", _PPL, perplexity)


def accuracy_over_budget(results: Results) -> Figure:
    """Accuracy of every policy over its budget."""
    return _over_budget(results, "Accuracy over budget", _ACCURACY, accuracy)


def perplexity_accuracy_tradeoff(results: Results) -> Figure:
    """Accuracy over perplexity; a line joins the budgets of a policy. Far points get a second panel without them."""
    rows = [row for row in cut_rows(results.rows) if is_number(row.accuracy)]
    if not rows:
        raise NothingToShowError("no policy has both a perplexity and an accuracy")
    series, looks = grouped(rows), Looks(results.rows)
    growth = min(max(len(rows) / _ROOMY, 1.0) ** 0.5, 1.5)  # room for the numbers of many points
    made, axes = plot_style.figure(5.6 * growth, 4.0 * growth, [entry.name for entry in series])
    full = full_row(results.rows)
    if full is not None and not (is_number(full.perplexity) and is_number(full.accuracy)):
        full = None
    values = [measured(row.perplexity) for row in (*rows, *([full] if full is not None else []))]
    near = _near(values)
    if near is not None:
        above = _panel_above(made, axes)
        _tradeoff_lines(above, series, looks, full, (-math.inf, near))
        above.set_title("Near the full cache")
    ends = _tradeoff_lines(axes, series, looks, full, (-math.inf if near is None else near, math.inf))
    plot_style.title(axes, "Perplexity against accuracy")
    plot_style.label_lines(axes, ends)
    said = "Numbers, in the colour of their line: budget in tokens, or share of the cache. Better is up and left."
    plot_style.caption(made, sentences(said, uncut_text(rows)))
    return made


def keep_ratio_analysis(results: Results) -> Figure:
    """Perplexity and accuracy over the protected share of a fixed size, or over the share that is kept."""
    rows = cut_rows(results.rows)
    lines: list[tuple[str, str, list[tuple[float, Row]]]] = []
    for option, what in (("recent_ratio", "share of the budget that is recent"), ("keep_ratio", "share kept")):
        found = [row for row in rows if _share(row, option) is not None]
        for entry in grouped(found, without=(option,)) if option == "recent_ratio" else grouped(found):
            for budget in sorted({row.budget or 0 for row in entry.rows}):
                members = sorted(
                    ((measured(_share(row, option)), row) for row in entry.rows if (row.budget or 0) == budget),
                    key=lambda pair: pair[0],
                )
                if len({x for x, _ in members}) > 1:
                    lines.append((what, f"{entry.name} {budget}" if budget else entry.name, members))
    if not lines:
        raise NothingToShowError("no policy ran with two values of recent_ratio or keep_ratio and all else equal")
    kinds = list(dict.fromkeys(what for what, _, _ in lines))
    return _ratio_panels(results, kinds, lines)


# -- parts of the trade-off -------------------------------------------------------------------------------------------


def _near(values: Sequence[float]) -> float | None:
    """The perplexity up to which points lie close together, where others lie so far away that they cannot be told."""
    best, middle = min(values), sorted(values)[len(values) // 2]
    near = best + 3 * (middle - best)
    return near if max(values) - best > 2 * (near - best) > 0 else None


def _panel_above(made: Figure, axes: Axes) -> Axes:
    """Another panel of the same size."""
    height = float(made.get_size_inches()[1])
    left, bottom, wide, tall = axes.get_position().bounds
    more = tall * height + 0.8
    plot_style.grow(made, above=more)
    return made.add_axes((left, (bottom * height + more) / (height + more), wide, tall * height / (height + more)))


def _tradeoff_lines(
    axes: Axes, series: Sequence[Series], looks: Looks, full: Row | None, numbered: tuple[float, float]
) -> list[LineEnd]:
    """Every line, and the numbers of its points above one perplexity and up to another, finite to show no others."""
    ends, sizes, lines = [], [], []
    shown = [] if full is None else [(measured(full.perplexity), 100 * measured(full.accuracy))]
    for entry in series:
        members = sorted(entry.rows, key=lambda row: (row.budget or 0, row.keep_ratio or 0))
        xs, ys = [measured(row.perplexity) for row in members], [100 * measured(row.accuracy) for row in members]
        look = looks.of(entry.rows[0].label)
        axes.plot(xs, ys, **look, markeredgecolor="white", markeredgewidth=0.5)
        uncut = [place for place, row in enumerate(members) if row.is_uncut]
        _hollow(axes, [xs[place] for place in uncut], [ys[place] for place in uncut], look)
        lines.append((xs, ys))
        for row, x, y in zip(members, xs, ys, strict=True):
            if numbered[0] < x <= numbered[1]:
                sizes.append(PointLabel(x, y, _size(row), look["color"]))
        ends.append(LineEnd(entry.name, xs[0], ys[0], look))
    for x, y in shown:
        look = {"color": INK, "marker": "*", "markersize": 11, "linestyle": "none", "zorder": 5}
        axes.plot([x], [y], **look)
        ends.append(LineEnd("full cache", x, y, look))
    axes.set(xlabel=_PPL, ylabel=_ACCURACY)
    axes.margins(0.08)
    if numbered[1] == math.inf:
        scale(axes, "x", [x for xs, _ in lines for x in xs] + [x for x, _ in shown])
    else:
        points = [*shown, *((one.x, one.y) for one in sizes)]
        for place, setting in enumerate((axes.set_xlim, axes.set_ylim)):
            low, high = min(point[place] for point in points), max(point[place] for point in points)
            room = 0.08 * (high - low) or 1.0
            setting(low - room, high + room)
    axes.axis((*axes.get_xlim(), *axes.get_ylim()))  # final: what follows is placed by them
    label_points(axes, sizes, lines, shown)
    return ends


# -- parts of the others ----------------------------------------------------------------------------------------------


def _over_budget(results: Results, title: str, ylabel: str, measure: Measure) -> Figure:
    rows = [row for row in cut_rows(results.rows) if row.budget and is_number(measure(row, 0).y)]
    if not rows:
        raise NothingToShowError(f"no policy with a budget has a measured {measure.__name__}")
    series, looks = grouped(rows), Looks(results.rows)
    full = full_row(results.rows)
    reference = None if full is None else measure(full, 0).y
    names = [entry.name for entry in series]
    made, axes = plot_style.figure(5.6, 4.0, [*names, "full cache 000.00"])
    budgets = sorted({row.budget or 0 for row in rows})
    ends = [
        _line(axes, entry.name, looks.of(entry.rows[0].label), [
            measure(row, (row.budget or 0) * 2 ** dodge(index, len(series)))
            for row in sorted(entry.rows, key=lambda row: row.budget or 0)
        ])
        for index, entry in enumerate(series)
    ]  # fmt: skip
    axes.set_xscale("log", base=2)
    low, high = budgets[0] * 2**-0.35, budgets[-1] * 2**0.35
    ticks = apart(budgets, (high / low) ** 0.08)
    axes.set_xticks(ticks, [f"{budget:,}" for budget in ticks])
    axes.minorticks_off()
    axes.set_xlim(low, high)
    if measure is perplexity:
        scale(axes, "y", [measure(row, 0).y for row in rows] + ([reference] if is_number(reference) else []))
    plot_style.title(axes, title)
    axes.set(xlabel="budget (tokens kept per layer)", ylabel=ylabel)
    axes.margins(y=0.08)
    if is_number(reference):
        axes.axhline(reference, **FULL)
        ends.append(LineEnd(f"full cache {reference:.2f}", axes.get_xlim()[1], reference, FULL))
    plot_style.label_lines(axes, ends)
    plot_style.caption(made, sentences(interval_text(rows), uncut_text(rows)))
    return made


def _hollow(axes: Axes, xs: Sequence[float], ys: Sequence[float], look: dict[str, Any]) -> None:
    """Draw points whose policies evicted nothing, over the filled ones."""
    if xs:
        empty = {"markerfacecolor": "white", "markeredgecolor": look["color"], "markeredgewidth": 1.2}
        axes.plot(xs, ys, **look | {"linestyle": "none"} | empty, zorder=4)


def _line(axes: Axes, name: str, look: dict[str, Any], points: Sequence[Point]) -> LineEnd:
    """A line with its error bars; returns what its label needs."""
    xs, ys = [point.x for point in points], [point.y for point in points]
    if all(point.low is not None and point.high is not None for point in points):
        below = [max(point.y - (point.low or 0.0), 0.0) for point in points]
        above = [max((point.high or 0.0) - point.y, 0.0) for point in points]
        axes.errorbar(xs, ys, yerr=[below, above], fmt="none", ecolor=look["color"], elinewidth=0.9, capsize=2,
                      alpha=0.7)  # fmt: skip
    axes.plot(xs, ys, **look, markeredgecolor="white", markeredgewidth=0.5)
    uncut = [point for point in points if point.is_uncut]
    _hollow(axes, [point.x for point in uncut], [point.y for point in uncut], look)
    return LineEnd(name, xs[-1], ys[-1], look)


def _ratio_panels(
    results: Results, kinds: Sequence[str], lines: Sequence[tuple[str, str, list[tuple[float, Row]]]]
) -> Figure:
    from matplotlib.figure import Figure

    full, looks = full_row(results.rows), Looks(results.rows)
    variants = _variants(looks, lines)
    measures: list[tuple[str, Measure]] = [(_PPL, perplexity)]
    if all(is_number(row.accuracy) for _, _, members in lines for _, row in members):
        measures.append((_ACCURACY, accuracy))
    room = plot_style.label_room([*(name for _, name, _ in lines), "full cache 000.00"])
    cell_width, cell_height = 0.75 + 4.2 + room, max(3.1, 0.6 + 0.16 * len(lines))
    made = Figure(figsize=(cell_width * len(kinds), cell_height * len(measures) + 0.75))
    width, height = made.get_size_inches()
    for column, what in enumerate(kinds):
        shown = [line for line in lines if line[0] == what]
        for number, (ylabel, measure) in enumerate(measures):
            bottom = 0.8 + (len(measures) - 1 - number) * cell_height
            box = ((column * cell_width + 0.75) / width, bottom / height, 4.2 / width, (cell_height - 0.45) / height)
            axes = made.add_axes(box)
            ends = []
            for _, name, members in shown:
                look = looks.of(members[0][1].label, variants[name])
                ends.append(_line(axes, name, look, [measure(row, x) for x, row in members]))
            ticks = sorted({x for _, _, members in shown for x, _ in members})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set(xlabel=what if number == len(measures) - 1 else "", ylabel=ylabel.split(" (")[0])
            axes.margins(0.06)
            if full is not None and is_number(reference := measure(full, 0).y):
                axes.axhline(reference, **FULL)
                ends.append(LineEnd(f"full cache {reference:.2f}", axes.get_xlim()[1], reference, FULL))
            if number == 0:
                plot_style.title(axes, f"Keep ratio: {what}")
            if measure is accuracy:
                axes.set_ylabel("accuracy (%)")
            plot_style.label_lines(axes, ends)
    drawn = [row for _, _, members in lines for _, row in members]
    plot_style.caption(made, sentences(interval_text(drawn), uncut_text(drawn)))
    return made


def _variants(looks: Looks, lines: Sequence[tuple[str, str, list[tuple[float, Row]]]]) -> dict[str, int]:
    """Lines of one colour, told apart by a number."""
    found: dict[str, int] = {}
    counts: dict[int, int] = {}
    for _, name, members in lines:
        family = looks.family(members[0][1].label)
        found[name] = counts.get(family, 0)
        counts[family] = found[name] + 1
    return found


def _size(row: Row) -> str:
    """The budget, or else the share."""
    if row.budget is not None:
        return f"{row.budget}"
    return "" if row.keep_ratio is None else f"{row.keep_ratio:g}"


def _share(row: Row, option: str) -> float | None:
    found = row.keep_ratio if option == "keep_ratio" else row.options.get(option)
    return float(found) if is_number(found) else None
