"""A layer's cache under a policy, step by step."""

from __future__ import annotations

from functools import partial

import numpy as np
import numpy.typing as npt

from ..arrays.layer_cache import LayerCache, check_pair
from ..dtypes import Floats, Indices, Words
from ..errors import KvmnnError
from ..text import count
from .base import Policy
from .state import CacheState
from .view import LayerView, Moment


class EvictingCache:
    """K and V of one layer, and the `CacheState` that is cut with them whenever the policy says so.

    One step is `append` (which returns what is to be attended), attention, `attended`. A caller that works in chunks
    calls `end_chunk` after each. Any policy works here; the lazy ones do what the classes of the
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
        self._keys: Words | None = None
        self._values: Words | None = None
        self._new = 0

    def __repr__(self) -> str:
        if self._keys is None:
            return f"EvictingCache({self.policy!r}, layer={self.layer}, empty)"
        heads, tokens, head_dim = self._keys.shape
        return (
            f"EvictingCache({self.policy!r}, layer={self.layer}, {tokens:,} of {count(self.state.seen, 'token')}, "
            f"{count(heads, 'KV head')} of {head_dim}, {self._keys.dtype})"
        )

    @property
    def stored(self) -> LayerCache:
        """What is stored now, with true positions."""
        if self._keys is None or self._values is None:
            raise KvmnnError(f"layer {self.layer}: nothing has been appended yet")
        return LayerCache(
            layer=self.layer,
            keys=self._keys,
            values=self._values,
            positions=self.state.positions,
            tokens_seen=self.state.seen,
        )

    def append(self, keys: Words, values: Words) -> LayerCache:
        """Store the tokens of a step, ``[kv_head, token, head_dim]``, and return what they are to attend to."""
        check_pair(f"layer {self.layer}", keys, values, axes=3)
        if self._keys is None or self._values is None:
            self.state = CacheState(self.policy.needs, keys.shape[0])
            self._keys, self._values = keys[:, :0], values[:, :0]
        self._check_same(self._keys, keys)
        self._keys = np.concatenate([self._keys, keys], axis=1)
        self._values = np.concatenate([self._values, values], axis=1)
        self._new = keys.shape[1]
        self.state.append(self._new)
        self._apply(Moment.APPENDED)
        return self.stored

    def attended(self, sums: Floats | None = None, *, weights: npt.NDArray[np.floating] | None = None) -> LayerCache:
        """The step has been attended; return what is stored after it.

        Parameters
        ----------
        sums
            What attention adds to the scores, as `Policy.column_sums` gives it.
        weights
            Or the attention itself, ``[query_head, query, key]``.
        """
        if sums is not None and weights is not None:
            raise KvmnnError(f"layer {self.layer}: sums and weights: expected only one")
        if weights is not None:
            sums = self.policy.column_sums(weights, self.stored.kv_heads)
        if sums is not None:
            self.state.add_scores(sums, partial(self.policy.scoring.fold, new=self._new))
        if self._new != self.state.seen:
            self.state.steps += 1
        self._apply(Moment.ATTENDED)
        return self.stored

    def end_chunk(self) -> LayerCache:
        """A chunk of text has ended: the lazy policies cut to their budget; return what is stored."""
        self._apply(Moment.CHUNK_END)
        return self.stored

    def _apply(self, moment: Moment) -> None:
        if self._keys is None or self._values is None:
            raise KvmnnError(f"layer {self.layer}: nothing has been appended yet")
        view = LayerView(
            tokens=self.state.tokens,
            layer=self.layer,
            keys=self._keys,
            values=self._values,
            scores=self.state.scores,
            new=self._new,
            seen=self.state.seen,
            steps=self.state.steps,
            moment=moment,
        )
        kept = self.policy.choose(view)
        if kept is not None:
            self.state.cut(kept)
            self._keys, self._values = take_rows(self._keys, kept), take_rows(self._values, kept)

    def _check_same(self, there: Words, new: Words) -> None:
        if there.dtype != new.dtype or there.shape[0] != new.shape[0] or there.shape[2] != new.shape[2]:
            raise KvmnnError(
                f"layer {self.layer}: {new.dtype} {list(new.shape)} does not continue {there.dtype} "
                f"[{there.shape[0]}, token, {there.shape[2]}]"
            )


def take_rows(array: Words, kept: Indices) -> Words:
    """The kept tokens of K or V, ``[kv_head, token, head_dim]``, as an array of their own."""
    if kept.ndim == 1:
        return array[:, kept]
    out = np.empty((array.shape[0], kept.shape[1], array.shape[2]), array.dtype)
    for head, rows in enumerate(kept):
        np.take(array[head], rows, axis=0, out=out[head], mode="clip")
    return out
