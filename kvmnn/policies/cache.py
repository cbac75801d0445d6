"""The cache of one layer under a policy: the stored tokens with their statistics, appended and cut step by step."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.text import pluralize
from .._util.validation import validate_count
from ..arrays.layer_cache import LayerCache, check_kv_pair
from ..dtypes import Elements, Floats, Indices, Positions
from ..errors import KvmnnError
from .layer_parameters import LayerParameters
from .policy import LayerState, Policy, RequiredStats, Trigger
from .scored import ScoredPolicy
from .wrappers import take_tokens_of_cut_layer

ScoreFold = Callable[[Floats, Floats], Floats]


class CacheState:
    """Scores, number of tokens seen and text positions of one layer, cut with its K and V.

    Parameters
    ----------
    requires
        As of a policy: ``"scores"`` keeps scores ``[token]`` for all heads, ``"head scores"`` scores
        ``[kv_head, token]``, anything else none.
    kv_heads
        Needed for head scores.

    Attributes
    ----------
    num_seen : int
        Tokens the model has seen, stored or not: the true position of the next one.
    positions : ndarray
        True position of each stored token: int64 ``[token]``, or ``[kv_head, token]`` once heads keep different ones.
    scores : ndarray or None
        Attention that each stored token has drawn so far, float32.
    num_steps : int
        Steps attended since the last cut, the prompt's not included.
    """

    def __init__(self, requires: RequiredStats = "lengths", kv_heads: int = 1) -> None:
        validate_count("kv_heads", kv_heads)
        self.num_seen = 0
        self.num_steps = 0
        self.positions: Positions = np.empty(0, np.int64)
        self.scores: Floats | None = None
        if requires in ("scores", "head scores"):
            self.scores = np.empty((kv_heads, 0) if requires == "head scores" else 0, np.float32)

    @property
    def tokens(self) -> int:
        """Return the number of stored tokens."""
        return int(self.positions.shape[-1])

    def append(self, count: int) -> None:
        """Append `count` further tokens of the text, with scores of 0."""
        validate_count("count", count)
        new_positions = np.arange(self.num_seen, self.num_seen + count, dtype=np.int64)
        self.positions = np.concatenate(
            [self.positions, np.broadcast_to(new_positions, (*self.positions.shape[:-1], count))], axis=-1
        )
        if self.scores is not None:
            zeros = np.zeros((*self.scores.shape[:-1], count), np.float32)
            self.scores = np.concatenate([self.scores, zeros], axis=-1)
        self.num_seen += count

    def add_scores(self, sums: npt.NDArray[Any], fold: ScoreFold = np.add) -> None:
        """Add the attention that one step gave to each stored token to the scores, in float32
        (`ScoreAccumulator.fold`).

        If the numbers of sums and tokens differ, only tokens with a sum are updated, as in the StreamingLLM + H2O
        project.

        Raises
        ------
        KvmnnError
            Where this state keeps no scores, or keeps them by another number of heads.
        """
        if self.scores is None:
            raise KvmnnError("this state keeps no scores")
        step_sums = np.asarray(sums)
        if step_sums.dtype.kind not in "fiu":
            raise TypeError(f"attention sums are {step_sums.dtype}: expected numbers")
        if step_sums.ndim != self.scores.ndim or step_sums.shape[:-1] != self.scores.shape[:-1]:
            raise KvmnnError(
                f"attention sums have shape {list(step_sums.shape)}: expected {[*self.scores.shape[:-1], self.tokens]}"
            )
        num_common = min(self.tokens, step_sums.shape[-1])
        with np.errstate(over="ignore", invalid="ignore"):
            self.scores[..., :num_common] = fold(
                self.scores[..., :num_common], step_sums[..., :num_common].astype(np.float32)
            )

    def keep(self, indices: Indices) -> None:
        """Keep these stored tokens, ``[kept]`` for all heads or ``[kv_head, kept]``, in this order.

        Raises
        ------
        KvmnnError
            For tokens that are not stored or named twice, and for numbers of heads that do not agree.
        """
        indices = validate_indices(indices, self.tokens)
        if indices.ndim == 2:
            for tensor in (self.positions, self.scores):
                if tensor is not None and tensor.ndim == 2 and tensor.shape[0] != indices.shape[0]:
                    raise KvmnnError(f"a cut for {indices.shape[0]} heads of a state with {tensor.shape[0]}")
        self.num_steps = 0
        self.positions = take_tokens(self.positions, indices)
        if self.scores is not None:
            self.scores = take_tokens(self.scores, indices)


def validate_indices(selection: npt.NDArray[Any], tokens: int) -> Indices:
    """Return indices of tokens as int64; each must be in ``[0, tokens)`` and unique in its head."""
    array = np.asarray(selection)
    if array.dtype.kind not in "iu":
        raise TypeError(f"kept tokens are {array.dtype}: expected integers")
    if array.ndim not in (1, 2):
        raise KvmnnError(f"kept tokens have shape {list(array.shape)}: expected [kept] or [kv_head, kept]")
    indices: Indices = array.astype(np.int64)
    if indices.size and not (indices.min() >= 0 and indices.max() < tokens):
        raise KvmnnError(f"kept tokens reach from {indices.min()} to {indices.max()}: {tokens} are stored")
    for row in np.atleast_2d(indices):
        is_selected = np.zeros(tokens, np.bool_)
        is_selected[row] = True
        if np.count_nonzero(is_selected) != row.size:
            raise KvmnnError("a kept token is named twice")
    return indices


def take_tokens(array: npt.NDArray[Any], indices: Indices) -> npt.NDArray[Any]:
    """Take tokens of an array ``[token]`` or ``[kv_head, token]``; the result has two axes if either argument has."""
    if indices.ndim == 1:
        return array[..., indices]
    if array.ndim == 1:
        array = np.broadcast_to(array, (indices.shape[0], array.shape[0]))
    return np.take_along_axis(array, indices, axis=1)


class EvictingCache:
    """K and V of one layer, and the `CacheState` that is cut with them by the policy.

    One step is `append` (which returns the cache to attend to), attention, `finish_attention`. A caller that works in
    chunks calls `end_chunk` after each. Any policy works; the lazy ones behave like the classes of the StreamingLLM +
    H2O project.

    Parameters
    ----------
    policy
        The policy that decides.
    layer
        Number of the layer.
    parameters
        Of the layer, for policies that need it.

    Attributes
    ----------
    state : CacheState
        Empty until the first tokens come.
    """

    def __init__(self, policy: Policy, layer: int = 0, parameters: LayerParameters | None = None) -> None:
        self.policy = policy
        self._parameters = parameters
        self._queries: Floats | None = None
        self.layer = layer
        self.state = CacheState()
        self._keys: Elements | None = None
        self._values: Elements | None = None
        self._num_new = 0

    def __repr__(self) -> str:
        if self._keys is None:
            return f"EvictingCache({self.policy!r}, layer={self.layer}, empty)"
        heads, tokens, head_dim = self._keys.shape
        tokens_text = f"{tokens:,} of {pluralize(self.state.num_seen, 'token')}"
        heads_text = f"{pluralize(heads, 'KV head')} of {head_dim}, {self._keys.dtype}"
        return f"EvictingCache({self.policy!r}, layer={self.layer}, {tokens_text}, {heads_text})"

    @property
    def snapshot(self) -> LayerCache:
        """Return the stored K and V with their text positions."""
        if self._keys is None or self._values is None:
            raise KvmnnError(f"layer {self.layer}: nothing has been appended yet")
        return LayerCache(
            layer=self.layer,
            keys=self._keys,
            values=self._values,
            positions=self.state.positions,
            tokens_seen=self.state.num_seen,
        )

    def append(self, keys: Elements, values: Elements) -> LayerCache:
        """Store the tokens of a step, ``[kv_head, token, head_dim]``; return the cache that they attend to."""
        check_kv_pair(f"layer {self.layer}", keys, values, num_axes=3)
        if self._keys is None or self._values is None:
            self.state = CacheState(self.policy.requires, keys.shape[0])
            self._keys, self._values = keys[:, :0], values[:, :0]
        existing = self._keys
        if existing.dtype != keys.dtype or existing.shape[::2] != keys.shape[::2]:
            raise KvmnnError(
                f"layer {self.layer}: {keys.dtype} {list(keys.shape)} does not continue {existing.dtype} "
                f"[{existing.shape[0]}, token, {existing.shape[2]}]"
            )
        self._keys = np.concatenate([self._keys, keys], axis=1)
        self._values = np.concatenate([self._values, values], axis=1)
        self._num_new = keys.shape[1]
        self.state.append(self._num_new)
        self._apply_policy(Trigger.AFTER_APPEND)
        return self.snapshot

    def finish_attention(
        self,
        sums: Floats | None = None,
        *,
        weights: npt.NDArray[np.floating] | None = None,
        queries: Floats | None = None,
    ) -> LayerCache:
        """Finish a step after attention; return the cache after it.

        Parameters
        ----------
        sums
            Scores that attention adds, as from `Policy.sum_columns`.
        weights
            Or the attention itself, ``[query_head, query, key]``.
        queries
            Rotated queries of the step, ``[query_head, query, head_dim]``, for policies that look at them.
        """
        if sums is not None and weights is not None:
            raise KvmnnError(f"layer {self.layer}: sums and weights: expected only one")
        if weights is not None:
            sums = self.policy.sum_columns(weights, self.snapshot.kv_heads)
        if sums is not None:
            self.state.add_scores(sums, partial(self.policy.score_accumulator.fold, num_new=self._num_new))
        if queries is not None and isinstance(self.policy, ScoredPolicy):
            self._queries = append_queries(self._queries, queries, self.policy.query_window)
        if self._num_new != self.state.num_seen:
            self.state.num_steps += 1
        self._apply_policy(Trigger.AFTER_ATTENTION)
        return self.snapshot

    def end_chunk(self) -> LayerCache:
        """End a chunk of text, where lazy policies cut to their budget; return the cache."""
        self._apply_policy(Trigger.CHUNK_END)
        return self.snapshot

    def _apply_policy(self, trigger: Trigger) -> None:
        if self._keys is None or self._values is None:
            raise KvmnnError(f"layer {self.layer}: nothing has been appended yet")
        layer_state = LayerState(
            tokens=self.state.tokens,
            layer=self.layer,
            keys=self._keys,
            values=self._values,
            scores=self.state.scores,
            queries=self._queries,
            positions=self.state.positions,
            parameters=self._parameters,
            num_new=self._num_new,
            num_seen=self.state.num_seen,
            num_steps=self.state.num_steps,
            trigger=trigger,
        )
        indices = self.policy.select(layer_state)
        if indices is not None:
            self.state.keep(indices)
            self._keys, self._values = take_rows(self._keys, indices), take_rows(self._values, indices)
        if isinstance(self.policy, ScoredPolicy) and self.policy.edits_keys and self.policy.is_due(layer_state):
            rows = np.arange(layer_state.tokens) if indices is None else indices
            rows = np.broadcast_to(rows, (self._keys.shape[0], rows.shape[-1]))
            edited_keys = self.policy.edit_keys(take_tokens_of_cut_layer(layer_state, rows))
            self._keys = self._keys if edited_keys is None else edited_keys


#: Latest queries that are held between two cuts of decoding where a policy asks for all, as in kvpress.
MAX_DECODING_QUERIES = 256


def append_queries(earlier: Floats | None, queries: Floats, window: int | None) -> Floats:
    """Append a step's queries and return the latest `window`; with None all of a prompt, or the latest 256 later on."""
    all_queries = queries if earlier is None else np.concatenate([earlier, queries], axis=1)
    if window is None:
        window = max(queries.shape[1], MAX_DECODING_QUERIES)
    return all_queries[:, max(all_queries.shape[1] - window, 0) :].copy()


def take_rows(array: Elements, indices: Indices) -> Elements:
    """Copy the kept tokens of K or V, ``[kv_head, token, head_dim]``, to a new array."""
    if indices.ndim == 1:
        return array[:, indices]
    out = np.empty((array.shape[0], indices.shape[1], array.shape[2]), array.dtype)
    for head, rows in enumerate(indices):
        np.take(array[head], rows, axis=0, out=out[head], mode="clip")
    return out
