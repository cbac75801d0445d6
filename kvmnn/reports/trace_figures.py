"""Plots of one document's course: bytes held, and which tokens live."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..policies.full import Full
from . import plot_style
from .figure_parts import NothingToShowError
from .plot_style import FULL, MUTED, LineEnd
from .results import KeepMap, Results, Trace
from .series import Looks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_MAPS = 9
_MAP_CELLS = 400
_MIB = float(1 << 20)
_GREY = "#e3e3e3"
_LIVE, _GONE, _UNSEEN = 0, 1, 2


def memory_over_time(results: Results) -> Figure:
    """Bytes that the cache holds over the tokens seen."""
    traces = _of_first_document([trace for trace in results.traces if trace.cache_bytes])
    if not traces:
        raise NothingToShowError("no run recorded the bytes of its cache")
    made, axes = plot_style.figure(5.6, 4.0, [trace.label for trace in traces])
    looks = _looks(results)
    courses = [(*trace.step_tokens, *trace.cache_bytes) for trace in traces]
    ends, shared = [], False
    for number, (trace, course) in enumerate(zip(traces, courses, strict=True)):
        steps, sizes = trace.step_tokens, [size / _MIB for size in trace.cache_bytes]
        look, turns = looks[trace.label], {}
        alike, before = courses.count(course), courses[:number].count(course)
        if alike > 1 and look["color"] != FULL["color"]:
            turns = {"linestyle": (4 * before, (4, 4 * (alike - 1)))}
            shared = True
        axes.plot(steps, sizes, **look | turns)
        ends.append(LineEnd(trace.label, steps[-1], sizes[-1], look))
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    plot_style.title(axes, "Memory over time")
    axes.set(xlabel="tokens seen", ylabel="K and V held, all layers (MiB)")
    plot_style.label_lines(axes, ends)
    turns_text = (
        " One line in several colours: these policies hold the same, their colours take turns." if shared else ""
    )
    plot_style.caption(made, f"Document: {traces[0].document}.{turns_text}")
    return made


def keep_map(results: Results) -> Figure:
    """Which tokens of one document live, over the tokens seen: a panel for each policy."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    maps = [(trace, trace.keep_map) for trace in results.traces if trace.keep_map is not None and trace.keep_map.steps]
    # The full cache keeps everything: its panel would be a triangle.
    full = {row.label for row in results.rows if row.is_full} | {Full.name}
    every = [
        (trace, found) for trace, found in maps if trace.label not in full and trace.document == maps[0][0].document
    ]
    shown = every[:MAX_MAPS]
    if not shown:
        raise NothingToShowError("no run that cuts the cache recorded which tokens live")
    columns = min(len(shown), 3)
    lines = -(-len(shown) // columns)
    cell, left, foot, between = 2.9, 0.7, 0.85, 0.5
    made = Figure(figsize=(left + columns * (cell + 0.25) + 0.1, foot + lines * (cell + between)))
    width, height = made.get_size_inches()
    looks = Looks(results.rows)
    for number, (trace, found) in enumerate(shown):
        line, column = divmod(number, columns)
        box = (left + column * (cell + 0.25), foot + (lines - 1 - line) * (cell + between), cell, cell)
        axes = made.add_axes((box[0] / width, box[1] / height, cell / width, cell / height))
        image, tokens = _image(found)
        colours = ListedColormap([looks.of(trace.label)["color"], _GREY, "white"])
        axes.imshow(
            image, cmap=colours, vmin=0, vmax=2, origin="lower", extent=(0, tokens, 0, tokens), interpolation="nearest"
        )
        axes.grid(False)
        axes.set_title("\n".join(textwrap.wrap(trace.label, 36)[:2]), fontsize=9)
        which = f"layer {found.layer}, KV head {found.kv_head}"
        axes.text(0.03, 0.97, which, transform=axes.transAxes, va="top", fontsize=7.5, color=MUTED)
        if column == 0:
            axes.set_ylabel("position in the text (token)")
        else:
            axes.tick_params(labelleft=False)
        if number + columns >= len(shown):
            axes.set_xlabel("tokens seen")
        else:
            axes.tick_params(labelbottom=False)
    more = f" {len(every) - len(shown)} more not shown." if len(every) > len(shown) else ""
    plot_style.caption(made, f"Coloured: live. Grey: evicted. Document: {shown[0][0].document}.{more}")
    return made


def _looks(results: Results) -> dict[str, dict[str, Any]]:
    """How each row's course is drawn: in its policy's colour; sizes are told apart by how high they lie."""
    looks, found = Looks(results.rows), {Full.name: FULL}
    for trace in results.traces:
        row = next((row for row in results.rows if row.label == trace.label), None)
        full = row is not None and row.is_full
        found.setdefault(trace.label, FULL if full else looks.of(trace.label) | {"marker": None, "linestyle": "-"})
    return found


def _image(recorded: KeepMap) -> tuple[npt.NDArray[np.uint8], int]:
    """``[position, step]`` of `_LIVE`, `_GONE` and `_UNSEEN`, both axes linear in tokens; and how many tokens."""
    steps = np.asarray(recorded.steps, np.int64)
    tokens = int(steps[-1])
    cells = min(tokens, _MAP_CELLS)
    places = (np.arange(cells) + 0.5) * tokens / cells
    image = np.full((cells, cells), _UNSEEN, np.uint8)
    for column, recording in enumerate(np.minimum(np.searchsorted(steps, places), len(steps) - 1)):
        image[places < steps[recording], column] = _GONE
        kept = np.asarray(recorded.kept[recording], np.int64)
        # A cell stands for several tokens: it lives if the nearest one does, so that shares look right.
        image[np.isin(places.astype(np.int64), kept), column] = _LIVE
    return image, tokens


def _of_first_document(traces: Sequence[Trace]) -> list[Trace]:
    return [trace for trace in traces if trace.document == traces[0].document]
