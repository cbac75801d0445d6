"""Plots as inline SVG whose colours are the page's own variables, so that they are legible in light, dark and print."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from html import escape
from typing import TYPE_CHECKING, Any
from xml.etree import ElementTree

from ..._util.packages import import_optional
from ..._util.text import escape_control
from .. import plot_style
from ..figures import compute_log_ticks
from .blocks import ChartBlock, ChartPoint, ChartSeries, thin_points

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUM_COLOURS = 8
MARKERS = ("o", "s", "^", "D", "v")
DASHES = ("-", (0, (5, 2)), (0, (1.5, 1.5)))

_SVG_NAMESPACE = "http://www.w3.org/2000/svg"
_INK_COLOUR, _MUTED_COLOUR, _RULE_COLOUR, _CARD_COLOUR = "#010101", "#020202", "#030303", "#040404"
_SERIES_COLOURS = tuple(f"#0a000{place}" for place in range(NUM_COLOURS))
_CSS_VARIABLES = {_INK_COLOUR: "--ink", _MUTED_COLOUR: "--muted", _RULE_COLOUR: "--rule", _CARD_COLOUR: "--card"} | {
    colour: f"--s{place}" for place, colour in enumerate(_SERIES_COLOURS)
}
"""Placeholder colours for CSS variables while matplotlib draws."""

_WIDTH, _HEIGHT = 338.0, 226.0
_LEFT_MARGIN, _RIGHT_MARGIN, _TOP_MARGIN, _BOTTOM_MARGIN = 50.0, 14.0, 26.0, 42.0
_MIN_LOG_VALUE = 1e-18
"""On a logarithmic axis; below it axes are linear."""

_ROW_HEIGHT = 36.0
_ROWS_TOP_MARGIN = 6.0
_FONT_SIZE = 11.0
_MAX_NAME_CHARS = 42
"""Maximum letters of a row's name."""


