"""What eviction costs: perplexity over budget, and the table of an evaluation; and how long operations take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .. import tables
from ..columns import COLUMNS, NO_EVICTION_MARK, add_no_eviction_mark, build_table
from ..rows import ResultRow, find_full_row
from ..series import group_into_series, is_number, perplexity, select_policy_rows
from .blocks import (
    Block,
    BulletList,
    Cell,
    ChartBlock,
    ChartPoint,
    ChartSeries,
    Section,
    TableBlock,
    make_missing_note,
    make_number_cell,
)
from .material import ReportInputs
from .records import EvaluationRecord, LatencyStats

_MAX_EVALUATION_ROWS = 120
_MAX_QUALITY_SERIES = 9
_FIRST_TABLE_COLUMNS = 9
"""Columns beside the policy in the first table of an evaluation; the others are in a second one."""


def build_quality_section(inputs: ReportInputs) -> Section:
    """Perplexity over budget, of evaluations and of the cases of gates."""
    blocks: list[Block] = []
    for name, evaluation in inputs.evaluations:
        blocks += _build_evaluation_blocks(name, evaluation)
    changes = _build_quality_table(inputs)
    blocks += [changes] if changes is not None else []
    if not inputs.evaluations:
        text = (
            "Perplexity over budget: not measured. kvmnn eval MODEL --text TEXTS --policy ... -o DIR/eval.json has it."
        )
        blocks.append(make_missing_note(text))
    return Section("quality", "Perplexity over budget", blocks)


def _build_evaluation_blocks(name: str, evaluation: EvaluationRecord) -> list[Block]:
    rows = [row for row in select_policy_rows(evaluation.rows) if row.budget]
    blocks: list[Block] = []
    if rows:
        blocks.append(_build_budget_chart(name, evaluation, rows))
    else:
        blocks.append(make_missing_note(f"{name}: perplexity over budget: not measured, no policy ran with a budget."))
    columns, lines = build_table(evaluation, COLUMNS)
    num_hidden = len(lines) - _MAX_EVALUATION_ROWS
    note = f"{num_hidden:,} more rows are in {name}." if num_hidden > 0 else ""
    ranks = sorted(range(1, len(columns)), key=lambda column_index: columns[column_index].drop_rank)
    for table_name, ranked_indices in (
        ("policies and budgets", ranks[:_FIRST_TABLE_COLUMNS]),
        ("further columns", ranks[_FIRST_TABLE_COLUMNS:]),
    ):
        column_indices = [0, *sorted(ranked_indices)]
        if len(column_indices) > 1:
            cells = [
                [_parse_evaluation_cell(line[column_index]) for column_index in column_indices]
                for line in lines[:_MAX_EVALUATION_ROWS]
            ]
            left_columns = frozenset(
                cell_index
                for cell_index, column_index in enumerate(column_indices)
                if columns[column_index].is_left_aligned
            )
            headings = [columns[column_index].heading for column_index in column_indices]
            blocks.append(TableBlock(f"{name}: {table_name}", headings, cells, left_columns, False, note))
    blocks.append(BulletList([line for line in tables.build_notes(evaluation) if line]))
    return blocks


def _parse_evaluation_cell(text: str) -> Cell:
    """A cell of the evaluation's own table, with the number that it begins with."""
    words = text.replace(",", "").split()
    try:
        return Cell(text, float(words[0]))
    except (ValueError, IndexError):
        return Cell(text)


def _build_budget_chart(name: str, evaluation: EvaluationRecord, rows: list[ResultRow]) -> ChartBlock:
    series = []
    groups = group_into_series(rows)
    for style_number, entry in enumerate(groups[:_MAX_QUALITY_SERIES]):
        members = sorted(entry.rows, key=lambda row: row.budget or 0)
        measured_points = [perplexity(row, row.budget or 0) for row in members]
        points = [
            ChartPoint(
                measured_point.x,
                measured_point.y,
                measured_point.low,
                measured_point.high,
                add_no_eviction_mark(row.label, row),
                measured_point.has_no_eviction,
            )
            for measured_point, row in zip(measured_points, members, strict=True)
        ]
        series.append(ChartSeries(entry.name, points, style_number))
    full_cache_row = find_full_row(evaluation.rows)
    has_reference = full_cache_row is not None and is_number(full_cache_row.perplexity)
    limits = (
        [(full_cache_row.perplexity, f"full cache {full_cache_row.perplexity:.2f}")]
        if full_cache_row is not None and full_cache_row.perplexity
        else []
    )
    summary = f"Perplexity (lower is better) of each policy over tokens kept in a layer, from {name}."
    if any(point.low is not None for measured_point in series for point in measured_point.points):
        summary += " Bars: 95 % interval of the difference to the full cache, over the documents."
    if any(row.has_no_eviction for row in rows):
        summary += f" Hollow, and marked {NO_EVICTION_MARK}: evicted nothing in these texts."
    if len(groups) > _MAX_QUALITY_SERIES:
        summary += f" {len(groups) - _MAX_QUALITY_SERIES:,} more are in the table."
    return ChartBlock(
        "Perplexity over budget", summary, "budget (tokens kept in a layer)", "perplexity", series,
        limits=limits if has_reference else [], is_log_x=True, has_integer_x=True, starts_at_zero=False, digits=4,
    )  # fmt: skip


