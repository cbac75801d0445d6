"""K and V of a model's layers in packed buffers, as an engine holds them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ... import dtypes
from ...dtypes import Indices, KVPair
from ...errors import KvmnnError
from ...packed.cache import PackedCache
from ...packed.layout import PackLayout
from ..graph.interface import DecoderInterface


class PackedStore:
    """A `PackedCache` for each layer, or for each KV head of a layer: packed, reallocated by reserve pairs, unpacked.

    Parameters
    ----------
    interface
        The model's.
    backend
        Whose layout, as `PackLayout.for_backend` takes it.
    by_head
        Whether heads keep different tokens; a packed buffer of several heads keeps the same of each.

    Raises
    ------
    KvmnnError
        For a layout of another type than the model's cache: that would not give back the same numbers.
    """

    def __init__(self, interface: DecoderInterface, backend: str, *, by_head: bool) -> None:
        held = dtypes.of_array(np.empty(0, interface.dtype)).name
        heads = 1 if by_head else interface.kv_heads
        layout = PackLayout.for_backend(backend, kv_heads=heads, head_dim=interface.head_dim)
        if layout.quantised or layout.dtype != held:
            kind = "int8" if layout.quantised else layout.dtype
            raise KvmnnError(
                f"layout {backend} holds {kind}, the cache of this model is {held}: expected the same for both"
            )
        self._interface = interface
        self._caches = [
            [PackedCache(layout) for _ in range(interface.kv_heads // heads)] for _ in range(interface.layers)
        ]

    @property
    def nbytes(self) -> int:
        return sum(cache.key_buffer.nbytes + cache.value_buffer.nbytes for caches in self._caches for cache in caches)

    def past(self) -> list[KVPair]:
        return [self._unpacked(caches) for caches in self._caches]

    def adopt(self, present: Sequence[KVPair], new: int, *, prompt: bool = False) -> None:
        for caches, (keys, values) in zip(self._caches, present, strict=True):
            heads = self._interface.kv_heads // len(caches)
            for number, cache in enumerate(caches):
                mine = slice(number * heads, (number + 1) * heads)
                cache.append(np.ascontiguousarray(keys[0, mine, -new:]), np.ascontiguousarray(values[0, mine, -new:]))

    def compact(self, layer: int, slots: Indices, live: int) -> None:
        caches = self._caches[layer]
        for number, cache in enumerate(caches):
            row = slots[number if len(slots) > 1 else 0, :live]
            cache.realloc(remove=len(cache), reserve=runs_of(row))

    def _unpacked(self, caches: Sequence[PackedCache]) -> KVPair:
        pairs = [cache.to_arrays() for cache in caches]
        dtype = self._interface.dtype
        keys, values = (np.concatenate(part)[None].astype(dtype, copy=False) for part in zip(*pairs, strict=True))
        return keys, values


def runs_of(slots: Indices) -> list[tuple[int, int]]:
    """Ascending slots as (begin, size) of the runs that they form."""
    if not len(slots):
        return []
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    starts = np.concatenate([[0], breaks])
    sizes = np.diff(np.concatenate([starts, [len(slots)]]))
    return [(int(slots[start]), int(size)) for start, size in zip(starts, sizes, strict=True)]
