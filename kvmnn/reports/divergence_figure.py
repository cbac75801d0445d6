"""The figure that shows all rows of an evaluation at once: divergence from the full cache over bytes of a token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from . import plot_style
from .figures import NothingToShowError, join_sentences, scale_axis
from .plot_style import INK_COLOUR, LineEnd
from .records import EvaluationResultsProtocol, ResultRow
from .series import (
    LineStyles,
    describe_untried,
    format_prompt_note,
    group_into_series,
    has_equal_cuts,
    is_number,
    select_divergences,
    select_policy_rows,
)
from .table import NO_EVICTION_MARK

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def find_pareto_front(points: Sequence[tuple[float, float]]) -> list[int]:
    """Return the indices of points that no other one beats, ascending by their first coordinate.

    A point is beaten by one that is at most as large in both coordinates, and smaller in one.
    """
    front: list[int] = []
    for index in sorted(range(len(points)), key=lambda index: points[index]):
        if not front or points[index][1] < points[front[-1]][1]:
            front.append(index)
    return front


def kl_over_bytes(results: EvaluationResultsProtocol) -> Figure:
    """Plot the KL divergence of every policy and codec over its bytes a token, with the Pareto front.

    The divergence is of tokens that are the same for all rows (`select_divergences`).
    """
    policy_rows = select_policy_rows(results.rows)
    # Rows whose policy or codec did nothing would hide the points that they equal, and share their place on the front.
    tried_rows = [row for row in policy_rows if row.cut_divergence is not None and not row.is_untried]
    point_by_row = _map_points(tried_rows)
    rows = [row for row in tried_rows if id(row) in point_by_row]
    if not rows:
        raise NothingToShowError("no row has a divergence from the full cache after a cut")
    series, styles = group_into_series(rows), LineStyles(results.rows)
    figure, axes = plot_style.make_figure(5.6, 4.4, [entry.name for entry in series])
    ends = []
    for entry in series:
        members = sorted(entry.rows, key=lambda row: row.bytes_per_token or 0)
        points = [point_by_row[id(row)] for row in members]
        style = styles.get_style(members[0].label)
        axes.plot(*zip(*points, strict=True), **style, markeredgecolor="white", markeredgewidth=0.5)
        for row, (x, y) in zip(members, points, strict=True):
            if is_number(row.frame_bytes_per_token):
                thin_style = {"color": style["color"], "linewidth": 0.7, "marker": "|", "markersize": 5, "alpha": 0.7}
                axes.plot([x, row.frame_bytes_per_token], [y, y], **thin_style, markevery=[1], zorder=1)
        ends.append(LineEnd(entry.name, *points[-1], style))
    all_points = [point_by_row[id(row)] for row in rows]
    front = [all_points[index] for index in find_pareto_front(all_points)]
    front_style = {"color": INK_COLOUR, "linewidth": 0.8, "linestyle": (0, (1, 2)), "zorder": 1.5}
    axes.plot(*zip(*front, strict=True), **front_style)
    ring_style = {"linestyle": "none", "marker": "o", "markersize": 11, "markerfacecolor": "none"}
    axes.plot(*zip(*front, strict=True), **ring_style, markeredgecolor=INK_COLOUR, markeredgewidth=0.9, zorder=5)
    coded_sizes = [row.frame_bytes_per_token for row in rows if is_number(row.frame_bytes_per_token)]
    scale_axis(axes, "x", [x for x, _ in all_points] + coded_sizes)
    scale_axis(axes, "y", [y for _, y in all_points])
    axes.margins(0.08)
    plot_style.set_title(axes, "Divergence over bytes")
    is_after_cut = has_equal_cuts(tried_rows)
    tokens_text = "after the cut" if is_after_cut else "of all scored tokens"
    axes.set(xlabel="bytes a token (fewer is better)", ylabel=f"KL divergence {tokens_text} (nats)")
    plot_style.add_line_labels(axes, ends)
    scope_text = (
        "Divergence of the tokens scored with an evicted or quantised cache."
        if is_after_cut
        else "Divergence of all scored tokens, 0 before a row's first cut: the tokens after it differ between rows."
    )
    front_text = "Rings: the Pareto front; no other row has fewer bytes and a lower divergence."
    untried_rows = [row for row in policy_rows if row.is_untried]
    untried_text = (
        f"Left out, and marked {NO_EVICTION_MARK} in the table, as they {describe_untried(untried_rows)}: "
        f"{'; '.join(row.label for row in untried_rows)}."
        if untried_rows
        else ""
    )
    coded_text = "Thin lines end at the bytes after lossless coding." if coded_sizes else ""
    plot_style.add_caption(
        figure, join_sentences(scope_text, front_text, coded_text, untried_text, format_prompt_note(rows))
    )
    return figure


def _map_points(rows: Sequence[ResultRow]) -> dict[int, tuple[float, float]]:
    """Map ids of rows to bytes a token and divergence; not where one lacks or is 0, as both axes may be logarithmic."""
    points: dict[int, tuple[float, float]] = {}
    for row, divergence in zip(rows, select_divergences(rows), strict=True):
        kl, nbytes = None if divergence is None else divergence.kl, row.bytes_per_token
        if is_number(kl) and is_number(nbytes) and kl > 0 and nbytes > 0:
            points[id(row)] = nbytes, kl
    return points
