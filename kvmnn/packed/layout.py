"""MNN's packed K and V buffers: tokens copied into them and out of them (docs/layout.md).

One K and one V buffer belong to each layer; inside a buffer the heads follow each other. The engine splits a buffer
into tiles after the pack numbers lP and hP of its matrix kernels; V moreover into blocks of tokens (the flash block).
"""

from __future__ import annotations

from typing import Any

from ..checks import validate_int
from ..dtypes import KVPair, Part
from ..errors import KvmnnError
from . import _layout
from .addressing import EXPAND_CHUNK, FLASH_BLOCK, LayoutParams
from .buffers import (
    BufferPair,
    get_nbytes,
    make_filled_bytes,
    make_plain_arrays,
    split_kv,
    to_byte_buffers,
    to_row_pair,
    to_writable_rows,
)
from .native import make_native_params, run_over_heads
from .token_range import TokenRange

__all__ = ["EXPAND_CHUNK", "FLASH_BLOCK", "PackLayout"]


class PackLayout(LayoutParams):
    """Where each element of a packed cache lies, and the copying that follows from it.

    Parameters as for `LayoutParams`: kv_heads, head_dim, dtype, lP, hP, flash_block, and lP8, hP8, int8_keys,
    int8_values for what is int8. Most callers want `PackLayout.from_backend`.

    Examples
    --------
    >>> import numpy as np
    >>> layout = PackLayout.from_backend("x86-avx2", kv_heads=1, head_dim=2)
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
    ) -> BufferPair:
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
        self._require_float("pack")
        if padding not in ("zero", "keep"):
            raise KvmnnError(f"padding is {padding!r}: expected 'zero' or 'keep'")
        row_pair = to_row_pair(keys, values, self)
        rows, tokens = split_kv(row_pair), row_pair[0].shape[1]
        buffer_capacity = (
            tokens + EXPAND_CHUNK if capacity is None else validate_int(capacity, "capacity", max(tokens, 1))
        )
        self.check_capacity(buffer_capacity)
        if out is None:
            fill = 0 if padding == "keep" else None
            byte_buffers = (
                make_filled_bytes(self.key_bytes(buffer_capacity), fill),
                make_filled_bytes(self.value_bytes(buffer_capacity), fill),
            )
        else:
            byte_buffers = to_byte_buffers(self, *out, buffer_capacity, writable=True)
        buffers = split_kv(byte_buffers)

        def pack_heads(part: Part, first: int, last: int) -> None:
            params = make_native_params(self, part, buffer_capacity)
            if padding == "zero":
                _layout.pad(params, buffers[part], first, last, tokens)
            if tokens:
                _layout.scatter(params, buffers[part], rows[part], first, last, 0)

        run_over_heads(pack_heads, self.kv_heads, threads)
        return byte_buffers

    def unpack(
        self,
        key_buffer: Any,
        value_buffer: Any,
        tokens: int,
        *,
        capacity: int | None = None,
        out: KVPair | None = None,
        threads: int | None = 1,
    ) -> KVPair:
        """The first `tokens` tokens as plain arrays ``[kv_heads, tokens, head_dim]``; the inverse of `pack`.

        `capacity` is derived from the sizes of the buffers by default. Otherwise as `gather`, but no tokens at all are
        fine.
        """
        if capacity is None:
            capacity = self.infer_capacity(get_nbytes(key_buffer), get_nbytes(value_buffer))
        if validate_int(tokens, "tokens", 0) == 0:
            to_byte_buffers(self, key_buffer, value_buffer, self.check_capacity(capacity))
            return make_plain_arrays(self, 0, out)
        return self.gather(
            key_buffer, value_buffer, 0, tokens, past_length=tokens, capacity=capacity, out=out, threads=threads
        )

    def gather(
        self,
        key_buffer: Any,
        value_buffer: Any,
        start: int,
        count: int,
        *,
        past_length: int,
        capacity: int,
        out: KVPair | None = None,
        threads: int | None = 1,
    ) -> KVPair:
        """Tokens ``[start, start + count)`` of both buffers, each as ``[kv_heads, count, head_dim]``.

        Of an int8 layout what comes back is float32, code times scale plus bias; `unrecoverable_parts` says what that
        is not.

        Parameters
        ----------
        key_buffer, value_buffer
            Bytes-like or arrays; exactly `key_bytes(capacity)` and `value_bytes(capacity)` bytes. Only the elements
            of the range are read: padding may hold anything.
        start, count
            The range in tokens; ``count >= 1``.
        past_length
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
        tokens = TokenRange.from_buffers(
            self, key_buffer, value_buffer, start, count, past_length=past_length, capacity=capacity
        )
        plain_pair = make_plain_arrays(self, count, out)
        rows = split_kv((to_writable_rows(plain_pair[0], "out[0]"), to_writable_rows(plain_pair[1], "out[1]")))

        def gather_heads(part: Part, first: int, last: int) -> None:
            read_rows = _layout.dequantize if self.is_int8(part) else _layout.gather
            read_rows(make_native_params(self, part, capacity), tokens.buffers[part], rows[part], first, last, start)

        run_over_heads(gather_heads, self.kv_heads, threads)
        return plain_pair

    def scatter(
        self,
        keys: Any,
        values: Any,
        key_buffer: Any,
        value_buffer: Any,
        start: int,
        *,
        past_length: int,
        capacity: int,
        threads: int | None = 1,
    ) -> None:
        """Write ``[kv_heads, count, head_dim]`` arrays over the tokens from `start` on; the inverse of `gather`.

        `keys` and `values` are as for `pack`; padding in the buffers stays as it is. Errors as for `gather`; nothing
        is written then.
        """
        self._require_float("scatter")
        row_pair = to_row_pair(keys, values, self)
        rows, count = split_kv(row_pair), row_pair[0].shape[1]
        tokens = TokenRange.from_buffers(
            self, key_buffer, value_buffer, start, count, past_length=past_length, capacity=capacity, writable=True
        )

        def scatter_heads(part: Part, first: int, last: int) -> None:
            params = make_native_params(self, part, capacity)
            _layout.scatter(params, tokens.buffers[part], rows[part], first, last, start)

        run_over_heads(scatter_heads, self.kv_heads, threads)

    def zero(
        self, key_buffer: Any, value_buffer: Any, start: int, count: int, *, past_length: int, capacity: int
    ) -> None:
        """Set the elements that `gather` would return to zero bytes; padding stays as it is. Errors as there."""
        self._require_float("zero")
        tokens = TokenRange.from_buffers(
            self, key_buffer, value_buffer, start, count, past_length=past_length, capacity=capacity, writable=True
        )
        for part, buffer in tokens.buffers.items():
            _layout.zero(make_native_params(self, part, capacity), buffer, 0, self.kv_heads, start, count)

    def _require_float(self, operation: str) -> None:
        if self.is_quantised:
            raise KvmnnError(
                f"{operation}: int8 rows are made by appending to a kvmnn.PackedCache, in the engine's order"
            )
