"""The six cases beside the fork's figures, how their runs went, and how rounds followed each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from ...text import pluralize
from .blocks import (
    Block,
    Cell,
    ChartBlock,
    ChartPoint,
    ChartSeries,
    Paragraph,
    Section,
    TableBlock,
    make_missing_note,
    make_number_cell,
)
from .material import ReportInputs
from .records import CaseRuns, HistoryRound, RoundRow
from .reference import REFERENCE_CASES, REFERENCE_SOURCE
from .verdict import TONE_BY_VERDICT, get_verdict_text, list_case_verdicts

SYNTHETIC_PROMPTS = "synthetic"
"""What a round says of prompts that are one token repeated."""

_MAX_CASE_ROWS = 200
_CASE_COLUMNS = (
    "case", "verdict", "lossy", "lossless", "product", "held in all", "decode tok/s", "without tok/s", "change",
    "bytes equal",
)  # fmt: skip


def build_cases_section(inputs: ReportInputs) -> Section:
    """The table of cases, as the fork's report has it, beside its figures."""
    title = "Cases beside the fork's report"
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
        f"times "
        "lossless, as the document takes it, though the two do not hold for the same bytes. Held in all: bytes of all "
        "tokens over all that is held at the end, hot rows and room to grow included, the least of the runs. Change: "
        "of the mean speed against that without compression, a minus is slower; the gate takes its interval. "
        "Figures of llm_demo are means over its prompts; its gates take the "
        "least lossy ratio, and raw over compressed bytes of all prompts together."
    )
    if any(row.prompts == SYNTHETIC_PROMPTS for row in inputs.round.rows):
        note += " Synthetic prompts are one token repeated, whose K and V compress better than those of texts."
    if len(inputs.round.rows) > _MAX_CASE_ROWS:
        note = f"{len(inputs.round.rows) - _MAX_CASE_ROWS:,} more cases are in summary.json. {note}"
    table = TableBlock(
        "Cases of this round beside those of the document", _CASE_COLUMNS, rows, frozenset({0, 1}), True, note
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
        _make_percent_cell(change), _make_consistency_cell(row, inputs),
    ]  # fmt: skip
    return [
        replace(cell, subtext=f"doc. {reference_text}") if reference_text else cell
        for cell, reference_text in zip(cells, _format_reference_cells(row), strict=True)
    ]


def _make_consistency_cell(row: RoundRow, inputs: ReportInputs) -> Cell:
    """Whether bytes were compared and equal, as the gate has it; else what the row says."""
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
    """The document's figures of a case, column by column; nothing where it has none."""
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
    """Lossy and lossless ratio, speed with and without compression, by the names of either suite."""

    def first_measured(*values: float | None) -> float | None:
        return next((value for value in values if value is not None), None)

    return (
        first_measured(row.lossy_best, row.candidate_lossy_ratio_avg),
        first_measured(row.lossless_selected_value, row.candidate_lossless_ratio_avg),
        first_measured(row.decode_gate_tps, row.candidate_decode_tps_avg),
        first_measured(row.decode_baseline, row.baseline_decode_tps_avg),
    )


def _make_percent_cell(value: float | None) -> Cell:
    return Cell("-", None, "muted") if value is None else Cell(f"{value:+.2%}", value)


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
        summary = f"{title} of each case of this round, beside the document's, with the document's target {limit}."
        charts.append(
            ChartBlock(f"{title} by case", summary, "ratio", "case", series, names, [(limit, f"target {limit}")])
        )  # fmt: skip
    return charts


