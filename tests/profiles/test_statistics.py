"""Statistics: streaming moments are those of all rows at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from kvmnn.arrays import LayerCache
from kvmnn.dense import RopeConfig
from kvmnn.errors import KvmnnError, SourceError
from kvmnn.profiles import LayerGeometry, Statistics, build_rows

ROPES = [RopeConfig(10000.0, 8), RopeConfig(1e6, 4, "interleaved"), None, RopeConfig(500.0, 6)]
SIZES = [(2, 8, 8), (1, 8, 8), (3, 4, 6), (2, 8, 8)]


def make_cache(tokens: int, seed: int, first: int = 0) -> list[LayerCache]:
    """K and V of four layers of different sizes, of which those of a layer follow from the one below."""
    rng = np.random.default_rng(seed)
    layers = []
    base = rng.normal(size=(tokens, 5))
    for layer, (heads, dim, value_dim) in enumerate(SIZES):
        rows = []
        for size in (dim, value_dim):
            mixed = base @ rng.normal(size=(5, heads * size)) + rng.normal(size=heads * size)
            rows.append(mixed.reshape(tokens, heads, size).transpose(1, 0, 2).astype(np.float32))
        positions = np.arange(first, first + tokens)
        layers.append(LayerCache(layer=layer, keys=rows[0], values=rows[1], positions=positions))
    return layers


def make_geometries(layers: list[LayerCache]) -> list[LayerGeometry]:
    return [LayerGeometry.from_cache(layer, rope) for layer, rope in zip(layers, ROPES, strict=True)]


def rotate_plainly(cache: LayerCache, rope: RopeConfig | None, sign: int) -> npt.NDArray[np.float64]:
    """K of every token turned by hand, element by element."""
    keys: npt.NDArray[np.float64] = cache.keys.astype(np.float64).copy()
    if rope is None:
        return keys
    for pair in range(rope.dims // 2):
        first, second = (pair, pair + rope.dims // 2) if rope.pairing == "half" else (2 * pair, 2 * pair + 1)
        angle = sign * cache.positions * rope.theta ** (-2 * pair / rope.dims)
        x, y = keys[..., first].copy(), keys[..., second].copy()
        keys[..., first] = x * np.cos(angle) - y * np.sin(angle)
        keys[..., second] = y * np.cos(angle) + x * np.sin(angle)
    return keys


def test_rows_are_unrotated_with_pairs_next_to_each_other() -> None:
    layers = make_cache(20, 0, first=1000)
    for cache, geometry, rope in zip(layers, make_geometries(layers), ROPES, strict=True):
        keys, values = build_rows(cache, geometry)
        plain = rotate_plainly(cache, rope, -1)
        order = list(range(cache.head_dim))
        if rope is not None and rope.pairing == "half":
            half = rope.dims // 2
            order[: rope.dims] = [i // 2 + half * (i % 2) for i in range(rope.dims)]
        expected = np.concatenate([plain[head][:, order] for head in range(cache.kv_heads)], axis=1)
        assert np.allclose(keys, expected, atol=1e-6)
        value_order = order if cache.value_dim == cache.head_dim else list(range(cache.value_dim))
        expected = np.concatenate([cache.values[head][:, value_order] for head in range(cache.kv_heads)], axis=1)
        assert np.array_equal(values, expected)


def test_rows_of_all_element_types_and_of_heads_with_their_own_positions() -> None:
    cache = make_cache(9, 1)[0]
    geometry = LayerGeometry.from_cache(cache, ROPES[0])
    half = replace(cache, keys=cache.keys.astype(np.float16), values=cache.values.astype(np.float16))
    assert np.array_equal(
        build_rows(half, geometry)[1],
        build_rows(replace(cache, values=half.values.astype(np.float32)), geometry)[1],
    )
    words = (cache.keys.view(np.uint32) >> 16).astype(np.uint16)
    brain = replace(cache, keys=words, values=words)
    exact = (words.astype(np.uint32) << 16).view(np.float32)
    assert np.array_equal(
        build_rows(brain, geometry)[0], build_rows(replace(cache, keys=exact, values=exact), geometry)[0]
    )
    positions = np.stack([np.arange(9), np.arange(9) * 3])
    mixed = replace(cache, positions=positions, ends=positions + 1, tokens_seen=30)
    rows = build_rows(mixed, geometry)[0]
    for head in range(2):
        alone = replace(cache, positions=positions[head], ends=positions[head] + 1, tokens_seen=30)
        assert np.array_equal(
            rows[:, head * 8 : head * 8 + 8], build_rows(alone, geometry)[0][:, head * 8 : head * 8 + 8]
        )


def test_statistics_are_those_of_all_rows_at_once() -> None:
    caches = [make_cache(700, 2), make_cache(3, 3), make_cache(40, 4)]
    statistics = Statistics(make_geometries(caches[0]))
    for cache in caches:
        statistics.add(cache)
    assert (statistics.num_tokens, statistics.num_texts, statistics.num_skipped) == (696 + 36, 3, 0)
    rows = [
        [
            np.concatenate([build_rows(cache[layer], statistics.layers[layer])[part][4:] for cache in caches])
            for part in (0, 1)
        ]
        for layer in range(4)
    ]
    for layer in range(4):
        blocks = {
            name: rows[layer - distance][part]
            for distance in range(min(layer, 2) + 1)
            for part, name in enumerate(["key", "value"] if not distance else [f"key-{distance}", f"value-{distance}"])
        }
        assert statistics.list_blocks(layer) == tuple(blocks)
        assert statistics.list_blocks(layer, 0) == ("key", "value")
        assert np.allclose(statistics.mean(layer, "value"), rows[layer][1].mean(axis=0))
        joined = np.concatenate(list(blocks.values()), axis=1)
        whole = statistics.covariance(layer, tuple(blocks), tuple(blocks))
        assert np.allclose(whole, np.cov(joined.T, bias=True), atol=1e-9)
        assert np.allclose(whole, whole.T)
        for first in blocks:
            for second in blocks:
                found = statistics.covariance(layer, first, [second])
                assert found.shape == (blocks[first].shape[1], blocks[second].shape[1])


def test_statistics_leave_out_tokens_that_are_not_finite() -> None:
    cache = make_cache(30, 5)
    statistics, expected = Statistics(make_geometries(cache)), Statistics(make_geometries(cache))
    keys = cache[2].keys.copy()
    keys[0, 10, 1], keys[1, 20, 0], keys[0, 0, 0] = np.nan, np.inf, np.nan
    statistics.add([replace(layer, keys=keys) if layer.layer == 2 else layer for layer in cache])
    kept = np.setdiff1d(np.arange(30), [10, 20])
    expected.add(
        [LayerCache(layer=c.layer, keys=c.keys[:, kept], values=c.values[:, kept], positions=kept) for c in cache]
    )
    assert (statistics.num_skipped, statistics.num_tokens) == (2, 24)
    assert np.allclose(statistics.covariance(3, "key", "value-1"), expected.covariance(3, "key", "value-1"))


def test_statistics_are_saved_and_go_on(tmp_path: Path) -> None:
    first, second = make_cache(50, 6), make_cache(20, 7)
    whole, part = Statistics(make_geometries(first)), Statistics(make_geometries(first))
    for cache in (first, second):
        whole.add(cache)
    part.add(first)
    part.save(tmp_path / "s")
    part.save(tmp_path / "s")
    resumed = Statistics.load(tmp_path / "s")
    resumed.add(second)
    assert (resumed.num_tokens, resumed.num_texts) == (whole.num_tokens, whole.num_texts)
    blocks = whole.list_blocks(3)
    assert np.array_equal(resumed.covariance(3, blocks, blocks), whole.covariance(3, blocks, blocks))
    data = (tmp_path / "s").read_bytes()
    for position in range(0, len(data), 97):
        (tmp_path / "s").write_bytes(data[:position] + bytes([data[position] ^ 4]) + data[position + 1 :])
        with pytest.raises(KvmnnError):
            Statistics.load(tmp_path / "s")
    (tmp_path / "s").write_bytes(data[:-64])
    with pytest.raises(SourceError):
        Statistics.load(tmp_path / "s")


def test_statistics_errors_say_what_does_not_fit() -> None:
    cache = make_cache(10, 8)
    statistics = Statistics(make_geometries(cache))
    with pytest.raises(KvmnnError, match="no tokens"):
        statistics.mean(0, "key")
    statistics.add(cache)
    with pytest.raises(KvmnnError, match="layer 1: has no block 'key-2'"):
        statistics.covariance(1, "key", "key-2")
    with pytest.raises(KvmnnError, match="4 layers"):
        statistics.covariance(4, "key", "key")
    with pytest.raises(KvmnnError, match="3 layers"):
        statistics.add(cache[:3])
    with pytest.raises(KvmnnError, match="layer 1: has 2 heads"):
        statistics.add([cache[0], replace(cache[0], layer=1), *cache[2:]])
    moved = replace(cache[2], positions=cache[2].positions + 1, ends=cache[2].ends + 1, tokens_seen=11)
    with pytest.raises(KvmnnError, match="layer 2: holds other tokens"):
        statistics.add([*cache[:2], moved, cache[3]])
    with pytest.raises(KvmnnError, match="0 layers"):
        Statistics([])
