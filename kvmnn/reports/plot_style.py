"""How plots look: one style, a palette that the colour-blind can tell apart, names beside the lines.

Nothing here touches pyplot or the user's own settings, and nothing depends on the time or the machine's fonts, so that
equal results make equal files.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK, MUTED, RULE = "#222222", "#5f5f5f", "#d9d9d9"
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#882255", "#999933", "#332288")
_MARKERS = "os^DvPX*"
_DASHES = ("-", "--", ":", "-.")

_LABEL_SIZE = 8.5
_LINE = 1.3 * _LABEL_SIZE / 72  # inches between two names
_MAX_LEADERS = 12  # more lines to names would hide the plot
_SAMPLE = 0.62  # inches between a plot and its names
_CAPTION_SIZE = 7.5
_CAPTION_LINE = 1.35 * _CAPTION_SIZE / 72
_TITLE = "title"
_METADATA: dict[str, dict[str, Any]] = {
    "png": {"Software": None},
    "svg": {"Date": None, "Creator": "kvmnn"},
    "pdf": {"CreationDate": None, "Creator": "kvmnn", "Producer": None},
}
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
    "axes.unicode_minus": False,
    "grid.color": RULE,
    "grid.linewidth": 0.6,
    "lines.linewidth": 1.5,
    "lines.markersize": 4.5,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "figure.facecolor": "white",
    "text.parse_math": False,
    "svg.hashsalt": "kvmnn",
    "svg.fonttype": "path",
}


@dataclass(frozen=True)
class LineEnd:
    """What a line's label needs: its name, where it ends (data coordinates), and how it is drawn (`look`)."""

    name: str
    x: float
    y: float
    look: dict[str, Any]


@contextmanager
def style() -> Iterator[None]:
    """matplotlib with its own defaults and these settings; what the user had comes back."""
    import matplotlib

    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update(_SETTINGS)
        yield


def look(index: int, variant: int = 0) -> dict[str, Any]:
    """Colour, marker and dashes of the line number `index`; different for the first 24.

    A `variant` of a line has its colour, and other dashes and another marker.
    """
    turn = index // len(_COLOURS) + variant
    return {
        "color": _COLOURS[index % len(_COLOURS)],
        "marker": _MARKERS[(index + 3 * variant) % len(_MARKERS)],
        "linestyle": _DASHES[turn % len(_DASHES)],
    }


FULL: dict[str, Any] = {"color": INK, "linestyle": (0, (5, 2)), "linewidth": 1.0, "marker": None}
"""How the full cache is drawn everywhere."""


def figure(axes_width: float, axes_height: float, labels: Sequence[str] = ()) -> tuple[Figure, Axes]:
    """A figure of one plot whose least inner size (inches) is given, with room on its right for `labels`."""
    from matplotlib.figure import Figure

    left, bottom, top = 0.75, 0.85, 0.45
    axes_height = max(axes_height, (len(labels) + 1) * _LINE)
    width = left + axes_width + label_room(labels)
    height = bottom + axes_height + top
    made = Figure(figsize=(width, height))
    axes = made.add_axes((left / width, bottom / height, axes_width / width, axes_height / height))
    return made, axes


def label_room(labels: Sequence[str]) -> float:
    """Inches that `label_lines` needs right of a plot."""
    return _SAMPLE + 0.1 + max([text_width(label) for label in labels] or [0.0])


@lru_cache(maxsize=4096)
def text_width(text: str, size: float = _LABEL_SIZE) -> float:
    """Width of a label in inches, as the control points of its outlines have it."""
    from matplotlib.textpath import TextPath

    if not text.strip():  # some versions of matplotlib fail for nothing but blanks
        return 0.0
    across = TextPath((0, 0), text, size=size).vertices[:, 0]
    return float(across.max() - across.min()) / 72 if len(across) else 0.0


