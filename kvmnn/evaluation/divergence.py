"""How far next-token distributions are from those of the full cache: Kullback-Leibler divergence, equal best tokens.

The full cache is scored first. Of its distribution at each token, a file contains the tokens of probability
`MIN_PROBABILITY` or more, at most `MAX_STORED_TOKENS` of them, with their logits as the model gave them; all others are
one bucket, whose probability follows. A configuration is compared with the file as its own logits go by.

The divergence of distributions with some tokens merged into one bucket is never above that of the distributions
themselves (the log-sum inequality), and below it by the bucket's probability times the divergence inside the bucket. So
what is measured is a lower bound; equal logits give exactly 0. Complete logits would be 400 MB for each text of 2,048
tokens of a vocabulary of 49,152. On SmolLM2-135M (512 and 768 tokens of a novel, a prompt of 256) the bound was 0.9 to
1.2 % below the divergence of all tokens: for all but 192 tokens evicted (0.065 and 0.076 nats), for q4_0 (0.024 nats)
and for noise of 0.01 on every logit (0.000042 nats). 3,100 tokens are stored on average.
"""

from __future__ import annotations

import base64
import hashlib
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Protocol, Self

import numpy as np
import numpy.typing as npt

from .._util.named_tuple import NamedTuple
from ..errors import KvmnnError
from ..lm.documents import Document
from ..reports.records import DivergenceStats
from .records import TokenDivergence

MIN_PROBABILITY = 2.0**-18
MAX_STORED_TOKENS = 1 << 14
_MIN_REMAINDER = 1e-300
"""In place of a remainder that rounding made 0: its product with a remainder of the other side stays finite."""

_HIGH_PERCENTILE = 0.99
_BLOCK_ELEMENTS = 1 << 19
"""Logits that are taken to float64 at once: 4 MiB."""


class TokenScores(NamedTuple):
    """What was computed of the logits of some tokens; arrays ``[token]``."""

    #: Negative log-probability of the next token, nats.
    nll: npt.NDArray[np.float64]
    #: The most probable token, the lowest id of several, and whether it is the next one.
    best: npt.NDArray[np.int64]
    hits: npt.NDArray[np.bool_]
    #: Logarithm of the sum of the exponentials of the logits.
    log_sums: npt.NDArray[np.float64]

    def select(self, tokens: slice) -> TokenScores:
        """Return the scores of some of the tokens."""
        return TokenScores(self.nll[tokens], self.best[tokens], self.hits[tokens], self.log_sums[tokens])


class DistributionObserver(Protocol):
    """Sees the logits of a text as it is scored, in order."""

    def add(self, logits: npt.NDArray[Any], scores: TokenScores) -> None:
        """Take the logits ``[token, vocab]`` of further tokens."""

    def skip(self, tokens: int) -> None:
        """Take note of further tokens whose logits nobody computed, as a prefix store had their scores."""


def get_reference_path(folder: Path, document: Document) -> Path:
    """Return the path of the full cache's distributions on a document."""
    digest = hashlib.sha256(np.ascontiguousarray(document.ids, "<i8").tobytes()).hexdigest()
    return folder / f"{digest}-{document.scored_from}"


