"""Copy tokens into MNN's packed K and V buffers and out of them (docs/layout.md).

Each layer has one K and one V buffer, in which the heads are consecutive. The engine splits a buffer into tiles by the
pack numbers lP and hP of its matrix kernels, and V also into blocks of tokens (the flash block).
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from .._util.parallel import parallel_map, resolve_threads
from .._util.validation import to_int, validate_int
from ..dtypes import PARTS, Bytes, KVPair, Part, parse_dtype
from ..errors import KvmnnError
from . import _layout
from .params import EXPAND_CHUNK, FLASH_BLOCK, LayoutParams

BufferPair = tuple[Bytes, Bytes]  # the packed K and V of a layer

T = TypeVar("T")


def split_kv(pair: tuple[T, T]) -> dict[Part, T]:
    """Return a pair as a dict of K and V."""
    return dict(zip(PARTS, pair, strict=True))


def to_byte_buffers(
    layout: LayoutParams, key_buffer: Any, value_buffer: Any, capacity: int, writable: bool = False
) -> BufferPair:
    """Return two packed buffers as bytes over the same memory; `KvmnnError` unless their sizes match `capacity`."""

    def to_bytes(buffer: Any, name: str, size: int) -> Bytes:
        if isinstance(buffer, np.ndarray) and not buffer.flags.c_contiguous:
            raise KvmnnError(f"{name}: expected a C-contiguous array")
        data = _to_flat_bytes(buffer, name)
        if data.size != size:
            raise KvmnnError(f"{name} has {data.size} bytes: expected {size} for a capacity of {capacity} tokens")
        if writable and not data.flags.writeable:
            raise KvmnnError(f"{name}: expected a writable buffer")
        return data

    keys = to_bytes(key_buffer, "key_buffer", layout.key_bytes(capacity))
    return keys, to_bytes(value_buffer, "value_buffer", layout.value_bytes(capacity))


def to_byte_rows(part: Any, name: str, layout: LayoutParams) -> Bytes:
    """Return plain rows as bytes ``[kv_heads, tokens, head_dim * itemsize]``; copied only if the strides require it."""
    heads, dims, size = layout.kv_heads, layout.head_dim, layout.itemsize
    if isinstance(part, np.ndarray) and part.dtype.itemsize != 1:
        if part.dtype.kind not in "fiuV" or part.dtype.itemsize != size:
            raise KvmnnError(f"{name} are {part.dtype}: expected {size}-byte words")
        if part.ndim != 3 or part.shape[0] != heads or part.shape[2] != dims:
            raise KvmnnError(f"{name} have the shape {part.shape}: expected ({heads}, tokens, {dims})")
        if part.strides[2] != size or min(part.strides) < 0:
            part = np.ascontiguousarray(part)
        rows: Bytes = part.view(np.uint8)
        return rows
    data = _to_flat_bytes(np.ascontiguousarray(part) if isinstance(part, np.ndarray) else part, name)
    if data.size % (heads * dims * size):
        raise KvmnnError(
            f"{name} have {data.size} bytes: expected a whole number of tokens of {heads * dims * size} bytes"
        )
    return data.reshape(heads, -1, dims * size)


def to_row_pair(keys: Any, values: Any, layout: LayoutParams) -> BufferPair:
    """Convert K and V, of equally many tokens, by `to_byte_rows`."""
    rows = to_byte_rows(keys, "keys", layout), to_byte_rows(values, "values", layout)
    if rows[0].shape != rows[1].shape:
        raise KvmnnError(f"keys of {rows[0].shape[1]} tokens and values of {rows[1].shape[1]}: expected as many")
    return rows


def make_plain_arrays(layout: LayoutParams, count: int, out: KVPair | None = None) -> KVPair:
    """Return two arrays ``[kv_heads, count, head_dim]``, float32 for int8: new ones, or `out`, checked."""
    shape = (layout.kv_heads, count, layout.head_dim)
    elements = parse_dtype(layout.dtype).numpy_dtype
    types = tuple(np.dtype("<f4") if layout.is_int8(part) else elements for part in PARTS)
    if out is None:
        return np.empty(shape, types[0]), np.empty(shape, types[1])
    for number, array in enumerate(out):
        if not isinstance(array, np.ndarray):
            raise TypeError(f"out[{number}] must be a numpy array, not {type(array).__name__}")
        size = types[number].itemsize
        if array.shape != shape or array.itemsize != size:
            raise KvmnnError(f"out[{number}] is {array.dtype} {array.shape}: expected {size}-byte words {shape}")
    return out


def to_writable_rows(array: npt.NDArray[Any], name: str) -> Bytes:
    """Return plain rows to write, as bytes over the same memory."""
    if array.size and (array.strides[2] != array.itemsize or min(array.strides) < 0):
        raise KvmnnError(f"{name}: expected a contiguous last axis and no negative strides")
    if not array.flags.writeable:
        raise KvmnnError(f"{name}: expected a writable array")
    return array.view(np.uint8)


def make_filled_bytes(size: int, fill: int | None) -> Bytes:
    """Return new bytes filled with `fill`; uninitialised for None."""
    if fill is None:
        return np.empty(size, np.uint8)
    return np.full(size, fill, np.uint8) if fill else np.zeros(size, np.uint8)


def get_nbytes(buffer: Any) -> int:
    """Return the number of bytes of an array or a bytes-like object."""
    return int(buffer.nbytes) if isinstance(buffer, np.ndarray) else memoryview(buffer).nbytes


def _to_flat_bytes(data: Any, name: str) -> Bytes:
    if isinstance(data, np.ndarray):
        return data.reshape(-1).view(np.uint8)
    try:
        return np.frombuffer(memoryview(data), np.uint8)
    except TypeError:
        raise TypeError(f"{name}: expected an array or a bytes-like object, not {type(data).__name__}") from None


HeadRangeWork = Callable[[Part, int, int], None]  # of part, first head, and last head (excluded)


def make_native_params(layout: LayoutParams, part: Part, capacity: int) -> _layout.NativeLayout:
    """Return the parameters of a K or V buffer of `capacity` tokens for the compiled code."""
    is_key = part == "key"
    tile = layout.key_strides()[0] if is_key else layout.value_strides(capacity)[0]
    return _layout.NativeLayout(
        is_key,
        layout.itemsize,
        layout.head_dim,
        *layout.get_pack_numbers(part),
        layout.value_block(capacity),
        get_head_bytes(layout, part, capacity),
        tile * (1 if layout.is_int8(part) else layout.itemsize),
    )


def run_over_heads(work: HeadRangeWork, kv_heads: int, threads: int | None) -> None:
    """Call `work` for all heads of K and of V, on `threads` threads; None for one per processor."""
    num_shares = min(resolve_threads(threads), kv_heads)
    boundaries = [kv_heads * i // num_shares for i in range(num_shares + 1)]
    shares = [(part, first, last) for part in PARTS for first, last in pairwise(boundaries)]
    parallel_map(lambda share: work(*share), shares, num_shares)


@dataclass(frozen=True)
class TokenRange:
    """Tokens ``[start, start + count)``, validated once against buffers, live tokens and capacity."""

    #: Range of tokens.
    start: int
    count: int
    #: Capacity of the buffers in tokens.
    capacity: int
    #: The packed K and V as bytes over the caller's memory.
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
        """Check that the range is inside the live tokens and that the buffers have the sizes of `capacity`."""
        layout.check_capacity(capacity)
        if to_int(count, "count") < 1 or to_int(start, "start") < 0:
            raise KvmnnError(f"range of {count} tokens from {start}: expected at least 1 token from 0 on")
        if start + count > capacity or start + count > past_length:
            limit_text = f"{past_length} live tokens" if past_length <= capacity else f"capacity of {capacity} tokens"
            raise KvmnnError(
                f"range of {count} tokens from {start} ends at {start + count}: expected at most the {limit_text}"
            )
        buffers = to_byte_buffers(layout, key_buffer, value_buffer, capacity, writable)
        return cls(start, count, capacity, split_kv(buffers))


__all__ = ["EXPAND_CHUNK", "FLASH_BLOCK", "PackLayout"]


class PackLayout(LayoutParams):
    """Placement of elements in a packed cache, and copying of tokens.

    Parameters as for `LayoutParams`: kv_heads, head_dim, dtype, lP, hP, flash_block, and lP8, hP8, int8_keys,
    int8_values for int8. Most callers want `PackLayout.from_backend`.

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
        """Pack plain arrays ``[kv_heads, tokens, head_dim]`` into a K and a V buffer.

        Parameters
        ----------
        keys, values
            Words of the layout's size in any order of the first two axes, or bytes in the order above.
        capacity
            Capacity in tokens; by default 64 more than there are, as the engine allocates.
        out
            Two writable buffers of `key_bytes` and `value_bytes` to write to.
        padding
            ``"zero"`` clears every byte that belongs to no token; ``"keep"`` leaves the contents of `out`.
        threads
            Threads to share the heads among; None for one per processor.

        Raises
        ------
        KvmnnError
            For shapes, sizes and capacities that do not fit, and for int8 layouts, whose codes depend on what the
            engine saw before (see `kvmnn.PackedCache`).
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
        """Unpack the first `tokens` tokens into plain arrays ``[kv_heads, tokens, head_dim]``; the inverse of `pack`.

        `capacity` defaults to the one of the buffers' sizes. Otherwise as `gather`, but `tokens` may be 0.
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
        """Return tokens ``[start, start + count)`` of both buffers, each as ``[kv_heads, count, head_dim]``.

        Int8 is returned as float32, code times scale plus bias; `unrecoverable_parts` describes what is lost.

        Parameters
        ----------
        key_buffer, value_buffer
            Bytes-like or arrays; exactly `key_bytes(capacity)` and `value_bytes(capacity)` bytes. Only the elements of
            the range are read: padding may contain anything.
        start, count
            The range in tokens; ``count >= 1``.
        past_length
            Live tokens in the buffers.
        capacity
            Capacity of the buffers in tokens.
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

        `keys` and `values` are as for `pack`; padding in the buffers stays as it is. Errors as for `gather`; nothing is
        written then.
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
        """Zero the elements that `gather` would return; padding is unchanged. Errors as for `gather`."""
        self._require_float("zero")
        tokens = TokenRange.from_buffers(
            self, key_buffer, value_buffer, start, count, past_length=past_length, capacity=capacity, writable=True
        )
        for part, buffer in tokens.buffers.items():
            _layout.zero(make_native_params(self, part, capacity), buffer, 0, self.kv_heads, start, count)

    def _require_float(self, operation: str) -> None:
        if self.is_quantized:
            raise KvmnnError(
                f"{operation}: int8 rows are made by appending to a kvmnn.PackedCache, in the engine's order"
            )


def get_head_bytes(layout: LayoutParams, part: Part, capacity: int) -> int:
    """Return the number of bytes of one head's buffer of `capacity` tokens."""
    return layout.key_head_bytes(capacity) if part == "key" else layout.value_head_bytes(capacity)


