"""The six cases beside the fork's figures, how their runs went, and how rounds followed each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from ...text import count
from .blocks import Block, Cell, Chart, Point, Section, Series, Table, Text, missing, number
from .material import Material
from .records import CaseRuns, PastRound, RoundRow
from .reference import REFERENCE, WHERE
from .verdict import TONES, case_verdicts, verdict_of

SYNTHETIC = "synthetic"
"""What a round says of prompts that are one token repeated."""

_MOST_ROWS = 200
_COLUMNS = (
    "case", "verdict", "lossy", "lossless", "product", "held in all", "decode tok/s", "without tok/s", "change",
    "bytes equal",
)  # fmt: skip


def cases_section(found: Material) -> Section:
    """The table of cases, as the fork's report has it, beside its figures."""
    title = "Cases beside the fork's report"
    if found.round is None:
        return Section("cases", title, [missing("Cases: not measured. No round of gates was given (kvmnn gate run).")])
    verdicts = dict(case_verdicts(found))
    rows = []
    for row in found.round.rows[:_MOST_ROWS]:
        runs = found.runs.get(row.case)
        word = verdict_of(verdicts[row.case])
        name = Cell(row.case, under=f"{row.prompts} prompts" if row.prompts == SYNTHETIC else "")
        rows.append([name, Cell(word, None, TONES[word]), *_figures(row, runs, found)])
    note = (
        f"doc.: {WHERE}. Lossy, lossless and decode are those of the rows of summary.json; product is lossy times "
        "lossless, as the document takes it, though the two do not hold for the same bytes. Held in all: bytes of all "
        "tokens over all that is held at the end, hot rows and room to grow included, the least of the runs. Change: "
        "of the mean speed against that without compression, a minus is slower; the gate takes its interval. "
        "Figures of llm_demo are means over its prompts; its gates take the "
        "least lossy ratio, and raw over compressed bytes of all prompts together."
    )
    if any(row.prompts == SYNTHETIC for row in found.round.rows):
        note += " Synthetic prompts are one token repeated, whose K and V compress better than those of texts."
    if len(found.round.rows) > _MOST_ROWS:
        note = f"{len(found.round.rows) - _MOST_ROWS:,} more cases are in summary.json. {note}"
    table = Table("Cases of this round beside those of the document", _COLUMNS, rows, frozenset({0, 1}), True, note)
    return Section("cases", title, [table, *_charts(found.round.rows)])


def _figures(row: RoundRow, runs: CaseRuns | None, found: Material) -> list[Cell]:
    lossy, lossless, speed, before = figures_of(row)
    product = None if lossy is None or lossless is None else lossy * lossless
    change = None if row.decode_drop_ratio is None or not before else -row.decode_drop_ratio
    held = min((pair.candidate.total_ratio for pair in runs.pairs), default=None) if runs is not None else None
    cells = [
        number(lossy), number(lossless), number(product), number(held), number(speed, 2), number(before, 2),
        _percent(change), _equal(row, found),
    ]  # fmt: skip
    return [
        replace(cell, under=f"doc. {said}") if said else cell for cell, said in zip(cells, _document(row), strict=True)
    ]


def _equal(row: RoundRow, found: Material) -> Cell:
    """Whether bytes were compared and equal, as the gate has it; else what the row says."""
    case = found.verdicts.get(row.case)
    gate = next((one for one in case[1].gates if one.name == "consistency"), None) if case is not None else None
    if gate is not None:
        return Cell(gate.verdict, None, TONES[gate.verdict])
    said = row.kv_content_consistency_pass
    return Cell("-" if said is None else "pass" if said else "fail", None, "muted")


def _document(row: RoundRow) -> list[str]:
    """The document's figures of a case, column by column; nothing where it has none."""
    there = REFERENCE.get(row.case)
    if there is None:
        return [""] * 8
    total = "" if there.total is None else f"{there.total:.3f}"
    same = "" if there.consistent is None else "pass" if there.consistent else "fail"
    return [
        f"{there.lossy:.3f}", f"{there.lossless:.3f}", total, "", f"{there.decode:.3f}", f"{there.baseline:.3f}",
        f"{there.change:+.2%}", same,
    ]  # fmt: skip


def figures_of(row: RoundRow) -> tuple[float | None, float | None, float | None, float | None]:
    """Lossy and lossless ratio, speed with and without compression, by the names of either suite."""

    def first(*values: float | None) -> float | None:
        return next((value for value in values if value is not None), None)

    return (
        first(row.lossy_best, row.candidate_lossy_ratio_avg),
        first(row.lossless_selected_value, row.candidate_lossless_ratio_avg),
        first(row.decode_gate_tps, row.candidate_decode_tps_avg),
        first(row.decode_baseline, row.baseline_decode_tps_avg),
    )


def _percent(value: float | None) -> Cell:
    return Cell("-", None, "muted") if value is None else Cell(f"{value:+.2%}", value)


