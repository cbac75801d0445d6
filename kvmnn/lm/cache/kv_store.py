"""K and V of a model's layers, as the model returns them and takes them back: ``[1, kv_head, slot, head_dim]``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ...dtypes import Elements, Indices, KVPair
from . import _eviction


class KVStore(Protocol):
    """Where K and V lie between the steps of a model."""

    @property
    def nbytes(self) -> int:
        """Bytes of the buffers held."""

    def get_past(self) -> list[KVPair]:
        """K and V of every layer for the next step."""

    def set_present(self, present: Sequence[KVPair], num_new: int, *, is_prompt: bool = False) -> None:
        """Take over what the step returned: the past and `num_new` tokens after it, which are a `is_prompt` or part of
        one.
        """

    def compact(self, layer: int, slots: Indices, num_live: int) -> None:
        """Keep the first `num_live` slots that a row of `slots` names, ascending; one row, or one for each KV head."""


class PlainStore:
    """The model's own buffers: nothing is copied but where tokens are dropped, and then inside the buffer.

    Parameters
    ----------
    empty_pairs
        K and V of no tokens, for every layer.
    """

    def __init__(self, empty_pairs: Sequence[KVPair]) -> None:
        self._pairs = list(empty_pairs)

    @property
    def nbytes(self) -> int:
        return sum(keys.nbytes + values.nbytes for keys, values in self._pairs)

    def get_past(self) -> list[KVPair]:
        return self._pairs

    def set_present(self, present: Sequence[KVPair], num_new: int, *, is_prompt: bool = False) -> None:
        self._pairs = list(present)

    def compact(self, layer: int, slots: Indices, num_live: int) -> None:
        keys, values = self._pairs[layer]
        self._pairs[layer] = _compact_rows(keys, slots, num_live), _compact_rows(values, slots, num_live)


def _compact_rows(elements: Elements, slots: Indices, num_live: int) -> Elements:
    """The live tokens at the front of the same memory."""
    if not elements.flags.c_contiguous or not elements.flags.writeable:
        elements = elements.copy()
    _, heads, num_slots, head_dim = elements.shape
    if elements.size:
        _eviction.gather(
            elements.view(np.uint8).reshape(heads, num_slots, head_dim * elements.itemsize), slots, num_live
        )
    return elements.reshape(-1)[: heads * num_live * head_dim].reshape(1, heads, num_live, head_dim)
