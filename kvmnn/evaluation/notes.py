"""What a reader of an evaluation's numbers must know, in sentences."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

from ..lm.cache.lossless_store import storing_notes
from ..lm.documents import Document
from ..policies.registry import policy_called
from ..policies.specs import make
from ..reports.columns import UNCUT_MARK
from ..reports.rows import Row
from ..text import LOSSLESS, LOSSY, count
from .setup.configurations import FULL
from .setup.settings import Settings
from .statistics import FEWEST


def notes(rows: Sequence[Row], documents: Sequence[Document], settings: Settings) -> Iterator[str]:
    """Sentences about rows, one for each thing that a table does not show."""
    yield from _short_texts(documents, settings)
    yield from _presets(rows)
    yield from _unequal_budgets(rows)
    yield from _nothing_evicted(rows, documents, settings)
    yield from _cut_too_late(rows, documents, settings)
    unequal = [row.label for row in rows if row.unequal_layers]
    if unequal:
        yield (
            f"Layers hold unequal numbers of tokens (tokens kept: the least and the most): {'; '.join(unequal)}. "
            "They hold more than rows of the same budget that cut every layer."
        )
    yield from _few_documents(rows)
    if settings.runtime is not None:
        runs = ((row.label, text.runtime) for row in rows for text in row.documents if text.runtime is not None)
        yield from storing_notes(runs, settings.runtime)


def _short_texts(documents: Sequence[Document], settings: Settings) -> Iterator[str]:
    short = [document for document in documents if document.fed < settings.tokens]
    begun = " behind the start" if any(document.begin for document in documents) else ""
    if len(short) > _NAMED:
        least, most = min(short, key=lambda one: one.fed), max(short, key=lambda one: one.fed)
        yield (
            f"{len(short):,} of {count(len(documents), 'text')} have fewer than the {settings.tokens:,} tokens asked "
            f"for, {least.fed:,} ({least.name}) to {most.fed:,}: all of them was scored{begun}."
        )
        return
    for document in short:
        yield (
            f"{document.name} has only {document.fed:,} tokens to score, {settings.tokens:,} were "
            f"asked for: all of it was scored{begun}."
        )


_NAMED = 3
"""Short texts that have a sentence each."""


def _presets(rows: Sequence[Row]) -> Iterator[str]:
    """What presets ran with: options that their projects chose, not the defaults of kvmnn's policies."""
    for preset in dict.fromkeys(row.preset for row in rows if row.preset is not None):
        policies: dict[str, dict[str, dict[str, None]]] = {}
        for row in rows:
            if row.preset == preset and not row.is_full:
                known = policies.setdefault(row.policy, {})
                for name, value in row.options.items():
                    if value is not None:
                        known.setdefault(name, {})[_written(value)] = None
        parts = []
        for policy, options in policies.items():
            said = [f"{name}={'/'.join(values)}" for name, values in options.items()]
            parts.append(f"{policy} with {', '.join(said)}")
        if parts:
            yield f"Preset {preset}, options of its project where you said none: {'; '.join(parts)}."


def _written(value: object) -> str:
    """As a spec has it."""
    if isinstance(value, list | tuple):
        return "+".join(map(str, value)) or "none"
    return f"{value:g}" if isinstance(value, float) else str(value)


def _few_documents(rows: Sequence[Row]) -> Iterator[str]:
    compared = [row.versus_full.documents for row in rows if row.versus_full is not None]
    if not compared or compared[0] >= FEWEST:
        return
    if compared[0] == 1:
        yield "One document: there is no interval for the differences to the full cache."
        return
    range_ = (
        ": of 2 documents one is their range and holds the true difference half of the time" if compared[0] == 2 else ""
    )
    yield (
        f"The intervals are over {compared[0]} documents: with fewer than {FEWEST} they are too narrow to be cited"
        f"{range_} (docs/lm.md)."
    )


