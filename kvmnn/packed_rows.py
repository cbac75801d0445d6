"""Rows of tokens out of one head of a packed buffer and into it, K and V apart.

A row is the `head_dim` words of one token; a head's buffer is the part of the K or V buffer that belongs to it. Sizes
are the caller's to check; a wrong one raises `KvmnnError` before anything is touched.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from . import _layout
from .errors import KvmnnError
from .layout import PackLayout

Part = Literal["key", "value"]
PARTS: tuple[Part, Part] = ("key", "value")
Bytes = npt.NDArray[np.uint8]


def head_bytes(layout: PackLayout, part: Part, capacity: int) -> int:
    """Bytes of one head's buffer with room for `capacity` tokens."""
    return layout.key_head_bytes(capacity) if part == "key" else layout.value_head_bytes(capacity)


def tile_tokens(layout: PackLayout, part: Part, capacity: int) -> int:
    """Tokens whose bytes lie together: tiles of so many follow each other in a head's buffer."""
    return layout.hP if part == "key" else layout.value_block(capacity)


class HeadRows:
    """Access to the rows of one head after the other.

    Parameters
    ----------
    layout, part, capacity
        What the buffers are. Float layouts only.
    """

    def __init__(self, layout: PackLayout, part: Part, capacity: int) -> None:
        if layout.quantised:
            raise KvmnnError("int8 caches are read through kvmnn.PackLayout.unpack, not row by row")
        self._numbers = layout.numbers(PARTS.index(part), capacity)
        self._row = layout.head_dim * layout.itemsize
        self._size = head_bytes(layout, part, capacity)
        self._capacity = capacity

    def read(self, head: Bytes, start: int, out: Bytes) -> None:
        """Copy the rows from token `start` on into `out` (bytes of whole rows)."""
        _layout.gather(self._numbers, head, self._rows(head, start, out), 0, 1, start)

    def write(self, head: Bytes, start: int, rows: Bytes) -> None:
        """Write `rows` (bytes of whole rows) over those from token `start` on."""
        _layout.scatter(self._numbers, head, self._rows(head, start, rows), 0, 1, start)

    def _rows(self, head: Bytes, start: int, rows: Bytes) -> Bytes:
        count, rest = divmod(rows.size, self._row)
        if head.size != self._size or rest or not count or start < 0 or start + count > self._capacity:
            raise KvmnnError(
                f"rows of {rows.size} bytes at token {start} of a head of {head.size} bytes: expected whole rows of "
                f"{self._row} bytes inside {self._capacity} tokens and {self._size} bytes"
            )
        return rows.reshape(1, count, self._row)
