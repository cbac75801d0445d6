"""The change of perplexity by what is evicted; what is stored changes no bit, which the comparison shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import expm1
from pathlib import Path
from typing import Any

from ...errors import KvmnnError
from ...evaluation import Settings, evaluate
from ...evaluation.setup.configurations import named
from ...lm.documents import Document
from ...policies.base import Policy
from ...policies.h2o_engine import H2OEngine
from ...text import count
from .run_cases import RunCase
from .settings import RunSettings

_FURTHER = 4096
"""Tokens beyond the texts up to which is looked for a length at which something would be evicted."""


@dataclass(frozen=True, kw_only=True)
class Quality:
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


class QualityProgress:
    """Progress of an evaluation in units of another work.

    Parameters
    ----------
    units
        That all of it is.
    advance
        Called with the units done since its last call.

    Attributes
    ----------
    left
        Units that were not counted yet.
    """

    def __init__(self, units: int, advance: Callable[[int], object]) -> None:
        self.left, self._units, self._advance = units, units, advance
        self._tokens, self._done = 0, 0

    def start(self, tokens: int, cells: int, reused: int) -> None:
        """Begin: this many tokens."""
        self._tokens = tokens

    def advance(self, tokens: int, cells: int) -> None:
        """Count tokens."""
        self._done += tokens
        left = self._units - self._units * min(self._done, self._tokens) // max(self._tokens, 1)
        self._advance(self.left - left)
        self.left = left


def measure_quality(
    model: str,
    documents: Sequence[Document],
    case: RunCase,
    *,
    jobs: int,
    store: Path,
    progress: QualityProgress | None = None,
) -> Quality:
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
        [_cut(document, settings.quality_tokens) for document in documents[: settings.quality_texts]],
        [named(H2OEngine.name, H2OEngine.options_from_engine(case.engine))],
        settings=Settings(
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
    lossy = row.lossy_ratio or 1.0
    return Quality(
        mean=expm1(difference.nll),
        low=None if difference.low is None else expm1(difference.low),
        high=None if difference.high is None else expm1(difference.high),
        texts=len(texts),
        tokens=sum(text.tokens for text in texts),
        lossy_ratio=lossy,
        why_all_stay="" if lossy > 1 else why_all_stay(case.policy, settings),
    )


def why_all_stay(policy: Policy, settings: RunSettings) -> str:
    """Why nothing was evicted in the texts, and from how many tokens on it would be."""
    prompt, tokens = settings.quality_prompt, settings.quality_tokens
    why = policy.why_all_stay(prompt, max(1, tokens - 1))  # what the last step plans, no step carries out
    if why is None:
        decoded = count(tokens - prompt, "token")
        return f"too few steps for a plan: {decoded} after the prompt (quality_tokens less quality_prompt)"
    further = range(tokens, tokens + _FURTHER)
    enough = next((length for length in further if policy.why_all_stay(prompt, length) is None), None)
    return why if enough is None else f"{why}, or quality_tokens above {enough:,}"


def _cut(document: Document, tokens: int) -> Document:
    """The beginning of a text; bytes are then those of all of it, which perplexity does not use."""
    if document.tokens <= tokens:
        return document
    return Document(
        name=document.name,
        ids=document.ids[: tokens + 1],
        nbytes=document.nbytes,
        sha256=document.sha256,
        begins_with_bos=document.begins_with_bos,
        asked=tokens,
    )
