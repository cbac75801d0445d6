"""Sections of the report page: the six cases, the loss by eviction, sizes and memory, and the origin of the figures."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from ..._util.text import pluralize
from ...arrays.completeness import format_missing
from ...bench.benchmark import ArrayBenchReport, BenchReport, CodecBenchResult
from ...evaluation.result import EvaluationResult
from ...gates.suite.results import CaseRuns
from ...runtime.metrics import LatencySummary
from ...runtime.replay import ReplayResult
from .. import tables
from ..break_even import BreakEvenReport
from ..records import ResultRow, find_full_row
from ..series import (
    describe_untried,
    format_prompt_note,
    group_into_series,
    is_number,
    perplexity,
    select_memory_traces,
    select_policy_rows,
)
from ..table import NO_EVICTION_MARK
from ..tables import add_no_eviction_mark, build_table
from .blocks import (
    Block,
    BulletList,
    Cell,
    ChartBlock,
    ChartPoint,
    ChartSeries,
    CommandList,
    FactList,
    Paragraph,
    Section,
    TableBlock,
    TableColumn,
    build_section,
    build_table_block,
    make_missing_note,
    make_number_cell,
    make_share_cell,
)
from .inputs import ReportInputs
from .records import (
    REFERENCE_CASES,
    REFERENCE_SOURCE,
    HistoryRound,
    LayerSizeStats,
    MeasurementRecord,
    PartSizeStats,
    RoundRow,
)
from .verdict import TONE_BY_VERDICT, get_verdict_text, list_case_verdicts

SYNTHETIC_PROMPTS = "synthetic"
"""Name in a round of prompts that repeat one token."""

_MAX_CASE_ROWS = 200
_CASE_COLUMNS = (
    "case", "verdict", "lossy", "lossless", "product", "held in all", "decode tok/s", "without tok/s", "change",
    "bytes equal",
)  # fmt: skip


def build_cases_section(inputs: ReportInputs) -> Section:
    """Build the table of cases: measured figures next to those of the MNN fork's report."""
    title = "Cases next to the fork's report"
    if inputs.round is None:
        return Section(
            "cases", title, [make_missing_note("Cases: not measured. No round of gates was given (kvmnn gate run).")]
        )
    verdicts = dict(list_case_verdicts(inputs))
    rows = []
    for row in inputs.round.rows[:_MAX_CASE_ROWS]:
        runs = inputs.runs.get(row.case)
        word = get_verdict_text(verdicts[row.case])
        name = Cell(row.case, subtext=f"{row.prompts} prompts" if row.prompts == SYNTHETIC_PROMPTS else "")
        rows.append([name, Cell(word, None, TONE_BY_VERDICT[word]), *_make_case_cells(row, runs, inputs)])
    note = (
        f"doc.: {REFERENCE_SOURCE}. Lossy, lossless and decode are those of the rows of summary.json; product is lossy "
        "times lossless, as the document takes it, though the two do not hold for the same bytes. Held in all: bytes "
        "of all tokens over all that is held at the end, hot rows and room to grow included, the least of the runs. "
        "Change: of the mean speed against that without compression, a minus is slower; the gate takes its interval. "
        "Figures of llm_demo are means over its prompts; its gates take the least lossy ratio, and raw over compressed "
        "bytes of all prompts together."
    )
    if any(row.prompts == SYNTHETIC_PROMPTS for row in inputs.round.rows):
        note += " Synthetic prompts are one token repeated, whose K and V compress better than those of texts."
    if len(inputs.round.rows) > _MAX_CASE_ROWS:
        note = f"{len(inputs.round.rows) - _MAX_CASE_ROWS:,} more cases are in summary.json. {note}"
    table = TableBlock(
        "Cases of this round next to those of the document", _CASE_COLUMNS, rows, frozenset({0, 1}), True, note
    )
    return Section("cases", title, [table, *_build_case_charts(inputs.round.rows)])


def _make_case_cells(row: RoundRow, runs: CaseRuns | None, inputs: ReportInputs) -> list[Cell]:
    lossy, lossless, speed, baseline_speed = extract_figures(row)
    product = None if lossy is None or lossless is None else lossy * lossless
    change = None if row.decode_drop_ratio is None or not baseline_speed else -row.decode_drop_ratio
    min_total_ratio = (
        min((pair.candidate.total_ratio for pair in runs.pairs), default=None) if runs is not None else None
    )
    cells = [
        make_number_cell(lossy), make_number_cell(lossless), make_number_cell(product),
        make_number_cell(min_total_ratio), make_number_cell(speed, 2), make_number_cell(baseline_speed, 2),
        make_share_cell(change), _make_consistency_cell(row, inputs),
    ]  # fmt: skip
    return [
        replace(cell, subtext=f"doc. {reference_text}") if reference_text else cell
        for cell, reference_text in zip(cells, _format_reference_cells(row), strict=True)
    ]


