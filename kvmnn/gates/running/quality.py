"""The change of perplexity by what is evicted; what is stored changes no bit, which the comparison shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import expm1
from pathlib import Path
from typing import Any

from ...errors import KvmnnError
from ...evaluation import EvaluationSettings, evaluate
from ...evaluation.setup.configurations import build_configuration
from ...lm.documents import Document
from ...policies.base import Policy
from ...policies.h2o_engine import H2OEngine
from ...text import pluralize
from .run_cases import RunCase
from .settings import RunSettings

_MAX_FURTHER_TOKENS = 4096
"""Tokens beyond the texts up to which is looked for a length at which something would be evicted."""


@dataclass(frozen=True, kw_only=True)
class PerplexityChange:
    """The change of perplexity against the full cache, as shares; no interval over fewer than two texts.

    lossy_ratio: bytes of all tokens over those kept at the end of the texts, 1 where nothing was evicted; why_all_stay
    is then the planner's reason, where it has one.
    """

    mean: float
    low: float | None
    high: float | None
    texts: int
    tokens: int
    lossy_ratio: float
    why_all_stay: str = ""


class PerplexityProgress:
    """Progress of an evaluation in units of another work.

    Parameters
    ----------
    units
        That all of it is.
    advance
        Called with the units done since its last call.

    Attributes
    ----------
    remaining_units
        Units that were not counted yet.
    """

    def __init__(self, units: int, advance: Callable[[int], object]) -> None:
        self.remaining_units, self._units, self._advance = units, units, advance
        self._tokens, self._done_tokens = 0, 0

    def start(self, tokens: int, cells: int, reused: int) -> None:
        """Begin: this many tokens."""
        self._tokens = tokens

    def advance(self, tokens: int, cells: int) -> None:
        """Count tokens."""
        self._done_tokens += tokens
        remaining_units = self._units - self._units * min(self._done_tokens, self._tokens) // max(self._tokens, 1)
        self._advance(self.remaining_units - remaining_units)
        self.remaining_units = remaining_units


def measure_perplexity_change(
    model: str,
    documents: Sequence[Document],
    case: RunCase,
    *,
    jobs: int,
    store: Path,
    progress: PerplexityProgress | None = None,
) -> PerplexityChange:
    """Evaluate the planner of a case on the beginnings of texts.

    Parameters
    ----------
    jobs
        Processes; 0: this one.
    store
        File of what was evaluated before.
    progress
        Told of tokens.

    Raises
    ------
    KvmnnError
        Where the model cannot run the planner.
    """
    settings = case.settings
    result = evaluate(
        model,
        [_truncate(document, settings.quality_tokens) for document in documents[: settings.quality_texts]],
        [build_configuration(H2OEngine.name, H2OEngine.parse_engine_options(case.engine))],
        settings=EvaluationSettings(
            tokens=settings.quality_tokens,
            prompt=settings.quality_prompt,
            threads=settings.threads,
            seed=settings.seed,
            timing=False,
        ),
        jobs=jobs,
        store=store,
        progress=progress,
    )
    if result.refused:
        raise KvmnnError(f"{case.name}: {result.refused[0].reason}")
    row, texts = result.rows[-1], result.documents
    difference: Any = row.versus_full
    lossy_ratio = row.lossy_ratio or 1.0
    return PerplexityChange(
        mean=expm1(difference.nll),
        low=None if difference.low is None else expm1(difference.low),
        high=None if difference.high is None else expm1(difference.high),
        texts=len(texts),
        tokens=sum(text.tokens for text in texts),
        lossy_ratio=lossy_ratio,
        why_all_stay="" if lossy_ratio > 1 else explain_no_eviction(case.policy, settings),
    )


def explain_no_eviction(policy: Policy, settings: RunSettings) -> str:
    """Why nothing was evicted in the texts, and from how many tokens on it would be."""
    prompt_tokens, tokens = settings.quality_prompt, settings.quality_tokens
    reason = policy.explain_no_eviction(
        prompt_tokens, max(1, tokens - 1)
    )  # what the last step plans, no step carries out
    if reason is None:
        decoded_text = pluralize(tokens - prompt_tokens, "token")
        return f"too few steps for a plan: {decoded_text} after the prompt (quality_tokens less quality_prompt)"
    lengths = range(tokens, tokens + _MAX_FURTHER_TOKENS)
    sufficient_length = next(
        (length for length in lengths if policy.explain_no_eviction(prompt_tokens, length) is None), None
    )
    return reason if sufficient_length is None else f"{reason}, or quality_tokens above {sufficient_length:,}"


def _truncate(document: Document, tokens: int) -> Document:
    """The beginning of a text; bytes are then those of all of it, which perplexity does not use."""
    if document.num_scored <= tokens:
        return document
    return Document(
        name=document.name,
        ids=document.ids[: tokens + 1],
        nbytes=document.nbytes,
        sha256=document.sha256,
        begins_with_bos=document.begins_with_bos,
        requested_tokens=tokens,
    )
