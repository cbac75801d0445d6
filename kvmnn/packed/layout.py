"""MNN's packed K and V buffers: tokens copied into them and out of them (docs/layout.md).

One K and one V buffer belong to each layer; inside a buffer the heads follow each other. The engine splits a buffer
into tiles after the pack numbers lP and hP of its matrix kernels; V moreover into blocks of tokens (the flash block).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from ..checks import as_int, whole
from ..dtypes import Bytes, Words, by_name
from ..errors import KvmnnError
from ..threads.pool import map_pulled, resolve_threads
from . import _layout
from .addressing import EXPAND_CHUNK, FLASH_BLOCK, PackNumbers
from .buffers import as_buffer, as_rows, filled, size_of, writable_rows

__all__ = ["EXPAND_CHUNK", "FLASH_BLOCK", "PackLayout"]


class PackLayout(PackNumbers):
    """Where each element of a packed cache lies, and the copying that follows from it.

    Parameters are those of `PackNumbers`: kv_heads, head_dim, dtype, lP, hP, flash_block, and lP8, hP8, int8_keys,
    int8_values for what is int8. Most callers want `PackLayout.for_backend`.

    Examples
    --------
    >>> layout = PackLayout.for_backend("x86-avx2", kv_heads=1, head_dim=2)
    >>> words = np.arange(6, dtype=np.float32).reshape(1, 3, 2)  # three tokens of two dims
    >>> keys, values = layout.pack(words, words, capacity=3)
    >>> keys.view(np.float32)  # hP is 4: dim 0 of tokens 0 to 3, then dim 1
    array([0., 2., 4., 0., 1., 3., 5., 0.], dtype=float32)
    >>> values.view(np.float32)[:12]  # one token after the other, dims padded to 4
    array([0., 1., 0., 0., 2., 3., 0., 0., 4., 5., 0., 0.], dtype=float32)
    """

    # -- tokens in and out ---------------------------------------------------------------------------------------------

    def pack(
        self,
        keys: Any,
        values: Any,
        *,
        capacity: int | None = None,
        out: tuple[Any, Any] | None = None,
        padding: str = "zero",
        threads: int | None = 1,
    ) -> tuple[Bytes, Bytes]:
        """Plain arrays ``[kv_heads, tokens, head_dim]`` as a K and a V buffer.

        Parameters
        ----------
        keys, values
            Words of the layout's size in any order of the first two axes (``[token, head, dim]`` transposed will do),
            or bytes in the order above.
        capacity
            Tokens to have room for; by default 64 more than there are, as the engine allocates.
        out
            Two writable buffers of `key_bytes` and `value_bytes` to write to.
        padding
            ``"zero"`` clears every byte that belongs to no token; ``"keep"`` leaves what was in `out`.
        threads
            Threads to share the heads among; None for one per processor.

        Raises
        ------
        KvmnnError
            For shapes, sizes and capacities that do not fit, and for int8 layouts: those codes depend on what the
            engine saw before, see `kvmnn.PackedCache`.
        """
        self._floats_only("pack")
        if padding not in ("zero", "keep"):
            raise KvmnnError(f"padding is {padding!r}: expected 'zero' or 'keep'")
        rows = as_rows(keys, "keys", self), as_rows(values, "values", self)
        tokens = self._same_tokens(*rows)
        room = tokens + EXPAND_CHUNK if capacity is None else whole(capacity, "capacity", max(tokens, 1))
        if out is None:
            packed = self.empty(room, 0 if padding == "keep" else None)
        else:
            packed = self.buffers(*out, room, writable=True)

        def work(side: int, first: int, last: int) -> None:
            numbers = self.numbers(side, room)
            if padding == "zero":
                _layout.pad(numbers, packed[side], first, last, tokens)
            if tokens:
                _layout.scatter(numbers, packed[side], rows[side], first, last, 0)

        self.share(work, threads)
        return packed

    def unpack(
        self,
        key_buffer: Any,
        value_buffer: Any,
        tokens: int,
        *,
        capacity: int | None = None,
        out: tuple[Words, Words] | None = None,
        threads: int | None = 1,
    ) -> tuple[Words, Words]:
        """The first `tokens` tokens as plain arrays ``[kv_heads, tokens, head_dim]``; the inverse of `pack`.

        `capacity` is derived from the sizes of the buffers by default. Otherwise as `gather`, but no tokens at all are
        fine.
        """
        if capacity is None:
            capacity = self.capacity_of(size_of(key_buffer), size_of(value_buffer))
        if whole(tokens, "tokens", 0) == 0:
            self.buffers(key_buffer, value_buffer, capacity)
            return self.plain(0, out)
        return self.gather(
            key_buffer, value_buffer, 0, tokens, past=tokens, capacity=capacity, out=out, threads=threads
        )

    def gather(
        self,
        key_buffer: Any,
        value_buffer: Any,
        start: int,
        count: int,
        *,
        past: int,
        capacity: int,
        out: tuple[Words, Words] | None = None,
        threads: int | None = 1,
    ) -> tuple[Words, Words]:
        """Tokens ``[start, start + count)`` of both buffers, each as ``[kv_heads, count, head_dim]``.

        Of an int8 layout what comes back is float32, code times scale plus bias; `unrecoverable` says what that is not.

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
        out
            Two arrays of that shape and word size to write to, each with a contiguous last axis.
        threads
            Threads to share the heads among; None for one per processor.

        Raises
        ------
        KvmnnError
            For a range outside the live tokens and for buffers of another size.
        """
        packed = self._range(key_buffer, value_buffer, start, count, past, capacity)
        plain = self.plain(count, out)
        rows = writable_rows(plain[0], "out[0]"), writable_rows(plain[1], "out[1]")

        def work(side: int, first: int, last: int) -> None:
            read = _layout.dequantise if self.is_int8(side) else _layout.gather
            read(self.numbers(side, capacity), packed[side], rows[side], first, last, start)

        self.share(work, threads)
        return plain

    def scatter(
        self,
        keys: Any,
        values: Any,
        key_buffer: Any,
        value_buffer: Any,
        start: int,
        *,
        past: int,
        capacity: int,
        threads: int | None = 1,
    ) -> None:
        """Write ``[kv_heads, count, head_dim]`` arrays over the tokens from `start` on; the inverse of `gather`.

        `keys` and `values` are as for `pack`; padding in the buffers stays as it is. Errors as for `gather`; nothing
        is written then.
        """
        self._floats_only("scatter")
        rows = as_rows(keys, "keys", self), as_rows(values, "values", self)
        count = self._same_tokens(*rows)
        packed = self._range(key_buffer, value_buffer, start, count, past, capacity, writable=True)

        def work(side: int, first: int, last: int) -> None:
            _layout.scatter(self.numbers(side, capacity), packed[side], rows[side], first, last, start)

        self.share(work, threads)

    def zero(self, key_buffer: Any, value_buffer: Any, start: int, count: int, *, past: int, capacity: int) -> None:
        """Set the elements that `gather` would return to zero bytes; padding stays as it is. Errors as there."""
        self._floats_only("zero")
        packed = self._range(key_buffer, value_buffer, start, count, past, capacity, writable=True)
        for side in (0, 1):
            _layout.zero(self.numbers(side, capacity), packed[side], 0, self.kv_heads, start, count)

    # -- for the modules around this one -------------------------------------------------------------------------------

    def buffers(self, key_buffer: Any, value_buffer: Any, capacity: int, writable: bool = False) -> tuple[Bytes, Bytes]:
        """The two buffers as arrays of bytes over the same memory, their sizes checked."""
        self.check_capacity(capacity)
        return (
            as_buffer(key_buffer, "key_buffer", self.key_bytes(capacity), capacity, writable),
            as_buffer(value_buffer, "value_buffer", self.value_bytes(capacity), capacity, writable),
        )

    def empty(self, capacity: int, fill: int | None) -> tuple[Bytes, Bytes]:
        """Two new buffers, every byte `fill`, or anything for None."""
        self.check_capacity(capacity)
        return filled(self.key_bytes(capacity), fill), filled(self.value_bytes(capacity), fill)

    def _floats_only(self, what: str) -> None:
        if self.quantised:
            raise KvmnnError(f"{what}: int8 rows are made by appending to a kvmnn.PackedCache, in the engine's order")

    def _same_tokens(self, keys: Bytes, values: Bytes) -> int:
        if keys.shape != values.shape:
            raise KvmnnError(f"keys of {keys.shape[1]} tokens and values of {values.shape[1]}: expected as many")
        return int(keys.shape[1])

    def plain(self, count: int, out: tuple[Words, Words] | None = None) -> tuple[Words, Words]:
        """Two arrays for so many plain tokens: new ones, or `out`, checked."""
        shape = (self.kv_heads, count, self.head_dim)
        words = by_name(self.dtype).numpy
        types = tuple(np.dtype("<f4") if self.is_int8(side) else words for side in (0, 1))
        if out is None:
            return np.empty(shape, types[0]), np.empty(shape, types[1])
        for number, array in enumerate(out):
            if not isinstance(array, np.ndarray):
                raise TypeError(f"out[{number}] must be a numpy array, not {type(array).__name__}")
            size = types[number].itemsize
            if array.shape != shape or array.itemsize != size:
                raise KvmnnError(f"out[{number}] is {array.dtype} {array.shape}: expected {size}-byte words {shape}")
        return out

    def _range(
        self,
        key_buffer: Any,
        value_buffer: Any,
        start: int,
        count: int,
        past: int,
        capacity: int,
        writable: bool = False,
    ) -> tuple[Bytes, Bytes]:
        self.check_capacity(capacity)
        if as_int(count, "count") < 1 or as_int(start, "start") < 0:
            raise KvmnnError(f"range of {count} tokens from {start}: expected at least 1 token from 0 on")
        if start + count > capacity or start + count > past:
            raise KvmnnError(
                f"range of {count} tokens from {start} ends at {start + count}: expected at most the {past} live "
                f"tokens and the capacity {capacity}"
            )
        return self.buffers(key_buffer, value_buffer, capacity, writable)

    def share(self, work: Callable[[int, int, int], None], threads: int | None) -> None:
        """Call `work(side, first head, last head)` for all heads of K and of V on so many threads."""
        share = min(resolve_threads(threads), self.kv_heads)
        cuts = [self.kv_heads * i // share for i in range(share + 1)]
        parts = [(side, first, last) for side in (0, 1) for first, last in pairwise(cuts)]
        map_pulled(lambda part: work(*part), parts, share)
