"""Beginnings of texts that were scored before: K and V, and how probable each token was, from a prefix store.

Only what another run of the same steps would give bit for bit is taken: rows are stored under the model and all that
decides how they were computed, and a text is taken up at the end of one of its steps, never inside one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from ... import dtypes
from ...arrays.layer_cache import LayerCache
from ...dtypes import Floats
from ...errors import KvmnnError
from ...frames.hashing import checksum
from ...lm.documents import Ids
from ...lm.graph.decoder import Step
from ...lm.runner import Runner
from ...policies.view import Moment
from ...store import PrefixStore
from .scoring import Known, Scored, negative_log_probabilities, score, steps_of

_DIGEST_IDS = 12
"""Token ids of 24 bits that stand for a text whose last logits are kept."""


def can_begin(runner: Runner) -> bool:
    """Whether a text under a runner's policy may begin with rows from elsewhere: with the full cache anywhere, with one
    that is cut after its first step, of which a policy that ranks by attention would need that of every token."""
    policy = runner.policy
    return not policy.evicts or not (policy.needs_attention or Moment.APPENDED in policy.moments)


@dataclass(frozen=True)
class StoredScores:
    """What a store has of texts that were scored.

    Parameters
    ----------
    store
        Where it is.
    model
        The model's fingerprint.
    how
        All else that decides the bits of K, V and logits.
    notes
        What was wrong in the store.
    """

    store: PrefixStore
    model: str
    how: Mapping[str, Any]
    notes: list[str] = field(default_factory=list)

    def find(self, runner: Runner, ids: Ids, steps: Sequence[tuple[int, int]]) -> Known | None:
        """What is known of a text that will be fed in `steps`: all of them up to one's end; None where nothing is.

        Parameters
        ----------
        runner
            Freshly reset, one that `can_begin`.
        ids
            int64 ``[1 + tokens]``.
        steps
            First token of each, and the token behind its last.
        """
        first = steps[0][1]
        if runner.policy.evicts and first == 1:
            return None
        asked = ids[: first if runner.policy.evicts else len(ids) - 1]
        dtype = dtypes.of_array(np.empty(0, runner.session.interface.dtype)).name
        found = self.store.get(asked, model=self._name("rows"), dtype=dtype)
        self.notes.extend(found.notes)
        ends = [end for _, end in steps if end <= found.tokens]
        if not ends:
            return None
        nll, hits = _scores(found.layers[-1])  # of token i + 1, as far as that one is stored
        if found.tokens > ends[-1]:
            tokens = ends[-1]
        elif len(ends) > 1:  # the last logits of the last step are not there: it is computed again
            tokens = ends[-2]
        else:
            logits = self._logits(ids[:first])
            if logits is None:
                return None
            tokens = first
            last_nll, last_hit = negative_log_probabilities(logits[np.newaxis], ids[first : first + 1])
            nll, hits = np.append(nll[: first - 1], last_nll), np.append(hits[: first - 1], last_hit)
        rows = [
            LayerCache(layer=each.layer, keys=_cut(each.keys, tokens), values=_cut(each.values, tokens))
            for each in found.layers[:-1]
        ]
        return Known(tokens=tokens, layers=rows, nll=nll[:tokens], hits=hits[:tokens])

    def put(
        self,
        ids: Ids,
        layers: Sequence[LayerCache],
        nll: npt.NDArray[np.float64],
        hits: npt.NDArray[np.bool_],
        *,
        first: int,
        logits: Floats | None,
    ) -> None:
        """Store whole steps of a text, whose first had `first` tokens and ended with `logits`.

        A store that cannot be written costs what it would have kept, not the scores: `notes` says why.
        """
        tokens = layers[0].tokens
        rows = [LayerCache(layer=each.layer, keys=each.keys, values=each.values) for each in layers]
        self._put(ids[:tokens], [*rows, _score_layer(rows[-1], nll, hits)], "rows")
        if first > 1 and logits is not None:
            words = np.append(logits, np.zeros(-len(logits) % (2 * _DIGEST_IDS), np.float32))
            keys, values = np.append(words, _mark(words)).reshape(2, 1, _DIGEST_IDS, -1)
            cache = LayerCache(layer=0, keys=keys, values=values)
            self._put(_digest(ids[:first]), [cache], f"logits {len(logits)}")

    def _put(self, ids: Ids, layers: Sequence[LayerCache], what: str) -> None:
        try:
            self.notes.extend(self.store.put(ids, layers, model=self._name(what)).notes)
        except KvmnnError as error:
            self.notes.append(f"nothing was stored: {error}")

    def _logits(self, ids: Ids) -> Floats | None:
        """The last logits of a text that is a first step; None where they are not there."""
        begin = self._name("logits ")
        for model in self.store.models:
            if model.startswith(begin) and (count := model[len(begin) :]).isdecimal():
                found = self.store.get(_digest(ids), model=model, dtype="fp32")
                if found.tokens == _DIGEST_IDS:
                    words = np.concatenate([found.layers[0].keys, found.layers[0].values]).reshape(-1)
                    size = 2 * _DIGEST_IDS
                    if words[-size:].tobytes() == _mark(words[:-size]).tobytes():
                        return words[: int(count)]
        return None

    def _name(self, what: str) -> str:
        about = json.dumps([self.model, self.how], sort_keys=True).encode()
        return f"{self.model[:16]} eval {hashlib.blake2b(about, digest_size=16).hexdigest()} {what}"


def scored_with(
    stored: StoredScores | None, runner: Runner, ids: Ids, *, chunk: int, prompt: int, **options: Any
) -> tuple[Scored, int | None]:
    """As `score`, with what is stored of the text's beginning; also how many tokens that was, None without a store.

    What is computed is put: of the full cache all whole steps, else the first one.
    """
    if stored is None:
        return score(runner, ids, chunk=chunk, prompt=prompt, **options), None
    steps = steps_of(len(ids) - 1, chunk, prompt)
    first = prompt or chunk
    whole = steps if steps[-1][1] - steps[-1][0] == (chunk if len(steps) > 1 else first) else steps[:-1]
    known = stored.find(runner, ids, whole) if whole else None
    kept = _Kept(known)
    runner.on_step = kept.first if runner.policy.evicts else None
    try:
        scored = score(runner, ids, chunk=chunk, prompt=prompt, known=known, keep=kept.step, **options)
    finally:
        runner.on_step = None
    tokens = 0 if known is None else known.tokens
    end = whole[-1][1] if whole and not runner.policy.evicts else first if whole else 0
    if tokens < end and (not runner.policy.evicts or first > 1):
        layers = kept.layers if runner.policy.evicts else runner.cache.layers()
        nll, hits = np.concatenate(kept.nll), np.concatenate(kept.hits)
        rows = [LayerCache(layer=e.layer, keys=e.keys[:, :end], values=e.values[:, :end]) for e in layers]
        stored.put(ids, rows, nll, hits, first=first, logits=kept.logits)
    return scored, tokens


class _Kept:
    """What a run leaves that may be put: K and V of its first step and the last logits of it, and all scores."""

    def __init__(self, known: Known | None) -> None:
        self.is_new = known is None
        self.layers: list[LayerCache] = []
        self.logits: Floats | None = None
        self.nll = [] if known is None else [known.nll]
        self.hits = [] if known is None else [known.hits]

    def first(self, step: Step) -> None:
        if self.is_new and not self.layers:
            pairs = [(keys[0], values[0]) for keys, values in step.present]
            self.layers = [
                LayerCache(layer=number, keys=keys.copy(), values=values.copy())
                for number, (keys, values) in enumerate(pairs)
            ]

    def step(self, logits: npt.NDArray[Any], nll: npt.NDArray[np.float64], hits: npt.NDArray[np.bool_]) -> None:
        if self.is_new and self.logits is None:
            self.logits = logits[-1].copy()
        self.nll.append(nll)
        self.hits.append(hits)


def _cut(words: npt.NDArray[Any], tokens: int) -> npt.NDArray[Any]:
    return np.ascontiguousarray(words[:, :tokens])


def _score_layer(like: LayerCache, nll: npt.NDArray[np.float64], hits: npt.NDArray[np.bool_]) -> LayerCache:
    """One layer more: of each token its negative log-probability after those before it, as the bits of a float64, and
    whether it was the most probable one. Of the first token nothing is known."""
    tokens = like.tokens
    both = np.zeros((2, tokens), np.float64)
    both[0, 1:], both[1, 1:] = nll[: tokens - 1], hits[: tokens - 1]
    words = both.view(like.keys.dtype).reshape(2, 1, tokens, -1)
    return LayerCache(layer=like.layer + 1, keys=words[0], values=words[1])


def _scores(layer: LayerCache) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    nll, hits = (np.ascontiguousarray(words).view(np.float64).reshape(-1) for words in (layer.keys, layer.values))
    return nll[1:].copy(), hits[1:] != 0


def _digest(ids: Ids) -> npt.NDArray[Any]:
    data = hashlib.blake2b(ids.astype("<u4").tobytes(), digest_size=3 * _DIGEST_IDS).digest()
    triples = np.frombuffer(data, np.uint8).reshape(-1, 3).astype(np.uint32)
    return triples[:, 0] | triples[:, 1] << 8 | triples[:, 2] << 16


def _mark(words: Floats) -> Floats:
    """What tells that all of them are there, and of one text."""
    value = np.array([checksum(np.ascontiguousarray(words).view(np.uint8))], "<u8").view(np.uint16)
    return np.resize(value.astype(np.float32), 2 * _DIGEST_IDS)
