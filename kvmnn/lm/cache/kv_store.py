"""K and V of a model's layers, as the model returns them and takes them back: ``[1, kv_head, slot, head_dim]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ...dtypes import Indices, KVPair, Words
from . import _eviction


class KVStore(Protocol):
    """Where K and V lie between the steps of a model."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers held."""

    def past(self) -> list[KVPair]:
        """K and V of every layer for the next step."""

    def adopt(self, present: Sequence[KVPair], new: int, *, prompt: bool = False) -> None:
        """Take over what the step returned: the past and `new` tokens after it, which are a `prompt` or part of one."""

    def compact(self, layer: int, slots: Indices, live: int) -> None:
        """Keep the first `live` slots that a row of `slots` names, ascending; one row, or one for each KV head."""


class PlainStore:
    """The model's own buffers: nothing is copied but where tokens are dropped, and then inside the buffer.

    Parameters
    ----------
    empty
        K and V of no tokens, for every layer.
    """

    def __init__(self, empty: Sequence[KVPair]) -> None:
        self._pairs = list(empty)

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self._pairs)

    def past(self) -> list[KVPair]:
        return self._pairs

    def adopt(self, present: Sequence[KVPair], new: int, *, prompt: bool = False) -> None:
        self._pairs = list(present)

    def compact(self, layer: int, slots: Indices, live: int) -> None:
        keys, values = self._pairs[layer]
        self._pairs[layer] = _compacted(keys, slots, live), _compacted(values, slots, live)


def _compacted(words: Words, slots: Indices, live: int) -> Words:
    """The live tokens at the front of the same memory."""
    if not words.flags.c_contiguous or not words.flags.writeable:
        words = words.copy()
    _, heads, slots_there, dims = words.shape
    if words.size:
        _eviction.gather(words.view(np.uint8).reshape(heads, slots_there, dims * words.itemsize), slots, live)
    return words.reshape(-1)[: heads * live * dims].reshape(1, heads, live, dims)
