"""Plots of a replay over its steps, as PNG and SVG. Needs matplotlib (extra ``plot``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..reports import plot_style, plots
from ..reports.plot_style import LineEnd
from .metrics import ReplayPoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BYTES_PER_MIB = float(1 << 20)

Points = Sequence[ReplayPoint]
Value = Callable[[ReplayPoint], float | None]

PLOTS: dict[str, tuple[str, str, dict[str, Value]]] = {
    "memory_over_steps": (
        "Memory over tokens",
        "K and V, all layers (MiB)",
        {
            "appended": lambda point: point.appended_bytes / _BYTES_PER_MIB,
            "live": lambda point: point.live_bytes / _BYTES_PER_MIB,
            "held": lambda point: point.held_bytes / _BYTES_PER_MIB,
        },
    ),
    "ratio_over_steps": (
        "Lossless ratio over tokens",
        "raw bytes over stored bytes",
        {
            "encoded blocks": lambda point: point.ratio,
            "all that is live": lambda point: point.live_bytes / max(1, point.held_bytes),
        },
    ),
    "queue_over_steps": (
        "Queue over tokens",
        "most open encodings so far",
        {"queue peak": lambda point: point.queue_depth_peak},
    ),
    "latency_over_steps": (
        "Latency over tokens",
        "time of a step in the runtime (ms)",
        {"runtime": lambda point: point.step_us / 1e3},
    ),
}
"""Title, y label and lines of each plot, by the name of its file."""


def check_can_write(directory: str | os.PathLike[str], overwrite: bool = False) -> None:
    """Raise the errors of `write_plots` that can be found before drawing."""
    plots.check_can_write(PLOTS, directory, overwrite)


def write_plots(points: Points, directory: str | os.PathLike[str], overwrite: bool = False) -> list[Path]:
    """Draw all plots; return the files."""
    return plots.write_figures(_draw_plots(points), directory, overwrite)


def _draw_plots(points: Points) -> Iterator[tuple[str, Figure]]:
    for file_name, (title, ylabel, lines) in PLOTS.items():
        with plot_style.use_style():
            figure = _draw_lines(points, title, ylabel, lines)
        yield file_name, figure


def _draw_lines(points: Points, title: str, ylabel: str, lines: Mapping[str, Value]) -> Figure:
    figure, axes = plot_style.make_figure(5.6, 4.0, list(lines))
    ends = []
    for number, (name, value) in enumerate(lines.items()):
        line_style = plot_style.make_line_style(number) | {"marker": None}
        series = [(point.tokens, height) for point in points if (height := value(point)) is not None]
        if series:
            axes.plot(*zip(*series, strict=True), **line_style)
            ends.append(LineEnd(name, *series[-1], line_style))
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.set(title=title, xlabel="tokens", ylabel=ylabel)
    plot_style.add_line_labels(axes, ends)
    return figure
