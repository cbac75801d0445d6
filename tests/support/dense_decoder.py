"""A slow second opinion: a decoder of dense streams in plain Python and numpy, written from docs/format-v2.md alone.

It shares nothing with kvmnn (and imports nothing of it), prefers the obvious to the fast, and is what the tests compare
arrays and verdicts with. Bit strings and tables are in `dense_tables`; frames (method 1) are decoded by `codec_model`.
A refusal is `Reject`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import codec_model
import numpy as np
import numpy.typing as npt
from dense_tables import (
    BF16,
    FP16,
    FP32,
    ROTARY,
    TABLE_SET,
    Bits,
    Reader,
    Reject,
    Rotary,
    Table,
    TableSet,
    check,
    read_base,
    read_model,
    read_rotary,
    read_table_set,
)
from xxh64_model import xxh64

WORDS, FRAME, ROWS = 0, 1, 2
COPY = 7
HEADER = struct.Struct("<4sBBBBHHIIQ")
LEAST_STATE = 1 << 15

SIN = np.array([0x3FC90FDB, 0xBF255DE7, 0x3DA335E3, 0xBB996966], np.uint32).view(np.float32)
COS = np.array([0xBF9DE9E6, 0x3E81E0F8, 0xBCAAE9E4, 0x3A70FA83], np.uint32).view(np.float32)
MASK = (1 << 64) - 1

Array = npt.NDArray[np.unsignedinteger]


class Row(NamedTuple):
    """How an own row is coded; without a reference it is None."""

    bucket: int
    reference: int | None


def read_positions(bits: Bits, count: int) -> list[int]:
    positions: list[int] = []
    while len(positions) < count:
        gap, run = bits.number(), bits.number() + 1
        start = (positions[-1] + 1 if positions else 0) + (-(gap + 1) // 2 if gap & 1 else gap // 2)
        check(len(positions) + run <= count, "a run of positions beyond the last row")
        check(start >= 0 and start + run <= 1 << 31, "a position below 0 or above 2^31 - 1")
        positions += range(start, start + run)
    return positions


def read_rows(bits: Bits, history: int, tokens: int) -> list[Row]:
    rows: list[Row] = []
    for n in range(history, history + tokens):
        if n == 0:
            rows.append(Row(0, None))
            continue
        bucket = bits.bits(3)
        check(bucket <= 4 or bucket == COPY, "bucket 5 or 6")
        if bits.bits(1):
            last = rows[-1].reference if rows else None
            reference = (n - 2 if last is None else last) + 1
        else:
            k = bits.bits((n.bit_length() - 1).bit_length())
            distance = (1 << k) + bits.bits(k)
            check(distance <= n, "a reference before the first row")
            reference = n - distance
        rows.append(Row(bucket, reference))
    return rows


def turned(words: Array, dtype: int, rotary: Rotary, distance: int) -> Array:
    """Predicted words out of a reference ``[head, dim]``, turned by a distance in positions."""
    one, other = rotary.pairs()
    angles = np.array([distance * frequency & MASK for frequency in rotary.frequencies], np.uint64)
    b = ((angles >> np.uint64(39)).astype(np.int64) + (1 << 22)) % (1 << 25)
    x = ((b & (1 << 23) - 1) - (1 << 22)).astype(np.float32) * np.float32(2.0**-23)
    z = x * x
    s = x * (SIN[0] + z * (SIN[1] + z * (SIN[2] + z * SIN[3])))
    k = np.float32(1) + z * (COS[0] + z * (COS[1] + z * (COS[2] + z * COS[3])))
    quarter = b >> 23
    cosine, sine = np.choose(quarter, [k, -s, -k, s]), np.choose(quarter, [s, k, -s, -k])
    first, second = to_binary32(words[:, one], dtype), to_binary32(words[:, other], dtype)
    found = words.copy()
    found[:, one] = from_binary32(first * cosine - second * sine, dtype)
    found[:, other] = from_binary32(second * cosine + first * sine, dtype)
    return found


def to_binary32(words: Array, dtype: int) -> npt.NDArray[np.float32]:
    if dtype == FP16:
        field = words >> 10 & 31
        value = words.view(np.float16).astype(np.float32)
        return np.where((field == 0) | (field == 31), np.float32(0), value)
    wide = words.astype(np.uint32) << (16 if dtype == BF16 else 0)
    field = wide >> 23 & 255
    return np.where((field < 64) | (field > 191), np.uint32(0), wide).astype(np.uint32).view(np.float32)


def from_binary32(values: npt.NDArray[np.float32], dtype: int) -> Array:
    bits = values.view(np.uint32).astype(np.int64)
    sign, v = bits >> 31, bits & (1 << 31) - 1
    if dtype == FP16:
        y = (v + (1 << 12) >> 13) - 114_688
        return (sign << 15 | np.where(y < 1024, 0, np.minimum(y, 31_743))).astype(np.uint16)
    if dtype == BF16:
        return (sign << 15 | v + (1 << 15) >> 16).astype(np.uint16)
    return bits.astype(np.uint32)


def symbols_of(words: Array, dtype: int, base: int) -> tuple[list[int], list[int]]:
    """Symbols and low parts of predicted words."""
    u = words.astype(np.int64) >> (16 if dtype == FP32 else 0)
    if dtype == FP16:
        return (u >> 8).tolist(), (u & 255).tolist()
    x = (u >> 7 & 255) - base
    x = np.where((x >= 1) & (x <= 31), x, 0)
    return (u >> 15 << 7 | x << 2 | u >> 5 & 3).tolist(), (u & 31).tolist()


def coded_order(heads: int, dim: int, rotary: Rotary | None) -> npt.NDArray[np.int64]:
    """The words of a row as they are coded: of interleaved pairs the first words, then the second ones."""
    places = np.arange(heads * dim).reshape(heads, dim)
    if rotary and rotary.interleaved:
        one, other = rotary.pairs()
        places = np.concatenate([places[:, one], places[:, other], places[:, rotary.width :]], axis=1)
    return places.reshape(-1)


class Coded:
    """Symbols coded by four states that share their units."""

    def __init__(self, states: Sequence[int], units: Sequence[int]) -> None:
        check(all(LEAST_STATE <= state < 1 << 31 for state in states), "a state is out of bounds")
        self.states, self.units = list(states), iter(units)

    def next(self, table: Table, which: int) -> int:
        state = self.states[which]
        r = state & 2047
        symbol = table.slots[r]
        state = table.frequencies[symbol] * (state >> 11) + r - table.starts[symbol]
        if state < LEAST_STATE:
            unit = next(self.units, None)
            if unit is None:
                raise Reject("the units end early")
            state = state << 16 | unit
        self.states[which] = state
        return symbol

    def end(self) -> None:
        check(self.states == [LEAST_STATE] * 4, "a state does not end as it must")
        check(next(self.units, None) is None, "units are left over")


def following(source: Iterator[int], what: str) -> int:
    found = next(source, None)
    if found is None:
        raise Reject(f"the {what} end early")
    return found


class Header(NamedTuple):
    """The header of a stream, without magic, version and checksum."""

    method: int
    dtype: int
    flags: int
    heads: int
    dim: int
    tokens: int


def decode_rows(payload: bytes, header: Header, history: Array | None, table_set: TableSet | None) -> tuple[Array, int]:
    """Words ``[token, head, dim]`` of method 2, and where the head ends in the payload."""
    dtype, reader = header.dtype, Reader(payload)
    base, low_bits = read_base(dtype, reader.take(1)[0]), reader.take(1)[0]
    check(low_bits < 32, "low")
    if header.flags & TABLE_SET:
        check(table_set is not None and int.from_bytes(reader.take(8), "little") == table_set.id, "the id of the set")
    else:
        table_set = None
    given = 0 if history is None else len(history)
    check(reader.varint() == given and given <= 256, "rows of history")
    head_bytes, exponent_bytes, escape_bytes, units = (reader.varint() for _ in range(4))
    low_counts = {bucket: (reader.varint(), reader.varint()) for bucket in range(5) if low_bits >> bucket & 1}
    check(given + header.tokens <= 1 << 24 and header.tokens <= 2 * head_bytes + 1, "more rows than the head can say")
    head, exponents, escapes = reader.take(head_bytes), reader.take(exponent_bytes), reader.take(escape_bytes)
    head_end = reader.at - exponent_bytes - escape_bytes
    coded = read_coded(reader, units)
    low_coded = {bucket: read_coded(reader, low_units) for bucket, (_, low_units) in low_counts.items()}

    bits = Bits(head)
    rotary = table_set.rotary if table_set else read_rotary(bits) if header.flags & ROTARY else None
    check(bool(header.flags & ROTARY) == (rotary is not None), "the flag of rotary parameters")
    check(rotary is None or rotary.width <= header.dim, "more words rotated than a head has")
    positions = read_positions(bits, given + header.tokens) if rotary else []
    model = table_set.model if table_set else read_model(bits)
    rows = read_rows(bits, given, header.tokens)
    bits.end()
    check(table_set is None or (table_set.dtype, table_set.base) == (dtype, base), "the set is another's")
    check(set(low_counts) <= set(model.low), "low parts are coded without a table")

    width = header.heads * header.dim
    count = width * sum(row.bucket != COPY for row in rows)
    plain = count - sum(number for number, _ in low_counts.values())
    check(plain >= 0, "more low parts than words")
    low_bytes = reader.take(plain if dtype == FP16 else -(-5 * plain // 8))
    tails = np.frombuffer(reader.take(2 * count if dtype == FP32 else 0), "<u2").tolist()
    check(reader.at == len(payload), "bytes are left after the last section")

    next_exponent, next_escape, next_tail = iter(exponents), iter(escapes), iter(tails)
    lows = Bits(low_bytes)
    order = coded_order(header.heads, header.dim, rotary)
    used = dict.fromkeys(low_counts, 0)
    all_rows = [] if history is None else list(history)
    for row in rows:
        own = len(all_rows)
        if row.bucket == COPY:
            all_rows.append(all_rows[row.reference])
            continue
        if row.reference is None:
            predicted = np.zeros((header.heads, header.dim), np.uint32)
        elif rotary:
            predicted = turned(all_rows[row.reference], dtype, rotary, positions[own] - positions[row.reference])
        else:
            predicted = all_rows[row.reference]
        words = []
        for j, (p, low_p) in enumerate(zip(*symbols_of(predicted.reshape(-1)[order], dtype, base), strict=True)):
            y = coded.next(model.contexts[128 * row.bucket + (p & 127)], j & 3)
            s = following(next_escape, "escapes") if y == 127 else y ^ p & 128
            if s == p and row.bucket in low_counts:
                which, used[row.bucket] = used[row.bucket] & 3, used[row.bucket] + 1
                difference = low_coded[row.bucket].next(model.low[row.bucket], which)
                low = low_p + difference & (255 if dtype == FP16 else 31)
            else:
                low = lows.bits(8 if dtype == FP16 else 5)
            if dtype == FP16:
                words.append(s << 8 | low)
                continue
            exponent = (s >> 2 & 31) + base
            if s & 124 == 0:
                exponent = following(next_exponent, "exponents")
                check(not 1 <= exponent - base <= 31, "an exponent that a symbol could say")
            word = s >> 7 << 15 | exponent << 7 | (s & 3) << 5 | low
            words.append(word << 16 | following(next_tail, "tails") if dtype == FP32 else word)
        made = np.empty(width, np.uint32 if dtype == FP32 else np.uint16)
        made[order] = words
        all_rows.append(made.reshape(header.heads, header.dim))
    coded.end()
    for bucket, (number, _) in low_counts.items():
        check(used[bucket] == number, "another number of coded low parts")
        low_coded[bucket].end()
    lows.end()
    left = (next(source, None) for source in (next_exponent, next_escape, next_tail))
    check(all(found is None for found in left), "escapes, exponents or tails are left over")
    return np.stack(all_rows[given:]), head_end


def read_coded(reader: Reader, units: int) -> Coded:
    return Coded(struct.unpack("<4I", reader.take(16)), np.frombuffer(reader.take(2 * units), "<u2").tolist())


def decode(stream: bytes, *, history: Array | None = None, tables: bytes | None = None) -> Array:
    """The words ``[head, token, dim]`` (uint16, or uint32 for fp32) of a stream.

    `history` are the words of earlier rows, of the same axes; `tables` the bytes of a table set.
    """
    check(len(stream) >= HEADER.size, "ends in its header")
    magic, version, *fields, payload_bytes, checksum = HEADER.unpack_from(stream)
    header, payload = Header(*fields), stream[HEADER.size :]
    check(magic == b"KVMD" and version == 1, "is no dense stream of version 1")
    check(header.method <= 2 and header.dtype <= 2, "unknown method or dtype")
    check(header.flags <= (3 if header.method == ROWS else 0), "unknown flags")
    kind = np.dtype("<u4" if header.dtype == FP32 else "<u2")
    check(header.heads >= 1 and header.dim >= 1 and header.tokens >= 1, "no heads, dim or tokens")
    check(header.heads * header.dim <= 1 << 16, "rows of more than 65,536 words")
    raw_bytes = header.heads * header.dim * header.tokens * kind.itemsize
    check(raw_bytes < 1 << 32, "4 GiB or more")
    check(len(payload) == payload_bytes, "is not as long as it says")
    hashed = b""
    shape = header.tokens, header.heads, header.dim
    if header.method == WORDS:
        check(len(payload) == raw_bytes, "is not as long as its words")
        words = np.frombuffer(payload, kind).reshape(shape)
    elif header.method == FRAME:
        hashed = payload
        try:
            data = codec_model.decode(payload, kind.itemsize)
        except codec_model.Reject as error:
            raise Reject(f"its frame: {error}") from None
        check(len(data) == raw_bytes, "its frame has another number of words")
        words = np.frombuffer(data, kind).reshape(shape)
    else:
        rows = None if history is None else np.ascontiguousarray(history.swapaxes(0, 1)).view(kind)
        words, head_end = decode_rows(payload, header, rows, read_table_set(tables) if tables is not None else None)
        hashed = payload[:head_end]
    seed = xxh64(hashed, xxh64(stream[:20]))
    check(xxh64(words.astype(kind).tobytes(), seed) == checksum, "the checksum")
    return words.swapaxes(0, 1)
