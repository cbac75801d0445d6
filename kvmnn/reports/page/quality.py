"""What eviction costs: perplexity over budget, and the table of an evaluation; and how long operations take."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from .. import tables
from ..columns import COLUMNS, UNCUT_MARK, filled, marked
from ..rows import Row, full_row
from ..series import cut_rows, grouped, is_number, perplexity
from .blocks import Block, Cell, Chart, Items, Point, Section, Series, Table, missing, number
from .material import Material
from .records import Evaluation, Latency

_MOST_ROWS = 120
_MOST_SERIES = 9
_WIDTH = 9
"""Columns beside the policy in the first table of an evaluation; the others are in a second one."""


def quality_section(found: Material) -> Section:
    """Perplexity over budget, of evaluations and of the cases of gates."""
    blocks: list[Block] = []
    for name, evaluation in found.evaluations:
        blocks += _evaluation(name, evaluation)
    changes = _changes(found)
    blocks += [changes] if changes is not None else []
    if not found.evaluations:
        text = (
            "Perplexity over budget: not measured. kvmnn eval MODEL --text TEXTS --policy ... -o DIR/eval.json has it."
        )
        blocks.append(missing(text))
    return Section("quality", "Perplexity over budget", blocks)


def _evaluation(name: str, evaluation: Evaluation) -> list[Block]:
    rows = [row for row in cut_rows(evaluation.rows) if row.budget]
    blocks: list[Block] = []
    if rows:
        blocks.append(_over_budget(name, evaluation, rows))
    else:
        blocks.append(missing(f"{name}: perplexity over budget: not measured, no policy ran with a budget."))
    columns, lines = filled(evaluation, COLUMNS)
    more = len(lines) - _MOST_ROWS
    note = f"{more:,} more rows are in {name}." if more > 0 else ""
    ranks = sorted(range(1, len(columns)), key=lambda place: columns[place].rank)
    for said, chosen in (("policies and budgets", ranks[:_WIDTH]), ("further columns", ranks[_WIDTH:])):
        places = [0, *sorted(chosen)]
        if len(places) > 1:
            cells = [[_cell(line[place]) for place in places] for line in lines[:_MOST_ROWS]]
            left = frozenset(at for at, place in enumerate(places) if columns[place].left)
            headings = [columns[place].heading for place in places]
            blocks.append(Table(f"{name}: {said}", headings, cells, left, False, note))
    blocks.append(Items([line for line in tables.notes(evaluation) if line]))
    return blocks


def _cell(text: str) -> Cell:
    """A cell of the evaluation's own table, with the number that it begins with."""
    words = text.replace(",", "").split()
    try:
        return Cell(text, float(words[0]))
    except (ValueError, IndexError):
        return Cell(text)


def _over_budget(name: str, evaluation: Evaluation, rows: list[Row]) -> Chart:
    series = []
    groups = grouped(rows)
    for look, entry in enumerate(groups[:_MOST_SERIES]):
        members = sorted(entry.rows, key=lambda row: row.budget or 0)
        measured = [perplexity(row, row.budget or 0) for row in members]
        points = [
            Point(one.x, one.y, one.low, one.high, marked(row.label, row), one.is_uncut)
            for one, row in zip(measured, members, strict=True)
        ]
        series.append(Series(entry.name, points, look))
    full = full_row(evaluation.rows)
    known = full is not None and is_number(full.perplexity)
    limits = [(full.perplexity, f"full cache {full.perplexity:.2f}")] if full is not None and full.perplexity else []
    said = f"Perplexity (lower is better) of each policy over tokens kept in a layer, from {name}."
    if any(point.low is not None for one in series for point in one.points):
        said += " Bars: 95 % interval of the difference to the full cache, over the documents."
    if any(row.is_uncut for row in rows):
        said += f" Hollow, and marked {UNCUT_MARK}: evicted nothing in these texts."
    if len(groups) > _MOST_SERIES:
        said += f" {len(groups) - _MOST_SERIES:,} more are in the table."
    return Chart(
        "Perplexity over budget", said, "budget (tokens kept in a layer)", "perplexity", series,
        limits=limits if known else [], log_x=True, whole_x=True, from_zero=False, digits=4,
    )  # fmt: skip


