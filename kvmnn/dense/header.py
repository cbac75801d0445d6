"""The header of dense streams (docs/format-v2.md, "Stream")."""

from __future__ import annotations

import struct
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from ..dtypes import BF16, FP16, FP32, Bytes, DType
from ..errors import FrameError, KvmnnError, LimitError
from ..frames.buffers import as_raw_bytes

MAGIC = b"KVMD"
VERSION = 1
METHOD_WORDS, METHOD_FRAME, METHOD_ROWS = 0, 1, 2
"""Methods: raw elements, an MNN frame of them, rows that refer to earlier rows."""
METHOD_NAMES = ("words", "frame", "rows")
FLAG_ROTARY, FLAG_TABLES = 1, 2
"""Flags of method 2: the stream has RoPE parameters, or refers to shared tables, which may have them."""
DTYPES = (FP16, BF16, FP32)
"""Element types by the number of the dtype in a stream."""
MAX_ROW_ELEMENTS = 65536
MAX_RAW_BYTES = (1 << 32) - 1
MAX_HISTORY_ROWS = 256

_LAYOUT = struct.Struct("<4sBBBBHHIIQ")
HEADER_BYTES = _LAYOUT.size


@dataclass(frozen=True)
class DenseHeader:
    """The validated header of a stream; `stream` is the whole stream."""

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
    """Read and validate the header of a stream."""
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
            f"dense stream has {data.size - HEADER_BYTES} bytes after its header: expected {payload_bytes}"
        )
    header = DenseHeader(method, DTYPES[dtype_code], flags, heads, dim, tokens, checksum, data)
    if header.raw_bytes > MAX_RAW_BYTES:
        raise FrameError(f"dense stream says {header.raw_bytes} raw bytes: expected at most {MAX_RAW_BYTES}")
    if max_bytes is not None and header.raw_bytes > max_bytes:
        raise LimitError(f"dense stream holds {header.raw_bytes} bytes: max_bytes is {max_bytes}")
    return header


def read_checksum(stream: bytes) -> int:
    """Return the checksum in the header of a stream that this program encoded, without validation."""
    return int(_LAYOUT.unpack_from(stream)[-1])


def read_method(stream: bytes) -> int:
    """Return the method of such a stream."""
    return int(_LAYOUT.unpack_from(stream)[2])


def is_rotated(stream: bytes) -> bool:
    """Return whether such a stream rotates its rows, which it does not if that makes it larger."""
    return bool(_LAYOUT.unpack_from(stream)[4] & FLAG_ROTARY)


def check_byte_order() -> None:
    """Raise `KvmnnError` on a big-endian machine: the compiled code reads elements in native byte order."""
    if sys.byteorder != "little":
        raise KvmnnError("dense streams need a little-endian machine")


def to_row_bytes(array: npt.NDArray[Any], dtype: DType) -> Bytes:
    """Return ``[kv_head, token, head_dim]`` as the aligned bytes of its rows, without a copy if possible."""
    rows = np.ascontiguousarray(array.transpose(1, 0, 2))
    if not rows.dtype.isnative:
        rows = rows.astype(rows.dtype.newbyteorder("<"))
    if not rows.flags.aligned:
        rows = rows.copy()
    return rows.reshape(-1).view(np.uint8)