def _build_quality_table(inputs: ReportInputs) -> TableBlock | None:
    """The change of perplexity that cases measured."""
    rows = []
    for runs in inputs.list_runs_in_order()[:_MAX_EVALUATION_ROWS]:
        quality = runs.quality
        if quality is not None:
            rows.append([
                Cell(runs.case), _make_share_cell(quality.mean), _make_share_cell(quality.low),
                _make_share_cell(quality.high),
                make_number_cell(quality.lossy_ratio), make_number_cell(quality.texts, 0),
                make_number_cell(quality.tokens, 0),
            ])  # fmt: skip
    if not rows:
        return None
    note = "Against the full cache on the same tokens; low and high: 95 % interval over the texts. "
    note += "Where lossy is 1, nothing was evicted in them, and the change says nothing."
    columns = ("case", "change", "low", "high", "lossy", "texts", "tokens scored")
    return TableBlock("Change of perplexity in the cases of gates", columns, rows, frozenset({0}), False, note)


def _make_share_cell(value: float | None) -> Cell:
    return Cell("-", None, "muted") if value is None else Cell(f"{value:+.2%}", value)


_OPERATION_NAMES = {
    "compress": "encode a block",
    "verify": "decode a block to prove it",
    "decompress": "decode a block to read it",
    "wait": "wait for a block",
}
_PERCENTILES = (("p50_us", "p50"), ("p95_us", "p95"), ("p99_us", "p99"))


def build_latency_section(inputs: ReportInputs) -> Section:
    """Percentiles of single operations."""
    title, blocks = "Latency percentiles", list[Block]()
    for name, replay in inputs.replays:
        metrics = replay.metrics
        latencies_by_key = {"compress": metrics.compress, "verify": metrics.verify, "decompress": metrics.decompress,
                 "wait": metrics.wait}  # fmt: skip
        blocks += _build_latency_blocks(
            name, [(_OPERATION_NAMES[key], latency) for key, latency in latencies_by_key.items()]
        )
    slowest = [
        (f"{runs.case}: {_OPERATION_NAMES[key]}", latency)
        for runs in inputs.list_runs_in_order()
        for key, latency in _find_slowest([pair.candidate.latencies for pair in runs.pairs]).items()
    ]
    if slowest:
        blocks += _build_latency_blocks("cases, of each its slowest run", slowest)
    if not blocks:
        text = (
            "Latency percentiles: not measured. kvmnn replay --json > DIR/replay.json and kvmnn gate run have them, "
            "where blocks were encoded."
        )
        blocks = [make_missing_note(text)]
    return Section("latency", title, blocks)


def _find_slowest(runs: Iterable[Mapping[str, LatencyStats]]) -> dict[str, LatencyStats]:
    """Of each operation the run with the highest p99."""
    slowest: dict[str, LatencyStats] = {}
    for latencies in runs:
        for key, latency in latencies.items():
            if (
                key in _OPERATION_NAMES
                and latency.count
                and (key not in slowest or latency.p99_us > slowest[key].p99_us)
            ):
                slowest[key] = latency
    return {key: slowest[key] for key in _OPERATION_NAMES if key in slowest}


def _build_latency_blocks(name: str, operations: list[tuple[str, LatencyStats]]) -> list[Block]:
    measured_operations = [(label, latency) for label, latency in operations if latency.count][:_MAX_EVALUATION_ROWS]
    if not measured_operations:
        return [make_missing_note(f"{name}: latency percentiles: not measured, no block was encoded.")]
    rows = [
        [
            Cell(label), make_number_cell(latency.count, 0), make_number_cell(latency.p50_us, 0),
            make_number_cell(latency.p95_us, 0), make_number_cell(latency.p99_us, 0),
            make_number_cell(latency.max_us, 0), make_number_cell(latency.total_us, 1, scale=1e-3),
        ]
        for label, latency in measured_operations
    ]  # fmt: skip
    columns = ("operation", "count", "p50 us", "p95 us", "p99 us", "most us", "in all ms")
    note = "Durations on the clock, one operation each; percentiles lie at most 9 % above the true ones."
    table = TableBlock(f"{name}: latency", columns, rows, frozenset({0}), False, note)
    series = [
        ChartSeries(summary, [ChartPoint(max(getattr(latency, key), 0.1), operation_index,
        name=label) for operation_index, (label, latency) in enumerate(measured_operations[:14])],
               style_number, has_line=False)
        for style_number, (key, summary) in enumerate(_PERCENTILES)
    ]  # fmt: skip
    chart = ChartBlock(
        "Latency of single operations", f"p50, p95 and p99 in microseconds, logarithmic, from {name}.",
        "microseconds", "operation", series, [label for label, _ in measured_operations[:14]], is_log_x=True, digits=0,
    )  # fmt: skip
    return [chart, table]