class ReferenceWriter:
    """Writes the distributions of the full cache; the file is in its place at the end, unless something was skipped."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._partial_path = path.with_name(f"{path.name}-partial")
        self._file: IO[bytes] | None = open(self._partial_path, "wb")  # noqa: SIM115

    def __enter__(self) -> Self:
        return self

    def __exit__(self, error_type: type[BaseException] | None, *error: object) -> None:
        if self._file is not None:
            self._file.close()
            if error_type is None:
                os.replace(self._partial_path, self._path)

    def add(self, logits: npt.NDArray[Any], scores: TokenScores) -> None:
        if self._file is None:
            return
        threshold = np.minimum(scores.log_sums + math.log(MIN_PROBABILITY), logits.max(axis=1))
        selected = logits >= threshold[:, None].astype(np.float32)
        counts = np.count_nonzero(selected, axis=1)
        for token in np.flatnonzero(counts > MAX_STORED_TOKENS):
            top_tokens = np.argpartition(logits[token], -MAX_STORED_TOKENS)[-MAX_STORED_TOKENS:]
            selected[token] = False
            selected[token, top_tokens] = True
            counts[token] = MAX_STORED_TOKENS
        rows, ids = np.nonzero(selected)
        for array in (
            np.array([len(counts), len(ids), logits.shape[1]], np.int64),
            scores.log_sums,
            scores.best.astype(np.int64),
            counts.astype(np.int64),
            ids.astype(np.int32),
            logits[rows, ids].astype(np.float32),
        ):
            self._file.write(array.tobytes())

    def skip(self, tokens: int) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None
            self._partial_path.unlink()


class ReferenceComparer:
    """Compares the distributions of a configuration with those of the full cache on the same tokens."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "rb")  # noqa: SIM115
        self._divergences: list[npt.NDArray[np.float64]] = []
        self._agreements: list[npt.NDArray[np.bool_]] = []

    def add(self, logits: npt.NDArray[Any], scores: TokenScores) -> None:
        tokens, stored, vocab = self._read(np.int64, 3).tolist()
        if tokens != len(logits) or vocab != logits.shape[1]:
            raise KvmnnError(
                f"{self._file.name}: logits of {tokens} tokens and {vocab:,} words: expected {len(logits)} and "
                f"{logits.shape[1]:,}, those of the same step"
            )
        reference_log_sums = self._read(np.float64, tokens)
        self._agreements.append(self._read(np.int64, tokens) == scores.best)
        counts = self._read(np.int64, tokens)
        ids, reference_logits = self._read(np.int32, stored), self._read(np.float32, stored)
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]])
        rows = np.repeat(np.arange(tokens), counts)
        log_p = reference_logits - reference_log_sums[rows]
        log_q = logits[rows, ids] - scores.log_sums[rows]
        p = np.exp(log_p)
        divergences = np.add.reduceat(p * (log_p - log_q), starts)
        remainder_p, remainder_q = (1 - np.add.reduceat(exponentials, starts) for exponentials in (p, np.exp(log_q)))
        has_remainder = counts < vocab
        remainder_p, remainder_q = (np.maximum(remainder, _MIN_REMAINDER) for remainder in (remainder_p, remainder_q))
        divergences += np.where(has_remainder, remainder_p * np.log(remainder_p / remainder_q), 0)
        self._divergences.append(np.maximum(divergences, 0))

    def skip(self, tokens: int) -> None:
        # A configuration's first step is what the full cache computes: nothing has been cut yet.
        while tokens > 0:
            step_tokens, stored, _ = self._read(np.int64, 3).tolist()
            self._file.seek(24 * step_tokens + 8 * stored, os.SEEK_CUR)
            self._divergences.append(np.zeros(step_tokens))
            self._agreements.append(np.ones(step_tokens, np.bool_))
            tokens -= step_tokens

    def _read(self, dtype: type[np.generic], count: int) -> npt.NDArray[Any]:
        array = np.fromfile(self._file, dtype, count)
        if len(array) != count:
            raise KvmnnError(f"{self._file.name}: the distributions of the full cache end before the text")
        return array

    def to_divergence(self, num_deep: int) -> TokenDivergence:
        """Return the divergence of every token; the last `num_deep` ones are the deep ones."""
        divergences = np.concatenate(self._divergences)
        if not np.isfinite(divergences).all():
            position = int(np.flatnonzero(~np.isfinite(divergences))[0])
            raise KvmnnError(f"scored token {position}: no probability for a token to which the full cache gives one")
        return TokenDivergence(
            tokens=len(divergences),
            num_deep=num_deep,
            kl=_encode(divergences.astype("<f4")),
            agreement=_encode(np.packbits(np.concatenate(self._agreements))),
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


def _encode(array: npt.NDArray[Any]) -> str:
    return base64.b64encode(array.tobytes()).decode()


def summarize_divergence(
    parts: Sequence[TokenDivergence | None], *, deep: bool = False, num_last: Sequence[int | None] | None = None
) -> DivergenceStats | None:
    """Summarize the divergences of documents; None where one was not compared, or no token is left.

    Parameters
    ----------
    deep
        Of the deep tokens only.
    num_last
        Of so many tokens at the end of each document only.
    """
    counts = num_last or [None if part is None else part.num_deep if deep else part.tokens for part in parts]
    if any(part is None or count is None for part, count in zip(parts, counts, strict=True)):
        return None
    kl, agreement = [], []
    for part, count in zip(parts, counts, strict=True):
        if part is not None and count is not None:
            first = part.tokens - count
            kl.append(np.frombuffer(base64.b64decode(part.kl), "<f4")[first:])
            bits = np.frombuffer(base64.b64decode(part.agreement), np.uint8)
            agreement.append(np.unpackbits(bits, count=part.tokens)[first:])
    all_kl = np.concatenate(kl).astype(np.float64)
    if not len(all_kl):
        return None
    return DivergenceStats(
        tokens=len(all_kl),
        kl=float(all_kl.mean()),
        kl_p99=float(np.quantile(all_kl, _HIGH_PERCENTILE)),
        agreement=float(np.concatenate(agreement).mean()),
    )


def compute_token_scores(logits: npt.NDArray[Any], targets: npt.NDArray[np.int64]) -> TokenScores:
    """Compute how probable targets are under logits ``[token, vocab]``, which are taken to float64 block by block.

    Of equal logits the lower id is the most probable one, as in numpy's and torch's argmax.
    """
    scores = TokenScores(
        np.empty(len(targets), np.float64),
        np.empty(len(targets), np.int64),
        np.empty(len(targets), np.bool_),
        np.empty(len(targets), np.float64),
    )
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
            log_sums = np.log(block.sum(axis=1))
            scores.nll[row_range] = log_sums + (max_logits - target_logits)
        scores.best[row_range] = best
        scores.hits[row_range] = best == block_targets
        scores.log_sums[row_range] = max_logits + log_sums
    return scores
