"""What callers hand to the packed layouts, checked and turned into arrays of bytes for the compiled code."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from ..dtypes import PARTS, Bytes, KVPair, Part, parse_dtype
from ..errors import KvmnnError
from .addressing import LayoutParams

BufferPair = tuple[Bytes, Bytes]
"""The packed K and V of a layer."""

T = TypeVar("T")


def split_kv(pair: tuple[T, T]) -> dict[Part, T]:
    """What belongs to K and what belongs to V."""
    return dict(zip(PARTS, pair, strict=True))


def to_byte_buffers(
    layout: LayoutParams, key_buffer: Any, value_buffer: Any, capacity: int, writable: bool = False
) -> BufferPair:
    """Two packed buffers as bytes over the same memory; `KvmnnError` unless they have the sizes for `capacity`."""
    return (
        to_byte_buffer(key_buffer, "key_buffer", layout.key_bytes(capacity), capacity, writable),
        to_byte_buffer(value_buffer, "value_buffer", layout.value_bytes(capacity), capacity, writable),
    )


def to_byte_buffer(buffer: Any, name: str, size: int, capacity: int, writable: bool) -> Bytes:
    """A packed buffer as bytes over the same memory."""
    if isinstance(buffer, np.ndarray) and not buffer.flags.c_contiguous:
        raise KvmnnError(f"{name}: expected a C-contiguous array")
    data = _to_flat_bytes(buffer, name)
    if data.size != size:
        raise KvmnnError(f"{name} has {data.size} bytes: expected {size} for a capacity of {capacity} tokens")
    if writable and not data.flags.writeable:
        raise KvmnnError(f"{name}: expected a writable buffer")
    return data


def to_byte_rows(part: Any, name: str, layout: LayoutParams) -> Bytes:
    """Plain rows to read, as bytes ``[kv_heads, tokens, head_dim * itemsize]``; copied only where strides demand it."""
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
    """`to_byte_rows` of K and of V, which must have the same number of tokens."""
    rows = to_byte_rows(keys, "keys", layout), to_byte_rows(values, "values", layout)
    if rows[0].shape != rows[1].shape:
        raise KvmnnError(f"keys of {rows[0].shape[1]} tokens and values of {rows[1].shape[1]}: expected as many")
    return rows


def make_plain_arrays(layout: LayoutParams, count: int, out: KVPair | None = None) -> KVPair:
    """Two arrays ``[kv_heads, count, head_dim]`` for plain tokens: new ones, or `out`, checked.

    What is int8 is read as float32.
    """
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
    """Plain rows to write, as bytes over the same memory."""
    if array.size and (array.strides[2] != array.itemsize or min(array.strides) < 0):
        raise KvmnnError(f"{name}: expected a contiguous last axis and no negative strides")
    if not array.flags.writeable:
        raise KvmnnError(f"{name}: expected a writable array")
    return array.view(np.uint8)


def make_filled_bytes(size: int, fill: int | None) -> Bytes:
    """New bytes, each `fill`; anything for None."""
    if fill is None:
        return np.empty(size, np.uint8)
    return np.full(size, fill, np.uint8) if fill else np.zeros(size, np.uint8)


def get_nbytes(buffer: Any) -> int:
    """Bytes of an array or a bytes-like object."""
    return int(buffer.nbytes) if isinstance(buffer, np.ndarray) else memoryview(buffer).nbytes


def _to_flat_bytes(data: Any, name: str) -> Bytes:
    if isinstance(data, np.ndarray):
        return data.reshape(-1).view(np.uint8)
    try:
        return np.frombuffer(memoryview(data), np.uint8)
    except TypeError:
        raise TypeError(f"{name}: expected an array or a bytes-like object, not {type(data).__name__}") from None
