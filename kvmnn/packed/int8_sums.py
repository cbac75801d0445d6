"""What the engine keeps in memory beside an int8 cache: sums for its integer matrix products, and channel maxima."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..dtypes import Floats
from .layout import PackLayout


@dataclass
class Int8Sums:
    """Side arrays of an int8 cache.

    Attributes
    ----------
    key_sum
        Sum over the dims of each dequantised key, ``[kv_heads, token slots]``, slots in groups of hP8.
    key_max
        Running maximum of each channel, ``[kv_heads, head_dim]``; what keys are quantised against.
    value_sum
        Sum over the tokens of each block of each dequantised value, ``[kv_heads, blocks, dims]``, dims in groups of
        hP8; None where values are not int8.
    """

    key_sum: Floats
    key_max: Floats
    value_sum: Floats | None

    @classmethod
    def allocate(cls, layout: PackLayout, capacity: int, fill_byte: int = 0) -> Int8Sums:
        """As after an allocation: nothing in them but what the engine's memory happened to hold, `fill_byte`."""
        key_max = np.full((layout.kv_heads, layout.head_dim), np.finfo(np.float32).min, np.float32)
        value_sum = np.zeros(_get_value_sum_shape(layout, capacity), np.float32) if layout.int8_values else None
        return cls(_allocate_key_sum(layout, capacity, fill_byte), key_max, value_sum)

    def resize(self, layout: PackLayout, capacity: int, fill_byte: int = 0) -> Int8Sums:
        """The same for more room."""
        key_sum = _allocate_key_sum(layout, capacity, fill_byte)
        key_sum[:, : self.key_sum.shape[1]] = self.key_sum
        value_sum = self.value_sum
        if value_sum is not None:
            resized = np.zeros(_get_value_sum_shape(layout, capacity), np.float32)
            resized[:, : value_sum.shape[1]] = value_sum
            value_sum = resized
        return Int8Sums(key_sum, self.key_max, value_sum)


def _allocate_key_sum(layout: PackLayout, capacity: int, fill_byte: int) -> Floats:
    tiles, _, slots, _ = layout.key_shape(capacity)
    return np.full((layout.kv_heads, tiles * slots * 4), fill_byte, np.uint8).view(np.float32)


def _get_value_sum_shape(layout: PackLayout, capacity: int) -> tuple[int, int, int]:
    blocks, columns, _, width, _ = layout.value_shape(capacity)
    return layout.kv_heads, blocks, columns * width
