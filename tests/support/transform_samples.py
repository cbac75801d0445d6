"""Small caches and profiles for transform streams: rows of few dimensions, related between sides and layers."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from kvmnn.arrays.layer_cache import LayerCache
from kvmnn.dense.rope import RopeConfig
from kvmnn.profiles.geometry import LayerGeometry, rotate_heads
from kvmnn.profiles.profile import Profile, ProfileInfo
from kvmnn.profiles.statistics import Statistics
from kvmnn.transform import Metrics, build_tables
from kvmnn.transform.tables import Mode

NUMPY_TYPES = {"fp16": np.float16, "fp32": np.float32, "bf16": np.float32}


def create_caches(
    seed: int,
    tokens: int,
    geometries: Sequence[LayerGeometry],
    dtype: str = "fp16",
    positions: Sequence[int] | None = None,
) -> list[LayerCache]:
    """Return a cache of every layer: the same model for all seeds, another text for each."""
    model, text = np.random.default_rng(99), np.random.default_rng(seed)
    hidden = text.standard_normal((tokens, 12)) * (1 + text.random((tokens, 1)))
    places = np.arange(tokens) if positions is None else np.array(positions)
    caches = []
    for number, geometry in enumerate(geometries):
        sides = []
        for dim in (geometry.head_dim, geometry.value_dim):
            n = geometry.kv_heads * dim
            rows = hidden @ model.standard_normal((12, n)) * 0.5 + model.standard_normal(n)
            rows += 0.1 * text.standard_normal((tokens, n))
            sides.append(rows.reshape(tokens, geometry.kv_heads, dim).transpose(1, 0, 2))
        if geometry.rope is not None:
            sides[0] = rotate_heads(np.ascontiguousarray(sides[0]), places, geometry.rope, 1)
        arrays = [np.ascontiguousarray(side, NUMPY_TYPES[dtype]) for side in sides]
        if dtype == "bf16":
            arrays = [(array.view(np.uint32) >> 16).astype(np.uint16) for array in arrays]
        caches.append(LayerCache(layer=number, keys=arrays[0], values=arrays[1], positions=places.astype(np.int64)))
    return caches


def create_geometries(
    layers: int, heads: int, head_dim: int, value_dim: int, rope: RopeConfig | None
) -> list[LayerGeometry]:
    """Return equal layers."""
    empty = np.zeros((heads, 1, head_dim), np.float16), np.zeros((heads, 1, value_dim), np.float16)
    return [
        LayerGeometry.from_cache(LayerCache(layer=number, keys=empty[0], values=empty[1]), rope)
        for number in range(layers)
    ]


def create_profile(
    geometries: Sequence[LayerGeometry],
    belows: Sequence[int] = (0, 2),
    mode: Mode = "joint",
    *,
    is_measured: bool = True,
) -> Profile:
    """Return a profile of three texts; with metrics and sensitivities if `is_measured`."""
    statistics = Statistics(geometries)
    for seed in (1, 2, 3):
        statistics.add(create_caches(seed, 100, geometries, "fp32"))
    random = np.random.default_rng(4)
    metrics = None
    if is_measured:
        sides = []
        for part in ("head_dim", "value_dim"):
            roots = [
                random.standard_normal((geometry.kv_heads, getattr(geometry, part), getattr(geometry, part)))
                for geometry in geometries
            ]
            sides.append([root @ root.transpose(0, 2, 1) for root in roots])
        metrics = Metrics(sides[0], sides[1])
    sensitivities = np.full((len(geometries), 2), 0.01) if is_measured else None
    tables = {}
    for below in belows:
        tables |= build_tables(statistics, metrics, sensitivities, below, mode=mode)
    info = ProfileInfo(model="test", fingerprint=None, dtype="fp32", texts=(), layers=tuple(geometries))
    return Profile(info, tables)
