"""Arrays and buffers as bytes, and their checksums: the engine's 64-bit hash, and a faster one for data in memory."""

from __future__ import annotations

from typing import Any, Self

import numpy as np

from ..dtypes import Bytes, DType, check_array_dtype, infer_dtype, parse_dtype
from ..errors import KvmnnError
from . import _hashing


class BF16Frame(bytes):
    """A frame that `encode` returned for bf16: `decode` returns uint16 for it without a `dtype`.

    Its bytes are those of an fp16 frame, so the dtype is lost in a file.
    """

    __slots__ = ()


class ShapedFrame(bytes):
    """A frame that `encode` returned with `keep_shape`: `decode` returns an array of its shape and element type.

    Its bytes are those of any frame, so both are lost in a file.
    """

    shape: tuple[int, ...]
    dtype: str | None

    def __new__(cls, frame: bytes, shape: tuple[int, ...] = (-1,), dtype: str | None = None) -> Self:
        self = super().__new__(cls, frame)
        self.shape, self.dtype = shape, dtype
        return self


def as_elements(values: Any, dtype: str | None) -> tuple[DType, Bytes]:
    """Return the dtype of values, and a contiguous view (or copy) of their little-endian bytes."""
    element_type = None if dtype is None else parse_dtype(dtype)
    if isinstance(values, np.ndarray) and values.dtype != np.uint8:
        if element_type is None:
            element_type = infer_dtype(values)
        check_array_dtype(values, element_type)
        if values.dtype.byteorder == ">" or not values.dtype.isnative:
            values = values.astype(values.dtype.newbyteorder("<"))
        return element_type, np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    data = as_raw_bytes(values, "values")
    if element_type is None:
        raise TypeError(f"{type(values).__name__}: raw bytes need a dtype: fp16, bf16 or fp32")
    return element_type, data


def as_raw_bytes(data: Any, name: str) -> Bytes:
    """Return a 1-D uint8 view of an array or a bytes-like object (a copy if it is not contiguous)."""
    if isinstance(data, np.ndarray):
        if data.dtype.hasobject:
            raise TypeError(f"{name}: numpy type {data.dtype} has no bytes of its own")
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    try:
        view = memoryview(data)
    except TypeError:
        raise TypeError(f"{name}: expected a numpy array or a bytes-like object, not {type(data).__name__}") from None
    return np.frombuffer(view if view.c_contiguous else view.tobytes(), np.uint8)


def as_writable_rows(out: Any, nbytes: int) -> Bytes:
    """Return a writable buffer of `nbytes` bytes as a view ``[row, byte]``; `KvmnnError` if it is not one.

    There is one row, unless only the rows along the first axis of an array are contiguous.
    """
    if isinstance(out, np.ndarray):
        is_contiguous = out.flags.c_contiguous
        rows = 1 if is_contiguous else len(out)
        if out.dtype.hasobject or not (is_contiguous or (out.ndim > 1 and out[0].flags.c_contiguous)):
            raise KvmnnError("out: expected plain numbers, C-contiguous after the first axis")
        target = out.reshape(rows, -1).view(np.uint8)
    else:
        view = memoryview(out)
        if not view.c_contiguous:
            raise KvmnnError("out: expected a C-contiguous buffer")
        target = np.frombuffer(view, np.uint8).reshape(1, -1)
    if not target.flags.writeable:
        raise KvmnnError("out: expected a writable buffer")
    if target.size != nbytes:
        raise KvmnnError(f"out has {target.size} bytes: the frame holds {nbytes}")
    return target


def fnv1a64(data: Any, seed: int = _hashing.SEED) -> int:
    """Return the engine's 64-bit hash of bytes (bytes-like, or an array's bytes in C order).

    The steps are those of FNV-1a, the start value is the engine's own and *not* the standard basis (docs/format.md,
    "Hash"). To hash a concatenation, pass the hash of one piece as `seed` for the next.
    """
    if not 0 <= seed < 1 << 64:
        raise KvmnnError(f"seed {seed}: expected an unsigned 64-bit number")
    return _hashing.fnv1a64(as_raw_bytes(data, "data"), seed)


def integrity_checksum(data: Any, seed: int = 0) -> int:
    """Return a 64-bit checksum that detects damaged bytes, at the speed of memory.

    It detects every change within one aligned 64-bit word, and almost every other; it is not cryptographic. Units of
    the prefix store contain it, so its values must not change. Big-endian machines have other values.
    """
    return _hashing.integrity_checksum(data if isinstance(data, bytes) else as_raw_bytes(data, "data"), seed)


def checksum_rows(rows: Bytes) -> int:
    """Return the `integrity_checksum` of ``[row, byte]``, contiguous or not."""
    return _hashing.checksum_blocks(rows[:, None], 1)[0] if rows.shape[1] else 0


def checksum_blocks(rows: Bytes, block_tokens: int) -> list[int]:
    """Return the `checksum_rows` of each block of `block_tokens` tokens of ``[row, token, byte]``.

    The last block may be shorter. The bytes of a token are contiguous; tokens and rows may have any strides.
    """
    return _hashing.checksum_blocks(rows, block_tokens)


def copy_with_checksum(rows: Bytes, out: Bytes) -> int:
    """Copy ``[row, token, byte]`` to the contiguous ``out``, ``[row, byte]``, and return its `checksum_rows`."""
    return _hashing.copy_rows(rows, out)
