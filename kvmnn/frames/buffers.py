"""Arrays and buffers as bytes, and their checksums: the engine's 64-bit hash, and one for memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from ..dtypes import Bytes, DType, check_array_dtype, infer_dtype, parse_dtype
from ..errors import KvmnnError
from . import _hashing


class BF16Frame(bytes):
    """A frame that `encode` made of bf16 words: `decode` returns uint16 for it without a `dtype`.

    Its bytes are those of a frame of fp16 words, so what is read back from a file no longer tells.
    """

    __slots__ = ()


def as_elements(values: Any, dtype: str | None) -> tuple[DType, Bytes]:
    """What `encode` takes its words from: the dtype and a contiguous view (or copy) of the little-endian bytes."""
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
    """A 1-D uint8 view (or copy, where it is not contiguous) of anything that has bytes."""
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
    """The `nbytes` bytes of a buffer that `decode` may write to, as a view ``[row, byte]``; `KvmnnError` if it is none.

    One row, unless the first axis of an array has a stride of its own.
    """
    if isinstance(out, np.ndarray):
        is_contiguous = out.flags.c_contiguous
        rows = 1 if is_contiguous else len(out)
        if out.dtype.hasobject or not (is_contiguous or (out.ndim > 1 and out[0].flags.c_contiguous)):
            raise KvmnnError("out: expected plain numbers, C-contiguous behind the first axis")
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
    """The engine's 64-bit hash of bytes (bytes-like, or an array's bytes in C order).

    FNV-1a's steps from the engine's own start value, which is *not* the standard basis (docs/format.md, "Hash"). Pass
    the hash of one piece as `seed` of the next to hash their concatenation.
    """
    if not 0 <= seed < 1 << 64:
        raise KvmnnError(f"seed {seed}: expected an unsigned 64-bit number")
    return _hashing.fnv1a64(as_raw_bytes(data, "data"), seed)


def integrity_checksum(data: Any, seed: int = 0) -> int:
    """64 bits that tell whether bytes are what they were, at the speed of memory.

    A change within one aligned 64-bit word always shows, any other all but always. It does not hold against intent. The
    units of the prefix store hold it, so its values stay what they are; a big-endian machine has others.
    """
    return _hashing.integrity_checksum(data if isinstance(data, bytes) else as_raw_bytes(data, "data"), seed)


def checksum_rows(rows: Bytes) -> int:
    """`integrity_checksum` of ``[row, byte]``, row after row: the same whether or not the rows lie together."""
    return _hashing.checksum_blocks(rows[:, None], 1)[0] if rows.shape[1] else 0


def checksum_blocks(rows: Bytes, block_tokens: int) -> list[int]:
    """`checksum_rows` of each block of so many tokens of ``[row, token, byte]``; the last one may be shorter.

    Bytes of a token lie together; tokens and rows may lie anywhere.
    """
    return _hashing.checksum_blocks(rows, block_tokens)


def copy_with_checksum(rows: Bytes, out: Bytes) -> int:
    """Copy ``[row, token, byte]`` to ``out``, ``[row, byte]``, contiguous; `checksum_rows` of it."""
    return _hashing.copy_rows(rows, out)
