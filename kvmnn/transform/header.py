"""Headers of transform streams, and lists of numbers in them (docs/format-transform.md)."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.dataclass import dataclass
from ..dense._stream import xxh64
from ..dtypes import BF16, FP16, FP32, DType
from ..errors import FrameError, LimitError

MAGIC, VERSION = b"KVMX", 1
DTYPES: tuple[DType, ...] = (FP16, BF16, FP32)
"""Element types by their number in a stream."""
KEY_BYTES = 32
FLAG_EXPONENTS, FLAG_CORRECTIONS = 1, 2
MAX_TOKENS = 1 << 24
MAX_POSITION = (1 << 31) - 1
MAX_RAW_BYTES = (1 << 32) - 1
MIN_STEP, MAX_STEP = 2.0**-60, 2.0**40

_LAYOUT = struct.Struct("<4s4B4H2I32s3f2hQ")
HEADER_BYTES = _LAYOUT.size
_CHECKSUM_OFFSET = HEADER_BYTES - 8
_MAX_SYMBOLS_PER_BYTE = 1 << 15
"""A coefficient takes at least log2(4096 / 4095) bits: 22,700 a byte."""


@dataclass(frozen=True, kw_only=True)
class TransformHeader:
    """Header of a stream of one layer."""

    dtype: DType
    below: int
    has_exponents: bool
    has_corrections: bool
    layer: int
    kv_heads: int
    head_dim: int
    value_dim: int
    tokens: int
    payload_bytes: int
    profile_key: bytes
    #: Steps of K and V, binary32, and their levels.
    steps: tuple[float, float]
    step_levels: tuple[int, int]
    #: Predicted loss of this layer in nats; NaN where it is not known.
    kl: float
    checksum: int = 0

    @property
    def raw_bytes(self) -> int:
        """Return the bytes of all words."""
        return self.tokens * self.kv_heads * (self.head_dim + self.value_dim) * self.dtype.itemsize

    def pack(self) -> bytes:
        """Return the bytes of the header."""
        return _LAYOUT.pack(
            MAGIC,
            VERSION,
            DTYPES.index(self.dtype),
            self.below,
            FLAG_EXPONENTS * self.has_exponents | FLAG_CORRECTIONS * self.has_corrections,
            self.layer,
            self.kv_heads,
            self.head_dim,
            self.value_dim,
            self.tokens,
            self.payload_bytes,
            self.profile_key,
            *self.steps,
            self.kl,
            *self.step_levels,
            self.checksum,
        )


def read_header(stream: Any, max_bytes: int | None = None) -> tuple[TransformHeader, memoryview]:
    """Return the header of a stream and its payload.

    Raises
    ------
    FrameError
        For anything but one whole stream.
    LimitError
        For a stream of more than `max_bytes` raw bytes.
    """
    data = memoryview(stream).cast("B")
    if len(data) < HEADER_BYTES:
        raise FrameError(f"a transform stream of {len(data)} bytes: expected at least {HEADER_BYTES}")
    (magic, version, dtype, below, flags, layer, heads, head_dim, value_dim, tokens, payload_bytes, key, *numbers) = (
        _LAYOUT.unpack(data[:HEADER_BYTES])
    )
    key_step, value_step, kl, key_level, value_level, checksum = numbers
    if magic != MAGIC:
        raise FrameError(f"starts with {bytes(magic)!r}: a transform stream starts with {MAGIC!r}")
    if version != VERSION:
        raise FrameError(f"a transform stream of version {version}: expected {VERSION}")
    if dtype >= len(DTYPES) or below > 2 or flags & ~(FLAG_EXPONENTS | FLAG_CORRECTIONS):
        raise FrameError(f"a transform stream of dtype {dtype}, {below} layers below and flags {flags}: unknown")
    if min(heads, head_dim, value_dim) < 1 or heads * max(head_dim, value_dim) > 1 << 16:
        raise FrameError(f"a transform stream of {heads} heads of {head_dim} and {value_dim} elements")
    if not 1 <= tokens <= MAX_TOKENS:
        raise FrameError(f"a transform stream of {tokens} tokens: expected 1 to {MAX_TOKENS}")
    if payload_bytes != len(data) - HEADER_BYTES:
        raise FrameError(f"a payload of {len(data) - HEADER_BYTES} bytes: the header says {payload_bytes}")
    if not all(MIN_STEP <= step <= MAX_STEP for step in (key_step, value_step)):
        raise FrameError(f"steps of {key_step:g} and {value_step:g}: expected {MIN_STEP:g} to {MAX_STEP:g}")
    header = TransformHeader(
        dtype=DTYPES[dtype],
        below=below,
        has_exponents=bool(flags & FLAG_EXPONENTS),
        has_corrections=bool(flags & FLAG_CORRECTIONS),
        layer=layer,
        kv_heads=heads,
        head_dim=head_dim,
        value_dim=value_dim,
        tokens=tokens,
        payload_bytes=payload_bytes,
        profile_key=key,
        steps=(key_step, value_step),
        step_levels=(key_level, value_level),
        kl=kl,
        checksum=checksum,
    )
    limit = MAX_RAW_BYTES if max_bytes is None else min(max_bytes, MAX_RAW_BYTES)
    if header.raw_bytes > limit:
        raise LimitError(f"a transform stream of {header.raw_bytes:,} bytes of K and V: the limit is {limit:,}")
    if tokens * heads * (head_dim + value_dim) > _MAX_SYMBOLS_PER_BYTE * len(data):
        raise FrameError(f"a transform stream of {len(data):,} bytes cannot hold {header.raw_bytes:,}")
    return header, data[HEADER_BYTES:]


def compute_checksum(header: bytes, payload: Any, *words: Any) -> int:
    """Return the checksum of a stream: of its header before the checksum, its payload, and the words of K and V."""
    checksum = xxh64(header[:_CHECKSUM_OFFSET])
    for part in (payload, *words):
        checksum = xxh64(part, checksum)
    return checksum


def write_varint(value: int) -> bytes:
    """Return a number, 7 bits a byte from the lowest on."""
    parts = bytearray()
    while value > 127:
        parts.append(value & 127 | 128)
        value >>= 7
    return bytes([*parts, value])


class PayloadReader:
    """Reads numbers and sections from the beginning of a payload; `FrameError` beyond its end."""

    def __init__(self, payload: memoryview) -> None:
        self._payload, self._offset = payload, 0

    @property
    def num_left(self) -> int:
        """Return how many bytes are left."""
        return len(self._payload) - self._offset

    def read_varint(self) -> int:
        """Read a number below 2^32."""
        value = 0
        for shift in range(0, 35, 7):
            byte = self.read_bytes(1)[0]
            value |= (byte & 127) << shift
            if byte < 128:
                if value >> 32:
                    break
                return value
        raise FrameError("a number in a transform stream's payload is too large")

    def read_bytes(self, count: int) -> memoryview:
        """Read `count` bytes."""
        if count > self.num_left:
            raise FrameError(f"a transform stream's payload ends {count - self.num_left} bytes too early")
        self._offset += count
        return self._payload[self._offset - count : self._offset]


def write_runs(numbers: npt.NDArray[np.int64]) -> bytes:
    """Return ascending numbers as runs: their count, then for each the gap before it, and its length less 1."""
    begins = np.flatnonzero(np.diff(numbers, prepend=-2) != 1)
    lengths = np.diff(begins, append=len(numbers))
    parts, end = [write_varint(len(begins))], 0
    for begin, length in zip(numbers[begins].tolist(), lengths.tolist(), strict=True):
        parts += [write_varint(begin - end), write_varint(length - 1)]
        end = begin + length
    return b"".join(parts)


def read_runs(reader: PayloadReader, max_count: int, limit: int, label: str) -> npt.NDArray[np.int64]:
    """Read ascending numbers below `limit`, at most `max_count` of them, as runs."""
    num_runs = reader.read_varint()
    if num_runs > max_count or 2 * num_runs > reader.num_left:
        raise FrameError(f"{num_runs} runs of {label}: more than fit")
    runs, end, count = [], 0, 0
    for _ in range(num_runs):
        begin = end + reader.read_varint()
        length = reader.read_varint() + 1
        end, count = begin + length, count + length
        if end > limit or count > max_count:
            raise FrameError(f"{label} of a transform stream reach {end}, of {count} tokens: more than fit")
        runs.append(np.arange(begin, end, dtype=np.int64))
    return np.concatenate(runs) if runs else np.empty(0, np.int64)


def write_sections(sections: Sequence[bytes]) -> bytes:
    """Return sizes of sections, then the sections."""
    return b"".join([*(write_varint(len(section)) for section in sections), *sections])


def read_sections(reader: PayloadReader, count: int) -> Iterable[memoryview]:
    """Read sections as `write_sections` writes them."""
    sizes = [reader.read_varint() for _ in range(count)]
    return [reader.read_bytes(size) for size in sizes]
