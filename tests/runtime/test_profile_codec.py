"""The runtime with a model's profile: lossless streams of cold tokens, and lossy ones that say so."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import transform_samples
from linear_samples import make_profile

from kvmnn.arrays.layer_cache import LayerCache
from kvmnn.calibration.maker import build_linear_tables
from kvmnn.dense.rope import RopeConfig
from kvmnn.errors import KvmnnError, RestoreError
from kvmnn.profiles import Profile, ProfileInfo, Statistics
from kvmnn.runtime import LosslessRuntime, RuntimeConfig

GEOMETRY = transform_samples.create_geometries(3, 2, 8, 8, RopeConfig(10000.0, 8))
LOSSY_PROFILE = transform_samples.create_profile(GEOMETRY)
CONFIG = RuntimeConfig(
    enable=True,
    runtime_enable=True,
    codec="gear_delta",
    mode="store",
    front_n=3,
    block_tokens=32,
    hot_recent_tokens=16,
    hot_sink_tokens=0,
    async_threads=0,
)


@pytest.fixture(scope="module")
def profile() -> Profile:
    statistics = Statistics(GEOMETRY)
    statistics.add(transform_samples.create_caches(1, 400, GEOMETRY, "fp32"))
    info = ProfileInfo(model="test", fingerprint=None, dtype="fp32", texts=(), layers=tuple(GEOMETRY))
    return Profile(info, build_linear_tables(statistics, below=0))


def run(config: RuntimeConfig, dtype: str, kept: list[tuple[int, int]]) -> tuple[list[LayerCache], LosslessRuntime]:
    """Feed a text, evict, code what is cold; return what a plain cache would hold, and the runtime."""
    caches = transform_samples.create_caches(7, 320, GEOMETRY, dtype)
    runtime = LosslessRuntime(
        replace(config, h2o=replace(config.h2o, trigger_min_tokens=1)), layers=3, kv_heads=2, head_dim=8, dtype=dtype
    )
    for begin, end in ((0, 256), (256, 319), (319, 320)):
        for layer, cache in enumerate(caches):
            runtime.append_call(layer, cache.keys[:, begin:end], cache.values[:, begin:end])
            runtime.end_call()
        runtime.end_step()
        if end == 256:
            runtime.flush()
            for layer in range(3):
                runtime.evict(layer, kept)
    runtime.flush()
    rows = np.concatenate([*(np.arange(first, first + count) for first, count in kept), np.arange(256, 320)])
    plain = [
        LayerCache(layer=cache.layer, keys=cache.keys[:, rows], values=cache.values[:, rows], positions=rows)
        for cache in caches
    ]
    return plain, runtime


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_profile_runtime_restores_every_word_after_evictions(profile: Profile, dtype: str) -> None:
    plain, runtime = run(replace(CONFIG, codec="profile", profile=profile), dtype, [(0, 4), (100, 77), (200, 56)])
    metrics = runtime.collect_metrics()
    assert metrics.h2o_lossless_fallback_count == 0
    assert 0 < metrics.h2o_lossless_compressed_bytes < metrics.h2o_lossless_raw_bytes
    for cache, restored in zip(plain, runtime.read_layers(range(3)), strict=True):
        assert np.array_equal(restored.positions, cache.positions)
        assert restored.keys.tobytes() == np.ascontiguousarray(cache.keys).tobytes()
        assert restored.values.tobytes() == np.ascontiguousarray(cache.values).tobytes()


def test_transform_runtime_rounds_cold_tokens_alone() -> None:
    config = replace(CONFIG, codec="transform", profile=LOSSY_PROFILE, kl=0.02)
    assert config.is_lossy and not CONFIG.is_lossy
    plain, runtime = run(config, "fp32", [(0, 4), (100, 77), (200, 56)])
    metrics = runtime.collect_metrics()
    assert metrics.h2o_lossless_fallback_count == 0
    assert 3 * metrics.h2o_lossless_compressed_bytes < metrics.h2o_lossless_raw_bytes
    for cache, restored in zip(plain, runtime.read_layers(range(3)), strict=True):
        assert np.array_equal(restored.positions, cache.positions)
        assert np.array_equal(restored.keys[:, -16:], cache.keys[:, -16:])
        assert np.array_equal(restored.keys[:, :4], cache.keys[:, :4])
        errors = np.linalg.norm(restored.keys - cache.keys) / np.linalg.norm(cache.keys)
        assert 0 < errors < 0.3


def test_runtime_metrics_of_a_lossy_codec_have_no_lossless_figure(profile: Profile) -> None:
    _, runtime = run(replace(CONFIG, codec="transform", profile=LOSSY_PROFILE, kl=0.02), "fp32", [(0, 256)])
    metrics = runtime.collect_metrics()
    document, columns, values = metrics.to_dict(), metrics.to_bench_columns(), metrics.to_gate_values()
    assert (document["codec"], document["is_lossy"], "codec transform is LOSSY" in str(metrics)) == (
        "transform",
        True,
        True,
    )
    assert document["lossless_ratio"] is document["h2o_lossless_ratio"] is None
    assert columns["h2o_lossless"] is values["lossless_selected_value"] is None
    assert 1 < document["lossy_ratio"] == columns["h2o_lossy"] == values["lossy_best"] == metrics.total_ratio
    assert values["candidate_runtime_total_ratio_avg"] == metrics.total_ratio
    assert metrics.encoded_ratio is not None and metrics.encoded_ratio > 3
    _, runtime = run(replace(CONFIG, codec="profile", profile=profile), "fp32", [(0, 256)])
    metrics = runtime.collect_metrics()
    document = metrics.to_dict()
    assert (document["codec"], document["is_lossy"], "LOSSY" in str(metrics)) == ("profile", False, False)
    assert document["h2o_lossless_ratio"] == metrics.to_bench_columns()["h2o_lossless"] > 1


def test_runtime_metrics_of_a_lossy_codec_that_encoded_nothing_have_no_lossless_ratio() -> None:
    config = replace(CONFIG, codec="transform", profile=LOSSY_PROFILE, kl=0.02)
    metrics = LosslessRuntime(config, layers=3, kv_heads=2, head_dim=8, dtype="fp16").collect_metrics()
    assert (metrics.lossless_ratio, metrics.h2o_lossless_ratio, metrics.lossy_ratio) == (None, None, 1.0)


def test_profile_stream_that_is_changed_in_memory_is_no_row(profile: Profile) -> None:
    _, runtime = run(replace(CONFIG, codec="profile", profile=profile), "fp16", [(0, 256)])
    strict = runtime._runtime
    segment = next(s for s in strict._layers[1].rows.segments if s.state == "stored")
    assert segment.frames is not None
    segment.frames = replace(segment.frames, key_frame=segment.frames.key_frame[:-1] + b"\xff")
    with pytest.raises(RestoreError, match="changed in memory"):
        runtime.read_layer(1)


@pytest.mark.parametrize(
    "values, message",
    [
        ({"profile": None}, "expected mode 'store' and a profile"),
        ({"mode": "full"}, "expected mode 'store' and a profile"),
        ({"kl": 0.1}, "kl, ratio and bits are of codec transform"),
    ],
)
def test_runtime_config_refuses_a_profile_codec_without_what_it_needs(
    profile: Profile, values: dict[str, object], message: str
) -> None:
    with pytest.raises(KvmnnError, match=message):
        replace(CONFIG, **{"codec": "profile", "profile": profile, **values})


def test_runtime_refuses_a_profile_of_other_layers_and_the_engine_behaviour(profile: Profile) -> None:
    config = replace(CONFIG, codec="profile", profile=profile)
    with pytest.raises(KvmnnError, match="the profile is of layers of"):
        LosslessRuntime(config, layers=3, kv_heads=1, head_dim=8, dtype="fp16")
    with pytest.raises(KvmnnError, match="none of the engine's"):
        LosslessRuntime(config, layers=3, kv_heads=2, head_dim=8, dtype="fp16", behaviour="engine")
    with pytest.raises(KvmnnError, match="the profile is of layers of"):
        LosslessRuntime(replace(config, profile=make_profile()), layers=4, kv_heads=2, head_dim=8, dtype="fp16")


def test_runtime_config_reads_profile_options_under_the_engine_prefix() -> None:
    document = {
        "kv_lossless_enable": True,
        "kv_lossless_runtime_enable": True,
        "kv_lossless_codec": "transform",
        "kv_lossless_runtime_mode": "store",
        "kv_lossless_profile": "model.kvmp",
        "kv_lossless_kl": 0.002,
    }
    config = RuntimeConfig.from_engine(document)
    assert (config.codec, config.profile, config.kl, config.is_lossy) == ("transform", "model.kvmp", 0.002, True)
    with pytest.raises(KvmnnError, match="kv_lossless_kl is 'x': expected a number"):
        RuntimeConfig.from_engine(document | {"kv_lossless_kl": "x"})
