"""A range of live tokens in the two packed buffers of a layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..checks import to_int
from ..dtypes import Bytes, Part
from ..errors import KvmnnError
from .addressing import LayoutParams
from .buffers import split_kv, to_byte_buffers


@dataclass(frozen=True)
class TokenRange:
    """The tokens ``[start, start + count)``, checked once against buffers, live tokens and capacity.

    Attributes
    ----------
    start, count
        Tokens.
    capacity
        Tokens that the buffers have room for.
    buffers
        The packed K and V as bytes over the caller's memory.
    """

    start: int
    count: int
    capacity: int
    buffers: dict[Part, Bytes]

    @classmethod
    def from_buffers(
        cls,
        layout: LayoutParams,
        key_buffer: Any,
        value_buffer: Any,
        start: int,
        count: int,
        *,
        past_length: int,
        capacity: int,
        writable: bool = False,
    ) -> TokenRange:
        """The range, if it lies inside the `past_length` live tokens and the buffers have the sizes of `capacity`.

        Raises
        ------
        KvmnnError
            For a range outside the live tokens and for buffers of another size.
        """
        layout.check_capacity(capacity)
        if to_int(count, "count") < 1 or to_int(start, "start") < 0:
            raise KvmnnError(f"range of {count} tokens from {start}: expected at least 1 token from 0 on")
        if start + count > capacity or start + count > past_length:
            raise KvmnnError(
                f"range of {count} tokens from {start} ends at {start + count}: expected at most the {past_length} "
                f"live "
                f"tokens and the capacity {capacity}"
            )
        buffers = to_byte_buffers(layout, key_buffer, value_buffer, capacity, writable)
        return cls(start, count, capacity, split_kv(buffers))
