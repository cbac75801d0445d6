"""The plots of an evaluation. Each takes results and gives a figure, or says why there is nothing to show."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from . import plot_style
from .plot_style import FULL, INK, MUTED, LineEnd
from .results import Results
from .rows import Row, full_row
from .series import Point, Series, accuracy, cut_rows, grouped, is_number, measured, perplexity

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Measure = Callable[[Row, float], Point]
Budgets = tuple[int, ...]

_PPL, _ACCURACY = "perplexity (lower is better)", "next-token accuracy (%, higher is better)"
_INTERVAL = "Bars: 95 % interval of the difference to the full cache, paired over the documents."
_FACETS = 4


class NothingToShowError(Exception):
    """The results hold nothing for a plot; the text is the reason."""


def perplexity_over_budget(results: Results) -> Figure:
    """Perplexity of every policy over its budget."""
    return _over_budget(results, "Perplexity over budget", _PPL, perplexity)


def accuracy_over_budget(results: Results) -> Figure:
    """Accuracy of every policy over its budget."""
    return _over_budget(results, "Accuracy over budget", _ACCURACY, accuracy)


def perplexity_accuracy_tradeoff(results: Results) -> Figure:
    """Accuracy over perplexity; a line joins the budgets of a policy."""
    rows = [row for row in cut_rows(results.rows) if is_number(row.accuracy)]
    if not rows:
        raise NothingToShowError("no policy has both a perplexity and an accuracy")
    series = grouped(rows)
    made, axes = plot_style.figure(5.6, 4.0, [entry.name for entry in series])
    ends, sizes = [], []
    for index, entry in enumerate(series):
        members = sorted(entry.rows, key=lambda row: (row.budget or 0, row.keep_ratio or 0))
        xs, ys = [measured(row.perplexity) for row in members], [100 * measured(row.accuracy) for row in members]
        look = plot_style.look(index)
        axes.plot(xs, ys, **look, markeredgecolor="white", markeredgewidth=0.5)
        sizes += [(x, y, _size(row)) for row, x, y in zip(members, xs, ys, strict=True)]
        ends.append(LineEnd(entry.name, xs[0], ys[0], look))
    full = full_row(results.rows)
    if full is not None and is_number(full.perplexity) and is_number(full.accuracy):
        x, y = full.perplexity, 100 * full.accuracy
        look = {"color": INK, "marker": "*", "markersize": 11, "linestyle": "none", "zorder": 5}
        axes.plot([x], [y], **look)
        ends.append(LineEnd("full cache", x, y, look))
    _scale(axes.set_xscale, axes, "x", [measured(row.perplexity) for row in rows])
    axes.set(title="Perplexity against accuracy", xlabel=_PPL, ylabel=_ACCURACY)
    axes.margins(0.08)
    plot_style.label_lines(axes, ends)
    plot_style.label_points(axes, sizes)
    plot_style.caption(made, "Numbers: budget in tokens, or share of the cache. Better is up and left.")
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
    quantities = [("perplexity change (%)", perplexity, full.perplexity)]
    if is_number(full.accuracy) and all(is_number(row.accuracy) for row in rows):
        quantities.append(("accuracy change (%)", accuracy, 100 * full.accuracy))
    return _comparison(series, panels, quantities)


# -- parts ------------------------------------------------------------------------------------------------------------


def _over_budget(results: Results, title: str, ylabel: str, measure: Measure) -> Figure:
    rows = [row for row in cut_rows(results.rows) if row.budget and is_number(measure(row, 0).y)]
    if not rows:
        raise NothingToShowError(f"no policy with a budget has a measured {measure.__name__}")
    series = grouped(rows)
    full = full_row(results.rows)
    reference = None if full is None else measure(full, 0).y
    names = [entry.name for entry in series]
    made, axes = plot_style.figure(5.6, 4.0, [*names, "full cache 000.00"])
    budgets = sorted({row.budget or 0 for row in rows})
    ends = [
        _line(axes, entry.name, index, [
            measure(row, (row.budget or 0) * 2 ** _dodge(index, len(series)))
            for row in sorted(entry.rows, key=lambda row: row.budget or 0)
        ])
        for index, entry in enumerate(series)
    ]  # fmt: skip
    axes.set_xscale("log", base=2)
    low, high = budgets[0] * 2**-0.35, budgets[-1] * 2**0.35
    ticks = _apart(budgets, (high / low) ** 0.08)
    axes.set_xticks(ticks, [f"{budget:,}" for budget in ticks])
    axes.minorticks_off()
    axes.set_xlim(low, high)
    if measure is perplexity:
        _scale(axes.set_yscale, axes, "y", [measured(row.perplexity) for row in rows])
    axes.set(title=title, xlabel="budget (tokens kept per layer)", ylabel=ylabel)
    axes.margins(y=0.08)
    if is_number(reference):
        axes.axhline(reference, **FULL)
        ends.append(LineEnd(f"full cache {reference:.2f}", axes.get_xlim()[1], reference, FULL))
    plot_style.label_lines(axes, ends)
    plot_style.caption(made, _INTERVAL if any(measure(row, 0).low is not None for row in rows) else "")
    return made


def _line(axes: Axes, name: str, index: int, points: Sequence[Point]) -> LineEnd:
    """A line with its error bars; returns what its label needs."""
    look = plot_style.look(index)
    xs, ys = [point.x for point in points], [point.y for point in points]
    if all(point.low is not None and point.high is not None for point in points):
        below = [max(point.y - (point.low or 0.0), 0.0) for point in points]
        above = [max((point.high or 0.0) - point.y, 0.0) for point in points]
        axes.errorbar(xs, ys, yerr=[below, above], fmt="none", ecolor=look["color"], elinewidth=0.9, capsize=2,
                      alpha=0.7)  # fmt: skip
    axes.plot(xs, ys, **look, markeredgecolor="white", markeredgewidth=0.5)
    return LineEnd(name, xs[-1], ys[-1], look)


def _ratio_panels(
    results: Results, kinds: Sequence[str], lines: Sequence[tuple[str, str, list[tuple[float, Row]]]]
) -> Figure:
    from matplotlib.figure import Figure

    full = full_row(results.rows)
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
            ends = [
                _line(axes, name, index, [measure(row, x) for x, row in members])
                for index, (_, name, members) in enumerate(shown)
            ]
            ticks = sorted({x for _, _, members in shown for x, _ in members})
            axes.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.set(xlabel=what if number == len(measures) - 1 else "", ylabel=ylabel.split(" (")[0])
            axes.margins(0.06)
            if full is not None and is_number(reference := measure(full, 0).y):
                axes.axhline(reference, **FULL)
                ends.append(LineEnd(f"full cache {reference:.2f}", axes.get_xlim()[1], reference, FULL))
            if number == 0:
                axes.set_title(f"Keep ratio: {what}")
            if measure is accuracy:
                axes.set_ylabel("accuracy (%)")
            plot_style.label_lines(axes, ends)
    if any(perplexity(row, x).low is not None for _, _, members in lines for x, row in members):
        plot_style.caption(made, _INTERVAL)
    return made


def _comparison(
    series: Sequence[Series], panels: Sequence[Budgets], quantities: Sequence[tuple[str, Measure, float]]
) -> Figure:
    from matplotlib.figure import Figure

    order = _best_last(series, panels)
    policies = list(dict.fromkeys(entry.rows[0].policy for entry in series))
    left = 0.3 + max(plot_style.text_width(entry.name, 9) for entry in order)
    panel, gap, tall = 2.1, 0.25, max(0.26 * len(order) + 0.2, 0.8)
    made = Figure(figsize=(left + len(panels) * (panel + gap) + 0.5, len(quantities) * (tall + 0.95) + 0.35))
    width, height = made.get_size_inches()
    for number, (label, measure, reference) in enumerate(quantities):
        bottom = 0.75 + (len(quantities) - 1 - number) * (tall + 0.95)
        first: Axes | None = None
        for column, budgets in enumerate(panels):
            box = ((left + column * (panel + gap)) / width, bottom / height, panel / width, tall / height)
            axes = made.add_axes(box, sharex=first)
            first = first or axes
            for place, entry in enumerate(order):
                for row in (row for row in entry.rows if row.budget in budgets):
                    _bar(axes, place, policies.index(row.policy), measure(row, 0), reference)
            axes.set_yticks(range(len(order)), [entry.name for entry in order] if column == 0 else [""] * len(order))
            axes.tick_params(axis="y", length=0, labelcolor=INK)
            axes.set_ylim(-0.6, len(order) - 0.4)
            axes.grid(axis="y", visible=False)
            axes.axvline(0, color=INK, linewidth=1.0)
            axes.set_xlabel(label)
            if number == 0:
                axes.set_title(
                    "budget " + " to ".join(f"{b:,}" for b in dict.fromkeys((budgets[0], budgets[-1]))) + " tokens"
                )
        if first is not None:
            first.margins(x=0.25)
            _symlog(first, [measure(row, 0).y / reference - 1 for entry in series for row in entry.rows])
    rows = [row for entry in series for row in entry.rows]
    thin = f" {_INTERVAL.replace('Bars', 'Thin lines')}" if any(perplexity(r, 0).low for r in rows) else ""
    plot_style.caption(made, f"Against the full cache (line at 0).{thin}")
    return made


def _symlog(axes: Axes, changes: Sequence[float]) -> None:
    """Logarithmic above 10 % where one change is so large that the others could not be seen beside it."""
    sizes = sorted(100 * abs(change) for change in changes)
    if sizes[-1] > max(8 * sizes[len(sizes) // 2], 30):
        axes.set_xscale("symlog", linthresh=10)
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


def _best_last(series: Sequence[Series], panels: Sequence[Budgets]) -> list[Series]:
    """By log perplexity, each measured against the others of its panel: series need not be in all of them."""
    logs = [
        [math.log(measured(row.perplexity)) for entry in series for row in entry.rows if row.budget in panel]
        for panel in panels
    ]
    means = {budget: sum(values) / len(values) for panel, values in zip(panels, logs, strict=True) for budget in panel}

    def excess(entry: Series) -> float:
        rows = [row for row in entry.rows if row.budget in means]
        return sum(math.log(measured(row.perplexity)) - means[row.budget or 0] for row in rows) / len(rows)

    return sorted(series, key=excess, reverse=True)


def _bar(axes: Axes, place: int, index: int, point: Point, reference: float) -> None:
    colour = plot_style.look(index)["color"]
    change = 100 * (point.y / reference - 1)
    axes.barh([place], [change], height=0.62, color=colour, alpha=0.8)
    far = change
    if point.low is not None and point.high is not None:
        low, high = (100 * (end / reference - 1) for end in (point.low, point.high))
        axes.plot([low, high], [place, place], color=INK, linewidth=1.0)
        far = max(high, change) if change >= 0 else min(low, change)
    side = 1 if change >= 0 else -1
    axes.annotate(
        f"{change:+.1f}",
        (far, place),
        (4 * side, 0),
        textcoords="offset points",
        va="center",
        ha="left" if side > 0 else "right",
        fontsize=7.5,
        color=MUTED,
    )


def _size(row: Row) -> str:
    """The budget, or else the share."""
    if row.budget is not None:
        return f"{row.budget}"
    return "" if row.keep_ratio is None else f"{row.keep_ratio:g}"


def _share(row: Row, option: str) -> float | None:
    found = row.keep_ratio if option == "keep_ratio" else row.options.get(option)
    return float(found) if is_number(found) else None


def _apart(ticks: Sequence[int], factor: float) -> list[int]:
    """Ascending ticks without those that would touch the one before."""
    found: list[int] = []
    for tick in ticks:
        if not found or tick > factor * found[-1]:
            found.append(tick)
    return found


def _dodge(index: int, count: int) -> float:
    """How far (in octaves) to the side a line is drawn, so that error bars do not cover each other."""
    step = min(0.045, 0.3 / count)
    return step * (index - (count - 1) / 2)


def _scale(setter: Callable[..., Any], axes: Axes, name: str, values: Sequence[float]) -> None:
    """Logarithmic, with plain numbers, where the values are far apart."""
    if max(values) <= 3 * min(values):
        return
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    setter("log")
    axis = axes.xaxis if name == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())
