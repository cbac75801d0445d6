"""The header of linear streams, and positions in them (docs/format-linear.md, "Stream")."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from .._util.dataclass import dataclass
from ..dense._stream import xxh64
from ..dense.header import DTYPES, check_byte_order
from ..dtypes import Bytes, DType, Positions
from ..errors import FrameError, LimitError
from ..frames.buffers import as_raw_bytes

MAGIC = b"KVML"
VERSION = 1
METHOD_WORDS, METHOD_DENSE, METHOD_LINEAR = 0, 1, 2
METHOD_NAMES = ("words", "dense", "linear")
FLAG_POSITIONS, FLAG_HEAD_POSITIONS = 1, 2
"""Positions are in the stream, of each head; without them they are 0, 1, 2 ..."""
KEY_BYTES = 32
MAX_TOKENS = 1 << 24
MAX_ROW_ELEMENTS = 65536
MAX_SIDE_BYTES = (1 << 32) - 1
MAX_POSITION = (1 << 31) - 1

_LAYOUT = struct.Struct("<4sBBBBBBHHHHIIQ")
_CHECKSUM_BYTES = 8
HEADER_BYTES = _LAYOUT.size


@dataclass(frozen=True)
class LinearHeader:
    """The validated header of a stream and its positions; `stream` is the whole stream."""

    dtype: DType
    below: int
    #: Methods of K and of V.
    methods: tuple[int, int]
    layer: int
    kv_heads: int
    head_dim: int
    value_dim: int
    tokens: int
    #: SHA-256 of the profile; None where no side is linear.
    key: bytes | None
    #: int64 ``[token]``, or ``[kv_head, token]``.
    positions: Positions
    payloads: tuple[Bytes, Bytes]
    checksum: int
    stream: Bytes

    @property
    def dims(self) -> tuple[int, int]:
        """Return elements of K and of V of a token in one head."""
        return self.head_dim, self.value_dim

    @property
    def raw_bytes(self) -> int:
        """Return the bytes of K and V."""
        return self.tokens * self.kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize


def write_stream(
    dtype: DType,
    below: int,
    methods: tuple[int, int],
    layer: int,
    sizes: tuple[int, int, int, int],
    profile_key: bytes,
    positions: Positions,
    payloads: tuple[bytes, bytes],
    words: tuple[Bytes, Bytes],
) -> bytes:
    """Build a stream; `sizes` are heads, elements of K and V in one, and tokens."""
    heads, head_dim, value_dim, tokens = sizes
    is_sequential = positions.ndim == 1 and np.array_equal(positions, np.arange(tokens))
    flags = 0 if is_sequential else FLAG_POSITIONS | (FLAG_HEAD_POSITIONS if positions.ndim == 2 else 0)
    methods_byte = methods[0] | methods[1] << 4
    fixed = (MAGIC, VERSION, DTYPES.index(dtype), below, flags, methods_byte, 0)
    fields = (*fixed, layer, heads, head_dim, value_dim, tokens, len(payloads[0]))
    body = (profile_key if METHOD_LINEAR in methods else b"") + (b"" if is_sequential else _write_positions(positions))
    body += payloads[0] + payloads[1]
    stream = _LAYOUT.pack(*fields, 0)[:-_CHECKSUM_BYTES] + body
    checksum = compute_checksum(np.frombuffer(stream, np.uint8), words)
    return _LAYOUT.pack(*fields, checksum) + body


def compute_checksum(stream: Bytes, words: tuple[Bytes, Bytes]) -> int:
    """Return the checksum of a stream, given without its field for it, and of the words of K and V."""
    checksum = xxh64(stream)
    for part_words in words:
        checksum = xxh64(part_words, checksum)
    return checksum


def read_header(data: Any, max_bytes: int | None = None) -> LinearHeader:
    """Read and validate the header of a stream, before memory is taken.

    Raises
    ------
    FrameError
        For anything that is not the beginning of a linear stream.
    LimitError
        Above `max_bytes`.
    """
    check_byte_order()
    stream = as_raw_bytes(data, "stream")
    if stream.size < HEADER_BYTES or stream[:4].tobytes() != MAGIC:
        raise FrameError(
            f"no linear stream: expected {HEADER_BYTES} bytes or more from {MAGIC.hex(' ')}, found "
            f"{stream[:4].tobytes().hex(' ') or 'nothing'} ({stream.size} bytes)"
        )
    _, version, dtype_code, below, flags, methods_byte, reserved, layer, heads, head_dim, value_dim, *tail = (
        _LAYOUT.unpack(stream[:HEADER_BYTES].tobytes())
    )
    tokens, key_bytes, checksum = tail
    methods = methods_byte & 15, methods_byte >> 4
    if version != VERSION:
        raise FrameError(f"linear stream has version {version}: expected {VERSION}")
    if dtype_code >= len(DTYPES) or below > 2 or max(methods) > METHOD_LINEAR or reserved or flags not in (0, 1, 3):
        raise FrameError(
            f"linear stream has dtype {dtype_code}, below {below}, methods {methods[0]} and {methods[1]}, flags "
            f"{flags} and {reserved}: expected at most 2 for the first four, flags 0, 1 or 3, and 0"
        )
    dtype = DTYPES[dtype_code]
    if not heads or not head_dim or heads * max(head_dim, value_dim) > MAX_ROW_ELEMENTS or tokens > MAX_TOKENS:
        raise FrameError(
            f"linear stream has {heads} heads of {head_dim} and {value_dim} elements and {tokens} tokens: expected at "
            f"least 1 of each, at most {MAX_ROW_ELEMENTS} elements in a row and {MAX_TOKENS} tokens"
        )
    if tokens * heads * max(head_dim, value_dim) * dtype.itemsize > MAX_SIDE_BYTES:
        raise FrameError(f"linear stream says {tokens} tokens of {heads} heads: expected less than 4 GiB of K and of V")
    raw_bytes = tokens * heads * (head_dim + value_dim) * dtype.itemsize
    if max_bytes is not None and raw_bytes > max_bytes:
        raise LimitError(f"linear stream holds {raw_bytes} bytes: max_bytes is {max_bytes}")
    begin, key = HEADER_BYTES, None
    if METHOD_LINEAR in methods:
        key = stream[begin : begin + KEY_BYTES].tobytes()
        begin += KEY_BYTES
    positions = np.arange(tokens, dtype=np.int64) if not flags else np.zeros(0, np.int64)
    if flags:
        num_rows = heads if flags & FLAG_HEAD_POSITIONS else 1
        positions, begin = _read_positions(stream, begin, num_rows, tokens)
        positions = positions if flags & FLAG_HEAD_POSITIONS else positions[0]
    if begin + key_bytes > stream.size:
        raise FrameError(f"linear stream has {max(stream.size - begin, 0)} bytes of K and V: expected {key_bytes} of K")
    payloads = stream[begin : begin + key_bytes], stream[begin + key_bytes :]
    return LinearHeader(
        dtype, below, methods, layer, heads, head_dim, value_dim, tokens, key, positions, payloads, checksum, stream
    )


def check_words(header: LinearHeader, words: tuple[Bytes, Bytes]) -> None:
    """Raise `FrameError` unless words of K and V are those of the stream."""
    begin = HEADER_BYTES - _CHECKSUM_BYTES
    stream = np.concatenate([header.stream[:begin], header.stream[HEADER_BYTES:]])
    if compute_checksum(stream, words) != header.checksum:
        raise FrameError("linear stream: other words than its checksum says")


def append_varint(out: bytearray, value: int) -> None:
    """Append a number, 7 bits a byte from the lowest on."""
    while value >= 128:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)


def read_varint(data: Bytes, offset: int) -> tuple[int, int]:
    """Return a number of at most 5 bytes, and the offset after it."""
    value = 0
    for i in range(5):
        if offset + i >= data.size:
            raise FrameError("linear stream: a number that is cut")
        byte = int(data[offset + i])
        value |= (byte & 127) << 7 * i
        if byte < 128:
            return value, offset + i + 1
    raise FrameError("linear stream: a number of more than 5 bytes")


def _write_positions(positions: Positions) -> bytes:
    """Return runs of positions that go up by one: where each begins, from the end of the last one, and its length."""
    out = bytearray()
    for row in positions.reshape(-1, positions.shape[-1]):
        breaks = np.flatnonzero(np.diff(row) != 1) + 1
        expected = 0
        for begin, end in zip([0, *breaks.tolist()], [*breaks.tolist(), len(row)], strict=True):
            if begin < end:
                gap = int(row[begin]) - expected
                append_varint(out, 2 * gap if gap >= 0 else -2 * gap - 1)
                append_varint(out, end - begin - 1)
                expected = int(row[begin]) + end - begin
    return bytes(out)


def _read_positions(stream: Bytes, offset: int, num_rows: int, tokens: int) -> tuple[Positions, int]:
    if num_rows * (tokens > 0) > stream.size:
        raise FrameError("linear stream: fewer bytes than heads have positions")
    runs: list[tuple[int, int]] = []
    for _ in range(num_rows):
        filled = expected = 0
        while filled < tokens:
            gap, offset = read_varint(stream, offset)
            extra, offset = read_varint(stream, offset)
            begin = expected + (-(gap + 1) // 2 if gap & 1 else gap // 2)
            if begin < 0 or begin + extra > MAX_POSITION or filled + extra + 1 > tokens:
                raise FrameError("linear stream: positions beyond its tokens, below 0 or above 2^31 - 1")
            runs.append((begin, extra + 1))
            filled, expected = filled + extra + 1, begin + extra + 1
    parts = [np.arange(begin, begin + count, dtype=np.int64) for begin, count in runs]
    positions = np.concatenate(parts) if parts else np.zeros(0, np.int64)
    return positions.reshape(num_rows, tokens), offset