def _make_consistency_cell(row: RoundRow, inputs: ReportInputs) -> Cell:
    """Make the cell of the consistency gate's verdict; without the gate, of the value in the row."""
    case = inputs.verdicts.get(row.case)
    gate = (
        next((candidate_gate for candidate_gate in case[1].gates if candidate_gate.name == "consistency"), None)
        if case is not None
        else None
    )
    if gate is not None:
        return Cell(gate.verdict, None, TONE_BY_VERDICT[gate.verdict])
    is_consistent = row.kv_content_consistency_pass
    return Cell("-" if is_consistent is None else "pass" if is_consistent else "fail", None, "muted")


def _format_reference_cells(row: RoundRow) -> list[str]:
    """Format the document's figures of a case by column; empty cells if it has none."""
    reference = REFERENCE_CASES.get(row.case)
    if reference is None:
        return [""] * 8
    total_text = "" if reference.total is None else f"{reference.total:.3f}"
    consistency_text = "" if reference.consistent is None else "pass" if reference.consistent else "fail"
    return [
        f"{reference.lossy:.3f}", f"{reference.lossless:.3f}", total_text, "", f"{reference.decode:.3f}",
        f"{reference.baseline:.3f}",
        f"{reference.change:+.2%}", consistency_text,
    ]  # fmt: skip


def extract_figures(row: RoundRow) -> tuple[float | None, float | None, float | None, float | None]:
    """Return lossy ratio, lossless ratio, and speed with and without compression, by the keys of either suite."""

    def first_measured(*values: float | None) -> float | None:
        return next((value for value in values if value is not None), None)

    return (
        first_measured(row.lossy_best, row.candidate_lossy_ratio_avg),
        first_measured(row.lossless_selected_value, row.candidate_lossless_ratio_avg),
        first_measured(row.decode_gate_tps, row.candidate_decode_tps_avg),
        first_measured(row.decode_baseline, row.baseline_decode_tps_avg),
    )


def _build_case_charts(rows: Sequence[RoundRow]) -> list[Block]:
    shown_rows = rows[:12]
    names = [row.case for row in shown_rows]
    charts: list[Block] = []
    for figure_index, (title, limit) in enumerate((("Lossy ratio", 3.0), ("Lossless ratio", 1.3))):
        round_points = [
            ChartPoint(value, row_index, name=row.case)
            for row_index, row in enumerate(shown_rows)
            if (value := extract_figures(row)[figure_index]) is not None
        ]
        reference_points = [
            ChartPoint((reference.lossy, reference.lossless)[figure_index], row_index, name=row.case)
            for row_index, row in enumerate(shown_rows)
            if (reference := REFERENCE_CASES.get(row.case)) is not None
        ]
        if not round_points:
            continue
        series = [ChartSeries("this round", round_points, 0, has_line=False)]
        if reference_points:
            series.append(ChartSeries("document", reference_points, 1, has_line=False))
        summary = f"{title} of each case of this round, next to the document's, with the document's target {limit}."
        charts.append(
            ChartBlock(f"{title} by case", summary, "ratio", "case", series, names, [(limit, f"target {limit}")])
        )  # fmt: skip
    return charts


def build_speed_section(inputs: ReportInputs) -> Section:
    """Build the section about the runs of each case, without and with compression."""
    title = "Speed, side by side"
    if not inputs.runs:
        text = "Runs in pairs: not measured. They are in CASE/runs.json of a folder of kvmnn gate run."
        return Section("speed", title, [make_missing_note(text)])
    ordered_runs = inputs.list_runs_in_order()
    work_items = [
        _RunsOfWork(runs, work) for runs in ordered_runs for work in dict.fromkeys(p.work for p in runs.pairs)
    ]
    num_hidden = len(work_items) - _MAX_CASE_ROWS
    note = (
        "Means over pairs of runs side by side; least and most: of the side with compression. Encoded: raw over "
        "compressed bytes of what was encoded; held in all: as in the table of cases."
    ) + (f" {num_hidden:,} more rows are in runs.json of the cases." if num_hidden > 0 else "")
    table = build_table_block("Runs of each case by work", _SPEED_COLUMNS, work_items[:_MAX_CASE_ROWS], note=note)
    sides = (("without", "without compression"), ("candidate", "with compression"))
    series = []
    for look, (side, name) in enumerate(sides):
        points = [
            ChartPoint(speed, row_index, name=f"{runs.case}, {pair.work}")
            for row_index, runs in enumerate(ordered_runs[:12])
            for pair in runs.pairs
            if (speed := getattr(pair, side).decode_speed)
        ]
        series.append(ChartSeries(name, points, look, has_line=False))
    chart = ChartBlock(
        "Decode speed of every run",
        "Each dot is a run: those without compression next to those with it, case by case.",
        "tokens a second", "case", series, [runs.case for runs in ordered_runs[:12]], digits=2,
    )  # fmt: skip
    return Section("speed", title, [chart, table])


class _RunsOfWork:
    """The pairs of runs of a case on one piece of work."""

    def __init__(self, runs: CaseRuns, work: str) -> None:
        self.case, self.work = runs.case, work
        self.pairs = [pair for pair in runs.pairs if pair.work == work]
        self.candidates = [pair.candidate for pair in self.pairs]
        self.baseline_speeds = [pair.without.decode_speed for pair in self.pairs if pair.without.decode_speed]
        self.candidate_speeds = [run.decode_speed for run in self.candidates if run.decode_speed]
        self.encoded_ratios = [run.encoded_ratio for run in self.candidates if run.encoded_ratio is not None]


