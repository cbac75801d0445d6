"""Plots as inline SVG whose colours are the page's own variables, so that they are legible in light, dark and print."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from ...optional import package
from ...text import visible
from .. import plot_style
from ..figure_parts import log_ticks
from .blocks import Chart, Point, Series, thinned

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = 8
MARKERS = ("o", "s", "^", "D", "v")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))

_SVG = "http://www.w3.org/2000/svg"
_INK, _MUTED, _RULE, _CARD = "#010101", "#020202", "#030303", "#040404"
_SERIES = tuple(f"#0a000{place}" for place in range(COLOURS))
_VARIABLES = {_INK: "--ink", _MUTED: "--muted", _RULE: "--rule", _CARD: "--card"} | {
    colour: f"--s{place}" for place, colour in enumerate(_SERIES)
}
"""Colours that stand for variables while matplotlib draws."""

_WIDTH, _HEIGHT = 338.0, 226.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 14.0, 26.0, 42.0
_LEAST = 1e-18
"""On a logarithmic axis; below it axes are linear."""

_ROW = 36.0
_ABOVE = 6.0
_FONT = 11.0
_NAME = 42
"""Letters of a name that a row has room for."""


def svg(chart: Chart, prefix: str, points: int) -> str:
    """A plot as SVG with the values of at most `points` points of a series on hover.

    Parameters
    ----------
    prefix
        Of every id in it, so that several plots can stand in one page.
    """
    package("matplotlib.figure")
    with plot_style.style():
        made, axes = _figure(chart)
        (_across if chart.across else _lines)(axes, chart)
        sink = io.StringIO()
        import matplotlib

        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvmnn", "font.size": _FONT}):
            made.savefig(sink, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        hits = "".join(_hits(axes, chart, points))
    return _themed(sink.getvalue(), prefix, f"{chart.title}. {chart.said}", hits)


def look(series: Series) -> dict[str, Any]:
    """How a series is drawn; the same in the key of the plot."""
    number = series.look
    return {
        "color": _SERIES[number % COLOURS],
        "marker": MARKERS[number % len(MARKERS)] if series.marker else None,
        "linestyle": (DASHES[1] if series.dashed else DASHES[number // COLOURS % 3]) if series.line else "none",
    }


def shown(value: float, digits: int) -> str:
    """A number as plots and their tables have it; no more digits than it needs."""
    if value == round(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.{digits}f}"


def _figure(chart: Chart) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    top = _ABOVE if chart.across else _TOP
    height = top + _BOTTOM + _ROW * len(chart.across) if chart.across else _HEIGHT
    left = _RIGHT if chart.across else _LEFT
    made = Figure(figsize=(_WIDTH / 72, height / 72), dpi=72)
    made.patch.set_visible(False)
    box = (left / _WIDTH, _BOTTOM / height, (_WIDTH - left - _RIGHT) / _WIDTH, (height - top - _BOTTOM) / height)
    axes = made.add_axes(box)
    axes.patch.set_visible(False)
    axes.tick_params(colors=_MUTED, labelsize=_FONT, length=3)
    axes.grid(True, color=_RULE)
    for spine in axes.spines.values():
        spine.set_edgecolor(_MUTED)
    axes.set_xlabel(_text(chart.x), color=_INK, fontsize=_FONT)
    if not chart.across:
        made.text(4 / _WIDTH, 1 - 13 / height, _text(chart.y), color=_INK, fontsize=_FONT)
    return made, axes


def _lines(axes: Axes, chart: Chart) -> None:
    every = [point for one in chart.series for point in one.points]
    for one in chart.series:
        style = look(one)
        xs, ys = [point.x for point in one.points], [point.y for point in one.points]
        for point in one.points:
            if point.low is not None and point.high is not None:
                axes.plot([point.x, point.x], [point.low, point.high], color=style["color"], linewidth=1, alpha=0.7)
        dense = len(xs) > 40
        axes.plot(
            xs,
            ys,
            **style | ({"marker": None} if dense and one.line else {}),
            linewidth=1.6,
            markersize=4.6,
            zorder=2.6 if one.dashed else 2.3,
        )
        hollow = [point for point in one.points if point.is_hollow]
        if hollow and not dense:
            empty = {"linestyle": "none", "markerfacecolor": _CARD, "markeredgecolor": style["color"]}
            axes.plot([point.x for point in hollow], [point.y for point in hollow], **style | empty, markersize=4.6,
                      zorder=2.7)  # fmt: skip
    for value, _ in chart.limits:
        axes.axhline(value, color=_INK, linewidth=1, linestyle=(0, (5, 2)))
    if chart.log_y:
        _log(axes, "y", [point.y for point in every])
    elif chart.from_zero:
        axes.set_ylim(bottom=min(0.0, min((point.y for point in every), default=0.0)))
    if chart.log_x:
        _log(axes, "x", [point.x for point in every], exact=chart.whole_x)
    elif chart.whole_x:
        _whole(axes)
    axes.margins(x=0.03)
    axes.yaxis.set_major_formatter(_number_format)
    if not chart.log_y:
        axes.locator_params(axis="y", nbins=6)


def _across(axes: Axes, chart: Chart) -> None:
    """Dots on lines of their own; names stand above the lines, where any length finds room."""
    rows = len(chart.across)
    sides = len(chart.series)
    for place, one in enumerate(chart.series):
        style = look(one) | {"linestyle": "none"}
        ys = [point.y + _aside(place, sides) for point in one.points]
        axes.plot([point.x for point in one.points], ys, **style, markersize=5.4, alpha=0.9)
    for value, _ in chart.limits:
        axes.axvline(value, color=_INK, linewidth=1, linestyle=(0, (5, 2)))
    axes.set_ylim(rows - 0.6, -0.76)
    axes.set_yticks([])
    axes.grid(False, axis="y")
    for place, name in enumerate(chart.across):
        axes.axhline(place, color=_RULE, linewidth=0.7, zorder=0)
        axes.text(0.006, place - 0.44, _text(name, _NAME), transform=axes.get_yaxis_transform(), color=_INK,
                  fontsize=_FONT - 0.5, va="center", zorder=3,
                  bbox={"facecolor": _CARD, "edgecolor": "none", "pad": 1.0})  # fmt: skip
    axes.spines["left"].set_visible(False)
    xs = [point.x for one in chart.series for point in one.points]
    if chart.log_x:
        _log(axes, "x", xs)
    else:
        most = max([*xs, *(value for value, _ in chart.limits)], default=1.0)
        least = min([0.0, *xs])
        room = 0.04 * (most - least or 1.0)
        axes.set_xlim(least - room, most + room)
        axes.locator_params(axis="x", nbins=6)
        axes.xaxis.set_major_formatter(_number_format)


def _aside(place: int, sides: int) -> float:
    """How far below its line a series lies, so that equal values are both seen."""
    return 0.13 * (place - (sides - 1) / 2) + 0.1


def _log(axes: Axes, name: str, values: Sequence[float], *, exact: bool = False) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = min(values), max(values)
    if low < _LEAST:
        return
    room = max((high / low) ** 0.06, 1.06)
    low, high = low / room, high * room
    (axes.set_xscale if name == "x" else axes.set_yscale)("log")
    (axes.set_xlim if name == "x" else axes.set_ylim)(low, high)
    axis = axes.xaxis if name == "x" else axes.yaxis
    found: list[float] = []
    for tick in sorted(set(values)) if exact else log_ticks(low, high):
        if low <= tick <= high and (not found or tick >= found[-1] * (high / low) ** 0.17):
            found.append(tick)
    axis.set_major_locator(FixedLocator(found))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(_number_format))


def _whole(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(_number_format))


def _number_format(value: float, _: object = None) -> str:
    if value == 0:
        return "0"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _hits(axes: Axes, chart: Chart, points: int) -> Sequence[str]:
    """Rings around points, each with what it stands for."""
    height = float(axes.figure.get_size_inches()[1]) * 72
    found = []
    for place, one in enumerate(chart.series):
        aside = _aside(place, len(chart.series)) if chart.across else 0.0
        for point in thinned(one.points, points):
            x, y = axes.transData.transform((point.x, point.y + aside))
            said = escape(visible(told(chart, one, point), lines=False))
            found.append(f'<circle cx="{x:.1f}" cy="{height - y:.1f}" r="6"><title>{said}</title></circle>')
    return found


def told(chart: Chart, series: Series, point: Point) -> str:
    """A point in words."""
    name = series.name if point.name in ("", series.name) else f"{series.name}, {point.name}"
    if chart.across:
        return f"{name}: {shown(point.x, chart.digits)} {chart.x}"
    text = f"{name}: {chart.y} {shown(point.y, chart.digits)}"
    if point.low is not None and point.high is not None:
        text += f" ({shown(point.low, chart.digits)} to {shown(point.high, chart.digits)})"
    return f"{text} at {chart.x} {shown(point.x, chart.digits)}"


def _text(text: str, most: int = 60) -> str:
    said = visible(text, lines=False)
    return said if len(said) <= most else said[: most - 3] + "..."


def _themed(text: str, prefix: str, label: str, hits: str) -> str:
    """The SVG as a part of a page: its own ids, the page's colours and letters, and a name for those who do not see."""
    ElementTree.register_namespace("", _SVG)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(text)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG}}}metadata", f"{{{_SVG}}}style"):
                parent.remove(child)
        if parent.tag == f"{{{_SVG}}}g":
            parent.attrib.pop("id", None)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("class", "plot")
    root.set("role", "img")
    root.set("aria-label", visible(label, lines=False))
    found = ElementTree.tostring(root, encoding="unicode")
    found = re.sub(r' id="', f' id="{prefix}', found)
    found = found.replace("url(#", f"url(#{prefix}").replace('xlink:href="#', f'href="#{prefix}')
    found = re.sub(r' xmlns(?::xlink)?="[^"]*"', "", found)
    found = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", found)
    found = re.sub(r" ?font-family: [^;\"]*;?", "", found)
    found = re.sub(r"(?<![\w#.])-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}", found)
    for colour, variable in _VARIABLES.items():
        found = found.replace(colour, f"var({variable})")
    return found.replace("</svg>", f'<g class="hits">{hits}</g></svg>') if hits else found
