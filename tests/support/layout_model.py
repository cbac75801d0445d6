"""A slow model of MNN's packed caches, written from the layout's rules: one token, one head, one dim at a time.

It shares nothing with kvmnn. Words are integers of the element's size; every byte of both buffers is there, those that
the engine leaves as it found them too.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np

Pairs = list[tuple[int, int]]


def up(a: int, b: int) -> int:
    return (a + b - 1) // b


def rup(a: int, b: int) -> int:
    return up(a, b) * b


@dataclass
class Numbers:
    heads: int
    dims: int
    size: int
    lP: int
    hP: int
    block: int | None

    def fa(self, capacity: int) -> int:
        return capacity if self.block is None else self.block

    def key_words(self, capacity: int) -> int:
        return rup(capacity, self.hP) * rup(self.dims, self.lP)

    def value_words(self, capacity: int) -> int:
        fa = self.fa(capacity)
        return up(capacity, fa) * rup(self.dims, self.hP) * rup(fa, self.lP)

    def key(self, t: int, d: int) -> int:
        lP, hP = self.lP, self.hP
        return t // hP * rup(self.dims, lP) * hP + d // lP * hP * lP + t % hP * lP + d % lP

    def value(self, t: int, d: int, capacity: int) -> int:
        lP, hP, fa = self.lP, self.hP, self.fa(capacity)
        s2 = hP * lP
        s1 = up(fa, lP) * s2
        s0 = s1 * up(self.dims, hP)
        r = t % fa
        return t // fa * s0 + d // hP * s1 + r // lP * s2 + d % hP * lP + r % lP


@dataclass
class Cache:
    """A layer's cache; `keys` and `values` are ``[head, word]``."""

    n: Numbers
    expand: int = 64
    fresh: int = 0
    dialect: str = "fork"
    past: int = 0
    capacity: int = 0
    keys: np.ndarray = field(init=False)
    values: np.ndarray = field(init=False)

    def _filled(self, words: int, byte: int) -> np.ndarray:
        one = int.from_bytes(bytes([byte]) * self.n.size, "little")
        return np.full((self.n.heads, words), one, f"<u{self.n.size}")

    def alloc(self, tokens: int) -> None:
        n = self.n
        self.past, self.capacity = 0, tokens + self.expand
        self.keys = self._filled(n.key_words(self.capacity), 0 if n.dims % n.lP else self.fresh)
        self.values = self._filled(n.value_words(self.capacity), 0 if n.lP > 1 else self.fresh)

    def grow(self, capacity: int) -> None:
        n, old = self.n, self.capacity
        keys = self._filled(n.key_words(capacity), 0)
        keys[:, : self.keys.shape[1]] = self.keys
        if n.block is not None:
            values = self._filled(n.value_words(capacity), 0)
            values[:, : self.values.shape[1]] = self.values
        else:
            values = self._filled(n.value_words(capacity), 0 if n.lP > 1 else self.fresh)
            was, now = rup(old, n.lP) * n.hP, rup(capacity, n.lP) * n.hP
            for column in range(up(n.dims, n.hP)):
                values[:, column * now : column * now + was] = self.values[:, column * was : (column + 1) * was]
        self.keys, self.values, self.capacity = keys, values, capacity

    def push(self, keys: np.ndarray, values: np.ndarray) -> None:
        for h in range(self.n.heads):
            for i in range(keys.shape[1]):
                for d in range(self.n.dims):
                    self.keys[h, self.n.key(self.past + i, d)] = keys[h, i, d]
                    self.values[h, self.n.value(self.past + i, d, self.capacity)] = values[h, i, d]
        self.past += keys.shape[1]

    def move(self, src: int, dst: int, size: int) -> None:
        for i in range(size):
            for d in range(self.n.dims):
                self.keys[:, self.n.key(dst + i, d)] = self.keys[:, self.n.key(src + i, d)]
                to, of = (self.n.value(t + i, d, self.capacity) for t in (dst, src))
                self.values[:, to] = self.values[:, of]

    def realloc(self, remove: int, pairs: Pairs, add: int) -> int:
        """Errors that the engine prints."""
        return self._fork(remove, pairs, add) if self.dialect == "fork" else self._upstream(remove, pairs, add)

    def _fork(self, remove: int, pairs: Pairs, add: int) -> int:
        errors = 0
        if remove > self.past + add:
            errors, remove, pairs = errors + 1, self.past + add, []
        if [1 for _, size in pairs if size <= 0]:
            errors, pairs = errors + 1, []
        need = self.past - remove + sum([size for _, size in pairs]) + add
        if need > self.capacity:
            self.grow(need + self.expand)
        start = self.past - remove
        if start < 0:
            errors, start, pairs = errors + 1, 0, []
        dst, last = start, start
        for begin, size in pairs:
            src = start + begin
            if begin < 0 or src + size > self.past or begin + size > remove or src < last:
                self.past = start
                return errors + 1
            self.move(src, dst, size)
            dst, last = dst + size, src + size
        self.past = dst
        return errors

    def _upstream(self, remove: int, pairs: Pairs, add: int) -> int:
        if remove == self.past:
            if add:
                self.alloc(add)
            else:
                self.past = self.capacity = 0
            return 0
        need = self.past + add - remove + sum([size for _, size in pairs])
        if need > self.capacity:
            self.grow(need + self.expand)
        dst = start = self.past - remove
        for begin, size in pairs:
            self.move(start + begin, dst, size)
            dst += size
        self.past = dst
        return 0

    def arrays(self) -> tuple[np.ndarray, np.ndarray]:
        shape = (self.n.heads, self.past, self.n.dims)
        keys, values = np.zeros(shape, self.keys.dtype), np.zeros(shape, self.values.dtype)
        for t in range(self.past):
            for d in range(self.n.dims):
                keys[:, t, d] = self.keys[:, self.n.key(t, d)]
                values[:, t, d] = self.values[:, self.n.value(t, d, self.capacity)]
        return keys, values


