"""Linear streams in plain Python, written from docs/format-linear.md: slow, independent of the compiled code."""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from repository import ROOT

from kvmnn import dense
from kvmnn.dense._stream import xxh64

M32, M64 = (1 << 32) - 1, (1 << 64) - 1


class RejectedError(Exception):
    """A stream that the page does not allow."""


def read_page_masses() -> list[list[int]]:
    """The table G of the page."""
    text = (ROOT / "docs" / "format-linear.md").read_text(encoding="utf-8")
    block = text.split("in the buckets:\n\n")[1].split("\n\n**What lies")[0]
    rows = re.sub(r"\n {6}", " ", block).strip().splitlines()
    table = []
    for row in rows:
        numbers = [int(number) for number in row.replace("and 0", "").split()]
        table.append(numbers + [0] * (32 - len(numbers)))
    assert len(table) == 6
    return table


G = read_page_masses()
S = 1686629713, -693598668, 85569306, -5026995, 172272
C = 1073741824, -1324675879, 272375560, -22401992, 987048, -27060


@dataclass
class Type:
    size: int
    fraction: int
    bias: int
    raw: int
    boundary_fraction: int
    half: int
    floor: int


TYPES = (
    Type(2, 10, 15, 0, 11, 1 << 15, 8),
    Type(2, 7, 127, 0, 8, 1 << 15, 8),
    Type(4, 23, 127, 13, 10, 1 << 18, 1),
)


def clamp(x: int, limit: int) -> int:
    return max(-limit, min(limit, x))


def divide(a: int, b: int) -> int:
    """Towards 0."""
    return a // b if (a >= 0) == (b > 0) else -(-a // b)


def to_units(u: int, fraction_bits: int, bias: int, q: int) -> int:
    e, f = u >> fraction_bits, u & ((1 << fraction_bits) - 1)
    f += (1 << fraction_bits) * (e != 0)
    s = max(e, 1) + q - bias - fraction_bits
    return min(1 << 30, f << s if s >= 0 else f >> -s)


def split(kind: Type, word: int) -> tuple[int, int]:
    bits = 8 * kind.size - 1
    return word >> bits, word & ((1 << bits) - 1)


def value_of(kind: Type, word: int, q: int) -> int:
    sign, u = split(kind, word)
    x = to_units(u, kind.fraction, kind.bias, q)
    return -x if sign else x


def boundary(kind: Type, rank: int, q: int) -> int:
    j = abs(rank - kind.half)
    if not j:
        return 0
    x = to_units(j if kind.raw else 2 * j - 1, kind.boundary_fraction, kind.bias, q)
    return -x if rank < kind.half else x


def word_of(kind: Type, rank: int, raw: int) -> int:
    if rank >= kind.half:
        return (rank - kind.half) << kind.raw | raw
    return 1 << (8 * kind.size - 1) | (kind.half - 1 - rank) << kind.raw | raw


def cosine_sine(a: int) -> tuple[int, int]:
    t = (a >> 34) + (1 << 27)
    quadrant = (t >> 28) % 4
    x = 4 * (t % (1 << 28) - (1 << 27))
    z = x * x >> 30
    s = S[4]
    for k in (3, 2, 1, 0):
        s = S[k] + (s * z >> 30)
    s = s * x >> 30
    c = C[5]
    for k in (4, 3, 2, 1, 0):
        c = C[k] + (c * z >> 30)
    return ((c, s), (-s, c), (-c, -s), (s, -c))[quadrant]


def forward(a: int, b: int, turn: tuple[int, int] | None) -> tuple[int, int]:
    if turn is None:
        return a, b
    c, s = turn
    return (a * c - b * s + (1 << 29)) >> 30, (b * c + a * s + (1 << 29)) >> 30


def back(a: int, b: int, turn: tuple[int, int] | None) -> tuple[int, int]:
    return forward(a, b, None if turn is None else (turn[0], -turn[1]))


