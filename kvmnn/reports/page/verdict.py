"""The head of the page: how many cases pass, what failed and by how much; without gates what was evaluated."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ...text import count
from .blocks import CaseCard, Cell, Section, Table, Text, Tone, Verdict
from .evaluated import evaluated
from .material import NOT_FINISHED, Material
from .records import CaseVerdict, GateLine
from .reference import REFERENCE

TONES: dict[str, Tone] = {
    "pass": "good",
    "fail": "bad",
    "not measured": "unknown",
    "unclear": "unknown",
    "off": "muted",
}

MOST_CASES = 60
"""Cases that have a card, and a table of gates."""

_NUMBER = re.compile(r"\s*([-+]?\d[\d,]*(?:\.\d+)?)\s*(%|us)?")
_LIMIT = re.compile(r"(<=|>=|<|>)\s*([-+]?\d[\d,]*(?:\.\d+)?)\s*(%|us)?")


def verdict(found: Material) -> Verdict:
    """The verdict over all cases; without gates what else was measured, which is no verdict."""
    cards = [_card(name, case) for name, case in case_verdicts(found)]
    if not cards and found.evaluations:
        return evaluated(found.evaluations, tuple(_replayed(found)))
    if not cards:
        return Verdict("No gates", "unknown", "No gates were judged: what is below was measured, not judged.", (),
                       tuple(_replayed(found)))  # fmt: skip
    passed = sum(card.tone == "good" for card in cards)
    failed = sum(card.tone == "bad" for card in cards)
    whole = passed == len(cards)
    said = f"{passed} of {count(len(cards), 'case')} {'passes' if passed == 1 else 'pass'}"
    counts = [f"{failed} {'fails' if failed == 1 else 'fail'}"] if failed else []
    unclear = sum(card.verdict == "unclear" for card in cards)
    unknown = len(cards) - passed - failed - unclear
    counts += [f"{number} {said}" for number, said in ((unknown, "not measured"), (unclear, "unclear")) if number]
    said += f"; {', '.join(counts)}." if counts else "."
    unfinished = sum(case.failure == NOT_FINISHED for _, case in case_verdicts(found))
    if unfinished:
        said = f"Round not finished: {len(cards) - unfinished} of {count(len(cards), 'case')} measured. {said}"
    word = "PASS" if whole else "FAIL" if failed else "NOT MEASURED" if unknown else "UNCLEAR"
    tone: Tone = "good" if whole else "bad" if failed else "unknown"
    notes = [*_not_run([card.name for card in cards]), *_replayed(found)]
    if len(cards) > MOST_CASES:
        notes.insert(0, f"{len(cards) - MOST_CASES:,} more cases are not shown here; those that fail come first.")
        cards.sort(key=lambda card: card.tone == "good")
    return Verdict(word, tone, said, tuple(cards[:MOST_CASES]), tuple(notes))


def case_verdicts(found: Material) -> list[tuple[str, CaseVerdict]]:
    """Cases in the order of the round; those without gates as their row has them."""
    if found.round is None:
        return [(name, case) for name, (_, case) in found.verdicts.items()]
    cases = []
    for row in found.round.rows:
        plain = CaseVerdict(
            case=row.case,
            mode=row.mode,
            overall_pass=row.overall_pass,
            verdict="not measured" if row.failure_reason == NOT_FINISHED else None,
            failure=row.failure_reason,
        )
        cases.append((row.case, found.verdicts.get(row.case, ("", plain))[1]))
    return cases


def verdict_of(case: CaseVerdict) -> str:
    """In a word."""
    return case.verdict or ("pass" if case.overall_pass else "fail")


def gates_section(found: Material) -> Section:
    """Every gate of every case."""
    tables = []
    every = sorted(case_verdicts(found), key=lambda pair: pair[1].overall_pass)
    for name, case in every[:MOST_CASES] if len(every) > MOST_CASES else case_verdicts(found):
        asked = [gate for gate in case.lines if gate.verdict != "off"]
        names = {gate.name for gate in asked}
        idle = [gate.name for gate in case.lines if gate.verdict == "off" and gate.name not in names]
        note = " ".join([*([f"Not asked for: {', '.join(idle)}."] if idle else []), *case.diagnoses])
        if asked:
            rows = [_gate_row(gate) for gate in asked]
            tables.append(
                Table(f"Gates of {name}", _GATE_COLUMNS, rows, left=frozenset({0, 1, 5}), cards=True, note=note)
            )
    if not every:
        return Section("gates", "Gates", [Text("Gates one by one: not measured. No gates were judged.", "unknown")])
    if not tables:
        text = "Gates one by one: not measured. There is a verdict, but no figure and limit of each gate."
        return Section("gates", "Gates", [Text(text, "unknown")])
    return Section("gates", "Gates", tables)


_GATE_COLUMNS = ("gate", "verdict", "value", "limit", "missed by", "of what")


def _gate_row(gate: GateLine) -> list[Cell]:
    found = _NUMBER.match(gate.value)
    return [
        Cell(gate.name),
        Cell(gate.verdict, None, TONES[gate.verdict]),
        Cell(gate.value or "-", None if found is None else _value(found[1])),
        Cell(gate.limit or "-"),
        Cell(missed_by(gate) or "-"),
        Cell(gate.why or "-"),
    ]


def missed_by(gate: GateLine) -> str:
    """How far a gate that failed is from its limit, in the unit of both; empty where texts do not tell."""
    value = _NUMBER.match(gate.value)
    if gate.verdict != "fail" or value is None:
        return ""
    here, unit = _value(value[1]), value[2] or ""
    for sign, text, limit_unit in _LIMIT.findall(gate.limit):
        limit = _value(text)
        if (limit_unit or unit) != unit or _holds(here, sign, limit):
            continue
        digits = max(_digits(value[1]), _digits(text))
        far = abs(here - limit)
        unit_text = " points" if unit == "%" else f" {unit}" if unit else ""
        where = "below" if sign.startswith(">") else "above"
        return f"{far:,.{digits}f}{unit_text} {where}" if far else "at the limit"
    if gate.name == "perplexity" and (high := re.search(r"95 % [-+][\d.]+% to ([-+][\d.]+)%", gate.why)):
        bound = _LIMIT.search(gate.limit)
        if bound is not None and float(high[1]) > _value(bound[2]):
            return f"{float(high[1]) - _value(bound[2]):.2f} points above, by the upper end"
    return ""


def _value(text: str) -> float:
    return float(text.replace(",", ""))


def _digits(text: str) -> int:
    return len(text.partition(".")[2])


def _holds(value: float, sign: str, limit: float) -> bool:
    return {"<=": value <= limit, ">=": value >= limit, "<": value < limit, ">": value > limit}[sign]


def _card(name: str, case: CaseVerdict) -> CaseCard:
    misses = []
    for gate in case.lines:
        if gate.verdict in ("fail", "not measured", "unclear"):
            far = missed_by(gate)
            limit = f", limit {gate.limit}" if gate.limit else ""
            said = f"{gate.value or gate.verdict}{limit}" + (f" ({far})" if far else "")
            if gate.verdict == "not measured":
                said = f"not measured{': ' + gate.why if gate.why else ''}"
            elif gate.verdict == "unclear":
                interval = re.search(r"95 % \S+ to [^;]+|one pair, no interval", gate.why)
                said = f"unclear: {said}" + (f"; {interval[0]}" if interval else "")
            misses.append((gate.name, said))
    word = verdict_of(case)
    gates = [gate for gate in case.lines if gate.verdict != "off"]
    passed = sum(gate.verdict == "pass" for gate in gates)
    said = f"{passed} of {count(len(gates), 'gate')} passed" if gates else ""
    if not misses and not case.overall_pass:
        misses.append(("reason", case.failure or "none is given"))
    return CaseCard(name, word, TONES[word], said, tuple(misses))


def _not_run(names: Sequence[str]) -> Iterator[str]:
    """Cases of the six that nobody ran; a sweep's cases have other names."""
    known = {name.split("+")[0] for name in names}
    absent = [name for name in REFERENCE if name not in known]
    if known & set(REFERENCE) and absent:
        yield f"Of the suite's six cases these were not run, so not measured: {', '.join(absent)}."


def _replayed(found: Material) -> Iterator[str]:
    for name, replay in found.replays:
        calls = replay.layers * (1 + replay.tokens - replay.prompt)
        if replay.wrong_calls:
            yield (
                f"{name}: WRONG: attention reads other bytes than were appended at {replay.wrong_calls:,} of "
                f"{count(replay.compared_calls, 'call')} compared."
            )
        elif not replay.metrics.h2o_lossless_raw_bytes:
            yield f"{name}: not measured: nothing was compressed, so equal bytes show nothing."
        elif replay.metrics.lossless_ratio is None:
            yield f"{name}: nothing was stored, so attention read every row as it was appended."
        elif replay.compared_calls < calls:
            yield f"{name}: equal in the {replay.compared_calls:,} of {count(calls, 'call')} that were compared."
        else:
            yield f"{name}: LOSSLESS: {count(calls, 'call')} compared, every byte that attention reads is right."
