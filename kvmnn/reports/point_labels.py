"""Short texts beside the points of a plot, where they hide as little as they can."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from .plot_style import text_width

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SIZE = 6.5
_DIRECTIONS = ((0, -1), (0, 1), (1, 0), (-1, 0), (0.8, -0.8), (-0.8, -0.8), (0.8, 0.8), (-0.8, 0.8))
_DISTANCES = (8, 14, 20, 28, 36, 46, 58, 72)  # points between a marker and its text
_HALF_MARKER, _HALF_TEXT = 3.0, 4.0
_STEP = 2.0
"""Points between two samples of a line."""
_OUTSIDE, _LINE, _FAR = 1000.0, 1.5, 0.6
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

    def place(x: float, y: float) -> tuple[float, float]:
        found = axes.transData.transform((x, y)) * to_points
        return float(found[0]), float(found[1])

    (left, bottom), (right, top) = axes.transAxes.transform(((0, 0), (1, 1))) * to_points
    taken = [_box(place(one.x, one.y), _HALF_MARKER, _HALF_MARKER) for one in labels]
    taken += [_box(place(x, y), 7.5, 7.5) for x, y in stars]
    drawn = _samples([axes.transData.transform(np.column_stack(line)) * to_points for line in lines])
    for one in labels:
        point, half = place(one.x, one.y), 72 * text_width(one.text, SIZE) / 2 + 1
        best: tuple[float, float, float] | None = None
        for distance in _DISTANCES:
            for dx, dy in _DIRECTIONS:
                x, y = point[0] + dx * (distance + half - 4), point[1] + dy * distance
                box = _box((x, y), half, _HALF_TEXT)
                outside = box[0] < left or box[1] < bottom or box[2] > right or box[3] > top
                cost = _FAR * distance + _LINE * _inside(drawn, box) + (_OUTSIDE if outside else 0)
                if best is not None and cost >= best[0]:
                    continue
                cost += sum(_shared(box, other) for other in taken)
                if best is None or cost < best[0]:
                    best = cost, x, y
        if best is not None:
            _, x, y = best
            taken.append(_box((x, y), half, _HALF_TEXT))
            _write(axes, one, (x - point[0], y - point[1]), half)


def _write(axes: Axes, one: PointLabel, offset: tuple[float, float], half: float) -> None:
    far = max(abs(offset[0]) - half, abs(offset[1])) > _DISTANCES[1]
    leader: dict[str, Any] = {"arrowstyle": "-", "color": one.colour, "linewidth": 0.5, "shrinkA": 1, "shrinkB": 2}
    axes.annotate(
        one.text,
        (one.x, one.y),
        offset,
        textcoords="offset points",
        ha="center",
        va="center",
        fontsize=SIZE,
        color=one.colour,
        arrowprops=leader if far else None,
        zorder=6,
    )


def _box(centre: Sequence[float], half_width: float, half_height: float) -> Box:
    return centre[0] - half_width, centre[1] - half_height, centre[0] + half_width, centre[1] + half_height


def _samples(lines: Sequence[npt.NDArray[np.float64]]) -> npt.NDArray[np.float64]:
    """Points along lines, ``[point, 2]``."""
    found = [np.empty((0, 2))]
    for line in lines:
        for begin, end in pairwise(line):
            steps = int(np.hypot(*(end - begin)) / _STEP) if np.isfinite([begin, end]).all() else 0
            found.append(begin + (end - begin) * np.linspace(0, 1, min(steps, 2000) + 1)[:, None])
    return np.concatenate(found)


def _inside(points: npt.NDArray[np.float64], box: Box) -> int:
    x, y = points[:, 0], points[:, 1]
    return int(((x > box[0]) & (x < box[2]) & (y > box[1]) & (y < box[3])).sum())


def _shared(one: Box, other: Box) -> float:
    """The area that two boxes share."""
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(width, 0.0) * max(height, 0.0)
