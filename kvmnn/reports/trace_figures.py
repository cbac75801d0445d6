"""Plots of one document's course: bytes held, and which tokens live."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..policies.full import FullCache
from . import plot_style
from .figure_parts import NothingToShowError
from .plot_style import FULL_CACHE_STYLE, MUTED_COLOUR, LineEnd
from .results import DocumentTrace, EvaluationResultsProtocol, KeepMap
from .series import LineStyles

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MAX_KEEP_MAPS = 9
_MAX_MAP_CELLS = 400
_MIB = float(1 << 20)
_EVICTED_COLOUR = "#e3e3e3"
_LIVE, _EVICTED, _NOT_SEEN = 0, 1, 2


def memory_over_time(results: EvaluationResultsProtocol) -> Figure:
    """Bytes that the cache holds over the tokens seen."""
    traces = _select_first_document([trace for trace in results.traces if trace.cache_bytes])
    if not traces:
        raise NothingToShowError("no run recorded the bytes of its cache")
    figure, axes = plot_style.make_figure(5.6, 4.0, [trace.label for trace in traces])
    styles = _make_line_styles(results)
    curves = [(*trace.step_tokens, *trace.cache_bytes) for trace in traces]
    ends, has_shared_line = [], False
    for number, (trace, curve) in enumerate(zip(traces, curves, strict=True)):
        steps, sizes = trace.step_tokens, [size / _MIB for size in trace.cache_bytes]
        style, dash_style = styles[trace.label], {}
        num_equal, num_earlier = curves.count(curve), curves[:number].count(curve)
        if num_equal > 1 and style["color"] != FULL_CACHE_STYLE["color"]:
            dash_style = {"linestyle": (4 * num_earlier, (4, 4 * (num_equal - 1)))}
            has_shared_line = True
        axes.plot(steps, sizes, **style | dash_style)
        ends.append(LineEnd(trace.label, steps[-1], sizes[-1], style))
    axes.set_ylim(bottom=0)
    axes.margins(x=0.01)
    plot_style.set_title(axes, "Memory over time")
    axes.set(xlabel="tokens seen", ylabel="K and V held, all layers (MiB)")
    plot_style.add_line_labels(axes, ends)
    shared_text = (
        " One line in several colours: these policies hold the same, their colours take turns."
        if has_shared_line
        else ""
    )
    plot_style.add_caption(figure, f"Document: {traces[0].document}.{shared_text}")
    return figure


def keep_map(results: EvaluationResultsProtocol) -> Figure:
    """Which tokens of one document live, over the tokens seen: a panel for each policy."""
    from matplotlib.colors import ListedColormap
    from matplotlib.figure import Figure

    maps = [(trace, trace.keep_map) for trace in results.traces if trace.keep_map is not None and trace.keep_map.steps]
    # The full cache keeps everything: its panel would be a triangle.
    full = {row.label for row in results.rows if row.is_full} | {FullCache.name}
    all_maps = [
        (trace, recorded_map)
        for trace, recorded_map in maps
        if trace.label not in full and trace.document == maps[0][0].document
    ]
    shown_maps = all_maps[:MAX_KEEP_MAPS]
    if not shown_maps:
        raise NothingToShowError("no run that cuts the cache recorded which tokens live")
    columns = min(len(shown_maps), 3)
    lines = -(-len(shown_maps) // columns)
    cell, left_margin, bottom_margin, row_gap = 2.9, 0.7, 0.85, 0.5
    figure = Figure(figsize=(left_margin + columns * (cell + 0.25) + 0.1, bottom_margin + lines * (cell + row_gap)))
    width, height = figure.get_size_inches()
    styles = LineStyles(results.rows)
    for number, (trace, recorded_map) in enumerate(shown_maps):
        line, column = divmod(number, columns)
        box = (left_margin + column * (cell + 0.25), bottom_margin + (lines - 1 - line) * (cell + row_gap), cell, cell)
        axes = figure.add_axes((box[0] / width, box[1] / height, cell / width, cell / height))
        image, tokens = _make_keep_image(recorded_map)
        colours = ListedColormap([styles.get_style(trace.label)["color"], _EVICTED_COLOUR, "white"])
        axes.imshow(
            image, cmap=colours, vmin=0, vmax=2, origin="lower", extent=(0, tokens, 0, tokens), interpolation="nearest"
        )
        axes.grid(False)
        axes.set_title("\n".join(textwrap.wrap(trace.label, 36)[:2]), fontsize=9)
        map_text = f"layer {recorded_map.layer}, KV head {recorded_map.kv_head}"
        axes.text(0.03, 0.97, map_text, transform=axes.transAxes, va="top", fontsize=7.5, color=MUTED_COLOUR)
        if column == 0:
            axes.set_ylabel("position in the text (token)")
        else:
            axes.tick_params(labelleft=False)
        if number + columns >= len(shown_maps):
            axes.set_xlabel("tokens seen")
        else:
            axes.tick_params(labelbottom=False)
    more_text = f" {len(all_maps) - len(shown_maps)} more not shown." if len(all_maps) > len(shown_maps) else ""
    plot_style.add_caption(figure, f"Coloured: live. Grey: evicted. Document: {shown_maps[0][0].document}.{more_text}")
    return figure


def _make_line_styles(results: EvaluationResultsProtocol) -> dict[str, dict[str, Any]]:
    """How each row's course is drawn: in its policy's colour; sizes are told apart by how high they lie."""
    styles, style_by_label = LineStyles(results.rows), {FullCache.name: FULL_CACHE_STYLE}
    for trace in results.traces:
        row = next((row for row in results.rows if row.label == trace.label), None)
        full = row is not None and row.is_full
        style_by_label.setdefault(
            trace.label,
            FULL_CACHE_STYLE if full else styles.get_style(trace.label) | {"marker": None, "linestyle": "-"},
        )
    return style_by_label


def _make_keep_image(recorded_map: KeepMap) -> tuple[npt.NDArray[np.uint8], int]:
    """``[position, step]`` of `_LIVE`, `_EVICTED` and `_NOT_SEEN`, both axes linear in tokens; and how many tokens."""
    steps = np.asarray(recorded_map.steps, np.int64)
    tokens = int(steps[-1])
    cells = min(tokens, _MAX_MAP_CELLS)
    positions = (np.arange(cells) + 0.5) * tokens / cells
    image = np.full((cells, cells), _NOT_SEEN, np.uint8)
    for column, sample_index in enumerate(np.minimum(np.searchsorted(steps, positions), len(steps) - 1)):
        image[positions < steps[sample_index], column] = _EVICTED
        live_positions = np.asarray(recorded_map.kept[sample_index], np.int64)
        # A cell stands for several tokens: it lives if the nearest one does, so that shares look right.
        image[np.isin(positions.astype(np.int64), live_positions), column] = _LIVE
    return image, tokens


def _select_first_document(traces: Sequence[DocumentTrace]) -> list[DocumentTrace]:
    return [trace for trace in traces if trace.document == traces[0].document]
