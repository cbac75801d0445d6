"""Plots of a replay over its steps, as PNG and SVG. Needs matplotlib (extra ``plot``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..reports import plot_style, plots
from ..reports.plot_style import LineEnd
from .metrics import ReplayPoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_BYTES_PER_MIB = float(1 << 20)

Points = Sequence[ReplayPoint]
LabelledValue = tuple[str, Callable[[ReplayPoint], float | None]]


def plot_memory(points: Points) -> Figure:
    """Bytes of all rows, of those that are left, and of what holds them."""
    lines: list[LabelledValue] = [
        ("appended", lambda point: point.appended_bytes / _BYTES_PER_MIB),
        ("live", lambda point: point.live_bytes / _BYTES_PER_MIB),
        ("held", lambda point: point.held_bytes / _BYTES_PER_MIB),
    ]
    return _draw_lines(points, "Memory over tokens", "K and V, all layers (MiB)", lines)


def plot_ratio(points: Points) -> Figure:
    """Ratio of what was encoded, and of the cache with its hot rows."""
    lines: list[LabelledValue] = [
        ("encoded blocks", lambda point: point.ratio),
        ("all that is live", lambda point: point.live_bytes / max(1, point.held_bytes)),
    ]
    return _draw_lines(points, "Lossless ratio over tokens", "raw bytes over stored bytes", lines)


def plot_queue(points: Points) -> Figure:
    """The highest number of open encodings so far."""
    lines: list[LabelledValue] = [("queue peak", lambda point: point.queue_depth_peak)]
    return _draw_lines(points, "Queue over tokens", "most open encodings so far", lines)


def plot_latency(points: Points) -> Figure:
    """What each step took in the runtime."""
    lines: list[LabelledValue] = [("runtime", lambda point: point.step_us / 1e3)]
    return _draw_lines(points, "Latency over tokens", "time of a step in the runtime (ms)", lines)


PLOTS: dict[str, Callable[[Points], Figure]] = {
    "memory_over_steps": plot_memory,
    "ratio_over_steps": plot_ratio,
    "queue_over_steps": plot_queue,
    "latency_over_steps": plot_latency,
}
"""Every plot by its name, which is its file's name."""


def check_can_write(directory: str | os.PathLike[str], overwrite: bool = False) -> None:
    """Refuse to begin what could not end in plots; errors as `plot_files.require`."""
    plots.check_can_write(PLOTS, directory, overwrite)


def write_plots(points: Points, directory: str | os.PathLike[str], overwrite: bool = False) -> list[Path]:
    """Draw all plots; returns the files. Errors as for `check_can_write`."""
    return plots.write_figures(_draw_plots(points), directory, overwrite)


def _draw_plots(points: Points) -> Iterator[tuple[str, Figure]]:
    for name, draw in PLOTS.items():
        with plot_style.use_style():
            figure = draw(points)
        yield name, figure


def _draw_lines(points: Points, title: str, ylabel: str, lines: Sequence[LabelledValue]) -> Figure:
    figure, axes = plot_style.make_figure(5.6, 4.0, [name for name, _ in lines])
    ends = []
    for number, (name, value) in enumerate(lines):
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
