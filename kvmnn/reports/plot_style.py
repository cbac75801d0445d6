"""The style of plots: a palette for colour-blind readers, labels next to lines and points.

It does not use pyplot or the user's settings, and nothing depends on the time or the machine's fonts, so that equal
results make equal files.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK_COLOUR, MUTED_COLOUR, RULE_COLOUR = "#222222", "#5f5f5f", "#d9d9d9"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933", "#332288")
_MARKERS = "os^DvPX*"
_DASHES = ("-", "--", ":", "-.")

_LABEL_SIZE = 8.5
_LABEL_LINE_INCHES = 1.3 * _LABEL_SIZE / 72  # inches between two names
_MAX_LEADER_LINES = 12  # more lines to names would hide the plot
_SAMPLE_INCHES = 0.62  # inches between a plot and its names
_CAPTION_SIZE = 7.5
_CAPTION_LINE_INCHES = 1.35 * _CAPTION_SIZE / 72
_TITLE_ID = "title"
_FILE_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": "kvmnn"},
    "pdf": {"CreationDate": None, "Creator": "kvmnn", "Producer": None},
}
_RC_SETTINGS: dict[str, Any] = {
    "font.family": ["DejaVu Sans", "sans-serif"],
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.edgecolor": MUTED_COLOUR,
    "axes.labelcolor": INK_COLOUR,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.unicode_minus": False,
    "grid.color": RULE_COLOUR,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "xtick.color": MUTED_COLOUR,
    "ytick.color": MUTED_COLOUR,
    "figure.facecolor": "white",
    "text.parse_math": False,
    "text.hinting": "none",  # else letters of PNG are wider than their outlines, by which captions are wrapped
    "svg.hashsalt": "kvmnn",
    "svg.fonttype": "none",  # text stays text, to be searched and set in the fonts of a paper
    "pdf.fonttype": 42,  # TrueType: journals refuse Type 3
    "ps.fonttype": 42,
}


@dataclass(frozen=True)
class LineEnd:
    """The data for a line's label: its name, its end in data coordinates, and its `style`."""

    name: str
    x: float
    y: float
    style: dict[str, Any]


@contextmanager
def use_style() -> Iterator[None]:
    """Use matplotlib's defaults with these settings in a ``with`` block; restore the user's afterwards."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_RC_SETTINGS)
        yield


def make_line_style(index: int, variant: int = 0) -> dict[str, Any]:
    """Return colour, marker and dashes of line number `index`; different for the first 24.

    A `variant` of a line has its colour, and other dashes and another marker.
    """
    dash_index = index // len(_COLOURS) + variant
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[(index + 3 * variant) % len(_MARKERS)],
        "linestyle": _DASHES[dash_index % len(_DASHES)],
    }


FULL_CACHE_STYLE: dict[str, Any] = {"color": INK_COLOUR, "linestyle": (0, (5, 2)), "linewidth": 1.0, "marker": None}
"""Line style of the full cache in all plots."""


def make_figure(axes_width: float, axes_height: float, labels: Sequence[str] = ()) -> tuple[Figure, Axes]:
    """Make a figure of one plot with a minimum inner size (inches) and space on its right for `labels`."""
    from matplotlib.figure import Figure

    left_margin, bottom, top = 0.75, 0.85, 0.45
    axes_height = max(axes_height, (len(labels) + 1) * _LABEL_LINE_INCHES)
    width = left_margin + axes_width + compute_label_inches(labels)
    height = bottom + axes_height + top
    new_figure = Figure(figsize=(width, height))
    return new_figure, add_axes(new_figure, left_margin, bottom, axes_width, axes_height)


def add_axes(target_figure: Figure, left: float, bottom: float, width: float, height: float, **options: Any) -> Axes:
    """Add a plot at a place and of a size in inches; `options` as for `Figure.add_axes`."""
    full_width, full_height = target_figure.get_size_inches()
    box = (left / full_width, bottom / full_height, width / full_width, height / full_height)
    axes: Axes = target_figure.add_axes(box, **options)
    return axes


def compute_label_inches(labels: Sequence[str]) -> float:
    """Compute the width that `add_line_labels` needs right of a plot, in inches."""
    return _SAMPLE_INCHES + 0.1 + max([measure_text_inches(label) for label in labels] or [0.0])


@lru_cache(maxsize=4096)
def measure_text_inches(text: str, size: float = _LABEL_SIZE) -> float:
    """Measure the width of a label in inches, from the control points of its outlines."""
    from matplotlib.textpath import TextPath

    if not text.strip():  # some versions of matplotlib fail for nothing but blanks
        return 0.0
    xs = TextPath((0, 0), text, size=size).vertices[:, 0]
    return float(xs.max() - xs.min()) / 72 if len(xs) else 0.0


def add_line_labels(axes: Axes, ends: Sequence[LineEnd]) -> None:
    """Add labels right of the plot, with a sample of each line, near its end and without overlap."""
    limits = *axes.get_xlim(), *axes.get_ylim()  # asking brings them up to date
    axes.axis(limits)
    if not ends:
        return
    to_axes = axes.transData + axes.transAxes.inverted()
    width, height = axes.get_position().size * axes.figure.get_size_inches()
    order = sorted(ends, key=lambda end: end.y)
    target_positions = [float(to_axes.transform((end.x, end.y))[1]) for end in order]
    begin, stop = 1 + 0.22 / width, 1 + (_SAMPLE_INCHES - 0.08) / width
    for end, position in zip(order, spread_positions(target_positions, _LABEL_LINE_INCHES / height), strict=True):
        if len(ends) <= _MAX_LEADER_LINES:
            axes.annotate(
                "",
                xy=(end.x, end.y),
                xytext=(begin, position),
                textcoords="axes fraction",
                annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": RULE_COLOUR, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 2},
                zorder=0.9,
            )
        axes.plot(
            [begin, stop],
            [position, position],
            transform=axes.transAxes,
            clip_on=False,
            **{**end.style, "marker": None},
        )
        axes.plot([(begin + stop) / 2], [position], transform=axes.transAxes, clip_on=False, **end.style)
        axes.text(1 + _SAMPLE_INCHES / width, position, end.name, transform=axes.transAxes, color=INK_COLOUR,
        fontsize=_LABEL_SIZE,
                  va="center")  # fmt: skip


def spread_positions(target_positions: Sequence[float], gap: float) -> list[float]:
    """Spread ascending positions from 0 to 1 by at least `gap`, moving them as little as possible (least squares)."""
    groups: list[tuple[float, int]] = []  # where the first of a group would be, and how many are in it
    for index, position in enumerate(target_positions):
        start, count = position - gap * index, 1
        while groups and groups[-1][0] > start:
            previous_start, previous_count = groups.pop()
            start = (previous_start * previous_count + start * count) / (previous_count + count)
            count += previous_count
        groups.append((start, count))
    max_start = max(1 - gap * (len(target_positions) - 1), 0.0)
    starts = [min(max(start, 0.0), max_start) for start, count in groups for _ in range(count)]
    return [start + gap * index for index, start in enumerate(starts)]


def set_title(axes: Axes, text: str) -> None:
    """Set the title above a figure; `remove_titles` removes it again, but not the names of panels."""
    axes.set_title(text).set_gid(_TITLE_ID)


def remove_titles(target_figure: Figure) -> None:
    """Remove the titles of a figure that is embedded in a text with its own."""
    from matplotlib.text import Text

    for text in target_figure.findobj(Text):
        if text.get_gid() == _TITLE_ID:
            text.set_text("")


def add_caption(target_figure: Figure, text: str) -> None:
    """Add a caption at the foot; the figure grows downwards if one line is too short."""
    width, height = target_figure.get_size_inches()
    margin = 0.15
    lines = _wrap_caption(text, width - 2 * margin)
    extra_height = max(len(lines) - 1, 0) * _CAPTION_LINE_INCHES
    grow_figure(target_figure, extra_below=extra_height)
    target_figure.text(margin / width, 0.1 / (height + extra_height), "\n".join(lines), color=MUTED_COLOUR,
    fontsize=_CAPTION_SIZE, va="bottom",
              ha="left", linespacing=1.35)  # fmt: skip


def grow_figure(target_figure: Figure, *, extra_below: float = 0.0, extra_above: float = 0.0) -> None:
    """Increase a figure's height by inches without moving or stretching its content."""
    width, height = target_figure.get_size_inches()
    new_height = height + extra_below + extra_above
    target_figure.set_size_inches(width, new_height)
    for axes in target_figure.axes:
        left_position, bottom, wide, tall = axes.get_position().bounds
        axes.set_position(
            (left_position, (bottom * height + extra_below) / new_height, wide, tall * height / new_height)
        )