def render_svg(chart: ChartBlock, prefix: str, points: int) -> str:
    """Render a plot as SVG; up to `points` points of each series show their values on hover."""
    import_optional("matplotlib.figure")
    with plot_style.use_style():
        figure, axes = _make_figure(chart)
        (_draw_rows if chart.row_names else _draw_lines)(axes, chart)
        sink = io.StringIO()
        import matplotlib

        with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "kvmnn", "font.size": _FONT_SIZE}):
            figure.savefig(sink, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
        hits = "".join(_make_hover_circles(axes, chart, points))
    return _apply_theme(sink.getvalue(), prefix, f"{chart.title}. {chart.summary}", hits)


def make_series_style(series: ChartSeries) -> dict[str, Any]:
    """Return the style of a series, in the plot and in its key."""
    number = series.style_number
    return {
        "color": _SERIES_COLOURS[number % NUM_COLOURS],
        "marker": MARKERS[number % len(MARKERS)] if series.has_markers else None,
        "linestyle": (DASHES[1] if series.is_dashed else DASHES[number // NUM_COLOURS % 3])
        if series.has_line
        else "none",
    }


def format_value(value: float, digits: int) -> str:
    """Format a number as in plots and their tables, with as many digits as it needs."""
    if value == round(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    return f"{value:,.{digits}f}"


def _make_figure(chart: ChartBlock) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    top_margin = _ROWS_TOP_MARGIN if chart.row_names else _TOP_MARGIN
    height = top_margin + _BOTTOM_MARGIN + _ROW_HEIGHT * len(chart.row_names) if chart.row_names else _HEIGHT
    left_margin = _RIGHT_MARGIN if chart.row_names else _LEFT_MARGIN
    figure = Figure(figsize=(_WIDTH / 72, height / 72), dpi=72)
    figure.patch.set_visible(False)
    box = (
        left_margin / _WIDTH,
        _BOTTOM_MARGIN / height,
        (_WIDTH - left_margin - _RIGHT_MARGIN) / _WIDTH,
        (height - top_margin - _BOTTOM_MARGIN) / height,
    )
    axes = figure.add_axes(box)
    axes.patch.set_visible(False)
    axes.tick_params(colors=_MUTED_COLOUR, labelsize=_FONT_SIZE, length=3)
    axes.grid(True, color=_RULE_COLOUR)
    for spine in axes.spines.values():
        spine.set_edgecolor(_MUTED_COLOUR)
    axes.set_xlabel(_clip_text(chart.x), color=_INK_COLOUR, fontsize=_FONT_SIZE)
    if not chart.row_names:
        figure.text(4 / _WIDTH, 1 - 13 / height, _clip_text(chart.y), color=_INK_COLOUR, fontsize=_FONT_SIZE)
    return figure, axes


def _draw_lines(axes: Axes, chart: ChartBlock) -> None:
    all_points = [point for chart_series in chart.series for point in chart_series.points]
    for chart_series in chart.series:
        style = make_series_style(chart_series)
        xs, ys = [point.x for point in chart_series.points], [point.y for point in chart_series.points]
        for point in chart_series.points:
            if point.low is not None and point.high is not None:
                axes.plot([point.x, point.x], [point.low, point.high], color=style["color"], linewidth=1, alpha=0.7)
        is_dense = len(xs) > 40
        axes.plot(
            xs,
            ys,
            **style | ({"marker": None} if is_dense and chart_series.has_line else {}),
            linewidth=1.6,
            markersize=4.6,
            zorder=2.6 if chart_series.is_dashed else 2.3,
        )
        hollow = [point for point in chart_series.points if point.is_hollow]
        if hollow and not is_dense:
            hollow_style = {"linestyle": "none", "markerfacecolor": _CARD_COLOUR, "markeredgecolor": style["color"]}
            axes.plot([point.x for point in hollow], [point.y for point in hollow], **style | hollow_style,
            markersize=4.6,
                      zorder=2.7)  # fmt: skip
    for value, _ in chart.limits:
        axes.axhline(value, color=_INK_COLOUR, linewidth=1, linestyle=(0, (5, 2)))
    if chart.is_log_y:
        _set_log_axis(axes, "y", [point.y for point in all_points])
    elif chart.starts_at_zero:
        axes.set_ylim(bottom=min(0.0, min((point.y for point in all_points), default=0.0)))
    if chart.is_log_x:
        _set_log_axis(axes, "x", [point.x for point in all_points], uses_values=chart.has_integer_x)
    elif chart.has_integer_x:
        _set_integer_ticks(axes)
    axes.margins(x=0.03)
    axes.yaxis.set_major_formatter(_format_tick)
    if not chart.is_log_y:
        axes.locator_params(axis="y", nbins=6)


def _draw_rows(axes: Axes, chart: ChartBlock) -> None:
    """Draw dots on one line for each row; names are above the lines, where long ones fit."""
    rows = len(chart.row_names)
    sides = len(chart.series)
    for index, chart_series in enumerate(chart.series):
        style = make_series_style(chart_series) | {"linestyle": "none"}
        ys = [point.y + _compute_row_offset(index, sides) for point in chart_series.points]
        axes.plot([point.x for point in chart_series.points], ys, **style, markersize=5.4, alpha=0.9)
    for value, _ in chart.limits:
        axes.axvline(value, color=_INK_COLOUR, linewidth=1, linestyle=(0, (5, 2)))
    axes.set_ylim(rows - 0.6, -0.76)
    axes.set_yticks([])
    axes.grid(False, axis="y")
    for index, name in enumerate(chart.row_names):
        axes.axhline(index, color=_RULE_COLOUR, linewidth=0.7, zorder=0)
        axes.text(0.006, index - 0.44, _clip_text(name, _MAX_NAME_CHARS), transform=axes.get_yaxis_transform(),
        color=_INK_COLOUR,
                  fontsize=_FONT_SIZE - 0.5, va="center", zorder=3,
                  bbox={"facecolor": _CARD_COLOUR, "edgecolor": "none", "pad": 1.0})  # fmt: skip
    axes.spines["left"].set_visible(False)
    xs = [point.x for chart_series in chart.series for point in chart_series.points]
    if chart.is_log_x:
        _set_log_axis(axes, "x", xs)
    else:
        max_value = max([*xs, *(value for value, _ in chart.limits)], default=1.0)
        min_value = min([0.0, *xs])
        margin = 0.04 * (max_value - min_value or 1.0)
        axes.set_xlim(min_value - margin, max_value + margin)
        axes.locator_params(axis="x", nbins=6)
        axes.xaxis.set_major_formatter(_format_tick)


def _compute_row_offset(index: int, sides: int) -> float:
    """Return the vertical offset of a series within its row, so that equal values remain visible."""
    return 0.13 * (index - (sides - 1) / 2) + 0.1


def _set_log_axis(axes: Axes, name: str, values: Sequence[float], *, uses_values: bool = False) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = min(values), max(values)
    if low < _MIN_LOG_VALUE:
        return
    margin_factor = max((high / low) ** 0.06, 1.06)
    low, high = low / margin_factor, high * margin_factor
    (axes.set_xscale if name == "x" else axes.set_yscale)("log")
    (axes.set_xlim if name == "x" else axes.set_ylim)(low, high)
    axis = axes.xaxis if name == "x" else axes.yaxis
    ticks: list[float] = []
    for tick in sorted(set(values)) if uses_values else compute_log_ticks(low, high):
        if low <= tick <= high and (not ticks or tick >= ticks[-1] * (high / low) ** 0.17):
            ticks.append(tick)
    axis.set_major_locator(FixedLocator(ticks))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(_format_tick))


def _set_integer_ticks(axes: Axes) -> None:
    from matplotlib.ticker import FuncFormatter, MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(nbins=6, integer=True, min_n_ticks=1))
    axes.xaxis.set_major_formatter(FuncFormatter(_format_tick))


def _format_tick(value: float, _: object = None) -> str:
    if value == 0:
        return "0"
    digits = max(0, 3 - math.floor(math.log10(abs(value))))
    text = f"{value:,.{min(digits, 6)}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _make_hover_circles(axes: Axes, chart: ChartBlock, points: int) -> Sequence[str]:
    """Make a circle around each point that shows its description on hover."""
    height = float(axes.figure.get_size_inches()[1]) * 72
    circles = []
    for index, chart_series in enumerate(chart.series):
        row_offset = _compute_row_offset(index, len(chart.series)) if chart.row_names else 0.0
        for point in thin_points(chart_series.points, points):
            x, y = axes.transData.transform((point.x, point.y + row_offset))
            point_text = escape(escape_control(describe_point(chart, chart_series, point), keep_line_ends=False))
            circles.append(f'<circle cx="{x:.1f}" cy="{height - y:.1f}" r="6"><title>{point_text}</title></circle>')
    return circles


def describe_point(chart: ChartBlock, series: ChartSeries, point: ChartPoint) -> str:
    """Describe a point in words."""
    name = series.name if point.name in ("", series.name) else f"{series.name}, {point.name}"
    if chart.row_names:
        return f"{name}: {format_value(point.x, chart.digits)} {chart.x}"
    text = f"{name}: {chart.y} {format_value(point.y, chart.digits)}"
    if point.low is not None and point.high is not None:
        text += f" ({format_value(point.low, chart.digits)} to {format_value(point.high, chart.digits)})"
    return f"{text} at {chart.x} {format_value(point.x, chart.digits)}"


def _clip_text(text: str, max_chars: int = 60) -> str:
    visible_text = escape_control(text, keep_line_ends=False)
    return visible_text if len(visible_text) <= max_chars else visible_text[: max_chars - 3] + "..."


def _apply_theme(text: str, prefix: str, label: str, hits: str) -> str:
    """Adapt an SVG to a page: unique ids, the page's colours and fonts, and a label for screen readers."""
    ElementTree.register_namespace("", _SVG_NAMESPACE)
    ElementTree.register_namespace("xlink", "http://www.w3.org/1999/xlink")
    root = ElementTree.fromstring(text)
    for parent in list(root.iter()):
        for child in list(parent):
            if child.tag in (f"{{{_SVG_NAMESPACE}}}metadata", f"{{{_SVG_NAMESPACE}}}style"):
                parent.remove(child)
        if parent.tag == f"{{{_SVG_NAMESPACE}}}g":
            parent.attrib.pop("id", None)
    for name in ("width", "height", "version"):
        root.attrib.pop(name, None)
    root.set("class", "plot")
    root.set("role", "img")
    root.set("aria-label", escape_control(label, keep_line_ends=False))
    svg_text = ElementTree.tostring(root, encoding="unicode")
    svg_text = re.sub(r' id="', f' id="{prefix}', svg_text)
    svg_text = svg_text.replace("url(#", f"url(#{prefix}").replace('xlink:href="#', f'href="#{prefix}')
    svg_text = re.sub(r' xmlns(?::xlink)?="[^"]*"', "", svg_text)
    svg_text = re.sub(r"font: ([\d.]+)px [^;\"]*", r"font-size: \1px", svg_text)
    svg_text = re.sub(r" ?font-family: [^;\"]*;?", "", svg_text)
    svg_text = re.sub(r"(?<![\w#.])-?\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}", svg_text)
    for colour, variable in _CSS_VARIABLES.items():
        svg_text = svg_text.replace(colour, f"var({variable})")
    return svg_text.replace("</svg>", f'<g class="hits">{hits}</g></svg>') if hits else svg_text
