"""Figures of a run: names, percentiles, ratios, table."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plain_cache import new_rows
from store_options import store_options

from kvmnn.policies.h2o import H2OConfig
from kvmnn.runtime import LosslessRuntime, RuntimeConfig
from kvmnn.runtime.metrics import LatencyHistogram

CONFIG = store_options(
    scope="front_n_and_h2o_kept",
    front_n=1,
    h2o=H2OConfig(
        layer_start=1,
        block_tokens=8,
        sink_tokens=8,
        recent_tokens=16,
        target_lossy_ratio=2.0,
        trigger_min_tokens=64,
        update_interval=4,
    ),
)
HEADS, HEAD_DIM, LAYERS = 2, 16, 3


def run(config: RuntimeConfig, behaviour: str = "sound", steps: int = 40) -> LosslessRuntime:
    runtime = LosslessRuntime(
        config,
        layers=LAYERS,
        kv_heads=HEADS,
        head_dim=HEAD_DIM,
        dtype="fp16",
        behaviour=behaviour,  # type: ignore[arg-type]
    )
    rng = np.random.default_rng(1)
    for tokens in [150] + [1] * steps:
        for layer in range(LAYERS):
            new = new_rows(rng, HEADS, tokens, HEAD_DIM, "<f2", "smooth")
            keys, _ = runtime.begin_call(layer, new[0], new[1])
            runtime.end_call(rows=rng.random((4, tokens, keys.shape[1]), np.float32))
        runtime.end_step()
    return runtime


@given(st.lists(st.integers(0, 10**12), min_size=1, max_size=60))
def test_latency_histogram_percentiles_are_upper_bounds(durations: list[int]) -> None:
    latencies = LatencyHistogram()
    for duration in durations:
        latencies.add(duration)
    for share in (0.5, 0.95, 0.99):
        true = sorted(durations)[max(0, int(np.ceil(share * len(durations))) - 1)] / 1e3
        assert true <= latencies.compute_percentile_us(share) <= true * 1.126
    summary = latencies.summarize()
    assert (summary.count, summary.max_us) == (len(durations), max(durations) / 1e3)
    assert summary.total_us == sum(durations) / 1e3


def test_latency_histogram_empty_summary_is_zero() -> None:
    assert set(LatencyHistogram().summarize().to_dict().values()) == {0}


@pytest.mark.parametrize("behaviour", ["sound", "engine"])
def test_metrics_names_and_sums(behaviour: str) -> None:
    metrics = run(CONFIG, behaviour).collect_metrics()
    document = json.loads(json.dumps(metrics.to_dict()))
    names = ("raw_bytes", "compressed_bytes", "decompressed_bytes", "compress_us", "decompress_us", "ratio")
    names += ("fallback_count", "backpressure_skip_count", "queue_depth_peak", "async_queue_peak", "async_wait_us")
    names += ("decode_cache_hit", "decode_cache_miss")
    assert {f"h2o_lossless_{name}" for name in names} | {"h2o_codec_us"} <= set(document)
    assert metrics.h2o_lossless_raw_bytes > metrics.h2o_lossless_compressed_bytes > 0
    assert metrics.h2o_lossless_ratio == pytest.approx(
        metrics.h2o_lossless_raw_bytes / metrics.h2o_lossless_compressed_bytes, rel=1e-6
    )
    assert metrics.h2o_lossless_decompressed_bytes > 0 and metrics.compress.p50_us <= metrics.compress.p99_us
    assert len(metrics.layers) == LAYERS and document["layers"][0]["layer"] == 0
    assert metrics.h2o_total_evict_tokens > 0
    columns = metrics.to_bench_columns()
    assert columns["h2o_lossless_raw_mb"] == metrics.h2o_lossless_raw_bytes / 1024 / 1024
    assert str(metrics).splitlines()[0].split()[:3] == ["layer", "tokens", "blocks"]
    assert len(str(metrics).splitlines()) == 1 + LAYERS + 6


def test_metrics_lossy_lossless_and_total_ratio_are_of_one_run() -> None:
    metrics = run(CONFIG).collect_metrics()
    token_bytes = 2 * HEADS * HEAD_DIM * 2
    live = sum(layer.tokens for layer in metrics.layers) * token_bytes
    held = sum(layer.held_bytes for layer in metrics.layers)
    appended = LAYERS * 190 * token_bytes
    assert metrics.layers[0].tokens == 190 and metrics.layers[1].tokens < 130
    assert metrics.lossy_ratio == appended / live
    assert metrics.lossless_ratio == live / held
    assert metrics.total_ratio == appended / held
    stored = metrics.layers[0]
    assert stored.stored_raw_bytes == stored.blocks * 16 * token_bytes > stored.stored_bytes


def test_metrics_emulation_frees_no_rows() -> None:
    config = replace(CONFIG, h2o=replace(CONFIG.h2o, enable=False), decode_cache_blocks=64, front_n=3)
    metrics = run(config, "engine").collect_metrics()
    assert metrics.h2o_lossless_ratio > 1.1
    assert metrics.lossless_ratio < 1


def test_metrics_stored_frames_equal_compressed_bytes() -> None:
    metrics = run(replace(CONFIG, scope="front_n", front_n=3, h2o=replace(CONFIG.h2o, enable=False))).collect_metrics()
    for layer in metrics.layers:
        assert 0 < layer.stored_bytes == layer.compressed_bytes < layer.held_bytes
        assert layer.stored_raw_bytes == layer.raw_bytes
    assert metrics.h2o_lossless_compressed_bytes == sum(layer.compressed_bytes for layer in metrics.layers)


def test_metrics_emulation_counts_rows_frames_and_copies() -> None:
    config = replace(CONFIG, h2o=replace(CONFIG.h2o, enable=False), decode_cache_blocks=64, front_n=3)
    runtime = run(config, "engine", steps=1)
    metrics = runtime.collect_metrics()
    inner: Any = runtime._runtime
    entries: list[Any] = [
        *inner._decoder.shared_cache.entries,
        *(one for state in inner._states for one in state.cache.entries),
    ]
    copies = sum(one.keys.nbytes + one.values.nbytes for one in {id(one.keys): one for one in entries}.values())
    frames = sum(layer.stored_bytes for layer in metrics.layers)
    assert copies > 0 and frames > 0
    assert metrics.held_bytes == sum(layer.held_bytes for layer in metrics.layers) + frames + copies


def test_metrics_reset_clears_all_figures() -> None:
    runtime = run(CONFIG)
    runtime.reset()
    fresh = LosslessRuntime(CONFIG, layers=LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="fp16")
    assert runtime.collect_metrics() == fresh.collect_metrics()


def test_metrics_to_gate_values_has_names_of_reports() -> None:
    metrics = run(CONFIG).collect_metrics()
    found = metrics.to_gate_values(
        tokens_per_second=9.0, baseline_tokens_per_second=12.0, wait_limit_us=40_000, consistent=True
    )
    assert found == {
        "lossy_best": metrics.h2o_lossy_ratio,
        "lossless_selected_value": metrics.h2o_lossless_ratio,
        "decode_gate_tps": 9.0,
        "decode_drop_ratio": 0.25,
        "kv_content_consistency_pass": True,
        "runtime_decomp_best_us": metrics.h2o_lossless_decompress_us,
        "runtime_async_wait_headroom_us": 40_000 - metrics.h2o_lossless_async_wait_us,
        "runtime_fallback_best": 0,
        "runtime_decode_cache_hit_best": 0,
        "runtime_queue_peak_best": metrics.h2o_lossless_queue_depth_peak,
        "candidate_runtime_total_ratio_avg": metrics.h2o_lossy_ratio * metrics.h2o_lossless_ratio,
    }
    assert found["lossy_best"] != 1 and found["runtime_decomp_best_us"] > 0
    unknown = {name for name, value in metrics.to_gate_values().items() if value is None}
    assert unknown == {
        "decode_gate_tps", "decode_drop_ratio", "kv_content_consistency_pass", "runtime_async_wait_headroom_us"
    }  # fmt: skip


@pytest.mark.parametrize("behaviour", ["sound", "engine"])
def test_metrics_layer_latencies_sum_to_totals(behaviour: str) -> None:
    runtime = run(CONFIG, behaviour)
    for _ in range(2):
        metrics = runtime.collect_metrics()
        for name in ("compress", "decompress", "verify"):
            layers, total = [getattr(layer, name) for layer in metrics.layers], getattr(metrics, name)
            assert sum(one.count for one in layers) == total.count
            assert sum(one.total_us for one in layers) == pytest.approx(total.total_us)
            assert max(one.max_us for one in layers) == total.max_us
            assert all(one.p50_us <= one.p95_us <= one.p99_us <= one.max_us for one in (*layers, total))
        document = json.loads(json.dumps(metrics.to_dict()))
        assert document["layers"][0]["compress"]["count"] == metrics.layers[0].compress.count
        runtime.reset()
    assert (metrics.compress.count == 0) is (behaviour == "sound")  # the engine forgets when the next prompt comes


def test_metrics_restore_wait_counts_in_its_layer() -> None:
    with run(replace(CONFIG, async_threads=1, h2o=replace(CONFIG.h2o, enable=False))) as runtime:
        runtime.flush()
        inner: Any = runtime._runtime
        layer, restorer = inner._layers[1], inner._restorer
        restorer.reset()
        before = [one.counters.timings.wait.count for one in inner._layers]
        started, release = threading.Event(), threading.Event()

        def held_back() -> None:
            started.set()
            release.wait()

        holding = inner._workers.submit(held_back)
        started.wait()
        restorer.prefetch(layer.rows.segments)
        piece, future = next(iter(restorer._prefetches.values()))
        future.cancel = lambda: False  # as if it had begun
        threading.Timer(0.01, release.set).start()
        assert restorer.read_rows(piece, layer.counters).shape[2] == piece.count
        holding.result()
        found = runtime.collect_metrics()
        assert [one.wait.count for one in found.layers] == [before[0], before[1] + 1, before[2]]
        assert found.wait.count >= sum(before) + 1 and found.restores_late == 1
