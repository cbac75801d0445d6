"""Of dense streams what lies in bit strings: numbers, tables, models, table sets. Part of `dense_decoder`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from xxh64_model import xxh64

FP16, BF16, FP32 = 0, 1, 2
ROTARY, TABLE_SET = 1, 2
SET_HEADER = struct.Struct("<4sBBBB")


class Reject(Exception):
    """The stream must be refused."""


def check(holds: bool, what: str) -> None:
    if not holds:
        raise Reject(what)


class Reader:
    """Bytes in order."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def take(self, nbytes: int) -> bytes:
        check(nbytes <= len(self.data) - self.at, "a section runs past the payload")
        self.at += nbytes
        return self.data[self.at - nbytes : self.at]

    def varint(self) -> int:
        number = 0
        for place in range(5):
            byte = self.take(1)[0]
            number |= (byte & 127) << 7 * place
            if byte < 128:
                check(number < 1 << 32, "a varint of 2^32 or more")
                return number
        raise Reject("a varint of more than 5 bytes")


class Bits:
    """A bit string, from the lowest bit of the first byte up."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def bits(self, count: int) -> int:
        check(count <= 8 * len(self.data) - self.at, "a bit string ends early")
        window = int.from_bytes(self.data[self.at >> 3 : self.at + count + 7 >> 3], "little")
        found = window >> (self.at & 7) & (1 << count) - 1
        self.at += count
        return found

    def number(self) -> int:
        count = self.bits(5)
        return (1 << count) - 1 + self.bits(count)

    def end(self) -> None:
        left = 8 * len(self.data) - self.at
        check(left < 8, "bytes after a bit string")
        check(self.bits(left) == 0, "bits after a bit string are not 0")


class Table(NamedTuple):
    """Frequencies, starts, and the symbol of each of the 2048 slots."""

    frequencies: list[int]
    starts: list[int]
    slots: list[int]


@dataclass
class Rotary:
    """Words of a head that are rotated, pairing, and frequencies in turns times 2^64."""

    width: int
    interleaved: bool
    frequencies: list[int]

    def pairs(self) -> tuple[slice, slice]:
        if self.interleaved:
            return slice(0, self.width, 2), slice(1, self.width, 2)
        return slice(0, self.width // 2), slice(self.width // 2, self.width)


@dataclass
class Model:
    """The table of every context, and those of low parts by bucket."""

    contexts: list[Table]
    low: dict[int, Table]


def read_rotary(bits: Bits) -> Rotary:
    width, interleaved = bits.bits(16), bits.bits(1)
    check(width % 2 == 0 and width >= 2, "an odd rotary width, or 0")
    frequencies = [bits.bits(32) | bits.bits(32) << 32 for _ in range(width // 2)]
    return Rotary(width, bool(interleaved), frequencies)


def read_used(bits: Bits) -> list[int]:
    groups = bits.bits(32)
    used = []
    for group in range(32):
        if groups >> group & 1:
            mask = bits.bits(8)
            used += [8 * group + place for place in range(8) if mask >> place & 1]
    return used


def read_table(bits: Bits, used: Sequence[int]) -> Table:
    frequencies, exponent = [0] * 256, 0
    for symbol in used:
        if bits.bits(1):
            if not bits.bits(1):
                exponent += -1 if bits.bits(1) else 1
            elif not bits.bits(1):
                exponent += -2 if bits.bits(1) else 2
            else:
                exponent = bits.bits(4)
        check(0 <= exponent <= 11, "an exponent of a table is not from 0 to 11")
        if exponent:
            k = exponent - 1
            p = min(k, 2)
            frequencies[symbol] = (1 << k) + (bits.bits(p) << k - p)
    largest = frequencies.index(max(frequencies))
    frequencies[largest] += 2048 - sum(frequencies)
    check(frequencies[largest] >= 1 and max(frequencies) <= 2047, "a frequency of a table is not from 1 to 2047")
    starts, slots = [], []
    for symbol, frequency in enumerate(frequencies):
        starts.append(len(slots))
        slots += [symbol] * frequency
    return Table(frequencies, starts, slots)


def read_model(bits: Bits) -> Model:
    count = bits.bits(6) + 1
    width = (count - 1).bit_length()
    places: list[int] = []
    while len(places) < 640:
        run = bits.bits(6) + 1
        places += [bits.bits(width)] * run
        check(len(places) <= 640 and places[-1] < count, "the map of contexts")
    used = read_used(bits)
    tables = [read_table(bits, used) for _ in range(count)]
    buckets = bits.bits(5)
    low = {bucket: read_table(bits, read_used(bits)) for bucket in range(5) if buckets >> bucket & 1}
    return Model([tables[place] for place in places], low)


@dataclass
class TableSet:
    """A table set and its id."""

    dtype: int
    base: int
    rotary: Rotary | None
    model: Model
    id: int


def read_base(dtype: int, base: int) -> int:
    check(base <= 224 and not (dtype == FP16 and base), "base")
    return base


def read_table_set(data: bytes) -> TableSet:
    check(len(data) >= SET_HEADER.size, "a table set ends in its header")
    magic, version, dtype, base, flags = SET_HEADER.unpack_from(data)
    check(magic == b"KVMT" and version == 1 and dtype <= 2 and flags <= 1, "the header of a table set")
    read_base(dtype, base)
    bits = Bits(data[SET_HEADER.size :])
    rotary = read_rotary(bits) if flags & ROTARY else None
    model = read_model(bits)
    bits.end()
    return TableSet(dtype, base, rotary, model, xxh64(data))
