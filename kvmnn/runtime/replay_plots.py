"""Plots of a replay over its steps, as PNG and SVG. Needs matplotlib (extra ``plot``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ..reports import plot_files, plot_style
from ..reports.plot_style import LineEnd
from .replay_point import ReplayPoint

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_MIB = float(1 << 20)

Points = Sequence[ReplayPoint]
Line = tuple[str, Callable[[ReplayPoint], float | None]]


def memory_over_steps(points: Points) -> Figure:
    """Bytes of all rows, of those that are left, and of what holds them."""
    lines: list[Line] = [
        ("appended", lambda point: point.appended_bytes / _MIB),
        ("live", lambda point: point.live_bytes / _MIB),
        ("held", lambda point: point.held_bytes / _MIB),
    ]
    return _drawn(points, "Memory over tokens", "K and V, all layers (MiB)", lines)


def ratio_over_steps(points: Points) -> Figure:
    """Ratio of what was encoded, and of the cache with its hot rows."""
    lines: list[Line] = [
        ("encoded blocks", lambda point: point.ratio),
        ("all that is live", lambda point: point.live_bytes / max(1, point.held_bytes)),
    ]
    return _drawn(points, "Lossless ratio over tokens", "raw bytes over stored bytes", lines)


def queue_over_steps(points: Points) -> Figure:
    """The highest number of open encodings so far."""
    lines: list[Line] = [("queue peak", lambda point: point.queue_depth_peak)]
    return _drawn(points, "Queue over tokens", "most open encodings so far", lines)


def latency_over_steps(points: Points) -> Figure:
    """What each step took in the runtime."""
    lines: list[Line] = [("runtime", lambda point: point.step_us / 1e3)]
    return _drawn(points, "Latency over tokens", "time of a step in the runtime (ms)", lines)


PLOTS: dict[str, Callable[[Points], Figure]] = {
    draw.__name__: draw for draw in (memory_over_steps, ratio_over_steps, queue_over_steps, latency_over_steps)
}
"""Every plot by its name, which is its file's name."""


def require(directory: str | os.PathLike[str], force: bool = False) -> None:
    """Refuse to begin what could not end in plots; errors as `plot_files.require`."""
    plot_files.require(PLOTS, directory, force)


def write_all(points: Points, directory: str | os.PathLike[str], force: bool = False) -> list[Path]:
    """Draw all plots; returns the files. Errors as for `require`."""
    return plot_files.write(_all(points), directory, force)


def _all(points: Points) -> Iterator[tuple[str, Figure]]:
    for name, draw in PLOTS.items():
        with plot_style.style():
            made = draw(points)
        yield name, made


def _drawn(points: Points, title: str, ylabel: str, lines: Sequence[Line]) -> Figure:
    made, axes = plot_style.figure(5.6, 4.0, [name for name, _ in lines])
    ends = []
    for number, (name, value) in enumerate(lines):
        look = plot_style.look(number) | {"marker": None}
        course = [(point.tokens, height) for point in points if (height := value(point)) is not None]
        if course:
            axes.plot(*zip(*course, strict=True), **look)
            ends.append(LineEnd(name, *course[-1], look))
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    axes.set(title=title, xlabel="tokens", ylabel=ylabel)
    plot_style.label_lines(axes, ends)
    return made
