"""Rows of tokens out of one head of a packed buffer and into it, K and V apart.

A row is the `head_dim` words of one token; a head's buffer is the part of the K or V buffer that belongs to it. Sizes
are the caller's to check; a wrong one raises `KvmnnError` before anything is touched.
"""

from __future__ import annotations

from ..dtypes import Bytes, Part, parse_dtype
from ..errors import KvmnnError
from . import _layout
from .addressing import LayoutParams
from .native import make_native_params


def get_head_bytes(layout: LayoutParams, part: Part, capacity: int) -> int:
    """Bytes of one head's buffer with room for `capacity` tokens."""
    return layout.key_head_bytes(capacity) if part == "key" else layout.value_head_bytes(capacity)


def get_tile_tokens(layout: LayoutParams, part: Part, capacity: int) -> int:
    """Tokens of a tile: the tokens whose bytes lie together in a head's buffer."""
    return layout.key_shape(capacity)[2] if part == "key" else layout.value_block(capacity)


def get_row_dtype(layout: LayoutParams, part: Part) -> str:
    """Name of the dtype that rows are read as: the layout's, or fp32 for what is int8."""
    return "fp32" if layout.is_int8(part) else layout.dtype


def get_row_bytes(layout: LayoutParams, part: Part) -> int:
    """Bytes of a row as it is read."""
    return layout.head_dim * parse_dtype(get_row_dtype(layout, part)).itemsize


class HeadRowAccessor:
    """Access to the rows of one head after the other.

    Parameters
    ----------
    layout, part, capacity
        What the buffers are. What is int8 is read as fp32, code times scale plus bias, and cannot be written.
    """

    def __init__(self, layout: LayoutParams, part: Part, capacity: int) -> None:
        self._params = make_native_params(layout, part, capacity)
        self._is_int8 = layout.is_int8(part)
        self._row_bytes = get_row_bytes(layout, part)
        self._head_bytes = get_head_bytes(layout, part, capacity)
        self._capacity = capacity

    def read_rows(self, head: Bytes, start: int, out: Bytes) -> None:
        """Copy the rows from token `start` on into `out`, the bytes of a number of rows."""
        gather = _layout.dequantize if self._is_int8 else _layout.gather
        gather(self._params, head, self._check_rows(head, start, out), 0, 1, start)

    def write_rows(self, head: Bytes, start: int, rows: Bytes) -> None:
        """Write `rows`, as bytes, over the rows from token `start` on."""
        if self._is_int8:
            raise KvmnnError("int8 rows depend on what the engine saw before: they can be read, not written")
        _layout.scatter(self._params, head, self._check_rows(head, start, rows), 0, 1, start)

    def clear_rows(self, head: Bytes, start: int, count: int) -> None:
        """Set the words of so many rows from token `start` on to zero; padding stays as it is."""
        if self._is_int8:
            raise KvmnnError("int8 rows depend on what the engine saw before: they can be read, not cleared")
        if head.size != self._head_bytes or count < 1 or start < 0 or start + count > self._capacity:
            raise KvmnnError(f"{count} rows from token {start}: expected rows inside {self._capacity} tokens")
        _layout.zero(self._params, head, 0, 1, start, count)

    def _check_rows(self, head: Bytes, start: int, rows: Bytes) -> Bytes:
        count, remainder = divmod(rows.size, self._row_bytes)
        if head.size != self._head_bytes or remainder or not count or start < 0 or start + count > self._capacity:
            raise KvmnnError(
                f"rows of {rows.size} bytes at token {start} of a head of {head.size} bytes: expected whole rows of "
                f"{self._row_bytes} bytes inside {self._capacity} tokens and {self._head_bytes} bytes"
            )
        return rows.reshape(1, count, self._row_bytes)