def label_lines(axes: Axes, ends: Sequence[LineEnd]) -> None:
    """Names right of the plot with a sample of each line, near the height of its end, never touching.

    Parameters
    ----------
    axes
        With its final limits: they are not changed any more.
    ends
        Of every line.
    """
    limits = *axes.get_xlim(), *axes.get_ylim()  # asking brings them up to date
    axes.axis(limits)
    if not ends:
        return
    to_axes = axes.transData + axes.transAxes.inverted()
    width, height = axes.get_position().size * axes.figure.get_size_inches()
    order = sorted(ends, key=lambda end: end.y)
    wanted = [float(to_axes.transform((end.x, end.y))[1]) for end in order]
    begin, stop = 1 + 0.22 / width, 1 + (_SAMPLE - 0.08) / width
    for end, place in zip(order, spread(wanted, _LINE / height), strict=True):
        if len(ends) <= _MAX_LEADERS:
            axes.annotate(
                "",
                xy=(end.x, end.y),
                xytext=(begin, place),
                textcoords="axes fraction",
                annotation_clip=False,
                arrowprops={"arrowstyle": "-", "color": RULE, "linewidth": 0.7, "shrinkA": 0, "shrinkB": 2},
                zorder=0.9,
            )
        axes.plot(
            [begin, stop], [place, place], transform=axes.transAxes, clip_on=False, **{**end.look, "marker": None}
        )
        axes.plot([(begin + stop) / 2], [place], transform=axes.transAxes, clip_on=False, **end.look)
        axes.text(1 + _SAMPLE / width, place, end.name, transform=axes.transAxes, color=INK, fontsize=_LABEL_SIZE,
                  va="center")  # fmt: skip


def spread(wanted: Sequence[float], gap: float) -> list[float]:
    """Ascending places from 0 to 1, as near to those wanted as a distance of `gap` allows (least squares)."""
    groups: list[tuple[float, int]] = []  # where the first of a group would be, and how many are in it
    for index, place in enumerate(wanted):
        start, count = place - gap * index, 1
        while groups and groups[-1][0] > start:
            before, many = groups.pop()
            start = (before * many + start * count) / (many + count)
            count += many
        groups.append((start, count))
    most = max(1 - gap * (len(wanted) - 1), 0.0)
    starts = [min(max(start, 0.0), most) for start, count in groups for _ in range(count)]
    return [start + gap * index for index, start in enumerate(starts)]


def title(axes: Axes, text: str) -> None:
    """What a figure shows, above it; `remove_titles` takes it away again. Names of panels are none."""
    axes.set_title(text).set_gid(_TITLE)


def remove_titles(made: Figure) -> None:
    """Leave titles to the text that the figure will stand in."""
    from matplotlib.text import Text

    for text in made.findobj(Text):
        if text.get_gid() == _TITLE:
            text.set_text("")


def caption(made: Figure, text: str) -> None:
    """What is shown, at the foot; the figure grows downwards where one line does not hold it."""
    width, height = made.get_size_inches()
    margin = 0.15
    lines = _lines(text, width - 2 * margin)
    more = max(len(lines) - 1, 0) * _CAPTION_LINE
    grow(made, below=more)
    made.text(margin / width, 0.1 / (height + more), "\n".join(lines), color=MUTED, fontsize=_CAPTION_SIZE, va="bottom",
              ha="left", linespacing=1.35)  # fmt: skip


def grow(made: Figure, *, below: float = 0.0, above: float = 0.0) -> None:
    """Make a figure higher by inches, without moving or stretching what is in it."""
    width, height = made.get_size_inches()
    taller = height + below + above
    made.set_size_inches(width, taller)
    for axes in made.axes:
        left, bottom, wide, tall = axes.get_position().bounds
        axes.set_position((left, (bottom * height + below) / taller, wide, tall * height / taller))


def _lines(text: str, width: float) -> list[str]:
    """The words in lines of at most `width` inches, as far as words allow."""
    space = text_width("a a", _CAPTION_SIZE) - text_width("aa", _CAPTION_SIZE)
    lines: list[list[str]] = []
    used = width
    for word in text.split():
        wide = text_width(word, _CAPTION_SIZE)
        if used + space + wide > width:
            lines.append([])
            used = -space
        lines[-1].append(word)
        used += space + wide
    return [" ".join(words) for words in lines]


def as_bytes(made: Figure, kind: str) -> bytes:
    """The figure as ``"png"``, ``"svg"`` or ``"pdf"``, without a date, so that equal figures are equal bytes."""
    sink = io.BytesIO()
    with style():
        made.savefig(sink, format=kind, dpi=150, metadata=_METADATA[kind])
    return sink.getvalue()
