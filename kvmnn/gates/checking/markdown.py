"""The report of one case, ``summary.md``, in the form of the fork's analyser; its consumers read the last section."""

from __future__ import annotations

from collections.abc import Callable

from ...text import escape_markdown
from .analysis import CaseAnalysis
from .metric_rows import MetricRow

GATE_HEADING = "## Quality Gate"

_AVERAGE_COLUMNS = (
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


def format_case_markdown(analysis: CaseAnalysis) -> str:
    """The report; ends with a newline. A missing column is 0, as the fork has it; that of own runs is left out."""
    parts = [
        ["# H2O final Summary"],
        _build_average_lines(analysis),
        ["## Best Lossy Ratio"],
        _build_best_row_lines(analysis, lambda row: row.numbers["h2o_lossy"], "lossy ratio"),
        ["## Best Decode TPS"],
        _build_best_row_lines(analysis, lambda row: row.decode_speed, "decode tps"),
        ["## Best Total Ratio"],
        _build_best_row_lines(analysis, lambda row: row.numbers["h2o_lossy"] * analysis.selected_ratio, "total ratio"),
        ["## Pareto Top-5 (by selected total then decode)"],
        _build_pareto_lines(analysis),
        [GATE_HEADING],
        [escape_markdown(f"- {name}: {text}".replace("\n", " ")) for name, text in analysis.section_lines.items()],
    ]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def _has_no_encoding(analysis: CaseAnalysis) -> bool:
    """Whether own runs encoded nothing: neither their ratio nor what the runtime did was measured then."""
    return analysis.is_own_run and "lossless_selected_value" not in analysis.section_lines


def _format_if_encoded(analysis: CaseAnalysis, value: float) -> str:
    """The selected ratio, or a multiple of it; a dash where it was not measured."""
    return "-" if _has_no_encoding(analysis) else f"{value:.4f}"


def _build_average_lines(analysis: CaseAnalysis) -> list[str]:
    rows = analysis.rows
    lines = [
        f"- Rows: {len(rows.rows)}",
        f"- Avg keep ratio: {rows.mean_value('h2o_keep'):.4f}",
        f"- Avg lossy ratio: {rows.mean_value('h2o_lossy'):.4f}",
        f"- Avg runtime lossless ratio: {rows.mean_value('h2o_lossless'):.4f}",
        f"- Lossless selected source: {analysis.ratio_source}",
        f"- Lossless selected value: {_format_if_encoded(analysis, analysis.selected_ratio)}",
    ]
    if analysis.upper_bound is not None:
        lines.append(f"- Offline upper-bound lossless: {analysis.upper_bound.ratio:.4f}")
    if analysis.online_ratio is not None:
        lines.append(f"- Offline online-sim lossless: {analysis.online_ratio.ratio:.4f}")
    total = sum(row.numbers["h2o_lossy"] * analysis.selected_ratio for row in rows.rows) / len(rows.rows)
    lines.append(f"- Avg total ratio (selected): {_format_if_encoded(analysis, total)}")
    shown_columns = [entry for entry in _AVERAGE_COLUMNS if not analysis.is_own_run or entry[1] in rows.columns]
    if _has_no_encoding(analysis):
        shown_columns = [entry for entry in shown_columns if not entry[1].startswith("h2o_lossless")]
    return lines + [f"- {heading}: {rows.mean_value(column):.{digits}f}" for heading, column, digits in shown_columns]


def _build_best_row_lines(
    analysis: CaseAnalysis, get_measure: Callable[[MetricRow], float], first_name: str
) -> list[str]:
    """The row in which `get_measure` is largest, the figure called `first_name` before the others."""
    row = max(analysis.rows.rows, key=get_measure)
    text_by_name = {
        "decode tps": f"{row.decode_speed:.2f}",
        "lossy ratio": f"{row.numbers['h2o_lossy']:.4f}",
        "keep ratio": f"{row.numbers['h2o_keep']:.4f}",
        f"lossless ratio ({analysis.ratio_source})": _format_if_encoded(analysis, analysis.selected_ratio),
        "runtime lossless ratio": f"{row.numbers['h2o_lossless']:.4f}",
        "total ratio": _format_if_encoded(analysis, row.numbers["h2o_lossy"] * analysis.selected_ratio),
        "log": f"`{escape_markdown(row.log_file)}`",
    }
    return [f"- {name}: {text_by_name[name]}" for name in dict.fromkeys([first_name, *text_by_name])]


def _build_pareto_lines(analysis: CaseAnalysis) -> list[str]:
    def get_ratio_and_speed(row: MetricRow) -> tuple[float, float]:
        return row.numbers["h2o_lossy"] * analysis.selected_ratio, row.decode_speed

    rows = sorted(analysis.rows.rows, key=get_ratio_and_speed, reverse=True)[:5]
    return [
        f"{rank}. total={_format_if_encoded(analysis, get_ratio_and_speed(row)[0])}, decode={row.decode_speed:.2f}, "
        f"lossy={row.numbers['h2o_lossy']:.4f}, lossless={_format_if_encoded(analysis, analysis.selected_ratio)}, "
        f"log=`{escape_markdown(row.log_file)}`"
        for rank, row in enumerate(rows, start=1)
    ]


def read_gate_section(text: str) -> dict[str, str]:
    """The lines of the last section of a report; empty where there is none."""
    section_lines: dict[str, str] = {}
    is_in_section = False
    for line in map(str.strip, text.split("\n")):
        if line == GATE_HEADING:
            is_in_section = True
        elif is_in_section and line.startswith("## "):
            break
        elif is_in_section and line.startswith("- ") and ":" in line:
            name, _, value = line[2:].partition(":")
            section_lines[name.strip()] = value.strip().strip("`")
    return section_lines
