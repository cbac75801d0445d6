"""One plan: against the slow model, at the edges, with scores that are no numbers, and on a real packed cache."""

from __future__ import annotations

import math
import random

import h2o_model
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from vector_formats.std_sort import sorted_as_libstdcxx

from kvmnn import KvmnnError, PackedCache, PackLayout
from kvmnn.policies.h2o import H2OConfig, plan_blocks

SCORES = st.sampled_from([0.0, -0.0, 1.0, 0.5, -1.0, math.inf, -math.inf, math.nan]) | st.floats(width=32)
CONFIGS = st.builds(
    H2OConfig,
    block_tokens=st.integers(-2, 12),
    sink_tokens=st.integers(-3, 40),
    recent_tokens=st.integers(-3, 60),
    target_mode=st.sampled_from(["adaptive", "static"]),
    target_lossy_ratio=st.floats(0, 20),
    target_keep_ratio=st.floats(-0.5, 1.5),
    floor=st.sampled_from(["engine", "keep"]),
)


@pytest.mark.slow
@settings(deadline=None, max_examples=400)
@given(st.data(), st.integers(1, 300), CONFIGS)
def test_plan_blocks_equals_the_model(data, kv_len, config):
    count = config.count_blocks(kv_len)
    seed = data.draw(st.integers(0, 2**32))
    some = data.draw(st.lists(SCORES, min_size=1, max_size=8))
    scores = random.Random(seed).choices(some, k=count)
    made, expected = plan_blocks(scores, kv_len, config), h2o_model.plan(scores, kv_len, config)
    assert made.keep.tolist() == expected.keep
    assert [tuple(run) for run in made.retained_runs.tolist()] == expected.pairs
    assert made.floor_tokens == expected.floor
    assert made.target_before_floor == expected.target
    assert made.quantized_keep == made.num_kept_tokens == expected.quantized == expected.kept
    assert made.floor_dominates == expected.dominates
    assert made.num_evicted == expected.evicted
    kept = [token for b, size in expected.pairs for token in range(b, b + size)]
    assert made.list_kept_tokens().tolist() == (kept if expected.evicted else list(range(kv_len)))
    assert made.reserve_pairs == (tuple(expected.pairs) if expected.evicted else ())
    assert made.window_tokens == (kv_len if expected.evicted else 0)


