"""The report of one case, ``summary.md``, in the form of the fork's analyser; its consumers read the last section."""

from __future__ import annotations

from collections.abc import Callable

from ...text import escape_markdown
from .analysis import Analysis
from .metric_rows import MetricRow

GATE_HEADING = "## Quality Gate"

_AVERAGES = (
    ("Avg target keep effective", "h2o_target_keep_effective", 4),
    ("Avg floor keep (sink+recent)", "h2o_floor_keep", 4),
    ("Avg quantized keep", "h2o_quantized_keep", 4),
    ("Avg evict us", "h2o_evict_us", 2),
    ("Avg codec us", "h2o_codec_us", 2),
    ("Avg lossless raw MB", "h2o_lossless_raw_mb", 4),
    ("Avg lossless comp MB", "h2o_lossless_comp_mb", 4),
    ("Avg lossless comp us", "h2o_lossless_comp_us", 2),
    ("Avg lossless decomp us", "h2o_lossless_decomp_us", 2),
    ("Avg lossless queue peak", "h2o_lossless_queue_peak", 2),
    ("Avg lossless fallback", "h2o_lossless_fallback", 2),
    ("Avg lossless backpressure skip", "h2o_lossless_backpressure_skip", 2),
    ("Avg lossless async queue peak", "h2o_lossless_async_queue_peak", 2),
    ("Avg lossless async wait us", "h2o_lossless_async_wait_us", 2),
    ("Avg lossless decode cache hit", "h2o_lossless_decode_cache_hit", 2),
    ("Avg lossless decode cache miss", "h2o_lossless_decode_cache_miss", 2),
)


def case_markdown(analysis: Analysis) -> str:
    """The report; ends with a newline. A missing column is 0, as the fork has it; that of own runs is left out."""
    parts = [
        ["# H2O final Summary"],
        _averages(analysis),
        ["## Best Lossy Ratio"],
        _best(analysis, lambda row: row.numbers["h2o_lossy"], "lossy ratio"),
        ["## Best Decode TPS"],
        _best(analysis, lambda row: row.decode, "decode tps"),
        ["## Best Total Ratio"],
        _best(analysis, lambda row: row.numbers["h2o_lossy"] * analysis.selected, "total ratio"),
        ["## Pareto Top-5 (by selected total then decode)"],
        _pareto(analysis),
        [GATE_HEADING],
        [escape_markdown(f"- {name}: {text}".replace("\n", " ")) for name, text in analysis.lines.items()],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _nothing_encoded(analysis: Analysis) -> bool:
    """Whether own runs encoded nothing: neither their ratio nor what the runtime did was measured then."""
    return analysis.measured and "lossless_selected_value" not in analysis.lines


def _of_lossless(analysis: Analysis, value: float) -> str:
    """The selected ratio, or a multiple of it; a dash where it was not measured."""
    return "-" if _nothing_encoded(analysis) else f"{value:.4f}"


def _averages(analysis: Analysis) -> list[str]:
    rows = analysis.rows
    lines = [
        f"- Rows: {len(rows.rows)}",
        f"- Avg keep ratio: {rows.mean('h2o_keep'):.4f}",
        f"- Avg lossy ratio: {rows.mean('h2o_lossy'):.4f}",
        f"- Avg runtime lossless ratio: {rows.mean('h2o_lossless'):.4f}",
        f"- Lossless selected source: {analysis.source}",
        f"- Lossless selected value: {_of_lossless(analysis, analysis.selected)}",
    ]
    if analysis.upper is not None:
        lines.append(f"- Offline upper-bound lossless: {analysis.upper.ratio:.4f}")
    if analysis.online is not None:
        lines.append(f"- Offline online-sim lossless: {analysis.online.ratio:.4f}")
    total = sum(row.numbers["h2o_lossy"] * analysis.selected for row in rows.rows) / len(rows.rows)
    lines.append(f"- Avg total ratio (selected): {_of_lossless(analysis, total)}")
    there = [entry for entry in _AVERAGES if not analysis.measured or entry[1] in rows.columns]
    if _nothing_encoded(analysis):
        there = [entry for entry in there if not entry[1].startswith("h2o_lossless")]
    return lines + [f"- {said}: {rows.mean(column):.{digits}f}" for said, column, digits in there]


def _best(analysis: Analysis, measure: Callable[[MetricRow], float], first: str) -> list[str]:
    """The row in which `measure` is largest, the figure called `first` before the others."""
    row = max(analysis.rows.rows, key=measure)
    found = {
        "decode tps": f"{row.decode:.2f}",
        "lossy ratio": f"{row.numbers['h2o_lossy']:.4f}",
        "keep ratio": f"{row.numbers['h2o_keep']:.4f}",
        f"lossless ratio ({analysis.source})": _of_lossless(analysis, analysis.selected),
        "runtime lossless ratio": f"{row.numbers['h2o_lossless']:.4f}",
        "total ratio": _of_lossless(analysis, row.numbers["h2o_lossy"] * analysis.selected),
        "log": f"`{escape_markdown(row.log_file)}`",
    }
    return [f"- {name}: {found[name]}" for name in dict.fromkeys([first, *found])]


def _pareto(analysis: Analysis) -> list[str]:
    def both(row: MetricRow) -> tuple[float, float]:
        return row.numbers["h2o_lossy"] * analysis.selected, row.decode

    rows = sorted(analysis.rows.rows, key=both, reverse=True)[:5]
    return [
        f"{place}. total={_of_lossless(analysis, both(row)[0])}, decode={row.decode:.2f}, "
        f"lossy={row.numbers['h2o_lossy']:.4f}, lossless={_of_lossless(analysis, analysis.selected)}, "
        f"log=`{escape_markdown(row.log_file)}`"
        for place, row in enumerate(rows, start=1)
    ]


def read_gate_section(text: str) -> dict[str, str]:
    """The lines of the last section of a report; empty where there is none."""
    found: dict[str, str] = {}
    inside = False
    for line in map(str.strip, text.split("\n")):
        if line == GATE_HEADING:
            inside = True
        elif inside and line.startswith("## "):
            break
        elif inside and line.startswith("- ") and ":" in line:
            name, _, value = line[2:].partition(":")
            found[name.strip()] = value.strip().strip("`")
    return found
