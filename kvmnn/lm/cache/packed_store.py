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
        Whose layout, as `PackLayout.from_backend` takes it.
    per_head
        Whether heads keep different tokens; a packed buffer of several heads keeps the same of each.

    Raises
    ------
    KvmnnError
        For a layout of another type than the model's cache: that would not give back the same numbers.
    """

    def __init__(self, interface: DecoderInterface, backend: str, *, per_head: bool) -> None:
        cache_dtype = dtypes.infer_dtype(np.empty(0, interface.dtype)).name
        heads = 1 if per_head else interface.kv_heads
        layout = PackLayout.from_backend(backend, kv_heads=heads, head_dim=interface.head_dim)
        if layout.is_quantised or layout.dtype != cache_dtype:
            layout_dtype = "int8" if layout.is_quantised else layout.dtype
            raise KvmnnError(
                f"layout {backend} holds {layout_dtype}, the cache of this model is {cache_dtype}: expected the same "
                f"for both"
            )
        self._interface = interface
        self._caches = [
            [PackedCache(layout) for _ in range(interface.kv_heads // heads)] for _ in range(interface.layers)
        ]

    @property
    def nbytes(self) -> int:
        return sum(cache.key_buffer.nbytes + cache.value_buffer.nbytes for caches in self._caches for cache in caches)

    def get_past(self) -> list[KVPair]:
        return [self._unpack_layer(caches) for caches in self._caches]

    def set_present(self, present: Sequence[KVPair], num_new: int, *, is_prompt: bool = False) -> None:
        for caches, (keys, values) in zip(self._caches, present, strict=True):
            heads = self._interface.kv_heads // len(caches)
            for number, cache in enumerate(caches):
                head_range = slice(number * heads, (number + 1) * heads)
                cache.append(
                    np.ascontiguousarray(keys[0, head_range, -num_new:]),
                    np.ascontiguousarray(values[0, head_range, -num_new:]),
                )

    def compact(self, layer: int, slots: Indices, num_live: int) -> None:
        caches = self._caches[layer]
        for number, cache in enumerate(caches):
            row = slots[number if len(slots) > 1 else 0, :num_live]
            cache.realloc(remove=len(cache), reserve=find_runs(row))

    def _unpack_layer(self, caches: Sequence[PackedCache]) -> KVPair:
        pairs = [cache.to_arrays() for cache in caches]
        dtype = self._interface.dtype
        keys, values = (np.concatenate(part)[None].astype(dtype, copy=False) for part in zip(*pairs, strict=True))
        return keys, values


def find_runs(slots: Indices) -> list[tuple[int, int]]:
    """Ascending slots as (begin, size) of the runs that they form."""
    if not len(slots):
        return []
    breaks = np.flatnonzero(np.diff(slots) != 1) + 1
    starts = np.concatenate([[0], breaks])
    sizes = np.diff(np.concatenate([starts, [len(slots)]]))
    return [(int(slots[start]), int(size)) for start, size in zip(starts, sizes, strict=True)]
