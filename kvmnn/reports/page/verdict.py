"""Build the head of the page: passed and failed cases, or the loss by eviction at each budget."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ..._util.patterns import declare_pattern
from ..._util.text import pluralize
from ...evaluation.result import EvaluationResult
from ...gates.summary import NOT_FINISHED_REASON
from ...gates.verdict import GateResult
from ..records import find_full_row
from ..series import describe_untried, has_equal_bytes, is_number, select_best_rows, select_policy_rows, to_float_or_nan
from .blocks import CaseCard, Cell, Section, TableColumn, Tone, VerdictBlock, build_section, build_table_block
from .inputs import ReportInputs
from .records import REFERENCE_CASES, CaseVerdict

_MAX_BUDGETS = 8
"""Budgets of one evaluation that have a sentence: the page's plot and table show all of them."""


def build_evaluation_head(evaluations: Sequence[tuple[str, EvaluationResult]], notes: tuple[str, ...]) -> VerdictBlock:
    """Build the head of a page with evaluations and without gates."""
    summary = " ".join(_describe_evaluation(name, evaluation) for name, evaluation in evaluations)
    costs = [
        line
        for name, evaluation in evaluations
        for line in _iter_budget_costs(name if len(evaluations) > 1 else "", evaluation)
    ]
    return VerdictBlock("Evaluation", "", summary, (), (*costs, *notes, "Measured, not judged: no gates were run."))


def _describe_evaluation(name: str, evaluation: EvaluationResult) -> str:
    full_cache_row, policy_rows = find_full_row(evaluation.rows), select_policy_rows(evaluation.rows)
    tokens = max((row.tokens or 0 for row in evaluation.rows), default=0)
    rows = (
        f"{pluralize(len(policy_rows), 'configuration')} against the full cache"
        if policy_rows
        else "the full cache alone"
    )
    has_perplexity = full_cache_row is not None and is_number(full_cache_row.perplexity)
    reference = (
        f" (perplexity {to_float_or_nan(full_cache_row.perplexity):.2f})"
        if full_cache_row is not None and has_perplexity
        else ""
    )
    return (
        f"{name}: {rows}{reference}, {pluralize(len(evaluation.documents), 'text')}, {pluralize(tokens, 'token')} "
        f"scored by each."
    )


def _iter_budget_costs(name: str, evaluation: EvaluationResult) -> Iterator[str]:
    """Yield, for each budget, the policies that none of at most their bytes beats, of those that evicted tokens."""
    full_cache_row, policy_rows = find_full_row(evaluation.rows), select_policy_rows(evaluation.rows)
    name_prefix = f"{name}: " if name else ""
    if full_cache_row is not None and is_number(full_cache_row.perplexity):
        candidates = [row for row in policy_rows if row.budget is not None and not row.is_untried]
        # a budget of the prompt is another one: all later tokens stay, as in the table by size
        budgets = sorted({(row.prompt_only, row.budget or 0) for row in candidates})
        for is_of_prompt, budget in budgets[:_MAX_BUDGETS]:
            budget_rows = [row for row in candidates if (row.prompt_only, row.budget) == (is_of_prompt, budget)]
            full_perplexity = to_float_or_nan(full_cache_row.perplexity)
            best_rows = select_best_rows(budget_rows)
            best_rows = best_rows[:1] if has_equal_bytes(best_rows) else best_rows
            changes = [f"{to_float_or_nan(row.perplexity) / full_perplexity - 1:+.2%}" for row in best_rows]
            scope = " of the prompt" if is_of_prompt else ""
            subject = f"{name_prefix}{pluralize(budget, 'token')}{scope} kept"
            if len(best_rows) == 1:
                best_of_text = "" if len(budget_rows) == 1 else f" is the best of {len(budget_rows):,}"
                yield f"{subject}: {best_rows[0].label}{best_of_text}, perplexity {changes[0]}."
            else:
                yield (
                    f"{subject}: {len(best_rows):,} of {len(budget_rows):,} rows are beaten by no row of at most the "
                    "same bytes."
                )
                for row, change in zip(best_rows, changes, strict=True):
                    size = f"{to_float_or_nan(row.bytes_per_token):,.0f} bytes a token"
                    yield f"{subject}, {size}: {row.label}, perplexity {change}."
    untried_rows = [row for row in policy_rows if row.is_untried]
    if untried_rows:
        subject = untried_rows[0].label if len(untried_rows) == 1 else pluralize(len(untried_rows), "configuration")
        yield f"{name_prefix}{subject} {describe_untried(untried_rows)}: no rival of the others."


TONE_BY_VERDICT: dict[str, Tone] = {
    "pass": "good",
    "fail": "bad",
    "not measured": "unknown",
    "unclear": "unknown",
    "off": "muted",
}

MAX_SHOWN_CASES = 60
"""Cases that have a card, and a table of gates."""

