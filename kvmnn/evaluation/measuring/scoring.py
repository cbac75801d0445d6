"""Teacher-forced scoring: how probable the model found each next token, one chunk of logits at a time."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from ...arrays.layer_cache import LayerCache
from ...errors import KvmnnError
from ...lm.documents import Ids
from ...reports.rows import QualityStats
from .cells import LossSums

_BLOCK_ELEMENTS = 1 << 19
"""Logits that are taken to float64 at once: 4 MiB."""


class StepRunner(Protocol):
    """What is needed of `kvmnn.lm.runner.Runner`."""

    def step(self, ids: Ids, *, end_chunk: bool = False) -> npt.NDArray[Any]:
        """Feed tokens, cut the cache, return logits ``[token, vocab]``."""

    def replay_step(self, layers: Sequence[LayerCache], num_new: int, *, end_chunk: bool = False) -> None:
        """The same with K and V of these tokens that are known already."""


@dataclass(frozen=True, eq=False, kw_only=True)
class CachedScores:
    """The beginning of a text that need not be computed.

    Parameters
    ----------
    tokens
        Fed, of whole steps.
    layers
        K and V of them.
    nll, hits
        ``[token]``: what `compute_nll` gives for the token behind each.
    """

    tokens: int
    layers: Sequence[LayerCache]
    nll: npt.NDArray[np.float64]
    hits: npt.NDArray[np.bool_]


@dataclass
class ScoreResult:
    """One document under one configuration.

    Attributes
    ----------
    every, deep : Sums
        All tokens, and those fed at `tail_start` or later.
    seconds : float
        Wall time of feeding: the model and the policy, not the scoring.
    """

    every: LossSums
    deep: LossSums
    seconds: float = 0.0


def compute_nll(logits: npt.NDArray[Any], targets: Ids) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """Of each target its negative log-probability in nats, and whether it is the most probable token.

    Parameters
    ----------
    logits
        ``[token, vocab]``; taken to float64 block by block.
    targets
        int64 ``[token]``.

    Notes
    -----
    Of equal logits the lower id is the most probable one, as in numpy's and torch's argmax.
    """
    nll = np.empty(len(targets), np.float64)
    hits = np.empty(len(targets), np.bool_)
    rows = max(1, _BLOCK_ELEMENTS // max(1, logits.shape[1]))
    for begin in range(0, len(targets), rows):
        row_range = slice(begin, begin + rows)
        block = logits[row_range].astype(np.float64)
        best = block.argmax(axis=1)
        block_targets = targets[row_range]
        target_logits = block[np.arange(len(block)), block_targets]
        max_logits = block[np.arange(len(block)), best]
        with np.errstate(invalid="ignore", over="ignore"):
            block -= max_logits[:, None]
            np.exp(block, out=block)
            nll[row_range] = np.log(block.sum(axis=1)) + (max_logits - target_logits)
        hits[row_range] = best == block_targets
    return nll, hits


def list_steps(tokens: int, chunk: int, prompt: int = 0, num_initial: int = 0) -> list[tuple[int, int]]:
    """How tokens are fed, but for the first `num_initial`: first token of each step, and the token behind its last."""
    ends = [num_initial or min(prompt or chunk, tokens)]
    while ends[-1] < tokens:
        ends.append(min(ends[-1] + chunk, tokens))
    steps = list(zip([0, *ends[:-1]], ends, strict=True)) if tokens else []
    return steps[1:] if num_initial else steps


def feed_unscored(
    runner: StepRunner,
    ids: Ids,
    tokens: int,
    chunk: int,
    prompt: int = 0,
    advance: Callable[[int], object] | None = None,
) -> None:
    """Feed the first `tokens` of `ids` in the steps of `score_document`, without their scores; `advance` hears of
    each.
    """
    for begin, end in list_steps(tokens, chunk, prompt):
        runner.step(ids[begin:end], end_chunk=max(chunk, end - begin) > 1)
        if advance is not None:
            advance(end - begin)


def score_document(
    runner: StepRunner,
    ids: Ids,
    *,
    chunk: int,
    tail_start: int,
    prompt: int = 0,
    on_step: Callable[[int], object] | None = None,
    num_initial: int = 0,
    cached_scores: CachedScores | None = None,
    on_scores: Callable[[npt.NDArray[Any], npt.NDArray[np.float64], npt.NDArray[np.bool_]], object] | None = None,
) -> ScoreResult:
    """Feed all ids but the last in chunks and score each against the one behind it.

    Parameters
    ----------
    runner
        Freshly reset, or with the first `num_initial` tokens.
    ids
        int64 ``[1 + tokens]``.
    chunk
        Tokens that are fed at once. The lazy policies are told of a chunk's end where it has more than one token, as
        StreamingLLM + H2O do; token by token they keep their surplus.
    prompt
        Tokens of the first step; 0 for `chunk`.
    tail_start
        Tokens fed at this position or later are also added up apart.
    on_step
        Called after every chunk with the tokens seen so far.
    num_initial
        Tokens that the runner holds already; the steps behind them are of `chunk`.
    cached_scores
        The steps with which the text begins, where they were computed before.
    on_scores
        Called with the logits of each other step, and what `compute_nll` gave for them.

    Raises
    ------
    KvmnnError
        Where a log-probability is not finite, naming the position.
    """
    result = ScoreResult(LossSums(), LossSums())
    for begin, end in list_steps(len(ids) - 1, chunk, prompt, num_initial):
        end_chunk = max(chunk, end - begin) > 1
        start_time = time.perf_counter()
        if cached_scores is not None and end <= cached_scores.tokens:
            runner.replay_step(cached_scores.layers, end - begin, end_chunk=end_chunk)
            nll, hits = cached_scores.nll[begin:end], cached_scores.hits[begin:end]
            result.seconds += time.perf_counter() - start_time
        else:
            logits = runner.step(ids[begin:end], end_chunk=end_chunk)
            result.seconds += time.perf_counter() - start_time
            nll, hits = compute_nll(logits, ids[begin + 1 : end + 1])
            if on_scores is not None:
                on_scores(logits, nll, hits)
        if not np.isfinite(nll).all():
            bad_position = begin + int(np.flatnonzero(~np.isfinite(nll))[0])
            raise KvmnnError(f"the model's logits at position {bad_position} give no finite log-probability")
        _add_scores(result.every, nll, hits)
        if end > tail_start:
            first = max(tail_start - begin, 0)
            _add_scores(result.deep, nll[first:], hits[first:])
        if on_step is not None:
            on_step(end)
    return result


def _add_scores(sums: LossSums, nll: npt.NDArray[np.float64], hits: npt.NDArray[np.bool_]) -> None:
    sums.tokens += len(nll)
    sums.nll += float(nll.sum())
    sums.hits += int(np.count_nonzero(hits))


def summarize(sums: LossSums, begin: int | None = None) -> QualityStats:
    """Means of sums; None of each where there are no tokens. `begin` is the position of the first token, if told."""
    if sums.tokens == 0:
        return QualityStats(begin=begin, tokens=0, nll=None, perplexity=None, accuracy=None)
    nll = sums.nll / sums.tokens
    return QualityStats(
        begin=begin, tokens=sums.tokens, nll=nll, perplexity=compute_perplexity(nll), accuracy=sums.hits / sums.tokens
    )


def compute_perplexity(nll: float) -> float | None:
    """``exp(nll)``; None beyond float64."""
    return math.exp(nll) if nll < 709 else None
