"""Packed buffers as the engine allocates them and as they look after they grew."""

from __future__ import annotations

import numpy as np

from .buffers import BufferPair, make_filled_bytes
from .layout import PackLayout


def allocate_buffers(layout: PackLayout, capacity: int, fill_byte: int) -> BufferPair:
    """K and V as the engine allocates them: cleared only where its kernels read padding.

    Parameters
    ----------
    fill_byte
        What memory holds that nobody cleared.
    """
    clear_keys = layout.int8_keys or layout.head_dim % layout.lP != 0
    clear_values = layout.int8_values or layout.lP > 1
    return (
        make_filled_bytes(layout.key_bytes(capacity), 0 if clear_keys else fill_byte),
        make_filled_bytes(layout.value_bytes(capacity), 0 if clear_values else fill_byte),
    )


def resize_buffers(
    layout: PackLayout, buffers: BufferPair, capacity: int, new_capacity: int, fill_byte: int
) -> BufferPair:
    """Buffers for `new_capacity` tokens with every row of `buffers`, live or not, where it belongs.

    K keeps its places, and so does V in blocks: the new part of each head is clear. Without a flash block V has as many
    columns as before, each of them longer; what is new in them is clear only where lP is above 1.
    """
    heads = layout.kv_heads
    keys = np.zeros((heads, layout.key_head_bytes(new_capacity)), np.uint8)
    values = np.zeros((heads, layout.value_head_bytes(new_capacity)), np.uint8)
    if capacity == 0:
        return keys.reshape(-1), values.reshape(-1)
    old_keys, old_values = (buffer.reshape(heads, -1) for buffer in buffers)
    keys[:, : old_keys.shape[1]] = old_keys
    if layout.flash_block is not None:
        values[:, : old_values.shape[1]] = old_values
    else:
        if layout.lP == 1:
            values.fill(fill_byte)
        columns = layout.value_shape(new_capacity)[1]
        new_columns, old_columns = (part.reshape(heads, columns, -1) for part in (values, old_values))
        new_columns[:, :, : old_columns.shape[2]] = old_columns
    return keys.reshape(-1), values.reshape(-1)
