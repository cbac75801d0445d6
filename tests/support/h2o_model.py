"""The planner once more, slowly and in plain Python: floats are Python floats, rounded to float32 after every step."""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass, field
from fractions import Fraction

from kvmnn.policies.h2o import H2OConfig


def f32(x: float) -> float:
    """The nearest float32; infinite beyond the range."""
    try:
        return float(struct.unpack("<f", struct.pack("<f", x))[0])
    except OverflowError:
        return math.copysign(math.inf, x)


def sums(rows: list[list[list[float]]], block: int, threads: int, tile: int) -> list[float]:
    heads, keys = len(rows), len(rows[0][0])
    blocks = math.ceil(Fraction(keys, block))
    total = [0.0] * blocks
    share = math.ceil(Fraction(heads, threads))
    for thread in range(threads):
        own = [0.0] * blocks
        for head in rows[thread * share : (thread + 1) * share]:
            for start in range(0, keys, tile):
                for row in head:
                    for key in range(start, min(start + tile, keys)):
                        own[key // block] = f32(own[key // block] + row[key])
        total = [f32(a + b) for a, b in zip(total, own, strict=True)]
    return total


def mean(old: list[float], added: list[float], count: int, alpha: float) -> list[float]:
    a = f32(min(1.0, max(0.0, f32(alpha))))
    rest = f32(1.0 - a)
    out = []
    for i, value in enumerate(added):
        before = old[i] if i < len(old) else 0.0
        out.append(f32(f32(a * before) + f32(rest * f32(value / f32(max(1, count))))))
    return out


@dataclass
class ModelPlan:
    keep: list[bool]
    pairs: list[tuple[int, int]]
    floor: int
    target: int
    quantized: int
    dominates: bool
    kept: int
    evicted: int


def plan(scores: list[float], kv: int, c: H2OConfig) -> ModelPlan:
    block = max(1, c.block_tokens)
    blocks = math.ceil(Fraction(kv, block))
    size = [min(block, kv - b * block) for b in range(blocks)]
    keep = [False] * blocks
    for token in range(min(kv, max(0, c.sink_tokens))):
        keep[token // block] = True
    for b in range(max(0, kv - max(0, c.recent_tokens)) // block, blocks):
        keep[b] = True
    floor = sum(s for s, k in zip(size, keep, strict=True) if k)
    if c.target_mode == "static":
        ratio = f32(min(1.0, max(0.0, f32(c.target_keep_ratio))))
    else:
        ratio = f32(1.0 / max(1.0, f32(c.target_lossy_ratio)))
    wanted = min(max(1, math.ceil(f32(ratio * f32(kv)))), kv)
    target = max(wanted, floor)
    quantized = floor if floor >= target else min(kv, floor + math.ceil(Fraction(target - floor, block)) * block)
    kept = floor
    lowest = [(-math.inf if math.isnan(s) else s) for s in scores]
    order = sorted((b for b in range(blocks) if not keep[b]), key=lambda b: (math.isnan(scores[b]), -lowest[b], b))
    for b in order:
        if kept >= quantized:
            break
        keep[b] = True
        kept += size[b]
    pairs: list[tuple[int, int]] = []
    for b in range(blocks):
        if keep[b] and b and keep[b - 1]:
            pairs[-1] = (pairs[-1][0], pairs[-1][1] + size[b])
        elif keep[b]:
            pairs.append((b * block, size[b]))
    dominates = floor >= wanted and c.floor == "engine"
    return ModelPlan(keep, pairs, floor, wanted, quantized, dominates, kept, 0 if dominates else kv - kept)


@dataclass
class ModelLayer:
    scores: list[float] = field(default_factory=list)
    pending: list[tuple[int, int]] | None = None
    remove: int = 0
    length: int = 0
    steps: int = 0
    last: int = 0


class Model:
    """Prompt and decode steps of all layers, every layer with its own cache; no second turns."""

    def __init__(self, config: H2OConfig, cadence: str) -> None:
        self.config, self.cadence = config, cadence
        self.layers = [ModelLayer() for _ in range(max(1, config.layers))]
        self.calls = self.last = 0
        self.total = 0

    def prompt(self, tokens: int) -> None:
        for layer in self.layers:
            layer.length = tokens

    def decode(self, index: int, add: int, added_of: object) -> tuple[list[tuple[int, int]], list[float]]:
        c, layer = self.config, self.layers[index]
        applied: list[tuple[int, int]] = []
        if layer.pending is not None:
            applied = layer.pending
            layer.length = sum(size for _, size in applied)
            layer.pending = None
        layer.length += add
        self.calls += 1
        layer.steps += 1
        last = len(self.layers) - 1
        first = min(max(0, c.layer_start), last)
        end = last if c.layer_end < 0 else min(c.layer_end, last)
        if not (c.enable and first <= index <= end):
            return applied, []
        added = added_of(math.ceil(Fraction(layer.length, max(1, c.block_tokens))))  # type: ignore[operator]
        layer.scores = mean(layer.scores, added, (c.heads or 1) * add, c.ema_alpha)
        seen = list(layer.scores)
        waited = self.calls - self.last if self.cadence == "layer-calls" else layer.steps - layer.last
        if layer.length >= max(1, c.trigger_min_tokens) and waited >= max(1, c.update_interval):
            self.last, layer.last = self.calls, layer.steps
            made = plan(layer.scores, layer.length, c)
            self.total += made.evicted
            if made.evicted:
                layer.pending = made.pairs
                layer.scores = [s for s, k in zip(layer.scores, made.keep, strict=True) if k]
        return applied, seen


@dataclass
class Step:
    """What one call of the engine model shows."""

    layer: int
    before: int
    after: int
    remove: int
    reserve: list[tuple[int, int]]
    stale: bool
    scores: list[float]


class EngineModel:
    """The engine's bookkeeping with all that its layers share, second turns and cleared caches included."""

    def __init__(self, config: H2OConfig) -> None:
        self.c = config
        self.count = max(1, config.layers)
        self.lengths = [0] * self.count
        self.scores: list[list[float]] = [[] for _ in range(self.count)]
        self.pending: list[tuple[int, list[tuple[int, int]]] | None] = [None] * self.count
        self.cursor = self.step = self.last = self.previous = self.remove = 0
        self.reserve: list[tuple[int, int]] = []

    def forward(self, add: int, decode: bool, attention: object, remove_all: bool = False) -> list[Step]:
        if remove_all:
            self.remove = self.previous
        steps = [self._call(manager, add, decode, attention) for manager in range(self.count)]
        kept = sum(size for _, size in self.reserve)
        if any(b < 0 or b + n > self.remove for b, n in self.reserve):
            kept = 0
        if self.remove > self.previous + add:
            self.remove, kept = self.previous + add, 0
        self.previous += add + kept - self.remove
        self.remove, self.reserve = 0, []
        return steps

    def _call(self, manager: int, add: int, decode: bool, attention: object) -> Step:
        c = self.c
        layer = self.cursor % self.count if decode else 0
        before = length = self.lengths[manager]
        if decode and c.enable:
            self.remove, self.reserve = 0, []
        waiting, self.pending[layer] = self.pending[layer], None
        stale = waiting is not None and waiting[0] != length
        if waiting is not None and not stale:
            self.remove, self.reserve = waiting[0], list(waiting[1])
        if self.remove > length:
            self.remove, self.reserve = length, []
        shown = self.remove, list(self.reserve)
        if self.previous == self.remove and not self.reserve:
            length = 0
        else:
            length = length - self.remove + sum(size for _, size in self.reserve)
        after = length
        length += add
        self.lengths[manager] = length
        if decode:
            self.cursor += 1
            self.step += 1
        elif length <= add:
            self.cursor = self.step = self.last = self.remove = 0
            self.reserve = []
            self.scores = [[] for _ in range(self.count)]
            self.pending = [None] * self.count
        last = self.count - 1
        end = last if c.layer_end < 0 else min(c.layer_end, last)
        scores: list[float] = []
        if decode and c.enable and min(max(0, c.layer_start), last) <= layer <= end:
            added = attention(math.ceil(Fraction(length, max(1, c.block_tokens))))  # type: ignore[operator]
            scores = self.scores[layer] = mean(self.scores[layer], added, (c.heads or 1) * add, c.ema_alpha)
            if length >= max(1, c.trigger_min_tokens) and self.step - self.last >= max(1, c.update_interval):
                self.last = self.step
                made = plan(scores, length, c)
                if made.evicted:
                    self.pending[layer] = (length, made.pairs)
                    self.scores[layer] = [s for s, k in zip(scores, made.keep, strict=True) if k]
        return Step(layer, before, after, *shown, stale, scores)