def _compute_mean(values: Sequence[float]) -> float | None:
    return fmean(values) if values else None


_SPEED_COLUMNS = (
    TableColumn("case", "case", is_left_aligned=True),
    TableColumn("work", "work", is_left_aligned=True),
    TableColumn("pairs", lambda item: Cell(f"{len(item.pairs)}", len(item.pairs))),
    TableColumn("without tok/s", lambda item: _compute_mean(item.baseline_speeds), 2),
    TableColumn("with tok/s", lambda item: _compute_mean(item.candidate_speeds), 2),
    TableColumn("least", lambda item: min(item.candidate_speeds, default=None), 2),
    TableColumn("most", lambda item: max(item.candidate_speeds, default=None), 2),
    TableColumn("lossy", lambda item: fmean(run.lossy_ratio for run in item.candidates)),
    TableColumn("encoded", lambda item: _compute_mean(item.encoded_ratios)),
    TableColumn("held in all", lambda item: min(run.total_ratio for run in item.candidates)),
)


def build_trend_section(inputs: ReportInputs) -> Section:
    """Build the section about successive rounds."""
    title = "Trend over rounds"
    rounds = inputs.history[-200:]
    if not rounds:
        return Section(
            "trend", title, [make_missing_note("Trend: not measured. There is no history.jsonl of kvmnn gate run.")]
        )
    first_number = len(inputs.history) - len(rounds) + 1
    blocks: list[Block] = []
    if len(rounds) < 2:
        blocks.append(Paragraph("One round so far: there is no trend yet.", "unknown"))
    else:
        blocks += _build_trend_charts(rounds, first_number)
    caption = f"Rounds: {pluralize(len(inputs.history), 'round')}"
    numbered_rounds = enumerate(rounds, start=first_number)
    blocks.append(build_table_block(caption, _ROUND_COLUMNS, numbered_rounds, has_cards=True))
    return Section("trend", title, blocks)


def _count_passed(entry: HistoryRound) -> Cell:
    num_passed = sum(case.passed for case in entry.cases)
    return Cell(f"{num_passed} of {len(entry.cases)}", num_passed / max(len(entry.cases), 1))


def _join_reasons(entry: HistoryRound) -> str:
    failed_cases = [case for case in entry.cases if not case.passed]
    return "; ".join(f"{case.case}: {case.reason or 'no reason given'}" for case in failed_cases) or "-"


_ROUND_COLUMNS = (
    TableColumn("round", lambda item: Cell(f"{item[0]}", item[0])),
    TableColumn("when", lambda item: item[1].generated_at, is_left_aligned=True),
    TableColumn("passed", lambda item: _count_passed(item[1])),
    TableColumn("what did not pass", lambda item: _join_reasons(item[1]), is_left_aligned=True),
    TableColumn("changed since the round before", lambda item: "; ".join(item[1].changed) or "-", is_left_aligned=True),
)
"""Columns of a round and its number."""


def _build_trend_charts(rounds: Sequence[HistoryRound], first_number: int) -> list[Block]:
    names = list(dict.fromkeys(case.case for entry in rounds for case in entry.cases))[:8]
    charts: list[Block] = []
    for title, key, unit in (
        ("Lossy ratio over rounds", "lossy", "ratio"),
        ("Lossless ratio over rounds", "lossless", "ratio"),
        ("Decode speed over rounds", "decode_tps", "tokens a second"),
    ):
        series = []
        for look, name in enumerate(names):
            points = [
                ChartPoint(round_number, value, name=name)
                for round_number, entry in enumerate(rounds, start=first_number)
                for case in entry.cases
                if case.case == name and (value := getattr(case, key))  # 0 in histories of before: not measured
            ]
            series.append(ChartSeries(name, points, look))
        if any(chart_series.points for chart_series in series):
            charts.append(
                ChartBlock(title, f"{title}, a line for each case.", "round", unit, series, has_integer_x=True)
            )
    return charts


_MAX_EVALUATION_ROWS = 120
_MAX_QUALITY_SERIES = 9
_FIRST_TABLE_COLUMNS = 9
"""Columns next to the policy in the first table of an evaluation; the others are in a second one."""


def build_quality_section(inputs: ReportInputs) -> Section:
    """Build the section of perplexity over budget, for evaluations and gate cases."""
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


def _build_evaluation_blocks(name: str, evaluation: EvaluationResult) -> list[Block]:
    rows = [row for row in select_policy_rows(evaluation.rows) if row.budget]
    blocks: list[Block] = []
    if rows:
        blocks.append(_build_budget_chart(name, evaluation, rows))
    else:
        blocks.append(make_missing_note(f"{name}: perplexity over budget: not measured, no policy ran with a budget."))
    _, columns, lines = build_table(evaluation)
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
    """Make a cell from one of the evaluation's own table, with the number at its beginning."""
    words = text.replace(",", "").split()
    try:
        return Cell(text, float(words[0]))
    except (ValueError, IndexError):
        return Cell(text)


