"""What each improvement of l2_compress / KnormPress over the paper's code does by itself."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from . import plot_style
from .columns import NO_EVICTION_MARK
from .figure_parts import NothingToShowError, format_no_eviction_note, join_sentences
from .plot_style import INK_COLOUR, MUTED_COLOUR
from .results import EvaluationResultsProtocol
from .rows import DocumentRow, ResultRow
from .series import LineStyles, is_number, select_policy_rows

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


class ImprovementStep(NamedTuple):
    """Two rows that differ in one thing."""

    name: str
    baseline: ResultRow
    variant: ResultRow


def improvement_summary(results: EvaluationResultsProtocol) -> Figure:
    """The threshold, the order and the hybrid, each against the row that lacks nothing else."""
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
    width, height = figure.get_size_inches()
    for number, (label, get_value) in enumerate(quantities):
        box = ((left_margin + number * (wide + 0.5)) / width, 0.85 / height, wide / width, tall / height)
        axes = figure.add_axes(box)
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
    """All pairs of rows that differ in one improvement.

    The paper's code that cuts from ``n + 1`` tokens on has the project's threshold of ``n``: beside the project's row
    it shows the order alone, and beside the paper's from ``n`` on the threshold alone.
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
    """Whether rows are of one policy and agree in all other options."""
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
        f"{change:+.2f}{NO_EVICTION_MARK if step.baseline.has_no_eviction or step.variant.has_no_eviction else ''}",
        (bar_end, row_index),
        (6 if change >= 0 else -6, 0),
        textcoords="offset points",
        va="center",
        ha="left" if change >= 0 else "right",
        fontsize=7.5,
        color=MUTED_COLOUR,
    )


def _compute_percent_change(baseline: float | None, variant: float | None) -> float | None:
    """In per cent."""
    if not is_number(baseline) or not is_number(variant) or baseline == 0:
        return None
    return 100 * (variant / baseline - 1)
