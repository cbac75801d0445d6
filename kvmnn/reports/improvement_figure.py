"""What each improvement of l2_compress / KnormPress over the paper's code does by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from . import plot_style
from .columns import UNCUT_MARK
from .figure_parts import NothingToShowError, sentences, uncut_text
from .plot_style import INK, MUTED
from .results import Results
from .rows import DocumentRow, Row
from .series import Looks, cut_rows, is_number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class Step(NamedTuple):
    """Two rows that differ in one thing."""

    name: str
    before: Row
    after: Row


def improvement_summary(results: Results) -> Figure:
    """The threshold, the order and the hybrid, each against the row that lacks nothing else."""
    from matplotlib.figure import Figure

    steps = improvements(results.rows)
    if not steps:
        raise NothingToShowError("no two rows differ in an improvement of l2_compress only (--preset knorm-ablation)")
    looks = Looks(results.rows)
    quantities: list[tuple[str, Callable[[Row | DocumentRow], float | None]]] = [
        ("relative perplexity change (%)", lambda row: row.perplexity),
        ("relative accuracy change (%)", lambda row: row.accuracy),
    ]
    left = 0.3 + max(plot_style.text_width(line, 9) for step in steps for line in step.name.split("\n"))
    tall, wide = 0.55 * len(steps) + 0.3, 3.0
    made = Figure(figsize=(left + len(quantities) * (wide + 0.5) + 0.2, tall + 1.35))
    width, height = made.get_size_inches()
    for number, (label, get) in enumerate(quantities):
        box = ((left + number * (wide + 0.5)) / width, 0.85 / height, wide / width, tall / height)
        axes = made.add_axes(box)
        if number == 0:
            plot_style.title(axes, "What each improvement does by itself")
        for place, step in enumerate(reversed(steps)):
            _bar(axes, place, step, get, looks.of(step.after.label)["color"])
        names = [step.name for step in reversed(steps)] if number == 0 else [""] * len(steps)
        axes.set_yticks(range(len(steps)), names)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.set_ylim(-0.6, len(steps) - 0.4)
        axes.grid(axis="y", visible=False)
        axes.axvline(0, color=INK, linewidth=1.0)
        axes.use_sticky_edges = False  # room on both sides of 0
        axes.margins(x=0.3)
        axes.set_xlabel(label)
    both = [row for step in steps for row in (step.before, step.after)]
    said = "Against the row that differs in this one thing. Points: documents."
    plot_style.caption(made, sentences(said, uncut_text(both, UNCUT_MARK)))
    return made


def improvements(rows: Sequence[Row]) -> list[Step]:
    """All pairs of rows that differ in one improvement.

    The paper's code that cuts from ``n + 1`` tokens on has the project's threshold of ``n``: beside the project's row
    it shows the order alone, and beside the paper's from ``n`` on the threshold alone.
    """
    cut = cut_rows(rows)
    steps = []
    for row in cut:
        for other in cut:
            step = _threshold(row, other) or _order(row, other) or _hybrid(row, other)
            if step is not None:
                steps.append(Step(step, row, other))
    return steps


def _threshold(row: Row, other: Row) -> str | None:
    first, then = row.options.get("prune_after"), other.options.get("prune_after")
    forms = (row.options.get("form"), other.options.get("form"))
    if forms != ("original", "original") or not (is_number(first) and then == first + 1):
        return None
    return f"threshold\nfrom {first:,} -> above {first:,}" if _alike(row, other, "prune_after") else None


def _order(row: Row, other: Row) -> str | None:
    first, then = row.options.get("prune_after"), other.options.get("prune_after")
    forms = (row.options.get("form"), other.options.get("form"))
    if forms != ("original", "seed") or not (is_number(then) and first == then + 1):
        return None
    return "order\nby norm -> in time" if _alike(row, other, "prune_after", "form") else None


def _hybrid(row: Row, other: Row) -> str | None:
    share = other.options.get("recent_ratio")
    if row.options.get("recent_ratio") != 0 or row.options.get("strategy") != "keep_low":
        return None
    if not is_number(share) or share <= 0 or not _alike(row, other, "recent_ratio"):
        return None
    return f"hybrid, {row.budget:,} tokens\nrecent 0 -> {share:g}" if row.budget else f"hybrid\nrecent 0 -> {share:g}"


def _alike(row: Row, other: Row, *but: str) -> bool:
    """Whether rows are of one policy and agree in all other options."""
    if (row.policy, row.positions) != (other.policy, other.positions):
        return False
    names = {*row.options, *other.options} - {*but}
    return all(row.options.get(name) == other.options.get(name) for name in names)


def _bar(axes: Axes, place: int, step: Step, get: Callable[[Row | DocumentRow], float | None], colour: str) -> None:
    change = _change(get(step.before), get(step.after))
    if change is None:
        return
    axes.barh([place], [change], height=0.5, color=colour, alpha=0.8)
    pairs = zip(step.before.documents, step.after.documents, strict=False)
    points = [found for one, two in pairs if (found := _change(get(one), get(two))) is not None]
    axes.plot(points, [place] * len(points), linestyle="none", marker="o", markersize=3, color=INK, alpha=0.6)
    far = max([change, *points]) if change >= 0 else min([change, *points])
    axes.annotate(
        f"{change:+.2f}{UNCUT_MARK if step.before.is_uncut or step.after.is_uncut else ''}",
        (far, place),
        (6 if change >= 0 else -6, 0),
        textcoords="offset points",
        va="center",
        ha="left" if change >= 0 else "right",
        fontsize=7.5,
        color=MUTED,
    )


def _change(before: float | None, after: float | None) -> float | None:
    """In per cent."""
    if not is_number(before) or not is_number(after) or before == 0:
        return None
    return 100 * (after / before - 1)