@pytest.mark.parametrize("kv_len", [77, 84, 91, 98, 3500, 16777217])
def test_plan_blocks_target_is_rounded_in_float32(kv_len):
    made = plan_blocks(np.zeros(-(-kv_len // 64)), kv_len, sink_tokens=0, recent_tokens=0, target_lossy_ratio=3.5)
    ratio = h2o_model.f32(1 / 3.5)
    assert made.target_before_floor == math.ceil(h2o_model.f32(ratio * h2o_model.f32(kv_len)))
    if kv_len < 100:
        assert made.target_before_floor == kv_len * 2 // 7 + 1  # exact arithmetic gives one less


def kept(scores, count, **options) -> list[int]:
    made = plan_blocks(
        scores, len(scores), block_tokens=1, sink_tokens=0, recent_tokens=0, target_lossy_ratio=len(scores) / count
    )
    return np.flatnonzero(made.keep).tolist()


def test_plan_blocks_ties_and_non_finite_scores():
    nan, inf = math.nan, math.inf
    assert kept([1.0] * 40, 20) == list(range(20))
    assert kept([2, 1, 2, 1, 2, 1, 1, 1], 4) == [0, 1, 2, 4]
    assert kept([-0.0, 0.0, -0.0, 0.0], 2) == [0, 1]
    assert kept([nan, -inf, nan, inf], 2) == [1, 3]
    assert kept([nan, nan, nan, nan], 2) == [0, 1]
    assert kept([nan, -nan, 3e38, 1e39], 2) == [2, 3]
    assert kept([1e-45, 0.0, -1e-45, 0.0], 2) == [0, 1]


def test_plan_blocks_ratios_at_float32_limits():
    made = plan_blocks(np.zeros(1 << 15), 1 << 30, block_tokens=1 << 15, bytes_per_token=1 << 30)
    before, after = (1 << 30) << 30, made.num_final_tokens << 30
    assert made.lossy_ratio == np.float32(np.float32(before) / np.float32(after + made.reserve_bytes))
    assert made.keep_ratio == np.float32(made.num_final_tokens) / np.float32(1 << 30)


def test_plan_blocks_pair_bytes_count_only_with_bytes_per_token():
    scores = np.arange(20.0)
    tokens = plan_blocks(scores, 160, block_tokens=8, sink_tokens=8, recent_tokens=8)
    data = plan_blocks(scores, 160, block_tokens=8, sink_tokens=8, recent_tokens=8, bytes_per_token=100)
    assert tokens.lossy_ratio == np.float32(160 / 56)
    assert data.lossy_ratio == np.float32(16000 / (5600 + 4 * 2 * len(data.reserve_pairs)))


@pytest.mark.parametrize(
    ("scores", "kv_len", "options", "message"),
    [
        ([1.0], 65, {}, "1 scores for 65 tokens: expected 2"),
        ([1.0, 2.0, 3.0], 65, {}, "expected 2"),
        ([], 1, {}, "expected 1"),
        ([1.0], 0, {}, "kv_len is 0"),
        ([1.0], -5, {}, "kv_len is -5"),
        ([1.0], 1 << 31, {}, "kv_len"),
        ([[1.0]], 1, {}, "list of numbers"),
        ([1.0], 1, {"target_mode": "both"}, "target_mode"),
        ([1.0], 1, {"target_lossy_ratio": math.nan}, "NaN"),
        ([1.0], 1, {"block_tokens": 1 << 31}, "block_tokens"),
        ([1.0], 1, {"ema_alpha": 10**400}, "too large"),
        ([1.0], 1, {"bytes_per_token": 0}, "bytes_per_token"),
    ],
)
def test_plan_blocks_invalid_arguments_are_refused(scores, kv_len, options, message):
    with pytest.raises(KvmnnError, match=message):
        plan_blocks(scores, kv_len, **options)


@pytest.mark.parametrize("options", [{"sink_tokens": 1.5}, {"enable": 1}, {"ema_alpha": "x"}, {"layers": True}])
def test_h2o_config_wrong_types_are_refused(options):
    with pytest.raises(TypeError, match=next(iter(options))):
        H2OConfig(**options)
    with pytest.raises(TypeError, match="one or the other"):
        plan_blocks([1.0], 1, H2OConfig(), block_tokens=3)


def test_h2o_config_from_engine_reads_its_keys():
    found = H2OConfig.from_engine(
        {
            "kv_h2o_enable": True,
            "kv_h2o_target_mode": "Static",
            "kv_h2o_block_tokens": 32,
            "llm_model": "x",
            "layer_nums": 4,
        },
        heads=8,
        lenient=True,
    )
    assert found == H2OConfig(enable=True, target_mode="adaptive", block_tokens=32, layers=4, heads=8)
    assert H2OConfig.from_engine({}) == H2OConfig(enable=False)
    assert H2OConfig.from_engine({"kv_h2o_target_mode": "static"}).target_mode == "static"
    with pytest.raises(KvmnnError, match="kv_h2o_blok"):
        H2OConfig.from_engine({"kv_h2o_blok": 1})


def test_h2o_config_extreme_ratios_are_clamped():
    assert H2OConfig(target_lossy_ratio=1e300).effective_keep_ratio == 0
    assert H2OConfig(target_lossy_ratio=-math.inf).effective_keep_ratio == 1
    assert H2OConfig(target_mode="static", target_keep_ratio=math.inf).effective_keep_ratio == 1
    assert H2OConfig(ema_alpha=-5).effective_alpha == 0


def test_plan_blocks_pairs_apply_to_packed_cache():
    layout = PackLayout.from_backend("x86-avx2", kv_heads=2, head_dim=8)
    rng = np.random.default_rng(3)
    rows = [rng.standard_normal((2, 150, 8)).astype(np.float32) for _ in range(2)]
    cache = PackedCache(layout)
    cache.append(*rows)
    made = plan_blocks(rng.random(19), 150, block_tokens=8, sink_tokens=8, recent_tokens=10)
    assert made.num_evicted and len(made.reserve_pairs) > 2
    cache.realloc(made.window_tokens, made.reserve_pairs)
    for found, row in zip(cache.to_arrays(), rows, strict=True):
        assert np.array_equal(found, row[:, made.list_kept_tokens()])
    before = cache.key_buffer.tobytes()
    nothing = plan_blocks(
        np.zeros(7), made.num_final_tokens, block_tokens=-(-made.num_final_tokens // 7), recent_tokens=200
    )
    cache.realloc(nothing.window_tokens, nothing.reserve_pairs)
    assert (nothing.num_evicted, len(cache), cache.key_buffer.tobytes()) == (0, made.num_final_tokens, before)


def test_emulated_sort_orders_worst_cases():
    """Its ties are proved by the vectors; here that it is a sort, in the worst cases too."""
    rng = random.Random(5)
    for size in (0, 1, 2, 16, 17, 100, 1000):
        for levels in (1, 3, 10**9):
            items = [(float(rng.randrange(levels)), block) for block in range(size)]
            for data in (items, sorted(items), sorted(items, reverse=True)):
                found = sorted_as_libstdcxx(data)
                assert sorted(found) == sorted(items)
                assert [score for score, _ in found] == sorted((score for score, _ in items), reverse=True)


def test_plan_blocks_floor_keep_drops_all_others():
    """The rule of the engine's documents, where sinks and recent tokens reach the target."""
    options = {"block_tokens": 4, "sink_tokens": 4, "recent_tokens": 12, "target_lossy_ratio": 4.0}
    scores = np.arange(10, dtype=np.float32)
    engine, keep = (plan_blocks(scores, 40, H2OConfig(**options, floor=floor)) for floor in ("engine", "keep"))
    assert (engine.num_evicted, keep.num_evicted) == (0, 24)
    assert keep.reserve_pairs == ((0, 4), (28, 12))
    assert keep.list_kept_tokens().tolist() == [*range(4), *range(28, 40)]
    below = {**options, "recent_tokens": 4}
    plans = [plan_blocks(scores, 40, H2OConfig(**below, floor=floor)).reserve_pairs for floor in ("engine", "keep")]
    assert plans[0] == plans[1]  # below the target both choose by scores
    assert H2OConfig.from_engine({"kv_h2o_floor": "keep"}).floor == "keep"
    with pytest.raises(KvmnnError, match="kv_h2o_floor is 'all': expected one of engine, keep"):
        H2OConfig.from_engine({"kv_h2o_floor": "all"})