def _wrap_caption(text: str, width: float) -> list[str]:
    """Wrap the words to lines of at most `width` inches; a longer word has a line of its own."""
    lines: list[str] = []
    for word in text.split():
        # The whole line, not the sum of its words: outlines lack the margins of letters, which add up.
        longer_line = f"{lines[-1]} {word}" if lines else word
        if lines and measure_text_inches(longer_line, _CAPTION_SIZE) <= width:
            lines[-1] = longer_line
        else:
            lines.append(word)
    return lines


def render_figure(target_figure: Figure, kind: str) -> bytes:
    """Render the figure as ``"png"``, ``"svg"`` or ``"pdf"``, without a date: equal figures give equal bytes."""
    sink = io.BytesIO()
    with use_style():
        target_figure.savefig(sink, format=kind, dpi=150, metadata=_FILE_METADATA[kind])
    return sink.getvalue()


POINT_LABEL_SIZE = 6.5
_DIRECTIONS = ((0, -1), (0, 1), (1, 0), (-1, 0), (0.8, -0.8), (-0.8, -0.8), (0.8, 0.8), (-0.8, 0.8))
_DISTANCES = (8, 14, 20, 28, 36, 46, 58, 72)  # points between a marker and its text
_HALF_MARKER, _HALF_TEXT = 3.0, 4.0
_SAMPLE_STEP_POINTS = 2.0
"""Points between two samples of a line."""
_OUTSIDE_COST, _LINE_SAMPLE_COST, _DISTANCE_COST = 1000.0, 1.5, 0.6
"""Cost of leaving the plot, of covering a sample of a line, and of one more point of distance; covering a square point
of another text or marker costs 1."""


class PointLabel(NamedTuple):
    """A label, its point in data coordinates, and the colour of its series."""

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
    """Write each text near its point, one after the other, clear of markers, lines and the texts before it."""
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
    """Sample points along lines, ``[point, 2]``."""
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
    """Compute the area that two boxes share."""
    width = min(first[2], second[2]) - max(first[0], second[0])
    height = min(first[3], second[3]) - max(first[1], second[1])
    return max(width, 0.0) * max(height, 0.0)