def _build_budget_chart(name: str, evaluation: EvaluationResult, rows: list[ResultRow]) -> ChartBlock:
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
                measured_point.is_untried,
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
    summary = f"Perplexity (lower is better) of each policy over its budget, from {name}."
    if any(point.low is not None for measured_point in series for point in measured_point.points):
        summary += " Bars: 95 % interval of the difference to the full cache, over the documents."
    if untried_text := describe_untried(rows):
        summary += f" Hollow, and marked {NO_EVICTION_MARK}: {untried_text}."
    if prompt_note := format_prompt_note(rows):
        summary += f" {prompt_note}"
    if len(groups) > _MAX_QUALITY_SERIES:
        summary += f" {len(groups) - _MAX_QUALITY_SERIES:,} more are in the table."
    return ChartBlock(
        "Perplexity over budget", summary, "budget (tokens of a layer)", "perplexity", series,
        limits=limits if has_reference else [], is_log_x=True, has_integer_x=True, starts_at_zero=False, digits=4,
    )  # fmt: skip


def _build_quality_table(inputs: ReportInputs) -> TableBlock | None:
    """Build the table of perplexity changes that the cases measured."""
    measured_runs = [runs for runs in inputs.list_runs_in_order()[:_MAX_EVALUATION_ROWS] if runs.quality is not None]
    if not measured_runs:
        return None
    note = "Against the full cache on the same tokens; low and high: 95 % interval over the texts. "
    note += "Where lossy is 1, nothing was evicted in them, and the change says nothing."
    return build_table_block("Change of perplexity in the cases of gates", _QUALITY_COLUMNS, measured_runs, note=note)


_QUALITY_COLUMNS = (
    TableColumn("case", "case", is_left_aligned=True),
    TableColumn("change", lambda runs: make_share_cell(runs.quality.mean)),
    TableColumn("low", lambda runs: make_share_cell(runs.quality.low)),
    TableColumn("high", lambda runs: make_share_cell(runs.quality.high)),
    TableColumn("lossy", "quality.lossy_ratio"),
    TableColumn("texts", "quality.texts", 0),
    TableColumn("tokens scored", "quality.tokens", 0),
)


_OPERATION_NAMES = {
    "compress": "encode a block",
    "verify": "decode a block to prove it",
    "decompress": "decode a block to read it",
    "wait": "wait for a block",
}
_PERCENTILES = (("p50_us", "p50"), ("p95_us", "p95"), ("p99_us", "p99"))


def build_latency_section(inputs: ReportInputs) -> Section:
    """Build the section of latency percentiles of single operations."""
    title, blocks = "Latency percentiles", list[Block]()
    for name, replay in inputs.replays:
        operations = [(label, getattr(replay.metrics, key)) for key, label in _OPERATION_NAMES.items()]
        blocks += _build_latency_blocks(name, operations)
    slowest = [
        (f"{runs.case}: {_OPERATION_NAMES[key]}", latency)
        for runs in inputs.list_runs_in_order()
        for key, latency in _find_slowest([pair.candidate.latencies for pair in runs.pairs]).items()
    ]
    if slowest:
        blocks += _build_latency_blocks("cases, of each its slowest run", slowest)
    text = (
        "Latency percentiles: not measured. kvmnn mnn replay --json > DIR/replay.json and kvmnn gate run have "
        "them, where blocks were encoded."
    )
    return build_section("latency", title, blocks, text)


def _find_slowest(runs: Iterable[Mapping[str, LatencySummary]]) -> dict[str, LatencySummary]:
    """Return, for each operation, the latencies of the run with the highest p99."""
    slowest: dict[str, LatencySummary] = {}
    for latencies in runs:
        for key, latency in latencies.items():
            if (
                key in _OPERATION_NAMES
                and latency.count
                and (key not in slowest or latency.p99_us > slowest[key].p99_us)
            ):
                slowest[key] = latency
    return {key: slowest[key] for key in _OPERATION_NAMES if key in slowest}


def _build_latency_blocks(name: str, operations: list[tuple[str, LatencySummary]]) -> list[Block]:
    measured_operations = [(label, latency) for label, latency in operations if latency.count][:_MAX_EVALUATION_ROWS]
    if not measured_operations:
        return [make_missing_note(f"{name}: latency percentiles: not measured, no block was encoded.")]
    note = "Durations on the clock, one operation each; percentiles lie at most 9 % above the true ones."
    table = build_table_block(f"{name}: latency", _LATENCY_COLUMNS, measured_operations, note=note)
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


_LATENCY_COLUMNS = (
    TableColumn("operation", lambda item: item[0], is_left_aligned=True),
    TableColumn("count", lambda item: item[1].count, 0),
    TableColumn("p50 us", lambda item: item[1].p50_us, 0),
    TableColumn("p95 us", lambda item: item[1].p95_us, 0),
    TableColumn("p99 us", lambda item: item[1].p99_us, 0),
    TableColumn("most us", lambda item: item[1].max_us, 0),
    TableColumn("in all ms", lambda item: make_number_cell(item[1].total_us, 1, scale=1e-3)),
)
"""Columns of an operation's name and its latencies."""

