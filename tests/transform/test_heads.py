"""Profiles of single heads, compared with profiles that are made of each head's K and V."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from transform_samples import create_caches, create_geometries, create_profile

from kvmnn.arrays.layer_cache import LayerCache
from kvmnn.dense.rope import RopeConfig
from kvmnn.errors import KvmnnError
from kvmnn.profiles.profile import Profile, ProfileInfo
from kvmnn.profiles.statistics import Statistics
from kvmnn.transform import (
    Metrics,
    TransformOptions,
    build_tables,
    decode_layer,
    encode_layer,
    get_tables,
    plan_steps,
    split_heads,
)

LAYERS, HEADS = 3, 3
ROPE = RopeConfig(10000.0, 8)
GEOMETRIES = create_geometries(LAYERS, HEADS, 8, 6, ROPE)


def take_heads(caches: list[LayerCache]) -> list[LayerCache]:
    """Make each head of each layer a layer."""
    return [
        LayerCache(
            layer=cache.layer * HEADS + head,
            keys=np.ascontiguousarray(cache.keys[head : head + 1]),
            values=np.ascontiguousarray(cache.values[head : head + 1]),
            positions=cache.positions,
        )
        for cache in caches
        for head in range(HEADS)
    ]


def create_head_profile() -> Profile:
    """Make of each head's K and V what `create_profile` makes of the layers', with its metrics and sensitivities."""
    geometries = [replace(geometry, kv_heads=1) for geometry in GEOMETRIES for _ in range(HEADS)]
    statistics = Statistics(geometries)
    for seed in (1, 2, 3):
        statistics.add(take_heads(create_caches(seed, 100, GEOMETRIES, "fp32")))
    random = np.random.default_rng(4)
    metrics, sensitivities = [], np.zeros((len(geometries), 2))
    for number, dim in enumerate((8, 6)):
        roots = [random.standard_normal((HEADS, dim, dim)) for _ in range(LAYERS)]
        layer_metrics = [root @ root.transpose(0, 2, 1) for root in roots]
        metrics.append([metric[head : head + 1] for metric in layer_metrics for head in range(HEADS)])
        for layer, metric in enumerate(layer_metrics):
            traces = np.einsum("hii->h", metric)
            sensitivities[layer * HEADS : (layer + 1) * HEADS, number] = 0.01 * traces / traces.mean() / HEADS
    tables = build_tables(statistics, Metrics(metrics[0], metrics[1]), sensitivities)
    return Profile(
        ProfileInfo(model="test", fingerprint=None, dtype="fp32", texts=(), layers=tuple(geometries)), tables
    )


@pytest.mark.parametrize("belows", [(0,), (2,)])
def test_split_heads_of_a_profile_is_the_profile_of_its_heads(belows: tuple[int, ...]) -> None:
    """Levels and weights of the first profile are rounded, so that what follows from them is near, not equal."""
    profile, expected = split_heads(create_profile(GEOMETRIES, belows)), create_head_profile()
    assert all(own.is_equivalent(other) for own, other in zip(profile.layers, expected.layers, strict=True))
    assert profile.info.settings == {"heads_of": create_profile(GEOMETRIES, belows).key.hex()}
    options = TransformOptions(kl=0.02)
    plans = [plan_steps(get_tables(entry), options, 64) for entry in (profile, expected)]
    np.testing.assert_allclose(plans[0].steps, plans[1].steps, rtol=0.02)
    assert plans[0].is_measured and plans[0].kl == pytest.approx(0.02)
    for name, array in expected.arrays.items():
        if name.endswith("/mean"):
            np.testing.assert_array_equal(profile.arrays[name], array)
        elif name.endswith("levels.0"):
            levels = profile.arrays[name].astype(int)
            assert np.abs(levels - array).mean() < 1.5, name
    caches = take_heads(create_caches(7, 64, GEOMETRIES))
    sizes, errors = np.zeros(2), np.zeros(2)
    for number, (entry, plan) in enumerate(zip((profile, expected), plans, strict=True)):
        for cache in caches:
            encoding = encode_layer(cache, entry, [], options, plan=plan)
            decoded = decode_layer(encoding.data, Profile.from_bytes(entry.to_bytes()))
            assert decoded.keys.tobytes() == encoding.decoded.keys.tobytes()
            sizes[number] += len(encoding.data)
            errors[number] += np.square(decoded.keys.astype(float) - cache.keys).sum()
    assert sizes[0] < 1.03 * sizes[1] and errors[0] < 1.1 * errors[1]


def test_split_heads_without_measured_losses_plans_by_the_size_of_elements() -> None:
    profile = split_heads(create_profile(GEOMETRIES, is_measured=False, mode="none"))
    plan = plan_steps(get_tables(profile), TransformOptions(bits=3.0), 1000)
    assert not plan.is_measured and plan.token_bits == pytest.approx(3.0 * LAYERS * HEADS * 14, rel=0.05)


def test_split_heads_refuses_layers_of_different_heads() -> None:
    geometries = [*create_geometries(1, 2, 8, 8, None), *create_geometries(1, 1, 8, 8, None)]
    with pytest.raises(KvmnnError, match="different numbers of heads"):
        split_heads(create_profile(geometries, (0,), is_measured=False))


@pytest.mark.parametrize(("name", "value"), [("transform/1/key/basis.0", 0), ("transform/1/value/levels.0", 32767)])
def test_split_heads_refuses_tables_of_no_model(name: str, value: int) -> None:
    profile = create_profile(GEOMETRIES, (0,))
    arrays = {key: np.full_like(array, value) if key == name else array for key, array in profile.arrays.items()}
    with pytest.raises(KvmnnError, match="layer 1"):
        split_heads(Profile(profile.info, arrays))
