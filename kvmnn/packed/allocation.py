"""Packed buffers as the engine allocates them and as they look after they grew."""

from __future__ import annotations

import numpy as np

from .buffers import Buffers, filled
from .layout import PackLayout


def fresh(layout: PackLayout, capacity: int, fresh_byte: int) -> Buffers:
    """K and V as the engine allocates them: cleared only where its kernels read padding.

    Parameters
    ----------
    fresh_byte
        What memory holds that nobody cleared.
    """
    clear_keys = layout.int8_keys or layout.head_dim % layout.lP != 0
    clear_values = layout.int8_values or layout.lP > 1
    return (
        filled(layout.key_bytes(capacity), 0 if clear_keys else fresh_byte),
        filled(layout.value_bytes(capacity), 0 if clear_values else fresh_byte),
    )


def grown(layout: PackLayout, old: Buffers, capacity: int, room: int, fresh_byte: int) -> Buffers:
    """Buffers for `room` tokens with every row of `old`, live or not, where it belongs.

    K keeps its places, and so does V in blocks: the new part of each head is clear. Without a flash block V has as many
    columns as before, each of them longer; what is new in them is clear only where lP is above 1.
    """
    heads = layout.kv_heads
    keys = np.zeros((heads, layout.key_head_bytes(room)), np.uint8)
    values = np.zeros((heads, layout.value_head_bytes(room)), np.uint8)
    if capacity == 0:
        return keys.reshape(-1), values.reshape(-1)
    old_keys, old_values = (buffer.reshape(heads, -1) for buffer in old)
    keys[:, : old_keys.shape[1]] = old_keys
    if layout.flash_block is not None:
        values[:, : old_values.shape[1]] = old_values
    else:
        if layout.lP == 1:
            values.fill(fresh_byte)
        columns = layout.value_shape(room)[1]
        wide, narrow = (part.reshape(heads, columns, -1) for part in (values, old_values))
        wide[:, :, : narrow.shape[2]] = narrow
    return keys.reshape(-1), values.reshape(-1)
