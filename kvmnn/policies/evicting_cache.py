"""A layer's cache under a policy, step by step."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from ..arrays.layer_cache import LayerCache, check_kv_pair
from ..dtypes import Elements, Floats, Indices
from ..errors import KvmnnError
from ..text import pluralize
from .base import Policy
from .state import CacheState
from .view import LayerState, Trigger


class EvictingCache:
    """K and V of one layer, and the `CacheState` that is cut with them whenever the policy says so.

    One step is `append` (which returns what is to be attended), attention, `finish_attention`. A caller that works in
    chunks calls `end_chunk` after each. Any policy works here; the lazy ones do what the classes of the
    StreamingLLM + H2O project do.

    Parameters
    ----------
    policy
        What decides.
    layer
        Which layer this is.

    Attributes
    ----------
    state : CacheState
        Empty until the first tokens come.
    """

    def __init__(self, policy: Policy, layer: int = 0) -> None:
        self.policy = policy
        self.layer = layer
        self.state = CacheState()
        self._keys: Elements | None = None
        self._values: Elements | None = None
        self._num_new = 0

    def __repr__(self) -> str:
        if self._keys is None:
            return f"EvictingCache({self.policy!r}, layer={self.layer}, empty)"
        heads, tokens, head_dim = self._keys.shape
        return (
            f"EvictingCache({self.policy!r}, layer={self.layer}, {tokens:,} of "
            f"{pluralize(self.state.num_seen, 'token')}, "
            f"{pluralize(heads, 'KV head')} of {head_dim}, {self._keys.dtype})"
        )

    @property
    def snapshot(self) -> LayerCache:
        """What is stored now, with true positions."""
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
        """Store the tokens of a step, ``[kv_head, token, head_dim]``, and return what they are to attend to."""
        check_kv_pair(f"layer {self.layer}", keys, values, num_axes=3)
        if self._keys is None or self._values is None:
            self.state = CacheState(self.policy.requires, keys.shape[0])
            self._keys, self._values = keys[:, :0], values[:, :0]
        self._check_continues(self._keys, keys)
        self._keys = np.concatenate([self._keys, keys], axis=1)
        self._values = np.concatenate([self._values, values], axis=1)
        self._num_new = keys.shape[1]
        self.state.append(self._num_new)
        self._apply_policy(Trigger.AFTER_APPEND)
        return self.snapshot

    def finish_attention(
        self, sums: Floats | None = None, *, weights: npt.NDArray[np.floating] | None = None
    ) -> LayerCache:
        """The step has been attended; return what is stored after it.

        Parameters
        ----------
        sums
            What attention adds to the scores, as `Policy.sum_columns` gives it.
        weights
            Or the attention itself, ``[query_head, query, key]``.
        """
        if sums is not None and weights is not None:
            raise KvmnnError(f"layer {self.layer}: sums and weights: expected only one")
        if weights is not None:
            sums = self.policy.sum_columns(weights, self.snapshot.kv_heads)
        if sums is not None:
            self.state.add_scores(sums, partial(self.policy.score_accumulator.fold, num_new=self._num_new))
        if self._num_new != self.state.num_seen:
            self.state.num_steps += 1
        self._apply_policy(Trigger.AFTER_ATTENTION)
        return self.snapshot

    def end_chunk(self) -> LayerCache:
        """A chunk of text has ended: the lazy policies cut to their budget; return what is stored."""
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
            num_new=self._num_new,
            num_seen=self.state.num_seen,
            num_steps=self.state.num_steps,
            trigger=trigger,
        )
        indices = self.policy.select(layer_state)
        if indices is not None:
            self.state.keep(indices)
            self._keys, self._values = take_rows(self._keys, indices), take_rows(self._values, indices)

    def _check_continues(self, existing: Elements, appended: Elements) -> None:
        if (
            existing.dtype != appended.dtype
            or existing.shape[0] != appended.shape[0]
            or existing.shape[2] != appended.shape[2]
        ):
            raise KvmnnError(
                f"layer {self.layer}: {appended.dtype} {list(appended.shape)} does not continue {existing.dtype} "
                f"[{existing.shape[0]}, token, {existing.shape[2]}]"
            )


def take_rows(array: Elements, indices: Indices) -> Elements:
    """The kept tokens of K or V, ``[kv_head, token, head_dim]``, as an array of their own."""
    if indices.ndim == 1:
        return array[:, indices]
    out = np.empty((array.shape[0], indices.shape[1], array.shape[2]), array.dtype)
    for head, rows in enumerate(indices):
        np.take(array[head], rows, axis=0, out=out[head], mode="clip")
    return out