class Side:
    """Tables of a side, and where its words stand."""

    def __init__(self, profile: Any, layer: int, side: str, below: int) -> None:
        geometry = profile.layers[layer]
        self.dim = geometry.head_dim if side == "key" else geometry.value_dim
        self.n = geometry.kv_heads * self.dim
        rope = geometry.rope if side == "key" else None
        self.turns = [] if rope is None else [int(turn) for turn in rope.turns]
        order = list(range(self.dim))
        if geometry.rope is not None and geometry.rope.pairing == "half" and self.dim == geometry.head_dim:
            half = geometry.rope.dims // 2
            order[: 2 * half] = [i // 2 + i % 2 * half for i in range(2 * half)]
        self.order = [head * self.dim + place for head in range(geometry.kv_heads) for place in order]
        prefix = f"linear/{layer}/{side}/{below}/"
        tables = {
            name.removeprefix(prefix): array.tolist()
            for name, array in profile.arrays.items()
            if name.startswith(prefix)
        }
        self.has_tables = bool(tables)
        if tables:
            self.q, self.means, self.deviations = tables["exponents"], tables["means"], tables["deviations"]
            self.sigmas, self.correlations = tables["sigmas"], tables["correlations"]
            self.base, self.base_factors = tables["base"], tables["base_factors"]
            self.chain_factors = tables["chain_factors"]
            self.chain, begin = [], 0
            for place in range(self.n):
                count = place // 2 * 2
                self.chain.append(tables["chain"][begin : begin + count])
                begin += count

    def turn(self, pair: int, position: int) -> tuple[tuple[int, int] | None, int]:
        i = pair % (self.dim // 2)
        if i >= len(self.turns):
            return None, 0
        a = position * self.turns[i] & M64
        return cosine_sine(a), ((a + (1 << 56)) >> 57) % 64

    def scales(self, pair: int, angle: int) -> tuple[int, int, int]:
        c, s = (x >> 16 for x in cosine_sine(angle << 57))
        a, b = self.sigmas[2 * pair] >> 4, self.sigmas[2 * pair + 1] >> 4
        x = divide(a * b * self.correlations[pair], 1 << 14)
        v11 = max((a * a * c * c - 2 * x * c * s + b * b * s * s) >> 28, 1)
        v22 = max((a * a * s * s + 2 * x * c * s + b * b * c * c) >> 28, 1)
        v12 = ((a * a - b * b) * c * s + x * (c * c - s * s)) >> 28
        w1 = (1 << 32) // math.isqrt(256 * v11)
        rest = max(v22 - v12 * v12 // v11, v22 >> 12, 1)
        return w1, divide(v12 << 14, v11), (1 << 32) // math.isqrt(256 * rest)

    def regressors(self, kind: Type, words: Sequence[Sequence[int]], positions: Sequence[int]) -> list[list[int]]:
        rows = []
        for row, position in zip(words, positions, strict=True):
            out: list[int] = []
            for pair in range(self.n // 2):
                values = [value_of(kind, row[self.order[2 * pair + k]], self.q[pair]) for k in (0, 1)]
                for k, x in enumerate(back(*values, self.turn(pair, position)[0])):
                    d = clamp(x - self.means[2 * pair + k], 1 << 30)
                    w = (1 << 40) // self.deviations[2 * pair + k]
                    out.append(clamp((d * w + (1 << 31)) >> 32, 4095))
            rows.append(out)
        return rows


def bucket_of(z: int) -> int:
    z = abs(z)
    if z < 1 << 15:
        return z >> 12
    log = z.bit_length() - 1
    return 8 + 4 * (log - 15) + (z >> (log - 2)) % 4


def bucket_range(k: int) -> tuple[int, int]:
    """Begin and width."""
    if k < 8:
        return k << 12, 1 << 12
    log = 15 + (k - 8) // 4
    return (4 + k % 4) << (log - 2), 1 << (log - 2)


class Mixture:
    def __init__(self, counts: list[int]) -> None:
        factor = (4016 << 40) // sum(counts)
        self.weights = [(c * factor >> 40) + low for c, low in zip(counts, (3, 8, 20, 29, 16, 4), strict=True)]
        self.masses = [sum(w * G[j][k] for j, w in enumerate(self.weights)) for k in range(32)]
        self.before = [sum(self.masses[:k]) for k in range(32)]

    def below(self, kind: Type, rank: int, q: int, centre: int, w: int) -> int:
        if rank in (0, 2 * kind.half):
            return (1 << 28) if rank else 0
        z = distance(boundary(kind, rank, q), centre, w)
        k = bucket_of(z)
        begin, width = bucket_range(k)
        h = self.before[k] + self.masses[k] * (abs(z) - begin) // width
        return (1 << 27) - (1 << 18) + (-h if z < 0 else h) + rank * kind.floor


def distance(x: int, centre: int, w: int) -> int:
    return clamp((x - centre) * w >> 16, (1 << 21) - 1)


def signed32(x: int) -> int:
    x &= M32
    return x - (1 << 32) if x >> 31 else x


class Coder:
    def __init__(self, data: bytes) -> None:
        if len(data) < 128 or len(data) % 4:
            raise RejectedError("states")
        self.states = list(struct.unpack_from("<16Q", data))
        self.units = list(struct.unpack_from(f"<{(len(data) - 128) // 4}I", data, 128))
        self.next = 0
        if min(self.states) < 1 << 32:
            raise RejectedError("states")

    def take(self, lane: int, begin: int, size: int) -> None:
        x = self.states[lane]
        x = size * (x >> 28) + x % (1 << 28) - begin
        if x < 1 << 32:
            if self.next == len(self.units):
                raise RejectedError("units")
            x = x << 32 | self.units[self.next]
            self.next += 1
        self.states[lane] = x

    def check_end(self) -> None:
        if self.next != len(self.units) or set(self.states) != {1 << 32}:
            raise RejectedError("end")


def decode_side(
    side: Side,
    kind: Type,
    payload: bytes,
    constants: Mapping[int, int],
    positions: Sequence[int],
    regressors: Sequence[Sequence[int]],
) -> list[list[int]]:
    """Rows of words."""
    n, tokens = side.n, len(positions)
    coder = Coder(payload)
    counts = [[weight << 18 for weight in (164, 410, 1024, 1434, 819, 245)] for _ in range(n // 2)]
    sums, num = [0] * n, 0
    rows = [[0] * n for _ in range(tokens)]
    for start in range(0, tokens, 16):
        group = range(start, min(start + 16, tokens))
        spread = dict.fromkeys(group, 1 << 16)
        innovations: dict[int, list[int]] = {t: [] for t in group}
        factor = (1 << 20) // (num + 30)
        for pair in range(n // 2):
            q = side.q[pair]
            mixture = Mixture(counts[pair])
            predictions, centres, inverses, slopes, turns = {}, {}, {}, {}, {}
            for t in group:
                both = []
                for place in (2 * pair, 2 * pair + 1):
                    total = signed32(sum(a * b for a, b in zip(side.base[place], regressors[t], strict=True)))
                    base = clamp(
                        side.means[place] + ((total * side.base_factors[place] + (1 << 15)) >> 16), (1 << 30) - 1
                    )
                    total = signed32(sum(a * b for a, b in zip(side.chain[place], innovations[t], strict=True)))
                    both.append(clamp(base + ((total * side.chain_factors[place] + (1 << 15)) >> 16), (1 << 30) - 1))
                predictions[t] = both
                biased = []
                for k, place in enumerate((2 * pair, 2 * pair + 1)):
                    bias = (sums[place] * factor >> 8) * side.sigmas[place] >> 20
                    biased.append(clamp(both[k] + bias, (1 << 30) - 1))
                turn, angle = side.turn(pair, positions[t])
                turns[t] = turn
                centres[t] = [clamp(x, (1 << 30) - 1) for x in forward(*biased, turn)]
                w1, slopes[t], w2 = side.scales(pair, angle)
                v = (1 << 32) // spread[t]
                inverses[t] = [w1 * v >> 16, w2 * v >> 16]
            elements = side.order[2 * pair : 2 * pair + 2]
            for k, element in enumerate(elements):
                for t in group:
                    if k:
                        first = value_of(kind, rows[t][elements[0]], q)
                        step = clamp(first - centres[t][0], 1 << 21) * slopes[t] >> 14
                        centres[t][1] = clamp(centres[t][1] + step, (1 << 30) - 1)
                    if element in constants:
                        rows[t][element] = constants[element]
                        continue
                    lane, where = t % 16, (q, centres[t][k], inverses[t][k])
                    target = coder.states[lane] % (1 << 28)
                    low, high = 0, 2 * kind.half
                    while high - low > 1:
                        middle = (low + high) // 2
                        low, high = (middle, high) if mixture.below(kind, middle, *where) <= target else (low, middle)
                    begin = mixture.below(kind, low, *where)
                    coder.take(lane, begin, mixture.below(kind, low + 1, *where) - begin)
                    raw = 0
                    if kind.raw:
                        raw = coder.states[lane] % (1 << 28) >> 15
                        coder.take(lane, raw << 15, 1 << 15)
                    rows[t][element] = word_of(kind, low, raw)
            is_constant = any(element in constants for element in elements)
            histogram = [0] * 32
            for t in group:
                values = [value_of(kind, rows[t][element], q) for element in elements]
                for k, x in enumerate(back(*values, turns[t])):
                    d = clamp(x - predictions[t][k], 1 << 30)
                    innovations[t].append(clamp((d * ((1 << 32) // side.sigmas[2 * pair + k]) + (1 << 23)) >> 24, 4095))
                if is_constant:
                    continue
                z = [distance(values[k], centres[t][k], inverses[t][k]) for k in (0, 1)]
                for one in z:
                    histogram[bucket_of(one)] += 1
                y = sum(min(abs(one), 1 << 18) for one in z)
                v = spread[t] + (spread[t] * (5 * (y >> 9) - 1024) >> 15)
                spread[t] = max(26214, min(196608, v))
            for k, place in enumerate((2 * pair, 2 * pair + 1)):
                total = sum(clamp(innovations[t][2 * pair + k], 1024) for t in group)
                sums[place] += total - (sums[place] >> 2)
            if is_constant:
                continue
            gains = [0] * 6
            for bucket, count in enumerate(histogram):
                u = mixture.masses[bucket]
                if count and u:
                    length = u.bit_length()
                    m = (u << 8 >> length) & 127
                    reciprocal = (1 << 24) // (2 * m + 257)
                    shift = 25 - length
                    reciprocal = reciprocal << shift if shift >= 0 else reciprocal >> -shift
                    for j in range(6):
                        gains[j] += count * G[j][bucket] * reciprocal
            for j in range(6):
                counts[pair][j] = (29 * counts[pair][j] >> 5) + (gains[j] >> 16) * mixture.weights[j] + 1
        num += 16 - (num >> 2)
    coder.check_end()
    return rows


def read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for i in range(5):
        if at + i >= len(data):
            raise RejectedError("varint")
        value |= (data[at + i] & 127) << 7 * i
        if data[at + i] < 128:
            return value, at + i + 1
    raise RejectedError("varint")


Decoded = tuple[int, list[int], dict[str, list[list[int]]]]
"""Layer, positions, and rows of words by side."""


def decode(data: bytes, profile: Any, lower: Mapping[int, Decoded]) -> Decoded:
    """Decode a stream whose heads share their positions."""
    if len(data) < 34 or data[:4] != b"KVML":
        raise RejectedError("magic")
    version, dtype, below, flags, methods, zero, layer, heads, head_dim, value_dim, tokens, size, checksum = (
        struct.unpack_from("<6B4HIIQ", data, 4)
    )
    if version != 1 or dtype > 2 or below > 2 or flags > 1 or zero:
        raise RejectedError("header")
    kind, at = TYPES[dtype], 34
    if 2 in (methods & 15, methods >> 4):
        if data[34:66] != profile.key:
            raise RejectedError("profile")
        at = 66
    positions = list(range(tokens))
    if flags:
        positions, expected = [], 0
        while len(positions) < tokens:
            gap, at = read_varint(data, at)
            count, at = read_varint(data, at)
            begin = expected + (-(gap + 1) // 2 if gap % 2 else gap // 2)
            positions += range(begin, begin + count + 1)
            expected = begin + count + 1
    rows: dict[str, list[list[int]]] = {}
    for side, method, dim, payload in (
        ("key", methods & 15, head_dim, data[at : at + size]),
        ("value", methods >> 4, value_dim, data[at + size :]),
    ):
        n = heads * dim
        if method == 2:
            rows[side] = decode_linear(profile, layer, side, below, kind, payload, positions, rows, lower)
        else:
            if method == 1:
                payload = dense.decode(payload).transpose(1, 0, 2).tobytes()
            if len(payload) != tokens * n * kind.size:
                raise RejectedError("words")
            words = struct.unpack(f"<{tokens * n}{'I' if kind.size == 4 else 'H'}", payload)
            rows[side] = [list(words[t * n : t * n + n]) for t in range(tokens)]
    hashed = xxh64(data[:26] + data[34:])
    for side in ("key", "value"):
        letter = "I" if kind.size == 4 else "H"
        hashed = xxh64(b"".join(struct.pack(f"<{len(row)}{letter}", *row) for row in rows[side]), hashed)
    if hashed != checksum:
        raise RejectedError("checksum")
    return layer, positions, rows


def decode_linear(
    profile: Any,
    layer: int,
    name: str,
    below: int,
    kind: Type,
    payload: bytes,
    positions: list[int],
    own: Mapping[str, list[list[int]]],
    lower: Mapping[int, Decoded],
) -> list[list[int]]:
    side = Side(profile, layer, name, below)
    wanted = [(layer, "key")] if name == "value" else []
    wanted += [(layer - d, part) for d in range(1, min(below, layer) + 1) for part in ("key", "value")]
    regressors: list[list[int]] = [[] for _ in positions]
    for number, part in wanted:
        source = Side(profile, number, part, below)
        if source.dim % 2:
            continue
        other_positions, words = (positions, own) if number == layer else lower[number][1:]
        known: dict[int, list[int]] = {}
        if source.has_tables:
            rows = source.regressors(kind, words[part], other_positions)
            for position, row in zip(other_positions, rows, strict=True):
                known.setdefault(position, row)
        for t, position in enumerate(positions):
            regressors[t] = regressors[t] + known.get(position, [0] * source.n)
    count, at = read_varint(payload, 0)
    constants, element = {}, -1
    for _ in range(count):
        gap, at = read_varint(payload, at)
        element += gap + 1
        constants[element] = int.from_bytes(payload[at : at + kind.size], "little")
        at += kind.size
    return decode_side(side, kind, payload[at:], constants, positions, regressors)