_NUMBER_REGEX = declare_pattern(r"\s*([-+]?\d[\d,]*(?:\.\d+)?)\s*(%|us)?")
_LIMIT_REGEX = declare_pattern(r"(<=|>=|<|>)\s*([-+]?\d[\d,]*(?:\.\d+)?)\s*(%|us)?")


def build_verdict_head(inputs: ReportInputs) -> VerdictBlock:
    """Build the verdict over all cases; without gates, a summary of the measurements."""
    cards = [_make_case_card(name, case) for name, case in list_case_verdicts(inputs)]
    if not cards and inputs.evaluations:
        return build_evaluation_head(inputs.evaluations, tuple(_iter_replay_notes(inputs)))
    if not cards:
        return VerdictBlock("No gates", "unknown", "No gates were judged: what is below was measured, not judged.", (),
                       tuple(_iter_replay_notes(inputs)))  # fmt: skip
    num_passed = sum(card.tone == "good" for card in cards)
    num_failed = sum(card.tone == "bad" for card in cards)
    is_all_passed = num_passed == len(cards)
    summary = f"{num_passed} of {pluralize(len(cards), 'case')} {'passes' if num_passed == 1 else 'pass'}"
    counts = [f"{num_failed} {'fails' if num_failed == 1 else 'fail'}"] if num_failed else []
    num_unclear = sum(card.verdict == "unclear" for card in cards)
    num_not_measured = len(cards) - num_passed - num_failed - num_unclear
    counts += [
        f"{number} {summary}"
        for number, summary in ((num_not_measured, "not measured"), (num_unclear, "unclear"))
        if number
    ]
    summary += f"; {', '.join(counts)}." if counts else "."
    num_unfinished = sum(case.failure == NOT_FINISHED_REASON for _, case in list_case_verdicts(inputs))
    if num_unfinished:
        summary = (
            f"Round not finished: {len(cards) - num_unfinished} of {pluralize(len(cards), 'case')} measured. {summary}"
        )
    word = "PASS" if is_all_passed else "FAIL" if num_failed else "NOT MEASURED" if num_not_measured else "UNCLEAR"
    tone: Tone = "good" if is_all_passed else "bad" if num_failed else "unknown"
    notes = [*_iter_missing_cases([card.name for card in cards]), *_iter_replay_notes(inputs)]
    if len(cards) > MAX_SHOWN_CASES:
        notes.insert(0, f"{len(cards) - MAX_SHOWN_CASES:,} more cases are not shown here; those that fail come first.")
        cards.sort(key=lambda card: card.tone == "good")
    return VerdictBlock(word, tone, summary, tuple(cards[:MAX_SHOWN_CASES]), tuple(notes))


def list_case_verdicts(inputs: ReportInputs) -> list[tuple[str, CaseVerdict]]:
    """List the verdicts of cases in the order of the round; cases without gates use their row."""
    if inputs.round is None:
        return [(name, case) for name, (_, case) in inputs.verdicts.items()]
    cases = []
    for row in inputs.round.rows:
        verdict_without_gates = CaseVerdict(
            case=row.case,
            mode=row.mode,
            overall_pass=row.overall_pass,
            verdict="not measured" if row.failure_reason == NOT_FINISHED_REASON else None,
            failure=row.failure_reason,
        )
        cases.append((row.case, inputs.verdicts.get(row.case, ("", verdict_without_gates))[1]))
    return cases


def get_verdict_text(case: CaseVerdict) -> str:
    """Return the verdict as one word."""
    return case.verdict or ("pass" if case.overall_pass else "fail")


def build_gates_section(inputs: ReportInputs) -> Section:
    """Build the section with every gate of every case."""
    tables = []
    sorted_cases = sorted(list_case_verdicts(inputs), key=lambda pair: pair[1].overall_pass)
    for name, case in (
        sorted_cases[:MAX_SHOWN_CASES] if len(sorted_cases) > MAX_SHOWN_CASES else list_case_verdicts(inputs)
    ):
        active_gates = [gate for gate in case.all_checks if gate.verdict != "off"]
        names = {gate.name for gate in active_gates}
        unused_names = [gate.name for gate in case.all_checks if gate.verdict == "off" and gate.name not in names]
        note = " ".join([*([f"Not asked for: {', '.join(unused_names)}."] if unused_names else []), *case.diagnoses])
        if active_gates:
            tables.append(build_table_block(f"Gates of {name}", _GATE_COLUMNS, active_gates, has_cards=True, note=note))
    text = "There is a verdict, but no figure and limit of each gate." if sorted_cases else "No gates were judged."
    return build_section("gates", "Gates", tables, f"Gates one by one: not measured. {text}")


def _make_value_cell(gate: GateResult) -> Cell:
    match = _NUMBER_REGEX.match(gate.value)
    return Cell(gate.value or "-", None if match is None else _parse_value(match[1]))


