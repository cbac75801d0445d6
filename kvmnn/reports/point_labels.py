"""Short texts beside the points of a plot, where they hide as little as they can."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .plot_style import measure_text_inches

if TYPE_CHECKING:
    from matplotlib.axes import Axes

POINT_LABEL_SIZE = 6.5
_DIRECTIONS = ((0, -1), (0, 1), (1, 0), (-1, 0), (0.8, -0.8), (-0.8, -0.8), (0.8, 0.8), (-0.8, 0.8))
_DISTANCES = (8, 14, 20, 28, 36, 46, 58, 72)  # points between a marker and its text
_HALF_MARKER, _HALF_TEXT = 3.0, 4.0
_SAMPLE_STEP_POINTS = 2.0
"""Points between two samples of a line."""
_OUTSIDE_COST, _LINE_SAMPLE_COST, _DISTANCE_COST = 1000.0, 1.5, 0.6
"""What it costs to leave the plot, to cover a sample of a line, and to be a point farther away; covering a square point
of another text or marker costs 1."""


class PointLabel(NamedTuple):
    """A text and its point in data coordinates, in the colour of what it belongs to."""

    x: float
    y: float
    text: str
    colour: str


Box = tuple[float, float, float, float]


def label_points(
    axes: Axes,
    labels: Sequence[PointLabel],
    lines: Sequence[tuple[Sequence[float], Sequence[float]]] = (),
    stars: Sequence[tuple[float, float]] = (),
) -> None:
    """Write each text near its point, one after the other, clear of markers, lines and the texts before it.

    Parameters
    ----------
    axes
        With its final limits.
    labels
        Each with a marker of the usual size at its point.
    lines
        Abscissae and ordinates of the lines that are drawn.
    stars
        Larger markers.
    """
    to_points = 72 / axes.figure.dpi

    def to_figure_points(x: float, y: float) -> tuple[float, float]:
        position = axes.transData.transform((x, y)) * to_points
        return float(position[0]), float(position[1])

    (left_edge, bottom), (right_edge, top) = axes.transAxes.transform(((0, 0), (1, 1))) * to_points
    occupied_boxes = [_make_box(to_figure_points(label.x, label.y), _HALF_MARKER, _HALF_MARKER) for label in labels]
    occupied_boxes += [_make_box(to_figure_points(x, y), 7.5, 7.5) for x, y in stars]
    line_samples = _sample_lines([axes.transData.transform(np.column_stack(line)) * to_points for line in lines])
    for label in labels:
        point, half_width = (
            to_figure_points(label.x, label.y),
            72 * measure_text_inches(label.text, POINT_LABEL_SIZE) / 2 + 1,
        )
        best: tuple[float, float, float] | None = None
        for distance in _DISTANCES:
            for dx, dy in _DIRECTIONS:
                x, y = point[0] + dx * (distance + half_width - 4), point[1] + dy * distance
                box = _make_box((x, y), half_width, _HALF_TEXT)
                outside = box[0] < left_edge or box[1] < bottom or box[2] > right_edge or box[3] > top
                cost = (
                    _DISTANCE_COST * distance
                    + _LINE_SAMPLE_COST * _count_inside(line_samples, box)
                    + (_OUTSIDE_COST if outside else 0)
                )
                if best is not None and cost >= best[0]:
                    continue
                cost += sum(_compute_overlap_area(box, occupied) for occupied in occupied_boxes)
                if best is None or cost < best[0]:
                    best = cost, x, y
        if best is not None:
            _, x, y = best
            occupied_boxes.append(_make_box((x, y), half_width, _HALF_TEXT))
            _write_label(axes, label, (x - point[0], y - point[1]), half_width)


def _write_label(axes: Axes, label: PointLabel, offset: tuple[float, float], half_width: float) -> None:
    needs_leader = max(abs(offset[0]) - half_width, abs(offset[1])) > _DISTANCES[1]
    leader: dict[str, Any] = {"arrowstyle": "-", "color": label.colour, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 2}
    axes.annotate(
        label.text,
        (label.x, label.y),
        offset,
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=POINT_LABEL_SIZE,
        color=label.colour,
        arrowprops=leader if needs_leader else None,
        zorder=6,
    )


def _make_box(centre: Sequence[float], half_width: float, half_height: float) -> Box:
    return centre[0] - half_width, centre[1] - half_height, centre[0] + half_width, centre[1] + half_height


def _sample_lines(lines: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """Points along lines, ``[point, 2]``."""
    samples = [np.empty((0, 2))]
    for line in lines:
        for begin, end in pairwise(line):
            steps = int(np.hypot(*(end - begin)) / _SAMPLE_STEP_POINTS) if np.isfinite([begin, end]).all() else 0
            samples.append(begin + (end - begin) * np.linspace(0, 1, min(steps, 2000) + 1)[:, None])
    return np.concatenate(samples)


def _count_inside(points: npt.NDArray[np.float64], box: Box) -> int:
    x, y = points[:, 0], points[:, 1]
    return int(((x > box[0]) & (x < box[2]) & (y > box[1]) & (y < box[3])).sum())


def _compute_overlap_area(first: Box, second: Box) -> float:
    """The area that two boxes share."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return max(width, 0.0) * max(height, 0.0)