def _charts(rows: Sequence[RoundRow]) -> list[Block]:
    shown = rows[:12]
    names = [row.case for row in shown]
    charts: list[Block] = []
    for place, (title, limit) in enumerate((("Lossy ratio", 3.0), ("Lossless ratio", 1.3))):
        ours = [
            Point(value, at, name=row.case)
            for at, row in enumerate(shown)
            if (value := figures_of(row)[place]) is not None
        ]
        theirs = [
            Point((there.lossy, there.lossless)[place], at, name=row.case)
            for at, row in enumerate(shown)
            if (there := REFERENCE.get(row.case)) is not None
        ]
        if not ours:
            continue
        series = [Series("this round", ours, 0, line=False)]
        if theirs:
            series.append(Series("document", theirs, 1, line=False))
        said = f"{title} of each case of this round, beside the document's, with the document's target {limit}."
        charts.append(
            Chart(f"{title} by case", said, "ratio", "case", series, names, [(limit, f"target {limit}")])
        )  # fmt: skip
    return charts


def speed_section(found: Material) -> Section:
    """Both sides of the runs of each case."""
    title = "Speed, side by side"
    if not found.runs:
        text = "Runs in pairs: not measured. They are in CASE/runs.json of a folder of kvmnn gate run."
        return Section("speed", title, [missing(text)])
    rows, order = [], found.runs_in_order()
    for runs in order:
        for work in dict.fromkeys(pair.work for pair in runs.pairs):
            pairs = [pair for pair in runs.pairs if pair.work == work]
            rows.append([Cell(runs.case), Cell(work), Cell(f"{len(pairs)}", len(pairs)), *_speeds(runs, work)])
    more = len(rows) - _MOST_ROWS
    rows = rows[:_MOST_ROWS]
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
    ) + (f" {more:,} more rows are in runs.json of the cases." if more > 0 else "")
    table = Table("Runs of each case by work", columns, rows, frozenset({0, 1}), False, note)
    sides = (("without", "without compression"), ("candidate", "with compression"))
    series = []
    for look, (side, name) in enumerate(sides):
        points = [
            Point(speed, at, name=f"{runs.case}, {pair.work}")
            for at, runs in enumerate(order[:12])
            for pair in runs.pairs
            if (speed := getattr(pair, side).speed) is not None
        ]
        series.append(Series(name, points, look, line=False))
    chart = Chart(
        "Decode speed of every run",
        "Each dot is a run: those without compression beside those with it, case by case.",
        "tokens a second", "case", series, [runs.case for runs in order[:12]], digits=2,
    )  # fmt: skip
    return Section("speed", title, [chart, table])


def _speeds(runs: CaseRuns, work: str) -> list[Cell]:
    pairs = [pair for pair in runs.pairs if pair.work == work]
    before = [pair.without.speed for pair in pairs if pair.without.speed is not None]
    after = [pair.candidate.speed for pair in pairs if pair.candidate.speed is not None]
    encoded = [pair.candidate.encoded_ratio for pair in pairs if pair.candidate.encoded_ratio is not None]
    return [
        number(fmean(before) if before else None, 2),
        number(fmean(after) if after else None, 2),
        number(min(after, default=None), 2),
        number(max(after, default=None), 2),
        number(fmean(pair.candidate.lossy_ratio for pair in pairs)),
        number(fmean(encoded) if encoded else None),
        number(min(pair.candidate.total_ratio for pair in pairs)),
    ]


def trend_section(found: Material) -> Section:
    """Rounds, one after another."""
    title = "Trend over rounds"
    rounds = found.history[-200:]
    if not rounds:
        return Section("trend", title, [missing("Trend: not measured. There is no history.jsonl of kvmnn gate run.")])
    rows = []
    for place, entry in enumerate(rounds, start=len(found.history) - len(rounds) + 1):
        passed = sum(case.passed for case in entry.cases)
        reasons = "; ".join(
            f"{case.case}: {case.reason or 'no reason given'}" for case in entry.cases if not case.passed
        )
        share = Cell(f"{passed} of {len(entry.cases)}", passed / max(len(entry.cases), 1))
        changed = Cell("; ".join(entry.changed) or "-")
        rows.append([Cell(f"{place}", place), Cell(entry.generated_at), share, Cell(reasons or "-"), changed])
    blocks: list[Block] = []
    if len(rounds) < 2:
        blocks.append(Text("One round so far: there is no trend yet.", "unknown"))
    else:
        blocks += _trends(rounds, len(found.history) - len(rounds) + 1)
    columns = ("round", "when", "passed", "what did not pass", "changed since the round before")
    blocks.append(Table(f"Rounds: {count(len(found.history), 'round')}", columns, rows, frozenset({1, 3, 4}), True))
    return Section("trend", title, blocks)


def _trends(rounds: Sequence[PastRound], first: int) -> list[Block]:
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
                Point(place, value, name=name)
                for place, entry in enumerate(rounds, start=first)
                for case in entry.cases
                if case.case == name and (value := getattr(case, key))  # 0 in histories of before: not measured
            ]
            series.append(Series(name, points, look))
        if any(one.points for one in series):
            charts.append(Chart(title, f"{title}, a line for each case.", "round", unit, series, whole_x=True))
    return charts