# -- int8 -------------------------------------------------------------------------------------------------------------

F = np.float32


def round_away(x: np.float32) -> int:
    """Half away from zero; what is no number or too large becomes the least int, as x86 converts."""
    value = float(x)
    if math.isnan(value) or not -(2.0**31) <= value < 2.0**31:
        return -(2**31)
    return int(math.copysign(math.floor(abs(value) + 0.5), value))


class Int8Head:
    """One head's int8 keys and values, appended to; bytes as the engine has them."""

    def __init__(self, dims: int, lP: int, hP: int, block: int, capacity: int) -> None:
        self.dims, self.lP, self.hP, self.block, self.past = dims, lP, hP, block, 0
        self.group = rup(dims, lP) * hP + 8 * hP
        self.p1 = up(block, lP) * lP * hP + 8 * hP
        self.p0 = up(dims, hP) * self.p1
        self.blocks = up(capacity, block)
        self.keys = bytearray(up(capacity, hP) * self.group)
        self.values = bytearray(self.blocks * self.p0)
        self.key_sum = np.zeros(rup(capacity, hP), F)
        self.key_max = np.full(dims, np.finfo(F).min, F)
        self.value_sum = np.zeros((self.blocks, rup(dims, hP)), F)

    def append(self, keys: np.ndarray, values: np.ndarray) -> None:
        with np.errstate(all="ignore"):
            if len(keys) > 1:
                for row in keys:
                    self.key_max = np.where(self.key_max > row, self.key_max, row)
            for i, row in enumerate(keys):
                self._key(self.past + i, row)
            self._values(values)
        self.past += len(keys)

    def _key(self, t: int, row: np.ndarray) -> None:
        x = [F(a) - F(b) for a, b in zip(row, self.key_max, strict=True)]
        least, most = min(x), max(x)
        scale = (most - least) / F(255)
        bias = least + F(128) * (most - least) / F(255)
        base, slot = t // self.hP * self.group, t % self.hP
        total = F(0)
        for d, value in enumerate(x):
            q = round_away((value - least) / (most - least) * F(255) - F(128))
            self.keys[base + d // self.lP * self.lP * self.hP + slot * self.lP + d % self.lP] = q & 255
            total = total + (F(q) * scale + bias)
        scales = base + rup(self.dims, self.lP) * self.hP
        self._set(self.keys, scales + 4 * slot, scale)
        self._set(self.keys, scales + 4 * self.hP + 4 * slot, bias)
        self.key_sum[t] = total

    def _scale_at(self, block: int, d: int) -> int:
        codes = up(self.block, self.lP) * self.lP * self.hP
        return block * self.p0 + d // self.hP * self.p1 + codes + 4 * (d % self.hP)

    def _values(self, values: np.ndarray) -> None:
        if self.past == 0:
            for d in range(self.dims):
                least, most = values[:, d].min(), values[:, d].max()
                span = most - least
                flat = float(span) < 1e-6
                self._set(self.values, self._scale_at(0, d), F(0) if flat else span / F(255))
                bias = most if flat else span / F(255) * F(128) + least
                self._set(self.values, self._scale_at(0, d) + 4 * self.hP, bias)
        if self.past % self.block == 0:
            for block in range(1, self.blocks):
                for d in range(0, self.dims, self.hP):
                    of, to = self._scale_at(0, d), self._scale_at(block, d)
                    self.values[to : to + 8 * self.hP] = self.values[of : of + 8 * self.hP]
        for d in range(self.dims):
            scale = self._get(self.values, self._scale_at(0, d))
            bias = self._get(self.values, self._scale_at(0, d) + 4 * self.hP)
            flat = float(scale) < 1e-6
            factor = F(0) if flat else F(1) / scale
            shift = F(0) if flat else -bias / scale
            for i in range(len(values)):
                t = self.past + i
                q = max(-128, min(127, round_away(F(values[i, d]) * factor + shift)))
                r = t % self.block
                place = t // self.block * self.p0 + d // self.hP * self.p1 + r // self.lP * self.lP * self.hP
                self.values[place + d % self.hP * self.lP + r % self.lP] = q & 255
                self.value_sum[t // self.block, d] += F(q) * scale + bias

    @staticmethod
    def _set(buffer: bytearray, at: int, value: np.float32) -> None:
        buffer[at : at + 4] = F(value).tobytes()

    @staticmethod
    def _get(buffer: bytearray, at: int) -> np.float32:
        return np.frombuffer(buffer, F, 1, at)[0]
