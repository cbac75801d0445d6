"""The head of a page about evaluations: what eviction cost at each budget, which is no verdict."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...text import count
from ..rows import full_row
from ..series import cut_rows, is_number, measured
from .blocks import Verdict
from .records import Evaluation

_MAX_BUDGETS = 8
"""Budgets of one evaluation that have a sentence: the page's plot and table show all of them."""


def evaluated(evaluations: Sequence[tuple[str, Evaluation]], notes: tuple[str, ...]) -> Verdict:
    """Return the head of a page that holds evaluations and no gates.

    Parameters
    ----------
    evaluations
        Names of files, and what they hold.
    notes
        Sentences about the other results of the page.
    """
    said = " ".join(_about(name, one) for name, one in evaluations)
    costs = [line for name, one in evaluations for line in _costs(name if len(evaluations) > 1 else "", one)]
    return Verdict("Evaluation", "", said, (), (*costs, *notes, "Measured, not judged: no gates were run."))


def _about(name: str, one: Evaluation) -> str:
    full, cut = full_row(one.rows), cut_rows(one.rows)
    tokens = max((row.tokens or 0 for row in one.rows), default=0)
    rows = f"{count(len(cut), 'configuration')} against the full cache" if cut else "the full cache alone"
    known = full is not None and is_number(full.perplexity)
    reference = f" (perplexity {measured(full.perplexity):.2f})" if full is not None and known else ""
    return f"{name}: {rows}{reference}, {count(len(one.documents), 'text')}, {count(tokens, 'token')} scored by each."


def _costs(name: str, one: Evaluation) -> Iterator[str]:
    """Of each budget the policy that costs least, of those that evicted something."""
    full, cut = full_row(one.rows), cut_rows(one.rows)
    before = f"{name}: " if name else ""
    if full is not None and is_number(full.perplexity):
        rivals = [row for row in cut if row.budget is not None and not row.is_uncut]
        budgets = sorted({row.budget or 0 for row in rivals})
        for budget in budgets[:_MAX_BUDGETS]:
            same = [row for row in rivals if row.budget == budget]
            best = min(same, key=lambda row: measured(row.perplexity))
            change = measured(best.perplexity) / measured(full.perplexity) - 1
            of = "" if len(same) == 1 else f" is the best of {len(same):,}"
            yield f"{before}{count(budget, 'token')} kept: {best.label}{of}, perplexity {change:+.2%}."
    uncut = [row for row in cut if row.is_uncut]
    if uncut:
        which = uncut[0].label if len(uncut) == 1 else count(len(uncut), "configuration")
        yield f"{before}{which} evicted nothing in these texts: no rival of the others."
