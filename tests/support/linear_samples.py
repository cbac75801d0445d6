"""A small model's K and V, a profile of it, and caches with what is rare in them."""

from __future__ import annotations

from functools import cache

import numpy as np

from kvmnn import linear
from kvmnn.arrays.layer_cache import LayerCache
from kvmnn.dense.rope import RopeConfig, RopeFrequencies
from kvmnn.profiles import LayerGeometry, Profile, ProfileInfo, Statistics
from kvmnn.profiles.geometry import rotate_heads

DTYPES = ("fp16", "bf16", "fp32")


def _rope(dims: int, pairing: str = "half") -> RopeFrequencies:
    return RopeFrequencies.from_config(RopeConfig(10000.0, dims, pairing))


GEOMETRY = (
    LayerGeometry(kv_heads=2, head_dim=8, value_dim=8, rope=_rope(8)),
    LayerGeometry(kv_heads=2, head_dim=8, value_dim=4, rope=_rope(4, "interleaved")),  # another shape, partly rotated
    LayerGeometry(kv_heads=1, head_dim=12, value_dim=3, rope=None),  # V of an odd dim: not linear
    LayerGeometry(kv_heads=1, head_dim=12, value_dim=12, rope=_rope(12), window=16),
)


def convert(values: np.ndarray, dtype: str) -> np.ndarray:
    """Float32 values as fp16, bf16 (words) or fp32."""
    if dtype == "bf16":
        return (np.ascontiguousarray(values).view(np.uint32) >> 16).astype(np.uint16)
    return values.astype(np.float16 if dtype == "fp16" else np.float32)


def make_cache(
    tokens: int, dtype: str, seed: int = 1, positions: np.ndarray | None = None, is_odd: bool = False
) -> list[LayerCache]:
    """Layers whose rows follow from a few hidden numbers of each token; `is_odd` puts odd words in."""
    rng = np.random.default_rng(seed)
    mixing = np.random.default_rng(0)
    hidden = rng.normal(size=(tokens, 6))
    if positions is None:
        positions = np.arange(tokens)
    layers = []
    for number, geometry in enumerate(GEOMETRY):
        arrays = []
        for dim in (geometry.head_dim, geometry.value_dim):
            weights = mixing.normal(size=(6, geometry.kv_heads * dim)) * mixing.uniform(
                0.01, 4, geometry.kv_heads * dim
            )
            rows = hidden @ weights + rng.normal(size=(tokens, geometry.kv_heads * dim)) * 0.2
            arrays.append(np.ascontiguousarray(rows.reshape(tokens, geometry.kv_heads, dim).transpose(1, 0, 2)))
        if geometry.rope is not None:
            arrays[0] = rotate_heads(arrays[0], positions, geometry.rope, 1)
        keys, values = (convert(array.astype(np.float32), dtype) for array in arrays)
        if number == 0:
            values[:, :, 3] = 0  # a constant element
        if is_odd and tokens:
            put_odd_words(keys, rng)
            put_odd_words(values, rng)
        layers.append(LayerCache(layer=number, keys=keys, values=values, positions=positions))
    return layers


def put_odd_words(array: np.ndarray, rng: np.random.Generator) -> None:
    """Replace some words by NaN of several payloads, infinities, subnormals, zeros of both signs, the largest ones."""
    words = array.view(f"u{array.dtype.itemsize}")
    top = 8 * array.dtype.itemsize - 1
    odd = [0, 1, 3, 1 << top, (1 << top) - 1, (1 << top) | 1, (2 << top) - 1]
    odd += [0x7C00, 0x7BFF, 0xFC00, 0x7C01] if top == 15 and array.dtype.kind == "f" else [0x7F80 << (top - 15)]
    places = rng.random(words.shape) < 0.05
    words[places] = rng.choice(np.array(odd, words.dtype), int(places.sum()))


@cache
def make_profile(seed: int = 1) -> Profile:
    """A profile with tables of 0, 1 and 2 layers below."""
    statistics = Statistics(GEOMETRY)
    statistics.add(make_cache(400, "fp32", seed=100 + seed))
    tables = {name: array for below in (0, 1, 2) for name, array in linear.build_tables(statistics, below).items()}
    info = ProfileInfo(model="sample", fingerprint=None, dtype="fp32", texts=(), layers=GEOMETRY)
    return Profile(info, tables)


def is_equal(first: LayerCache, second: LayerCache) -> bool:
    """Whether two layers have the same words and positions."""
    return (
        first.keys.dtype == second.keys.dtype
        and first.keys.tobytes() == second.keys.tobytes()
        and first.values.tobytes() == second.values.tobytes()
        and np.array_equal(first.positions, second.positions)
    )
