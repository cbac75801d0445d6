"""A decoder of transform streams in plain Python, written from docs/format-transform.md alone."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from xxh64_model import xxh64

Array = np.ndarray[Any, Any]
F32 = np.float32
PARTS = ("key", "value")
WORD_TYPES = ("<u2", "<u2", "<u4")


class RejectedError(Exception):
    """The stream breaks a rule."""


def require(condition: bool, text: str) -> None:
    if not condition:
        raise RejectedError(text)


@dataclass
class Rope:
    dims: int
    interleaved: bool
    turns: list[int]


@dataclass
class Geometry:
    heads: int
    dims: tuple[int, int]
    rope: Rope | None


class Reader:
    def __init__(self, data: bytes) -> None:
        self.data, self.offset = data, 0

    def take(self, count: int) -> bytes:
        require(self.offset + count <= len(self.data), "ends too early")
        self.offset += count
        return self.data[self.offset - count : self.offset]

    def varint(self) -> int:
        value = 0
        for i in range(5):
            byte = self.take(1)[0]
            value |= (byte & 127) << 7 * i
            if byte < 128:
                require(value < 1 << 32, "varint")
                return value
        raise RejectedError("varint")

    def runs(self, limit: int) -> list[int]:
        numbers: list[int] = []
        end = 0
        for _ in range(self.varint()):
            begin = end + self.varint()
            end = begin + self.varint() + 1
            require(end <= limit and len(numbers) + end - begin <= 1 << 24, "runs")
            numbers += range(begin, end)
        return numbers


class Bits:
    def __init__(self, data: bytes) -> None:
        self.number, self.size, self.used = int.from_bytes(data, "little"), 8 * len(data), 0

    def take(self, count: int) -> int:
        require(self.used + count <= self.size, "bits")
        self.used += count
        return self.number >> self.used - count & (1 << count) - 1

    def finish(self) -> None:
        require(self.size - self.used < 8 and self.number >> self.used == 0, "bits left")


def decode_coefficients(
    units: bytes, bits: bytes, rows: int, levels: Sequence[int], exponents: Sequence[int], tables: Array
) -> list[list[int]]:
    require(len(units) >= 16 and len(units) % 2 == 0, "units")
    states = list(struct.unpack("<4I", units[:16]))
    require(min(states) >= 1 << 16, "states")
    words, raw, k = Reader(units[16:]), Bits(bits), 0
    starts = [np.concatenate([[0], np.cumsum(table.astype(int))]).tolist() for table in tables]
    coefficients = [[0] * len(levels) for _ in range(rows)]
    for begin in range(0, rows, 256):
        for c, level in enumerate(levels):
            for t in range(begin, min(begin + 256, rows)):
                own = max(level - 2 * exponents[t], 0)
                shift = 0 if own <= 56 else min((own - 56 + 7) // 8, 10)
                number = min(own - 8 * shift, 56)
                state = states[k % 4]
                slot = state % 4096
                symbol = next(y for y in range(64) if starts[number][y] <= slot < starts[number][y + 1])
                state = int(tables[number][symbol]) * (state >> 12) + slot - starts[number][symbol]
                if state < 1 << 16:
                    state = state << 16 | struct.unpack("<H", words.take(2))[0]
                states[k % 4] = state
                k += 1
                value = raw.take(16) if symbol == 63 else ((symbol - 31) << shift) + raw.take(shift)
                coefficients[t][c] = (value + 32768) % 65536 - 32768
    require(states == [1 << 16] * 4 and words.offset == len(words.data), "states at the end")
    raw.finish()
    return coefficients


def to_signed32(value: int) -> int:
    return (value + (1 << 31)) % (1 << 32) - (1 << 31)


def to_float(bits: int) -> Any:
    return np.array([bits], np.uint32).view(F32)[0]


def to_bits(x: Any) -> int:
    return int(np.array([x], F32).view(np.uint32)[0])


def word_to_float(word: int, dtype: int) -> Any:
    if dtype == 0:
        if word >> 10 & 31 in (0, 31):
            return F32(0)
        return F32(np.array([word], np.uint16).view(np.float16)[0])
    bits = word << 16 if dtype == 1 else word
    return to_float(bits) if 64 <= bits >> 23 & 255 <= 191 else F32(0)


def float_to_word(x: Any, dtype: int) -> int:
    bits = to_bits(x)
    sign, rest = bits >> 31, bits & 0x7FFFFFFF
    if dtype == 0:
        y = ((rest + (1 << 12)) >> 13) - 114688
        y = 0 if y < 1024 else min(y, 31743)
        return sign << 15 | y
    return sign << 15 | (rest + (1 << 15)) >> 16 if dtype == 1 else bits


def cos_sin(position: int, frequency: int) -> tuple[Any, Any]:
    angle = position * frequency % (1 << 64)
    b = ((angle >> 39) + (1 << 22)) % (1 << 25)
    quarter = b >> 23
    x = F32(((b & ((1 << 23) - 1)) - (1 << 22)) * 2.0**-23)
    z = x * x
    s0, s1, s2, s3 = (to_float(n) for n in (0x3FC90FDB, 0xBF255DE7, 0x3DA335E3, 0xBB996966))
    c1, c2, c3, c4 = (to_float(n) for n in (0xBF9DE9E6, 0x3E81E0F8, 0xBCAAE9E4, 0x3A70FA83))
    s = x * (s0 + z * (s1 + z * (s2 + z * s3)))
    k = F32(1) + z * (c1 + z * (c2 + z * (c3 + z * c4)))
    return ((k, s), (-s, k), (-k, -s), (s, -k))[quarter]


def rotate(row: list[Any], heads: int, rope: Rope | None, position: int) -> list[Any]:
    if rope is None:
        return row
    row, dim = list(row), len(row) // heads
    for i, frequency in enumerate(rope.turns):
        c, s = cos_sin(position, frequency)
        for head in range(heads):
            first = head * dim + (2 * i if rope.interleaved else i)
            second = head * dim + (2 * i + 1 if rope.interleaved else i + rope.dims // 2)
            a, b = row[first], row[second]
            row[first], row[second] = a * c - b * s, b * c + a * s
    return row


class Decoder:
    def __init__(self, key: bytes, layers: Sequence[Geometry], tables: Mapping[str, Array]) -> None:
        self.key, self.layers, self.tables = key, layers, tables

    def regressor(self, words: Array, positions: list[int], dtype: int, layer: int, side: int) -> list[list[int]]:
        geometry = self.layers[layer]
        mean = self.tables[f"transform/{layer}/{PARTS[side]}/mean"]
        reciprocal = self.tables[f"transform/{layer}/{PARTS[side]}/reciprocal"]
        rows = []
        for t, position in enumerate(positions):
            row = [word_to_float(int(w), dtype) for w in words[:, t].reshape(-1)]
            row = rotate(row, geometry.heads, geometry.rope if side == 0 else None, -position)
            values = [(x - mean[j]) * reciprocal[j] for j, x in enumerate(row)]
            rows.append([int(np.rint(min(max(v, F32(-32768)), F32(32767)))) for v in values])
        return rows

    def decode(self, stream: bytes, lower: Sequence[tuple[Array, Array]] = ()) -> tuple[Array, Array, list[int]]:
        """Return the words of K and V, ``[head, token, dim]``, and positions; `lower` are words of l - 1 and l - 2."""
        require(len(stream) >= 80, "header")
        fields = struct.unpack("<4s4B4H2I32s3f2hQ", stream[:80])
        magic, version, dtype, below, flags, layer, heads, *dims = fields[:9]
        tokens, payload_bytes, key, *numbers = fields[9:]
        steps, step_levels, checksum = numbers[:2], numbers[3:5], numbers[5]
        require(magic == b"KVMX" and version == 1 and dtype < 3 and below < 3 and flags < 4, "header")
        require(key == self.key and layer < len(self.layers), "profile")
        geometry = self.layers[layer]
        require(heads == geometry.heads and tuple(dims) == geometry.dims, "geometry")
        require(0 < tokens <= 1 << 24 and payload_bytes == len(stream) - 80, "sizes")
        require(all(2.0**-60 <= step <= 2.0**40 for step in steps), "steps")
        reader = Reader(stream[80:])
        positions, exact = reader.runs(1 << 31), reader.runs(tokens)
        require(len(positions) == tokens, "positions")
        coded = [t for t in range(tokens) if t not in set(exact)]
        counts = [heads * dim for dim in dims] if flags & 2 else []
        counts += [len(coded)] if flags & 1 else []
        list_tables = [reader.varint() for _ in counts]
        require(all(number < 57 for number in list_tables), "table of a list")
        sizes = [reader.varint() for _ in range(2 * bool(counts) + 4 * bool(coded))]
        sections = [reader.take(size) for size in sizes]
        tables = self.tables["transform/tables"]
        lists: list[list[int]] = []
        if counts:
            levels = [number for number, count in zip(list_tables, counts, strict=True) for _ in range(count)]
            values = decode_coefficients(sections[0], sections[1], 1, levels, [0], tables)[0] if levels else []
            for count in counts:
                lists.append(values[:count])
                values = values[count:]
            sections = sections[2:]
        exponents = lists[-1] if flags & 1 else [0] * len(coded)
        require(all(-16 <= e <= 15 for e in exponents), "exponents")
        word_type = WORD_TYPES[dtype]
        exact_words = [
            np.frombuffer(reader.take(len(exact) * heads * dim * int(word_type[-1])), word_type) for dim in dims
        ]
        require(reader.offset == len(reader.data), "surplus")
        decoded: list[Array] = []
        for side in (0, 1):
            n, prefix = heads * dims[side], f"transform/{layer}/{PARTS[side]}"
            levels = [int(v) - step_levels[side] for v in self.tables[f"{prefix}/levels.{below}"]]
            if flags & 2:
                levels = [a + b for a, b in zip(levels, lists[side], strict=True)]
            rows = [[0] * n for _ in range(tokens)]
            token_exponents = [0] * tokens
            if coded:
                units, bits = sections[2 * side : 2 * side + 2]
                values = decode_coefficients(units, bits, len(coded), levels, exponents, tables)
                for t, row, e in zip(coded, values, exponents, strict=True):
                    rows[t], token_exponents[t] = row, e
            inputs = [(layer, 0, decoded[0])] if side == 1 else []
            for distance in range(1, min(below, layer) + 1):
                inputs += [(layer - distance, s, lower[distance - 1][s]) for s in (0, 1)]
            regressors = [self.regressor(words, positions, dtype, source, s) for source, s, words in inputs]
            output = np.zeros((heads, tokens, dims[side]), word_type)
            for t in range(tokens):
                z = [value for regressor in regressors for value in regressor[t]]
                row = self.row(prefix, below, z, rows[t], F32(steps[side]), token_exponents[t], bool(flags & 1))
                row = rotate(row, heads, geometry.rope if side == 0 else None, positions[t])
                output[:, t] = np.array([float_to_word(x, dtype) for x in row]).reshape(heads, dims[side])
            if exact:
                words = exact_words[side].reshape(len(exact), heads, dims[side])
                output[:, exact] = words.transpose(1, 0, 2)
            decoded.append(output)
        digest = xxh64(stream[:72], 0)
        for part in (stream[80:], decoded[0].tobytes(), decoded[1].tobytes()):
            digest = xxh64(part, digest)
        require(digest == checksum, "checksum")
        return decoded[0], decoded[1], positions

    def row(
        self,
        prefix: str,
        below: int,
        z: list[int],
        coefficients: list[int],
        step: Any,
        exponent: int,
        has_exponents: bool,
    ) -> list[Any]:
        mean, basis = self.tables[f"{prefix}/mean"], self.tables[f"{prefix}/basis.{below}"]
        h = step * self.tables[f"{prefix}/unit.{below}"][0]
        if has_exponents:
            factor = to_float((0x3F800000, 0x3F9837F0, 0x3FB504F3, 0x3FD744FD)[exponent % 4])
            h = (factor * F32(2.0 ** (exponent >> 2))) * h
        row = []
        for i, center in enumerate(mean):
            if basis.ndim == 1:
                b = int(basis[i]) * coefficients[i]
            else:
                block, place = divmod(i, basis.shape[1])
                part = coefficients[block * basis.shape[1] : (block + 1) * basis.shape[1]]
                b = sum(int(w) * q for w, q in zip(basis[block, place], part, strict=True))
            residual = F32(to_signed32(b)) * h
            if z:
                weights = self.tables[f"{prefix}/weights.{below}"][i]
                a = to_signed32(sum(int(w) * v for w, v in zip(weights, z, strict=True)))
                residual = F32(a) * self.tables[f"{prefix}/gain.{below}"][i] + residual
            row.append(center + residual)
        return row