_BYTES_PER_MIB = float(1 << 20)
_MAX_ARRAY_ROWS = 40


def build_layers_section(inputs: ReportInputs) -> Section:
    """Build the section of lossless ratios by layer."""
    blocks: list[Block] = []
    for name, measurement in inputs.measurements:
        blocks += _build_measurement_blocks(name, measurement)
    for name, replay in inputs.replays:
        if any(layer.raw_bytes for layer in replay.metrics.layers):
            blocks += _build_replay_layer_blocks(name, replay)
    text = "Ratios over layers: not measured. kvmnn measure DUMP --json > DIR/measure.json has them."
    return build_section("layers", "Lossless ratios over layers", blocks, text)


def _build_measurement_blocks(name: str, measurement: MeasurementRecord) -> list[Block]:
    totals, size_report = measurement.evaluation, measurement.breakdown
    if size_report is None:
        text = (
            f"{name}: lossless ratio {totals.weighted_lossless_ratio:.4f} (K {totals.k_lossless_ratio:.4f}, V "
            f"{totals.v_lossless_ratio:.4f}), simulated: {totals.raw_bytes:,} over {totals.compressed_bytes:,} bytes. "
            "Its layers are not measured: --json has them, --out-json does not."
        )
        return [Paragraph(text)]
    blocks: list[Block] = []
    if measurement.label == "LOSSY":
        blocks.append(Paragraph(f"{name}: the words were rounded to fp16 before they were measured, which is LOSSY."))
    layers = [
        (_parse_layer_number(key, layer_index), layer)
        for layer_index, (key, layer) in enumerate(size_report.layers.items())
    ]
    if layers:
        blocks.append(_build_layer_chart(name, layers))
    is_simulated = all(layer.k.stored_ratio is None for _, layer in layers)
    word = "simulated" if is_simulated else "STORED"
    columns = ("layer", "tokens", "raw bytes", "simulated", "byte entropy", "STORED",
               *(f"{part} {kind}" for part in "KV" for kind in (word, "byte entropy")))  # fmt: skip
    rows = [
        [Cell(f"{number}", number), Cell(f"{layer.tokens:,}", layer.tokens), *_make_size_cells(layer),
         *_make_part_cells(layer.k), *_make_part_cells(layer.v)]
        for number, layer in layers[:200]
    ]  # fmt: skip
    total_cells = [Cell("all", float("inf")), Cell("-"), *_make_size_cells(size_report.overall)]
    total_cells += [Cell("-", None, "muted")] * 4
    note = " ".join(
        f"{meaning if meaning.lower().startswith(key) else f'{key}: {meaning}'}."
        for key, meaning in size_report.meaning.items()
    )
    table = TableBlock(f"{name}: ratios by layer", columns, [*rows, total_cells], frozenset(), False, note)
    return [*blocks, table]


def _parse_layer_number(key: str, fallback: int) -> int:
    """Parse the number of a layer, which is a key in JSON."""
    return int(key) if key.isdecimal() and len(key) < 10 else fallback


def _make_size_cells(sizes: PartSizeStats) -> list[Cell]:
    ratios = (sizes.simulated_ratio, sizes.limit_ratio, sizes.stored_ratio)
    return [make_number_cell(sizes.raw_bytes, 0), *(make_number_cell(ratio, 4) for ratio in ratios)]


def _make_part_cells(sizes: PartSizeStats) -> list[Cell]:
    ratio = sizes.simulated_ratio if sizes.stored_ratio is None else sizes.stored_ratio
    return [make_number_cell(ratio, 4), make_number_cell(sizes.limit_ratio, 4)]


def _build_layer_chart(name: str, layers: Sequence[tuple[int, LayerSizeStats]]) -> ChartBlock:
    is_stored = all(layer.k.stored_ratio is not None and layer.v.stored_ratio is not None for _, layer in layers)
    kind = "STORED" if is_stored else "simulated"
    series = []
    for style_number, part in enumerate(("k", "v")):
        sizes = [(layer_index, getattr(layer, part)) for layer_index, layer in layers]
        ratio_points = [
            ChartPoint(
                layer_number, part_sizes.stored_ratio if is_stored else part_sizes.simulated_ratio, name=part.upper()
            )
            for layer_number, part_sizes in sizes
        ]
        series.append(ChartSeries(f"{part.upper()}, {kind}", ratio_points, style_number))
        limit_points = [
            ChartPoint(layer_number, part_sizes.limit_ratio, name=f"{part.upper()} byte entropy")
            for layer_number, part_sizes in sizes
            if part_sizes.limit_ratio
        ]
        if limit_points:
            series.append(
                ChartSeries(
                    f"{part.upper()}, byte entropy", limit_points, style_number, is_dashed=True, has_markers=False
                )
            )
    summary = (
        f"Ratio of raw over compressed bytes of K and V by layer, from {name}; dashed: the entropy of their bytes."
    )
    return ChartBlock("Lossless ratio by layer", summary, "layer", "raw over compressed", series,
                      has_integer_x=True, digits=4, starts_at_zero=False)  # fmt: skip


