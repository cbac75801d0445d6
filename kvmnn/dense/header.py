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
from ..frames.words import raw_bytes_of

MAGIC = b"KVMD"
VERSION = 1
WORDS, FRAME, ROWS = 0, 1, 2
"""Methods: words as they are, an MNN frame of them, rows that refer back."""
METHOD_NAMES = ("words", "frame", "rows")
ROTARY, TABLES = 1, 2
"""Flags."""
DTYPES = (FP16, BF16, FP32)
"""By the number that a stream has for them."""
MOST_ROW_WORDS = 65536
MOST_RAW_BYTES = (1 << 32) - 1
MOST_HISTORY = 256

_LAYOUT = struct.Struct("<4sBBBBHHIIQ")
SIZE = _LAYOUT.size


@dataclass(frozen=True)
class Header:
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
        return self.stream[SIZE:]


def read_header(stream: Any, max_bytes: int | None = None) -> Header:
    """The header of a stream.

    Raises
    ------
    FrameError
        For what is no dense stream, or cut.
    LimitError
        For one above `max_bytes` of raw data.
    """
    check_machine()
    data = raw_bytes_of(stream, "stream")
    if data.size < SIZE or data[:4].tobytes() != MAGIC:
        found = data[:4].tobytes().hex(" ") or "nothing"
        raise FrameError(
            f"no dense stream: expected {SIZE} bytes or more from {MAGIC.hex(' ')}, found {found} ({data.size} bytes)"
        )
    _, version, method, dtype, flags, heads, dim, tokens, payload, checksum = _LAYOUT.unpack(data[:SIZE].tobytes())
    if version != VERSION:
        raise FrameError(f"dense stream has version {version}: expected {VERSION}")
    if method >= len(METHOD_NAMES) or dtype >= len(DTYPES):
        raise FrameError(f"dense stream has method {method} and dtype {dtype}: expected 0 to 2 for both")
    if flags & ~(ROTARY | TABLES) or (flags and method != ROWS):
        raise FrameError(f"dense stream has flags {flags} with method {METHOD_NAMES[method]!r}: expected none of these")
    if not (heads and dim and tokens) or heads * dim > MOST_ROW_WORDS:
        raise FrameError(
            f"dense stream has {heads} heads, {tokens} tokens, dim {dim}: expected at least 1 of each and at most "
            f"{MOST_ROW_WORDS} words a token"
        )
    if payload != data.size - SIZE:
        raise FrameError(f"dense stream has {data.size - SIZE} bytes behind its header: expected {payload}")
    header = Header(method, DTYPES[dtype], flags, heads, dim, tokens, checksum, data)
    if header.raw_bytes > MOST_RAW_BYTES:
        raise FrameError(f"dense stream says {header.raw_bytes} raw bytes: expected at most {MOST_RAW_BYTES}")
    if max_bytes is not None and header.raw_bytes > max_bytes:
        raise LimitError(f"dense stream holds {header.raw_bytes} bytes: max_bytes is {max_bytes}")
    return header


def checksum_of(made: bytes) -> int:
    """The checksum in the header of a stream that was just made, and needs no check."""
    return int(_LAYOUT.unpack_from(made)[-1])


def method_of(made: bytes) -> int:
    """The method of such a stream."""
    return int(_LAYOUT.unpack_from(made)[2])


def is_rotated(made: bytes) -> bool:
    """Return whether such a stream turns its rows: it does not where that makes it larger."""
    return bool(_LAYOUT.unpack_from(made)[4] & ROTARY)


def check_machine() -> None:
    """Refuse to work where numbers lie the other way round: the compiled code takes words as they lie."""
    if sys.byteorder != "little":
        raise KvmnnError("dense streams need a little-endian machine")


def rows_of(array: npt.NDArray[Any], dtype: DType) -> Bytes:
    """``[kv_head, token, head_dim]`` as aligned bytes of its tokens' rows; no copy where they lie so."""
    rows = np.ascontiguousarray(array.transpose(1, 0, 2))
    if not rows.dtype.isnative:
        rows = rows.astype(rows.dtype.newbyteorder("<"))
    if not rows.flags.aligned:
        rows = rows.copy()
    return rows.reshape(-1).view(np.uint8)
