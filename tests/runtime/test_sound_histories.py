"""Random histories of a sound runtime: what attention reads equals a cache without one, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_cache import PlainLayer, new_rows
from store_options import store_options

from kvmnn.policies.h2o import H2OConfig, H2OPlanner
from kvmnn.policies.h2o.planner import PendingPlan
from kvmnn.runtime import LosslessRuntime, RuntimeConfig

DTYPES = {"fp16": "<f2", "fp32": "<f4", "bf16": "<u2"}

configs = st.builds(
    store_options,
    mode=st.sampled_from(["store", "store", "store", "full", "probe"]),
    scope=st.sampled_from(["front_n", "h2o_kept", "front_n_and_h2o_kept", "none"]),
    front_n=st.integers(0, 3),
    block_tokens=st.integers(1, 12),
    hot_recent_tokens=st.integers(0, 12),
    hot_sink_tokens=st.integers(0, 6),
    kept_sample_layers=st.integers(0, 2),
    kept_sample_token_interval=st.integers(0, 3),
    front_sample_token_interval=st.integers(0, 3),
    store_disable_front=st.booleans(),
    async_threads=st.sampled_from([0, 0, 1, 3]),
    max_queue=st.sampled_from([1, 2, 256]),
    decode_cache_blocks=st.sampled_from([0, 1, 64]),
    decode_cache_bytes=st.sampled_from([0, 2000, 1 << 20]),
    max_bytes_in_flight=st.sampled_from([0, 3000, 1 << 20]),
    prefetch_layers=st.integers(0, 3),
    verify=st.sampled_from(["compare", "hash"]),
    effort=st.sampled_from(["fast", "exact"]),
    h2o=st.builds(
        H2OConfig,
        enable=st.booleans(),
        block_tokens=st.integers(1, 6),
        sink_tokens=st.integers(0, 4),
        recent_tokens=st.integers(0, 8),
        target_lossy_ratio=st.sampled_from([1.5, 3.0]),
        update_interval=st.integers(1, 4),
        trigger_min_tokens=st.integers(1, 30),
        layer_start=st.integers(0, 2),
    ),
)
operations = st.one_of(
    st.tuples(st.just("step"), st.integers(1, 3), st.integers(1, 8)),
    st.tuples(st.just("follow-up"), st.integers(1, 40), st.just(0)),
    st.tuples(st.just("erase"), st.integers(0, 99), st.integers(0, 99)),
    st.tuples(st.just("reset"), st.integers(0, 0), st.integers(0, 0)),
    st.tuples(st.just("flush"), st.integers(0, 0), st.integers(0, 0)),
    st.tuples(st.just("wait"), st.integers(0, 0), st.integers(0, 0)),
    st.tuples(st.just("append"), st.integers(1, 3), st.just(0)),
)


class Both:
    """A runtime and the plain cache next to it."""

    def __init__(self, config: RuntimeConfig, layers: int, heads: int, head_dim: int, dtype: str, seed: int) -> None:
        self.shape, self.dtype = (layers, heads, head_dim), DTYPES[dtype]
        self.rng = np.random.default_rng(seed)
        self.runtime = LosslessRuntime(config, layers=layers, kv_heads=heads, head_dim=head_dim, dtype=dtype)
        self.planner = self.runtime._runtime.planner
        self.reset()

    def reset(self) -> None:
        layers, heads, head_dim = self.shape
        self.plain = [PlainLayer(heads, head_dim, self.dtype) for _ in range(layers)]
        self.position = 0

    def step(self, tokens: int, *, read: bool = True) -> None:
        layers, heads, head_dim = self.shape
        kind = str(self.rng.choice(["random", "smooth", "smooth", "smooth", "constant"]))
        for layer in self.rng.permutation(layers).tolist():
            rows = new_rows(self.rng, heads, tokens, head_dim, self.dtype, kind)
            plan = self.planner.layers[layer].pending_plan
            plain = self.plain[layer]
            if plan is not None and plan.is_applicable(plain.rows.shape[2]):
                plain.evict(plan.pairs, plan.remove)
            plain.append(rows, self.position)
            if read:
                keys, values = self.runtime.begin_call(layer, rows[0], rows[1])
                assert keys.tobytes() == plain.rows[0].tobytes()
                assert values.tobytes() == plain.rows[1].tobytes()
            else:
                self.runtime.append_call(layer, rows[0], rows[1])
            self.runtime.end_call(rows=self.rng.random((2, tokens, plain.rows.shape[2]), np.float32))
        self.runtime.end_step()
        self.position += tokens

    def run(self, operation: Any) -> None:
        kind, first, second = operation
        if kind == "step":
            for _ in range(second):
                self.step(first)
        elif kind == "append":
            self.step(first, read=False)
        elif kind == "follow-up":
            self.runtime.start_request(keep_cache=True)
            self.step(first)
        elif kind == "erase":
            begin, end = first * self.position // 100, second * self.position // 100
            if begin < end:
                self.runtime.erase(begin, end if end < self.position else 0)
                for plain in self.plain:
                    plain.erase(begin, end)
                self.position = begin if end == self.position else self.position
        elif kind == "reset":
            self.runtime.reset()
            self.reset()
        else:
            getattr(self.runtime, kind)()
        self.check()

    def check(self) -> None:
        for layer, plain in enumerate(self.plain):
            cache = self.runtime.read_layer(layer)
            assert cache.keys.tobytes() == plain.rows[0].tobytes()
            assert cache.values.tobytes() == plain.rows[1].tobytes()
            assert cache.positions.tolist() == plain.positions.tolist()
            assert cache.tokens_seen == max(self.position, int(plain.positions.max(initial=-1)) + 1)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    config=configs,
    layers=st.integers(1, 4),
    heads=st.integers(1, 3),
    head_dim=st.sampled_from([1, 3, 8]),
    dtype=st.sampled_from(sorted(DTYPES)),
    prompt=st.integers(1, 60),
    history=st.lists(operations, min_size=1, max_size=12),
    seed=st.integers(0, 1 << 30),
)
def test_strict_any_history_reads_like_a_plain_cache(
    config: RuntimeConfig,
    layers: int,
    heads: int,
    head_dim: int,
    dtype: str,
    prompt: int,
    history: list[Any],
    seed: int,
) -> None:
    both = Both(config, layers, heads, head_dim, dtype, seed)
    with both.runtime:
        both.step(prompt)
        for operation in history:
            both.run(operation)
        metrics = both.runtime.collect_metrics()
        assert metrics.h2o_lossless_fallback_count == 0
        assert [layer.tokens for layer in metrics.layers] == [plain.rows.shape[2] for plain in both.plain]


STORE = store_options(hot_recent_tokens=24)


def pieces_of(runtime: Any, layer: int) -> list[tuple[int, int, str]]:
    rows = runtime._runtime._layers[layer].rows
    return [(start, piece.count, piece.state) for start, piece in rows.iter_segments()]


def test_strict_cold_tokens_are_stored_once_in_aligned_blocks() -> None:
    both = Both(STORE, 2, 2, 8, "fp16", 1)
    both.rng = FixedKind(both.rng)
    both.step(100)
    both.step(1)
    for layer in range(2):
        assert pieces_of(both.runtime, layer) == [(0, 4, "raw")] + [(4 + 16 * n, 16, "stored") for n in range(4)]
    for _ in range(15):
        both.step(1)
    assert pieces_of(both.runtime, 0)[-1] == (68, 16, "stored")
    both.check()


class FixedKind:
    """A generator whose rows always compress."""

    def __init__(self, rng: np.random.Generator) -> None:
        self._rng = rng

    def choice(self, kinds: list[str]) -> str:
        return "smooth"

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rng, name)


@pytest.mark.parametrize("threads", [1, 4])
def test_strict_refused_jobs_are_submitted_later(threads: int) -> None:
    config = replace(STORE, async_threads=threads, max_queue=1)
    both = Both(config, 3, 2, 8, "fp32", 2)
    both.rng = FixedKind(both.rng)
    with both.runtime:
        both.step(200)
        both.step(1)
        assert both.runtime.collect_metrics().h2o_lossless_backpressure_skip_count > 0
        for _ in range(60):
            both.step(1)
            both.runtime.wait()
        for layer in range(3):
            states = [state for _, _, state in pieces_of(both.runtime, layer)]
            assert states[0] == "raw" and set(states[1:]) == {"stored"} and len(states) == 1 + (261 - 24 - 4) // 16
        both.check()


def test_strict_without_threads_is_deterministic() -> None:
    figures = []
    for _ in range(2):
        both = Both(STORE, 2, 2, 8, "fp16", 3)
        both.step(150)
        for _ in range(40):
            both.step(1)
        found = both.runtime.collect_metrics().to_dict()
        drop = ("_us", "compress", "decompress", "verify", "wait")
        figures.append({name: value for name, value in found.items() if not name.endswith(drop) and name != "layers"})
        figures[-1]["pieces"] = pieces_of(both.runtime, 1)
    assert figures[0] == figures[1]


def test_strict_layer_planning_at_every_step_is_stored() -> None:
    class AlwaysPlanning(H2OPlanner):
        def end_call(self, *arguments: Any, **options: Any) -> Any:
            call = super().end_call(*arguments, **options)
            self.layers[0].pending_plan = PendingPlan(call.kv_len, (0, call.kv_len - 1))
            return call

    planner = AlwaysPlanning(replace(STORE.h2o, layers=1), cadence="tokens")
    runtime = LosslessRuntime(STORE, layers=1, kv_heads=1, head_dim=4, dtype="fp16", planner=planner)
    for tokens in [200] + [1] * 70:
        rows = np.ones((1, tokens, 4), np.float16)
        runtime.begin_call(0, rows, rows)
        runtime.end_call()
        runtime.end_step()
    assert runtime.collect_metrics().layers[0].blocks > 5
