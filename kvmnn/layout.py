"""MNN's packed K and V buffers: their numbers, and token ranges copied out of them, into them, and zeroed.

One K and one V buffer belong to each layer; inside a buffer the heads follow each other. The engine splits a buffer
into tiles after the pack numbers lP and hP of its matrix kernels; V moreover into blocks of tokens (the flash block).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import _layout
from .dtypes import by_name
from .errors import KvmnnError, LimitError

_GATHER, _SCATTER, _ZERO = range(3)
_MAX_ELEMENTS = 1 << 48  # far beyond any memory, far below any overflow


def _up(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True)
class PackLayout:
    """The numbers that fix where an element lies.

    Parameters
    ----------
    kv_heads, head_dim
        Geometry of the attention layer.
    dtype
        ``fp16``, ``bf16`` or ``fp32``.
    lP, hP
        Pack numbers of the backend.
    flash_block
        Tokens in a block of V (64 with flash attention); None without flash attention, where one block spans the
        capacity.

    Raises
    ------
    KvmnnError
        For numbers below 1.
    """

    kv_heads: int
    head_dim: int
    dtype: str
    lP: int
    hP: int
    flash_block: int | None = 64

    def __post_init__(self) -> None:
        by_name(self.dtype)
        for name in ("kv_heads", "head_dim", "lP", "hP", "flash_block"):
            value = getattr(self, name)
            if name == "flash_block" and value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | np.integer):
                raise TypeError(f"{name} must be an integer, not {type(value).__name__}")
            if value < 1:
                raise KvmnnError(f"{name} is {value}: expected at least 1")

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return by_name(self.dtype).itemsize

    def value_block(self, capacity: int) -> int:
        """Tokens in a block of V."""
        return self.flash_block if self.flash_block is not None else capacity

    def key_head_elements(self, capacity: int) -> int:
        """Elements of one head's part of the K buffer, for room for `capacity` tokens."""
        return _up(capacity, self.hP) * self.hP * _up(self.head_dim, self.lP) * self.lP

    def value_head_elements(self, capacity: int) -> int:
        """Elements of one head's part of the V buffer, for room for `capacity` tokens."""
        block = self.value_block(capacity)
        return _up(capacity, block) * _up(self.head_dim, self.hP) * self.hP * _up(block, self.lP) * self.lP

    def key_bytes(self, capacity: int) -> int:
        """Bytes of the K buffer."""
        return self.kv_heads * self.key_head_elements(capacity) * self.itemsize

    def value_bytes(self, capacity: int) -> int:
        """Bytes of the V buffer."""
        return self.kv_heads * self.value_head_elements(capacity) * self.itemsize

    def gather(
        self, key_buffer: Any, value_buffer: Any, start: int, count: int, *, past: int, capacity: int
    ) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Tokens ``[start, start + count)`` of both buffers, each as ``[kv_heads, count, head_dim]``.

        Parameters
        ----------
        key_buffer, value_buffer
            Bytes-like or arrays; exactly `key_bytes(capacity)` and `value_bytes(capacity)` bytes. Only the elements
            of the range are read: padding may hold anything.
        start, count
            The range in tokens; ``count >= 1``.
        past
            Live tokens in the buffers.
        capacity
            Tokens that the buffers have room for.

        Raises
        ------
        KvmnnError
            For a range outside the live tokens and for buffers of another size.
        """
        keys, values = self._buffers(key_buffer, value_buffer, start, count, past, capacity, writable=False)
        shape = (self.kv_heads, count, self.head_dim)
        words = by_name(self.dtype).numpy
        plain = np.empty(shape, words), np.empty(shape, words)
        self._move(keys, values, plain, start, count, capacity, _GATHER)
        return plain

    def scatter(
        self, keys: Any, values: Any, key_buffer: Any, value_buffer: Any, start: int, *, past: int, capacity: int
    ) -> None:
        """Write ``[kv_heads, count, head_dim]`` arrays over the tokens from `start` on; the inverse of `gather`.

        `keys` and `values` must have one and the same size, a whole number of tokens, and word size; padding in the
        buffers stays as it is. Errors as for `gather`; nothing is written then.
        """
        plain = self._plain(keys, "keys"), self._plain(values, "values")
        token_bytes = self.kv_heads * self.head_dim * self.itemsize
        if plain[0].size != plain[1].size or plain[0].size % token_bytes:
            raise KvmnnError(
                f"keys have {plain[0].size} and values {plain[1].size} bytes: expected the same whole number of "
                f"tokens of {token_bytes} bytes"
            )
        count = plain[0].size // token_bytes
        packed = self._buffers(key_buffer, value_buffer, start, count, past, capacity, writable=True)
        self._move(*packed, plain, start, count, capacity, _SCATTER)

    def zero(self, key_buffer: Any, value_buffer: Any, start: int, count: int, *, past: int, capacity: int) -> None:
        """Set the elements that `gather` would return to zero bytes; padding stays as it is. Errors as there."""
        packed = self._buffers(key_buffer, value_buffer, start, count, past, capacity, writable=True)
        self._move(*packed, (None, None), start, count, capacity, _ZERO)

    def _move(
        self,
        keys: npt.NDArray[np.uint8],
        values: npt.NDArray[np.uint8],
        plain: tuple[Any, Any],
        start: int,
        count: int,
        capacity: int,
        what: int,
    ) -> None:
        plain_keys, plain_values = (None if part is None else part.reshape(-1).view(np.uint8) for part in plain)
        _layout.move_range(
            keys,
            values,
            plain_keys,
            plain_values,
            self.itemsize,
            self.kv_heads,
            self.head_dim,
            start,
            count,
            self.lP,
            self.hP,
            self.value_block(capacity),
            self.key_head_elements(capacity),
            self.value_head_elements(capacity),
            what,
        )

    def _plain(self, part: Any, name: str) -> npt.NDArray[np.uint8]:
        if isinstance(part, np.ndarray) and part.dtype.itemsize not in (1, self.itemsize):
            raise KvmnnError(f"{name} are {part.dtype}: expected {self.itemsize}-byte words")
        return _bytes(part, name)

    def _buffers(
        self, key_buffer: Any, value_buffer: Any, start: int, count: int, past: int, capacity: int, writable: bool
    ) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.uint8]]:
        if capacity < 1:
            raise KvmnnError(f"capacity is {capacity}: expected at least 1 token")
        if count < 1 or start < 0:
            raise KvmnnError(f"range of {count} tokens from {start}: expected at least 1 token from 0 on")
        if start + count > capacity or start + count > past:
            raise KvmnnError(
                f"range of {count} tokens from {start} ends at {start + count}: expected at most the {past} live "
                f"tokens and the capacity {capacity}"
            )
        if max(self.key_bytes(capacity), self.value_bytes(capacity)) > _MAX_ELEMENTS:
            raise LimitError(f"capacity {capacity} gives buffers beyond any memory")
        found = []
        for buffer, name, size in (
            (key_buffer, "key_buffer", self.key_bytes(capacity)),
            (value_buffer, "value_buffer", self.value_bytes(capacity)),
        ):
            if isinstance(buffer, np.ndarray) and not buffer.flags.c_contiguous:
                raise KvmnnError(f"{name}: expected a C-contiguous array")
            data = _bytes(buffer, name)
            if data.size != size:
                raise KvmnnError(f"{name} has {data.size} bytes: expected {size} for a capacity of {capacity} tokens")
            if writable and not data.flags.writeable:
                raise KvmnnError(f"{name}: expected a writable buffer")
            found.append(data)
        return found[0], found[1]


def _bytes(data: Any, name: str) -> npt.NDArray[np.uint8]:
    if isinstance(data, np.ndarray):
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    try:
        return np.frombuffer(memoryview(data), np.uint8)
    except TypeError:
        raise TypeError(f"{name}: expected an array or a bytes-like object, not {type(data).__name__}") from None
