"""How plots look: one style, a palette that the colour-blind can tell apart, names beside the lines.

Nothing here touches pyplot or the user's own settings, and nothing depends on the time or the machine's fonts, so that
equal results make equal files.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE = "#222222", "#5f5f5f", "#d9d9d9"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
_MARKERS = "os^DvPX*"
_DASHES = ("-", "--", ":", "-.")

_LABEL_SIZE = 8.5
_SETTINGS: dict[str, Any] = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "figure.facecolor": "white",
    "svg.hashsalt": "kvmnn",
    "svg.fonttype": "path",
}


@contextmanager
def style() -> Iterator[None]:
    """matplotlib with its own defaults and these settings; what the user had comes back."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def look(index: int) -> dict[str, Any]:
    """Colour, marker and dashes of the line number `index`; different for the first 28."""
    turn = index // len(_COLOURS)
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[index % len(_MARKERS)],
        "linestyle": _DASHES[turn % len(_DASHES)],
    }


def figure(axes_width: float, axes_height: float, labels: Sequence[str] = ()) -> tuple[Figure, Axes]:
    """A figure of one plot whose inner size (inches) is given, with room on its right for `labels`."""
    from matplotlib.figure import Figure

    left, bottom, top = 0.75, 0.85, 0.45
    width = left + axes_width + 0.3 + max([text_width(label) for label in labels] or [0.0])
    height = bottom + axes_height + top
    made = Figure(figsize=(width, height))
    axes = made.add_axes((left / width, bottom / height, axes_width / width, axes_height / height))
    return made, axes


def text_width(text: str, size: float = _LABEL_SIZE) -> float:
    """Width of a label in inches."""
    from matplotlib.textpath import TextPath

    return float(TextPath((0, 0), text or " ", size=size).get_extents().width) / 72


def label_lines(axes: Axes, ends: Sequence[tuple[str, str, float, float]]) -> None:
    """Names right of the plot, each at the height of its line's end, moved apart where they would touch.

    Parameters
    ----------
    axes
        With its final limits: they are not changed any more.
    ends
        ``(name, colour, x, y)`` of each line, in data coordinates.
    """
    axes.autoscale(False)
    made = axes.get_figure(root=True)
    if made is None or not ends:
        return
    to_axes = axes.transData + axes.transAxes.inverted()
    height = axes.get_position().height * made.get_size_inches()[1]
    gap = 1.3 * _LABEL_SIZE / 72 / height
    order = sorted(ends, key=lambda end: end[3])
    wanted = [float(to_axes.transform((x, y))[1]) for _, _, x, y in order]
    for (name, colour, x, y), place in zip(order, spread(wanted, gap), strict=True):
        axes.annotate(
            name,
            xy=(x, y),
            xytext=(1.025, place),
            textcoords="axes fraction",
            color=colour,
            fontsize=_LABEL_SIZE,
            va="center",
            ha="left",
            annotation_clip=False,
            arrowprops={"arrowstyle": "-", "color": colour, "linewidth": 0.5, "alpha": 0.6, "shrinkA": 0, "shrinkB": 3},
        )


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending places as near to those wanted as a distance of `gap` between neighbours allows (least squares)."""
    groups: list[tuple[float, int]] = []  # where the first of a group would be, and how many are in it
    for index, place in enumerate(wanted):
        start, count = place - gap * index, 1
        while groups and groups[-1][0] > start:
            before, many = groups.pop()
            start = (before * many + start * count) / (many + count)
            count += many
        groups.append((start, count))
    starts = [start for start, count in groups for _ in range(count)]
    return [start + gap * index for index, start in enumerate(starts)]


def caption(made: Figure, text: str) -> None:
    """A line at the foot that says what is shown."""
    made.text(0.012, 0.015, text, color=MUTED, fontsize=7.5, va="bottom", ha="left")


def as_bytes(made: Figure, kind: str) -> bytes:
    """The figure as ``"png"`` or ``"svg"``, without a date or the name of what made it."""
    sink = io.BytesIO()
    with style():
        if kind == "svg":
            made.savefig(sink, format="svg", metadata={"Date": None, "Creator": "kvmnn"})
        else:
            made.savefig(sink, format="png", dpi=150, metadata={"Software": None})
    return sink.getvalue()