def _build_replay_layer_blocks(name: str, replay: ReplayResult) -> list[Block]:
    layers = [layer for layer in replay.metrics.layers if layer.compressed_bytes]
    points = [ChartPoint(layer.layer, layer.raw_bytes / layer.compressed_bytes) for layer in layers]
    chart = ChartBlock(
        "Encoded ratio by layer in a replay",
        f"Raw over compressed bytes of what the runtime encoded, by layer, from {name}.",
        "layer", "raw over compressed", [ChartSeries("encoded", points, 0)], has_integer_x=True, starts_at_zero=False,
    )  # fmt: skip
    return [chart, build_table_block(f"{name}: layers of the replay", _REPLAY_COLUMNS, replay.metrics.layers[:200])]


_REPLAY_COLUMNS = (
    TableColumn("layer", lambda layer: Cell(f"{layer.layer}", layer.layer)),
    TableColumn("tokens", "tokens", 0),
    TableColumn("encoded bytes", "raw_bytes", 0),
    TableColumn("compressed bytes", "compressed_bytes", 0),
    TableColumn(
        "encoded ratio", lambda layer: layer.raw_bytes / layer.compressed_bytes if layer.compressed_bytes else None
    ),
    TableColumn("held bytes", "held_bytes", 0),
)


def build_memory_section(inputs: ReportInputs) -> Section:
    """Build the section about the resident bytes, step by step."""
    blocks: list[Block] = []
    for name, replay in inputs.replays:
        blocks += _build_replay_memory_blocks(name, replay)
    for name, evaluation in inputs.evaluations:
        blocks += _build_evaluation_memory_blocks(name, evaluation)
    text = (
        "Memory over time: not measured. kvmnn mnn replay --json and kvmnn eval --plot DIR -o RESULTS.json record it."
    )
    return build_section("memory", "Memory over time", blocks, text)


def _build_replay_memory_blocks(name: str, replay: ReplayResult) -> list[Block]:
    if not replay.points:
        return [make_missing_note(f"{name}: memory over time: not measured, the replay has no steps.")]
    series = []
    for style_number, (label, key) in enumerate(
        (("all tokens, raw", "appended_bytes"), ("tokens that are left, raw", "live_bytes"), ("held", "held_bytes"))
    ):
        points = [ChartPoint(step.tokens, getattr(step, key) / _BYTES_PER_MIB, name=label) for step in replay.points]
        series.append(ChartSeries(label, points, style_number, is_dashed=style_number == 0, has_markers=False))
    last_step = replay.points[-1]
    chart = ChartBlock(
        "Memory of a replay",
        f"K and V of all layers over the tokens, from {name}: at the end {last_step.held_bytes / _BYTES_PER_MIB:.2f} "
        f"MiB hold {last_step.live_bytes / _BYTES_PER_MIB:.2f} MiB.",
        "tokens", "MiB, all layers", series, has_integer_x=True,
    )  # fmt: skip
    metrics = replay.metrics
    held_text, total = (
        "not measured" if figure is None else f"{figure:.3f}"
        for figure in (metrics.lossless_ratio, metrics.total_ratio)
    )
    coded_text = "not measured" if metrics.encoded_ratio is None else f"{metrics.encoded_ratio:.3f}"
    text = (
        f"{name}: {pluralize(replay.layers, 'layer')}, {replay.prompt:,} tokens as prompt, {replay.tokens:,} in all. "
        f"Lossy {metrics.lossy_ratio:.3f}, held {held_text}, in all {total}; of what was encoded {coded_text}; "
        f"{pluralize(metrics.h2o_lossless_fallback_count, 'fallback')}."
    )
    return [Paragraph("; ".join([text, *format_missing(replay.completeness)])), chart]


def _build_evaluation_memory_blocks(name: str, evaluation: EvaluationResult) -> list[Block]:
    all_traces, note = select_memory_traces(evaluation)
    traces = all_traces[:8]
    if not traces:
        return [
            make_missing_note(
                f"{name}: memory over time: not measured. kvmnn eval --plot records the course of a text."
            )
        ]
    series = []
    for style_number, trace in enumerate(traces):
        steps = zip(trace.step_tokens, trace.cache_bytes, strict=False)
        points = [ChartPoint(tokens, size / _BYTES_PER_MIB, name=trace.label) for tokens, size in steps]
        series.append(
            ChartSeries(trace.label, points, style_number, is_dashed=style_number % 2 == 1, has_markers=False)
        )
    more_text = f" {len(all_traces) - 8:,} more are not drawn." if len(all_traces) > 8 else ""
    summary = (
        f"K and V held over the tokens of {traces[0].document}, from {name}, a line for each policy.{more_text} {note}"
    )
    if len({trace.cache_bytes for trace in traces}) < len(traces):
        summary += " Policies that hold the same lie over each other."
    return [
        ChartBlock("Memory of an evaluation", summary, "tokens seen", "MiB, all layers", series, has_integer_x=True)
    ]


