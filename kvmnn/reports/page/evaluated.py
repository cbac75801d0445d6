"""The head of a page about evaluations: what eviction cost at each budget, which is no verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...text import pluralize
from ..rows import find_full_row
from ..series import is_number, select_policy_rows, to_float_or_nan
from .blocks import VerdictBlock
from .records import EvaluationRecord

_MAX_BUDGETS = 8
"""Budgets of one evaluation that have a sentence: the page's plot and table show all of them."""


def build_evaluation_head(evaluations: Sequence[tuple[str, EvaluationRecord]], notes: tuple[str, ...]) -> VerdictBlock:
    """Return the head of a page that holds evaluations and no gates.

    Parameters
    ----------
    evaluations
        Names of files, and what they hold.
    notes
        Sentences about the other results of the page.
    """
    summary = " ".join(_describe_evaluation(name, evaluation) for name, evaluation in evaluations)
    costs = [
        line
        for name, evaluation in evaluations
        for line in _iter_budget_costs(name if len(evaluations) > 1 else "", evaluation)
    ]
    return VerdictBlock("Evaluation", "", summary, (), (*costs, *notes, "Measured, not judged: no gates were run."))


def _describe_evaluation(name: str, evaluation: EvaluationRecord) -> str:
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


def _iter_budget_costs(name: str, evaluation: EvaluationRecord) -> Iterator[str]:
    """Of each budget the policy that costs least, of those that evicted something."""
    full_cache_row, policy_rows = find_full_row(evaluation.rows), select_policy_rows(evaluation.rows)
    name_prefix = f"{name}: " if name else ""
    if full_cache_row is not None and is_number(full_cache_row.perplexity):
        candidates = [row for row in policy_rows if row.budget is not None and not row.has_no_eviction]
        budgets = sorted({row.budget or 0 for row in candidates})
        for budget in budgets[:_MAX_BUDGETS]:
            budget_rows = [row for row in candidates if row.budget == budget]
            best = min(budget_rows, key=lambda row: to_float_or_nan(row.perplexity))
            change = to_float_or_nan(best.perplexity) / to_float_or_nan(full_cache_row.perplexity) - 1
            best_of_text = "" if len(budget_rows) == 1 else f" is the best of {len(budget_rows):,}"
            yield (
                f"{name_prefix}{pluralize(budget, 'token')} kept: {best.label}{best_of_text}, perplexity {change:+.2%}."
            )
    no_eviction_rows = [row for row in policy_rows if row.has_no_eviction]
    if no_eviction_rows:
        subject = (
            no_eviction_rows[0].label
            if len(no_eviction_rows) == 1
            else pluralize(len(no_eviction_rows), "configuration")
        )
        yield f"{name_prefix}{subject} evicted nothing in these texts: no rival of the others."
