"""Texts whose rows come again where tokens do: what stores of dense streams are tried on."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from kvmnn import LayerCache, dense
from kvmnn.store.unit import Unit, parse_unit

HEADS, DIMS, LAYERS = 2, 16, 2
ROTARY = dense.RopeConfig(theta=10000.0, dims=DIMS)
VOCABULARY = np.random.default_rng(5).standard_normal((LAYERS, 2, 97, HEADS, DIMS)).astype(np.float32)


def text(tokens: int, seed: int = 0) -> list[int]:
    return np.random.default_rng(seed).integers(0, 97, tokens).tolist()


def layers_of(ids: Sequence[int], dtype: str = "<f2", shift: float = 0.0) -> list[LayerCache]:
    """Rows that come again where tokens do, with a little of their own; K and V of a prefix are those of the text."""
    numbers = np.asarray(ids)
    own = np.sin(np.cumsum(numbers + 1) + shift)[None, :, None].astype(np.float32) / 64
    made = []
    for layer in range(LAYERS):
        rows = [VOCABULARY[layer, part][numbers].transpose(1, 0, 2) + own for part in range(2)]
        made.append(LayerCache(layer=layer, keys=rows[0].astype(dtype), values=rows[1].astype(dtype)))
    return made


def mixed_layers_of(ids: Sequence[int], dtype: str = "<f2") -> list[LayerCache]:
    """`layers_of` for ids below 97; those above have rows that nothing else has but the same text."""
    numbers = np.asarray(ids)
    made = layers_of((numbers % 97).tolist(), dtype)
    state = np.cumsum((numbers + 1).astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15), dtype=np.uint64)
    for layer, each in enumerate(made):
        for part, words in enumerate((each.keys, each.values)):
            place = np.arange(HEADS * DIMS, dtype=np.uint64) + np.uint64(1 + 1000 * (2 * layer + part))
            mixed = (state[:, None] ^ place * np.uint64(0xBF58476D1CE4E5B9)) * np.uint64(0x94D049BB133111EB)
            mixed ^= mixed >> np.uint64(31)
            noise = (mixed >> np.uint64(40)).astype(np.float32) / (1 << 23) - 1
            rows = noise.reshape(-1, HEADS, DIMS).transpose(1, 0, 2).astype(dtype)
            words[:, numbers >= 97] = rows[:, numbers >= 97]
    return made


def same(found: Sequence[LayerCache], wanted: Sequence[LayerCache], tokens: int) -> bool:
    return len(found) == len(wanted) and all(
        a.keys.tobytes() == b.keys[:, :tokens].tobytes() and a.values.tobytes() == b.values[:, :tokens].tobytes()
        for a, b in zip(found, wanted, strict=True)
    )


def units(folder: Path) -> list[Unit]:
    return [parse_unit(np.fromfile(path, np.uint8)) for path in sorted(folder.glob("units/*/*.unit"))]