def build_codecs_section(inputs: ReportInputs) -> Section:
    """Build the section about ratios and speeds of codecs."""
    blocks: list[Block] = []
    for name, codecs in inputs.codecs:
        blocks += _build_codec_blocks(name, codecs)
    for name, report in inputs.break_evens:
        blocks += _build_break_even_blocks(name, report)
    text = "Codecs side by side: not measured. kvmnn bench FILES --json > DIR/bench.json has them."
    return build_section("codecs", "Codecs side by side", blocks, text)


def _build_codec_blocks(name: str, codecs: BenchReport) -> list[Block]:
    names = list(dict.fromkeys(result.codec for array in codecs.arrays for result in array.results))[:40]
    rows, points = [], list[ChartSeries]()
    for codec in names:
        results = [result for array in codecs.arrays for result in array.results if result.codec == codec]
        successes = [result for result in results if result.error is None and result.ratio is not None]
        raw_bytes, stored_bytes = (
            sum(success.raw_bytes for success in successes),
            sum(success.stored_bytes for success in successes),
        )
        ratio = raw_bytes / stored_bytes if stored_bytes else None
        speeds = [
            _compute_total_speed([(success.raw_bytes, getattr(success, key)) for success in successes])
            for key in _SPEED_KEYS
        ]
        errors = len(results) - len(successes)
        rows.append([
            Cell(codec), make_number_cell(ratio, 4), *map(_make_rate_cell, speeds),
            Cell(f"{len(successes)}", len(successes)),
            Cell(f"{errors}", errors, "bad" if errors else "") if errors else Cell("0", 0),
        ])  # fmt: skip
        if ratio is not None and speeds[0] is not None:
            points.append(
                ChartSeries(codec, [ChartPoint(speeds[0] / 1e6, ratio, name=codec)], len(points), has_line=False)
            )
    columns = ("codec", "ratio", "encode MB/s", "decode MB/s", "arrays", "failed")
    note = (
        f"Sums over {pluralize(len(codecs.arrays), 'array')}; speeds: raw bytes over processor time, medians of the "
        f"rounds "
        f"of each array, {pluralize(codecs.threads, 'thread')}; every round trip was compared. MB are 10^6 bytes."
    )
    blocks: list[Block] = []
    if 0 < len(points) <= 12:
        summary = f"Ratio over encode speed, from {name}: better is up and right."
        blocks.append(
            ChartBlock(
                "Ratio over encode speed",
                summary,
                "encode MB/s",
                "ratio",
                points,
                is_log_x=True,
                starts_at_zero=False,
                digits=2,
            )
        )
    blocks.append(TableBlock(f"{name}: codecs", columns, rows, frozenset({0}), False, note))
    blocks.append(_build_array_table(name, codecs.arrays))
    return blocks


def _build_break_even_blocks(name: str, report: BreakEvenReport) -> list[Block]:
    notes = report.list_notes()
    return [
        TableBlock(
            f"{name}: {table.title.lower()}",
            [column.heading for column in table.columns],
            [[Cell(text) for text in line] for line in table.lines],
            frozenset({0}),
            False,
            note,
        )
        for table, note in zip(report.to_tables(), notes, strict=True)
    ]


_SPEED_KEYS = ("encode_bytes_per_s_cpu", "decode_bytes_per_s_cpu")


def _make_rate_cell(speed: float | None) -> Cell:
    """Make a cell of a rate in MB/s."""
    return make_number_cell(speed, 0 if (speed or 0) >= 100e6 else 1, scale=1e-6)


def _compute_total_speed(pairs: Sequence[tuple[int, float | None]]) -> float | None:
    """Compute the speed over all arrays in bytes per second; None if one has no speed."""
    seconds = [nbytes / speed for nbytes, speed in pairs if speed]
    return sum(nbytes for nbytes, _ in pairs) / sum(seconds) if seconds and len(seconds) == len(pairs) else None


def _build_array_table(name: str, arrays: Sequence[ArrayBenchReport]) -> TableBlock:
    num_hidden = len(arrays) - _MAX_ARRAY_ROWS
    note = f"{num_hidden:,} more arrays are in {name}." if num_hidden > 0 else ""
    items = [(array, _find_best_result(array)) for array in arrays[:_MAX_ARRAY_ROWS]]
    return build_table_block(f"{name}: arrays and the entropy of their bytes", _ARRAY_COLUMNS, items, note=note)


def _find_best_result(array: ArrayBenchReport) -> CodecBenchResult | None:
    successes = [result for result in array.results if result.error is None and result.ratio is not None]
    return max(successes, key=lambda result: result.ratio or 0.0, default=None)


_ARRAY_COLUMNS = (
    TableColumn("array", lambda item: item[0].name, is_left_aligned=True),
    TableColumn("type", lambda item: item[0].dtype, is_left_aligned=True),
    TableColumn("bytes", lambda item: item[0].array_bytes, 0),
    TableColumn("byte entropy", lambda item: item[0].entropy_ratio, 4),
    TableColumn("best ratio", lambda item: None if item[1] is None else item[1].ratio, 4),
    TableColumn("by", lambda item: "-" if item[1] is None else item[1].codec, is_left_aligned=True),
)
"""Columns of an array and its best result."""