_GATE_COLUMNS = (
    TableColumn("gate", "name", is_left_aligned=True),
    TableColumn("verdict", lambda gate: Cell(gate.verdict, None, TONE_BY_VERDICT[gate.verdict]), is_left_aligned=True),
    TableColumn("value", _make_value_cell),
    TableColumn("limit", lambda gate: gate.limit or "-"),
    TableColumn("missed by", lambda gate: describe_gate_margin(gate) or "-"),
    TableColumn("of what", lambda gate: gate.why or "-", is_left_aligned=True),
)


def describe_gate_margin(gate: GateResult) -> str:
    """Describe by how much a failed gate missed its limit; empty if its texts contain no comparable numbers."""
    value = _NUMBER_REGEX.match(gate.value)
    if gate.verdict != "fail" or value is None:
        return ""
    measured, unit = _parse_value(value[1]), value[2] or ""
    for sign, text, limit_unit in _LIMIT_REGEX.findall(gate.limit):
        limit = _parse_value(text)
        if (limit_unit or unit) != unit or _is_within_limit(measured, sign, limit):
            continue
        digits = max(_count_decimals(value[1]), _count_decimals(text))
        distance = abs(measured - limit)
        unit_text = " points" if unit == "%" else f" {unit}" if unit else ""
        side = "below" if sign.startswith(">") else "above"
        return f"{distance:,.{digits}f}{unit_text} {side}" if distance else "at the limit"
    if gate.name == "perplexity" and (upper_match := re.search(r"95 % [-+][\d.]+% to ([-+][\d.]+)%", gate.why)):
        limit_match = _LIMIT_REGEX.search(gate.limit)
        if limit_match is not None and float(upper_match[1]) > _parse_value(limit_match[2]):
            return f"{float(upper_match[1]) - _parse_value(limit_match[2]):.2f} points above, by the upper end"
    return ""


def _parse_value(text: str) -> float:
    return float(text.replace(",", ""))


def _count_decimals(text: str) -> int:
    return len(text.partition(".")[2])


def _is_within_limit(value: float, sign: str, limit: float) -> bool:
    return {"<=": value <= limit, ">=": value >= limit, "<": value < limit, ">": value > limit}[sign]


def _make_case_card(name: str, case: CaseVerdict) -> CaseCard:
    misses = []
    for gate in case.all_checks:
        if gate.verdict in ("fail", "not measured", "unclear"):
            miss_text = describe_gate_margin(gate)
            limit = f", limit {gate.limit}" if gate.limit else ""
            miss_detail = f"{gate.value or gate.verdict}{limit}" + (f" ({miss_text})" if miss_text else "")
            if gate.verdict == "not measured":
                miss_detail = f"not measured{': ' + gate.why if gate.why else ''}"
            elif gate.verdict == "unclear":
                interval = re.search(r"95 % \S+ to [^;]+|one pair, no interval", gate.why)
                miss_detail = f"unclear: {miss_detail}" + (f"; {interval[0]}" if interval else "")
            misses.append((gate.name, miss_detail))
    word = get_verdict_text(case)
    gates = [gate for gate in case.all_checks if gate.verdict != "off"]
    num_passed = sum(gate.verdict == "pass" for gate in gates)
    miss_detail = f"{num_passed} of {pluralize(len(gates), 'gate')} passed" if gates else ""
    if not misses and not case.overall_pass:
        misses.append(("reason", case.failure or "none is given"))
    return CaseCard(name, word, TONE_BY_VERDICT[word], miss_detail, tuple(misses))


def _iter_missing_cases(names: Sequence[str]) -> Iterator[str]:
    """Yield a sentence that names the cases of the suite that were not run."""
    run_names = {name.split("+")[0] for name in names}
    missing_names = [name for name in REFERENCE_CASES if name not in run_names]
    if run_names & set(REFERENCE_CASES) and missing_names:
        yield f"Of the suite's six cases these were not run, so not measured: {', '.join(missing_names)}."


def _iter_replay_notes(inputs: ReportInputs) -> Iterator[str]:
    for name, replay in inputs.replays:
        calls = replay.layers * (1 + replay.tokens - replay.prompt)
        if replay.wrong_calls:
            yield (
                f"{name}: WRONG: attention reads other bytes than were appended at {replay.wrong_calls:,} of "
                f"{pluralize(replay.compared_calls, 'call')} compared."
            )
        elif not replay.metrics.h2o_lossless_raw_bytes:
            yield f"{name}: not measured: nothing was compressed, so equal bytes show nothing."
        elif replay.metrics.lossless_ratio is None:
            yield f"{name}: nothing was stored, so attention read every row as it was appended."
        elif replay.compared_calls < calls:
            yield f"{name}: equal in the {replay.compared_calls:,} of {pluralize(calls, 'call')} that were compared."
        else:
            yield f"{name}: LOSSLESS: {pluralize(calls, 'call')} compared, every byte that attention reads is right."