def _changes(found: Material) -> Table | None:
    """The change of perplexity that cases measured."""
    rows = []
    for runs in found.runs_in_order()[:_MOST_ROWS]:
        quality = runs.quality
        if quality is not None:
            rows.append([
                Cell(runs.case), _share(quality.mean), _share(quality.low), _share(quality.high),
                number(quality.lossy_ratio), number(quality.texts, 0), number(quality.tokens, 0),
            ])  # fmt: skip
    if not rows:
        return None
    note = "Against the full cache on the same tokens; low and high: 95 % interval over the texts. "
    note += "Where lossy is 1, nothing was evicted in them, and the change says nothing."
    columns = ("case", "change", "low", "high", "lossy", "texts", "tokens scored")
    return Table("Change of perplexity in the cases of gates", columns, rows, frozenset({0}), False, note)


def _share(value: float | None) -> Cell:
    return Cell("-", None, "muted") if value is None else Cell(f"{value:+.2%}", value)


_OPERATIONS = {
    "compress": "encode a block",
    "verify": "decode a block to prove it",
    "decompress": "decode a block to read it",
    "wait": "wait for a block",
}
_PERCENTILES = (("p50_us", "p50"), ("p95_us", "p95"), ("p99_us", "p99"))


def latency_section(found: Material) -> Section:
    """Percentiles of single operations."""
    title, blocks = "Latency percentiles", list[Block]()
    for name, replay in found.replays:
        metrics = replay.metrics
        every = {"compress": metrics.compress, "verify": metrics.verify, "decompress": metrics.decompress,
                 "wait": metrics.wait}  # fmt: skip
        blocks += _latencies(name, [(_OPERATIONS[key], one) for key, one in every.items()])
    slowest = [
        (f"{runs.case}: {_OPERATIONS[key]}", one)
        for runs in found.runs_in_order()
        for key, one in _slowest([pair.candidate.latencies for pair in runs.pairs]).items()
    ]
    if slowest:
        blocks += _latencies("cases, of each its slowest run", slowest)
    if not blocks:
        text = (
            "Latency percentiles: not measured. kvmnn replay --json > DIR/replay.json and kvmnn gate run have them, "
            "where blocks were encoded."
        )
        blocks = [missing(text)]
    return Section("latency", title, blocks)


def _slowest(runs: Iterable[Mapping[str, Latency]]) -> dict[str, Latency]:
    """Of each operation the run with the highest p99."""
    found: dict[str, Latency] = {}
    for latencies in runs:
        for key, one in latencies.items():
            if key in _OPERATIONS and one.count and (key not in found or one.p99_us > found[key].p99_us):
                found[key] = one
    return {key: found[key] for key in _OPERATIONS if key in found}


def _latencies(name: str, operations: list[tuple[str, Latency]]) -> list[Block]:
    there = [(label, one) for label, one in operations if one.count][:_MOST_ROWS]
    if not there:
        return [missing(f"{name}: latency percentiles: not measured, no block was encoded.")]
    rows = [
        [
            Cell(label), number(one.count, 0), number(one.p50_us, 0), number(one.p95_us, 0), number(one.p99_us, 0),
            number(one.max_us, 0), number(one.total_us, 1, scale=1e-3),
        ]
        for label, one in there
    ]  # fmt: skip
    columns = ("operation", "count", "p50 us", "p95 us", "p99 us", "most us", "in all ms")
    note = "Durations on the clock, one operation each; percentiles lie at most 9 % above the true ones."
    table = Table(f"{name}: latency", columns, rows, frozenset({0}), False, note)
    series = [
        Series(said, [Point(max(getattr(one, key), 0.1), at, name=label) for at, (label, one) in enumerate(there[:14])],
               look, line=False)
        for look, (key, said) in enumerate(_PERCENTILES)
    ]  # fmt: skip
    chart = Chart(
        "Latency of single operations", f"p50, p95 and p99 in microseconds, logarithmic, from {name}.",
        "microseconds", "operation", series, [label for label, _ in there[:14]], log_x=True, digits=0,
    )  # fmt: skip
    return [chart, table]
