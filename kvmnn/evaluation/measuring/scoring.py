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
from ...reports.rows import Quality
from .cells import Sums

_BLOCK_WORDS = 1 << 19
"""Logits that are taken to float64 at once: 4 MiB."""


class Feeder(Protocol):
    """What is needed of `kvmnn.lm.runner.Runner`."""

    def feed(self, ids: Ids, *, end_chunk: bool = False) -> npt.NDArray[Any]:
        """Feed tokens, cut the cache, return logits ``[token, vocab]``."""

    def replay(self, layers: Sequence[LayerCache], new: int, *, end_chunk: bool = False) -> None:
        """The same with K and V of these tokens that are known already."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Known:
    """The beginning of a text that need not be computed.

    Parameters
    ----------
    tokens
        Fed, of whole steps.
    layers
        K and V of them.
    nll, hits
        ``[token]``: what `negative_log_probabilities` gives for the token behind each.
    """

    tokens: int
    layers: Sequence[LayerCache]
    nll: npt.NDArray[np.float64]
    hits: npt.NDArray[np.bool_]


@dataclass
class Scored:
    """One document under one configuration.

    Attributes
    ----------
    every, deep : Sums
        All tokens, and those fed at `deep_from` or later.
    seconds : float
        Wall time of feeding: the model and the policy, not the scoring.
    """

    every: Sums
    deep: Sums
    seconds: float = 0.0


def negative_log_probabilities(
    logits: npt.NDArray[Any], targets: Ids
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
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
    rows = max(1, _BLOCK_WORDS // max(1, logits.shape[1]))
    for begin in range(0, len(targets), rows):
        some = slice(begin, begin + rows)
        block = logits[some].astype(np.float64)
        best = block.argmax(axis=1)
        wanted = targets[some]
        chosen = block[np.arange(len(block)), wanted]
        highest = block[np.arange(len(block)), best]
        with np.errstate(invalid="ignore", over="ignore"):
            block -= highest[:, None]
            np.exp(block, out=block)
            nll[some] = np.log(block.sum(axis=1)) + (highest - chosen)
        hits[some] = best == wanted
    return nll, hits


def steps_of(tokens: int, chunk: int, prompt: int = 0, held: int = 0) -> list[tuple[int, int]]:
    """How tokens are fed, but for the first `held`: first token of each step, and the token behind its last."""
    ends = [held or min(prompt or chunk, tokens)]
    while ends[-1] < tokens:
        ends.append(min(ends[-1] + chunk, tokens))
    steps = list(zip([0, *ends[:-1]], ends, strict=True)) if tokens else []
    return steps[1:] if held else steps


def feed_unscored(
    runner: Feeder, ids: Ids, tokens: int, chunk: int, prompt: int = 0, advance: Callable[[int], object] | None = None
) -> None:
    """Feed the first `tokens` of `ids` in the steps of `score`, without their scores; `advance` hears of each."""
    for begin, end in steps_of(tokens, chunk, prompt):
        runner.feed(ids[begin:end], end_chunk=max(chunk, end - begin) > 1)
        if advance is not None:
            advance(end - begin)


def score(
    runner: Feeder,
    ids: Ids,
    *,
    chunk: int,
    deep_from: int,
    prompt: int = 0,
    after: Callable[[int], object] | None = None,
    held: int = 0,
    known: Known | None = None,
    keep: Callable[[npt.NDArray[Any], npt.NDArray[np.float64], npt.NDArray[np.bool_]], object] | None = None,
) -> Scored:
    """Feed all ids but the last in chunks and score each against the one behind it.

    Parameters
    ----------
    runner
        Freshly reset, or with the first `held` tokens.
    ids
        int64 ``[1 + tokens]``.
    chunk
        Tokens that are fed at once. The lazy policies are told of a chunk's end where it has more than one token, as
        StreamingLLM + H2O do; token by token they keep their surplus.
    prompt
        Tokens of the first step; 0 for `chunk`.
    deep_from
        Tokens fed at this position or later are also added up apart.
    after
        Called after every chunk with the tokens seen so far.
    held
        Tokens that the runner holds already; the steps behind them are of `chunk`.
    known
        The steps with which the text begins, where they were computed before.
    keep
        Called with the logits of each other step, and what `negative_log_probabilities` gave for them.

    Raises
    ------
    KvmnnError
        Where a log-probability is not finite, naming the position.
    """
    scored = Scored(Sums(), Sums())
    for begin, end in steps_of(len(ids) - 1, chunk, prompt, held):
        end_chunk = max(chunk, end - begin) > 1
        started = time.perf_counter()
        if known is not None and end <= known.tokens:
            runner.replay(known.layers, end - begin, end_chunk=end_chunk)
            nll, hits = known.nll[begin:end], known.hits[begin:end]
            scored.seconds += time.perf_counter() - started
        else:
            logits = runner.feed(ids[begin:end], end_chunk=end_chunk)
            scored.seconds += time.perf_counter() - started
            nll, hits = negative_log_probabilities(logits, ids[begin + 1 : end + 1])
            if keep is not None:
                keep(logits, nll, hits)
        if not np.isfinite(nll).all():
            wrong = begin + int(np.flatnonzero(~np.isfinite(nll))[0])
            raise KvmnnError(f"the model's logits at position {wrong} give no finite log-probability")
        _add(scored.every, nll, hits)
        if end > deep_from:
            first = max(deep_from - begin, 0)
            _add(scored.deep, nll[first:], hits[first:])
        if after is not None:
            after(end)
    return scored


def _add(sums: Sums, nll: npt.NDArray[np.float64], hits: npt.NDArray[np.bool_]) -> None:
    sums.tokens += len(nll)
    sums.nll += float(nll.sum())
    sums.hits += int(np.count_nonzero(hits))


def summary(sums: Sums, begin: int | None = None) -> Quality:
    """Means of sums; None of each where there are no tokens. `begin` is the position of the first token, if told."""
    if sums.tokens == 0:
        return Quality(begin=begin, tokens=0, nll=None, perplexity=None, accuracy=None)
    nll = sums.nll / sums.tokens
    return Quality(
        begin=begin, tokens=sums.tokens, nll=nll, perplexity=perplexity(nll), accuracy=sums.hits / sums.tokens
    )


def perplexity(nll: float) -> float | None:
    """``exp(nll)``; None beyond float64."""
    return math.exp(nll) if nll < 709 else None
