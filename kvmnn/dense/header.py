"""The header that all dense streams have (docs/format-v2.md, "Stream")."""

from __future__ import annotations

import struct
import sys
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import BF16, FP16, FP32, Bytes, DType
from ..errors import FrameError, KvmnnError, LimitError
from ..frames.buffers import as_raw_bytes

MAGIC = b"KVMD"
VERSION = 1
METHOD_WORDS, METHOD_FRAME, METHOD_ROWS = 0, 1, 2
"""Methods: words as they are, an MNN frame of them, rows that refer back."""
METHOD_NAMES = ("words", "frame", "rows")
FLAG_ROTARY, FLAG_TABLES = 1, 2
"""Flags."""
DTYPES = (FP16, BF16, FP32)
"""By the number that a stream has for them."""
MAX_ROW_ELEMENTS = 65536
MAX_RAW_BYTES = (1 << 32) - 1
MAX_HISTORY_ROWS = 256

_LAYOUT = struct.Struct("<4sBBBBHHIIQ")
HEADER_BYTES = _LAYOUT.size


@dataclass(frozen=True)
class DenseHeader:
    """What the header of a stream says, checked; `stream` is all of it."""

    method: int
    dtype: DType
    flags: int
    heads: int
    dim: int
    tokens: int
    checksum: int
    stream: Bytes

    @property
    def dtype_code(self) -> int:
        return DTYPES.index(self.dtype)

    @property
    def raw_bytes(self) -> int:
        return self.tokens * self.heads * self.dim * self.dtype.itemsize

    @property
    def payload(self) -> Bytes:
        return self.stream[HEADER_BYTES:]


def read_header(stream: Any, max_bytes: int | None = None) -> DenseHeader:
    """The header of a stream.

    Raises
    ------
    FrameError
        For what is no dense stream, or cut.
    LimitError
        For one above `max_bytes` of raw data.
    """
    check_byte_order()
    data = as_raw_bytes(stream, "stream")
    if data.size < HEADER_BYTES or data[:4].tobytes() != MAGIC:
        magic_text = data[:4].tobytes().hex(" ") or "nothing"
        raise FrameError(
            f"no dense stream: expected {HEADER_BYTES} bytes or more from {MAGIC.hex(' ')}, found {magic_text} "
            f"({data.size} bytes)"
        )
    _, version, method, dtype_code, flags, heads, dim, tokens, payload_bytes, checksum = _LAYOUT.unpack(
        data[:HEADER_BYTES].tobytes()
    )
    if version != VERSION:
        raise FrameError(f"dense stream has version {version}: expected {VERSION}")
    if method >= len(METHOD_NAMES) or dtype_code >= len(DTYPES):
        raise FrameError(f"dense stream has method {method} and dtype {dtype_code}: expected 0 to 2 for both")
    if flags & ~(FLAG_ROTARY | FLAG_TABLES) or (flags and method != METHOD_ROWS):
        raise FrameError(f"dense stream has flags {flags} with method {METHOD_NAMES[method]!r}: expected none of these")
    if not (heads and dim and tokens) or heads * dim > MAX_ROW_ELEMENTS:
        raise FrameError(
            f"dense stream has {heads} heads, {tokens} tokens, dim {dim}: expected at least 1 of each and at most "
            f"{MAX_ROW_ELEMENTS} words a token"
        )
    if payload_bytes != data.size - HEADER_BYTES:
        raise FrameError(
            f"dense stream has {data.size - HEADER_BYTES} bytes behind its header: expected {payload_bytes}"
        )
    header = DenseHeader(method, DTYPES[dtype_code], flags, heads, dim, tokens, checksum, data)
    if header.raw_bytes > MAX_RAW_BYTES:
        raise FrameError(f"dense stream says {header.raw_bytes} raw bytes: expected at most {MAX_RAW_BYTES}")
    if max_bytes is not None and header.raw_bytes > max_bytes:
        raise LimitError(f"dense stream holds {header.raw_bytes} bytes: max_bytes is {max_bytes}")
    return header


def read_checksum(stream: bytes) -> int:
    """The checksum in the header of a stream that was just made, and needs no check."""
    return int(_LAYOUT.unpack_from(stream)[-1])


def read_method(stream: bytes) -> int:
    """The method of such a stream."""
    return int(_LAYOUT.unpack_from(stream)[2])


def is_rotated(stream: bytes) -> bool:
    """Return whether such a stream turns its rows: it does not where that makes it larger."""
    return bool(_LAYOUT.unpack_from(stream)[4] & FLAG_ROTARY)


def check_byte_order() -> None:
    """Refuse to work where numbers lie the other way round: the compiled code takes words as they lie."""
    if sys.byteorder != "little":
        raise KvmnnError("dense streams need a little-endian machine")


def to_row_bytes(array: npt.NDArray[Any], dtype: DType) -> Bytes:
    """``[kv_head, token, head_dim]`` as aligned bytes of its tokens' rows; no copy where they lie so."""
    rows = np.ascontiguousarray(array.transpose(1, 0, 2))
    if not rows.dtype.isnative:
        rows = rows.astype(rows.dtype.newbyteorder("<"))
    if not rows.flags.aligned:
        rows = rows.copy()
    return rows.reshape(-1).view(np.uint8)