def _unequal_budgets(rows: Sequence[Row]) -> Iterator[str]:
    """Where policies did not all run at the same sizes, so that rows side by side hold unequal numbers of tokens."""
    sizes: dict[str, dict[str, None]] = {}
    for row in rows:
        if row.policy != FULL:
            sizes.setdefault(row.policy, {})[_size(row)] = None
    if len({frozenset(found) for found in sizes.values()}) < 2:
        return
    said = "; ".join(f"{policy} {' and '.join(found)}" for policy, found in sizes.items())
    none = [policy for policy, found in sizes.items() if _NO_BUDGET in found]
    why = "".join(f" Of {policy}: {policy_called(policy).budget_means.replace('`', '')}." for policy in none)
    yield f"Policies ran with unequal budgets: {said}. Compare rows of one budget only.{why}"


_NO_BUDGET = "none"


def _size(row: Row) -> str:
    if row.budget is not None:
        return f"{row.budget:,}"
    return _NO_BUDGET if row.keep_ratio is None else f"{100 * row.keep_ratio:.4g} %"


def _nothing_evicted(rows: Sequence[Row], documents: Sequence[Document], settings: Settings) -> Iterator[str]:
    """Which rows evicted nothing: that they are no rivals of the others, and for each reason once why."""
    if any(row.is_uncut for row in rows):
        yield (
            f"Rows marked {UNCUT_MARK} evicted nothing before the last token was scored: their quality is that of the "
            "full cache and says nothing of the policy, so that none of them is the best of its budget."
        )
    longest = max(document.fed for document in documents)
    first = documents[0].begin or min(settings.prompt or settings.chunk, longest)
    held = next((row.tokens_kept for row in rows if row.start is not None and row.policy == FULL), None)
    yield from by_reason(
        (row.label, f"nothing was evicted: {_why_all_stay(row, first, longest)}.")
        for row in rows
        if row.policy != FULL and (row.kind == LOSSLESS if row.start is None else row.tokens_kept == held)
    )


def by_reason(reasons: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Return one sentence for each reason, after the labels of all rows that have it.

    Parameters
    ----------
    reasons
        Labels, each with what is to be said of its row.
    """
    labels: dict[str, list[str]] = {}
    for label, reason in reasons:
        labels.setdefault(reason, []).append(label)
    yield from (f"{'; '.join(same)}: {reason}" for reason, same in labels.items())


def _why_all_stay(row: Row, first: int, longest: int) -> str:
    return make(row.policy, row.options).why_all_stay(first, longest) or "no step gave it reason to"


def _cut_too_late(rows: Sequence[Row], documents: Sequence[Document], settings: Settings) -> Iterator[str]:
    """Which rows evicted only once all tokens of every text were scored, so that their quality is the full cache's."""
    steps = [_steps(document, settings) for document in documents]
    cut = [row for row in rows if row.kind == LOSSY and row.policy != FULL]
    late = [row.label for row in cut if (_all_scored_before(row, steps) if row.evicted is None else not row.evicted)]
    if late:
        yield (
            f"No scored token saw the cut cache: {'; '.join(late)}: a cache is cut after a step, and the first "
            "cut came after the last one, so quality is that of the full cache. Expected a smaller --chunk or "
            "--prompt, or more --tokens."
        )


def _steps(document: Document, settings: Settings) -> tuple[int, int]:
    """Tokens of a text's first step, and those fed before its last one; a start is a first step."""
    tokens = document.fed
    first = document.begin or min(settings.prompt or settings.chunk, tokens)
    return first, 0 if first == tokens else first + (tokens - first - 1) // settings.chunk * settings.chunk


def _all_scored_before(row: Row, steps: Sequence[tuple[int, int]]) -> bool:
    """Whether the policy had no reason to evict, in any text, before the last step."""
    policy = make(row.policy, row.options)
    return all(not before or policy.why_all_stay(first, before) is not None for first, before in steps)