def build_speed_section(inputs: ReportInputs) -> Section:
    """Both sides of the runs of each case."""
    title = "Speed, side by side"
    if not inputs.runs:
        text = "Runs in pairs: not measured. They are in CASE/runs.json of a folder of kvmnn gate run."
        return Section("speed", title, [make_missing_note(text)])
    rows, ordered_runs = [], inputs.list_runs_in_order()
    for runs in ordered_runs:
        for work in dict.fromkeys(pair.work for pair in runs.pairs):
            pairs = [pair for pair in runs.pairs if pair.work == work]
            rows.append(
                [Cell(runs.case), Cell(work), Cell(f"{len(pairs)}", len(pairs)), *_make_speed_cells(runs, work)]
            )
    num_hidden = len(rows) - _MAX_CASE_ROWS
    rows = rows[:_MAX_CASE_ROWS]
    columns = (
        "case",
        "work",
        "pairs",
        "without tok/s",
        "with tok/s",
        "least",
        "most",
        "lossy",
        "encoded",
        "held in all",
    )
    note = (
        "Means over pairs of runs side by side; least and most: of the side with compression. Encoded: raw over "
        "compressed bytes of what was encoded; held in all: as in the table of cases."
    ) + (f" {num_hidden:,} more rows are in runs.json of the cases." if num_hidden > 0 else "")
    table = TableBlock("Runs of each case by work", columns, rows, frozenset({0, 1}), False, note)
    sides = (("without", "without compression"), ("candidate", "with compression"))
    series = []
    for look, (side, name) in enumerate(sides):
        points = [
            ChartPoint(speed, row_index, name=f"{runs.case}, {pair.work}")
            for row_index, runs in enumerate(ordered_runs[:12])
            for pair in runs.pairs
            if (speed := getattr(pair, side).tokens_per_second) is not None
        ]
        series.append(ChartSeries(name, points, look, has_line=False))
    chart = ChartBlock(
        "Decode speed of every run",
        "Each dot is a run: those without compression beside those with it, case by case.",
        "tokens a second", "case", series, [runs.case for runs in ordered_runs[:12]], digits=2,
    )  # fmt: skip
    return Section("speed", title, [chart, table])


def _make_speed_cells(runs: CaseRuns, work: str) -> list[Cell]:
    pairs = [pair for pair in runs.pairs if pair.work == work]
    baseline_speeds = [pair.without.tokens_per_second for pair in pairs if pair.without.tokens_per_second is not None]
    candidate_speeds = [
        pair.candidate.tokens_per_second for pair in pairs if pair.candidate.tokens_per_second is not None
    ]
    encoded_ratios = [pair.candidate.encoded_ratio for pair in pairs if pair.candidate.encoded_ratio is not None]
    return [
        make_number_cell(fmean(baseline_speeds) if baseline_speeds else None, 2),
        make_number_cell(fmean(candidate_speeds) if candidate_speeds else None, 2),
        make_number_cell(min(candidate_speeds, default=None), 2),
        make_number_cell(max(candidate_speeds, default=None), 2),
        make_number_cell(fmean(pair.candidate.lossy_ratio for pair in pairs)),
        make_number_cell(fmean(encoded_ratios) if encoded_ratios else None),
        make_number_cell(min(pair.candidate.total_ratio for pair in pairs)),
    ]


def build_trend_section(inputs: ReportInputs) -> Section:
    """Rounds, one after another."""
    title = "Trend over rounds"
    rounds = inputs.history[-200:]
    if not rounds:
        return Section(
            "trend", title, [make_missing_note("Trend: not measured. There is no history.jsonl of kvmnn gate run.")]
        )
    rows = []
    for round_number, entry in enumerate(rounds, start=len(inputs.history) - len(rounds) + 1):
        num_passed = sum(case.passed for case in entry.cases)
        reasons = "; ".join(
            f"{case.case}: {case.reason or 'no reason given'}" for case in entry.cases if not case.passed
        )
        passed_cell = Cell(f"{num_passed} of {len(entry.cases)}", num_passed / max(len(entry.cases), 1))
        changed_cell = Cell("; ".join(entry.changed) or "-")
        rows.append(
            [
                Cell(f"{round_number}", round_number),
                Cell(entry.generated_at),
                passed_cell,
                Cell(reasons or "-"),
                changed_cell,
            ]
        )
    blocks: list[Block] = []
    if len(rounds) < 2:
        blocks.append(Paragraph("One round so far: there is no trend yet.", "unknown"))
    else:
        blocks += _build_trend_charts(rounds, len(inputs.history) - len(rounds) + 1)
    columns = ("round", "when", "passed", "what did not pass", "changed since the round before")
    blocks.append(
        TableBlock(f"Rounds: {pluralize(len(inputs.history), 'round')}", columns, rows, frozenset({1, 3, 4}), True)
    )
    return Section("trend", title, blocks)


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