def get_tile_tokens(layout: LayoutParams, part: Part, capacity: int) -> int:
    """Return the number of tokens of a tile: those whose bytes are stored together in a head's buffer."""
    return layout.key_shape(capacity)[2] if part == "key" else layout.value_block(capacity)


def get_row_dtype(layout: LayoutParams, part: Part) -> str:
    """Return the dtype that rows are read as: the layout's, or fp32 for int8."""
    return "fp32" if layout.is_int8(part) else layout.dtype


def get_row_bytes(layout: LayoutParams, part: Part) -> int:
    """Return the number of bytes of a row as it is read."""
    return layout.head_dim * parse_dtype(get_row_dtype(layout, part)).itemsize


class HeadRowAccessor:
    """Accessor of the rows of one head; int8 is read as fp32, code times scale plus bias, and cannot be written."""

    def __init__(self, layout: LayoutParams, part: Part, capacity: int) -> None:
        self._params = make_native_params(layout, part, capacity)
        self._is_int8 = layout.is_int8(part)
        self._row_bytes = get_row_bytes(layout, part)
        self._head_bytes = get_head_bytes(layout, part, capacity)
        self._capacity = capacity

    def read_rows(self, head: Bytes, start: int, out: Bytes) -> None:
        """Copy rows from token `start` on into `out`, whose size must be a whole number of rows."""
        gather = _layout.dequantize if self._is_int8 else _layout.gather
        gather(self._params, head, self._check_rows(head, start, out), 0, 1, start)

    def write_rows(self, head: Bytes, start: int, rows: Bytes) -> None:
        """Write `rows`, as bytes, over the rows from token `start` on."""
        if self._is_int8:
            raise KvmnnError("int8 rows depend on what the engine saw before: they can be read, not written")
        _layout.scatter(self._params, head, self._check_rows(head, start, rows), 0, 1, start)

    def clear_rows(self, head: Bytes, start: int, count: int) -> None:
        """Zero the words of `count` rows from token `start` on; padding is unchanged."""
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