def build_environment_section(inputs: ReportInputs) -> Section:
    """Build the section of models, machines, versions and settings."""
    blocks: list[Block] = []
    for name, run_info in inputs.run_infos:
        blocks.append(FactList([
            ("from", name), ("model", run_info.model), ("SHA-256 of the model", run_info.model_sha256),
            ("kvmnn", run_info.kvmnn), ("Python", run_info.python), ("machine", run_info.machine),
            ("processors", "not known" if run_info.processors is None else f"{run_info.processors:,}"),
            *((f"setting {key}", _format_setting(value)) for key, value in run_info.settings.items()),
        ]))  # fmt: skip
        blocks += _iter_engine_tables(run_info.cases)
    for name, evaluation in inputs.evaluations:
        model, settings = evaluation.model, evaluation.settings
        shape = (
            f"{pluralize(model.layers, 'layer')}, {model.kv_heads} KV heads of {model.head_dim}, {model.cache_dtype}"
        )
        blocks.append(FactList([
            ("from", name), ("model", f"{model.name} ({model.path}): {shape}"), ("SHA-256 of the model", model.sha256),
            ("kvmnn", evaluation.kvmnn), ("texts", f"{len(evaluation.documents):,}"), ("threads",
            f"{settings.threads:,}"),
            ("prompt", f"{settings.prompt:,} tokens"), ("fed at a time", pluralize(settings.chunk, "token")),
            ("seed", f"{settings.seed}"),
        ]))  # fmt: skip
    for name, measurement in inputs.measurements:
        dump, codec = measurement.evaluation.dump_dir, measurement.evaluation.codec
        blocks.append(FactList([("from", name), ("input", _format_setting(dump)), ("codec", codec)]))
    for name, replay in inputs.replays:
        blocks.append(FactList([("from", name), ("behaviour", replay.behaviour), ("layers", f"{replay.layers:,}")]))
    for name, codecs in inputs.codecs:
        machine = codecs.machine
        blocks.append(FactList([
            ("from", name), ("processor", machine.processor), ("processors", f"{machine.cpus:,}"),
            ("system", machine.system), ("threads", f"{codecs.threads:,}"),
            ("not installed", ", ".join(sorted({name for array in codecs.arrays for name in array.missing})) or "none"),
        ]))  # fmt: skip
    return build_section("environment", "Environment", blocks, "Environment: not recorded in what was read.")


def _format_setting(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _iter_engine_tables(cases: object) -> Iterator[Block]:
    """Yield a table with a row for each engine key that a case sets."""
    engines = {
        name: case["engine"]
        for name, case in (cases.items() if isinstance(cases, dict) else ())
        if isinstance(case, dict) and isinstance(case.get("engine"), dict) and case["engine"]
    }
    shown_engines = dict(list(engines.items())[:6])
    keys = list(dict.fromkeys(key for engine in shown_engines.values() for key in engine))[:80]
    if not keys:
        return
    rows = [
        [
            Cell(key),
            *(Cell(_format_setting(engine[key]) if key in engine else "-") for engine in shown_engines.values()),
        ]
        for key in keys
    ]
    num_hidden = len(engines) - len(shown_engines)
    note = f"{num_hidden:,} more cases are in run.json." if num_hidden > 0 else ""
    yield TableBlock("Keys of the engine, case by case", ["key", *shown_engines], rows, frozenset({0}), False, note)


def build_commands_section(inputs: ReportInputs) -> Section:
    """Build the section of the commands that made the files, as far as the files record them."""
    all_commands = [entry for commands in inputs.commands.values() for entry in commands]
    lines = [(name, command) for name, command in all_commands if command]
    names_without_command = [name for name, command in all_commands if not command]
    blocks: list[Block] = [CommandList(lines)] if lines else []
    if names_without_command:
        blocks.append(make_missing_note(f"Command not recorded in: {', '.join(names_without_command)}."))
    return build_section("commands", "Exact commands", blocks, "Commands: not recorded in what was read.")


def build_sources_section(inputs: ReportInputs) -> Section:
    """Build the section of the files that were read and those that were skipped."""
    num_hidden = len(inputs.sources) - 200
    note = f"{num_hidden:,} more were read." if num_hidden > 0 else ""
    blocks: list[Block] = [build_table_block("Files that were read", _SOURCE_COLUMNS, inputs.sources[:200], note=note)]
    if inputs.ignored_files:
        shown_ignored = [f"{name} ({reason})" for name, reason in inputs.ignored_files[:20]]
        num_hidden_ignored = len(inputs.ignored_files) - len(shown_ignored)
        more_text = f", and {num_hidden_ignored:,} more" if num_hidden_ignored > 0 else ""
        blocks.append(Paragraph(f"Left out: {', '.join(shown_ignored)}{more_text}.", "unknown"))
    return Section("sources", "Sources", blocks)


_SOURCE_COLUMNS = (
    TableColumn("file", "name", is_left_aligned=True),
    TableColumn("what it is", "kind", is_left_aligned=True),
    TableColumn("bytes", "nbytes", 0),
    TableColumn("SHA-256", "sha256", is_left_aligned=True),
)
