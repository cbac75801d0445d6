"""`CacheState` and `EvictingCache`: what is cut stays together, and the lazy caches act when their originals do."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmnn import KvmnnError
from kvmnn.policies import CacheState, EvictingCache, H2OBlocks, H2OHeads, H2OTokens, L2Fixed, L2Ratio, Streaming


def tokens(first: int, count: int, heads: int = 1) -> npt.NDArray[np.float32]:
    """Keys that carry their true position."""
    row = np.arange(first, first + count, dtype=np.float32)[None, :, None]
    return np.broadcast_to(row, (heads, count, 2)).copy()


def grow(cache: EvictingCache, count: int, heads: int = 1) -> list[int]:
    part = tokens(cache.state.num_seen, count, heads)
    return list(cache.append(part, part).positions.reshape(-1).tolist())


# -- state ------------------------------------------------------------------------------------------------------------


def test_cache_state_keep_for_all_heads() -> None:
    state = CacheState("scores")
    state.append(4)
    state.add_scores(np.array([1.0, 2.0, 3.0, 4.0]))
    state.keep(np.array([1, 3]))
    state.append(2)
    assert state.positions.tolist() == [1, 3, 4, 5] and state.num_seen == 6 and state.tokens == 4
    assert state.scores is not None and state.scores.tolist() == [2, 4, 0, 0] and state.scores.dtype == np.float32
    state.add_scores(np.array([10.0, 10.0]))  # fewer than there are tokens
    state.add_scores(np.array([0, 0, 0, 1, 99]))  # more
    assert state.scores.tolist() == [12, 14, 0, 1]


def test_cache_state_keep_by_head() -> None:
    state = CacheState("head scores", kv_heads=2)
    state.append(3)
    state.add_scores(np.array([[1, 2, 3], [4, 5, 6]], np.float16))
    state.keep(np.array([[2, 0], [1, 2]]))
    state.append(1)
    assert state.positions.tolist() == [[2, 0, 3], [1, 2, 3]]
    assert state.scores is not None and state.scores.tolist() == [[3, 1, 0], [5, 6, 0]]
    state.keep(np.array([2, 0]))
    assert state.positions.tolist() == [[3, 2], [3, 1]] and state.scores.tolist() == [[0, 3], [0, 5]]


def test_cache_state_shared_scores_are_split_by_head() -> None:
    state = CacheState("scores")
    state.append(3)
    state.add_scores(np.array([1, 2, 3]))
    state.keep(np.array([[0, 1], [1, 2]]))
    assert state.scores is not None and state.scores.tolist() == [[1, 2], [2, 3]]


def test_cache_state_non_finite_sums_emit_no_warning() -> None:
    state = CacheState("scores")
    state.append(3)
    state.add_scores(np.array([np.inf, np.nan, 3e38], np.float32))
    state.add_scores(np.array([-np.inf, 1, 3e38], np.float32))
    assert state.scores is not None and np.isnan(state.scores[:2]).all() and state.scores[2] == np.inf


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ([0, 4], "from 0 to 4: 4 are stored"),
        ([-1, 0], "from -1 to 0"),
        ([1, 1], "named twice"),
        ([[0, 1], [2, 2]], "named twice"),
        ([[[0]]], r"shape \[1, 1, 1\]"),
        ([[0], [1], [2]], "a cut for 3 heads of a state with 2"),
    ],
)
def test_cache_state_keep_invalid_indices_are_refused(kept: list[int], message: str) -> None:
    state = CacheState("head scores", kv_heads=2)
    state.append(4)
    with pytest.raises(KvmnnError, match=message):
        state.keep(np.array(kept))
    assert state.tokens == 4
    with pytest.raises(TypeError, match="kept tokens are float64"):
        state.keep(np.array([0.0]))


def test_cache_state_invalid_scores_are_refused() -> None:
    with pytest.raises(KvmnnError, match="keeps no scores"):
        CacheState().add_scores(np.zeros(0))
    state = CacheState("head scores", kv_heads=2)
    state.append(3)
    with pytest.raises(KvmnnError, match=r"shape \[3\]: expected \[2, 3\]"):
        state.add_scores(np.zeros(3))
    with pytest.raises(TypeError, match="attention sums are <U1"):
        state.add_scores(np.array([["a"]] * 2))
    with pytest.raises(KvmnnError, match="count is -1"):
        state.append(-1)


@given(st.data())
@settings(deadline=None, max_examples=50)
def test_cache_state_equals_list_model(data: st.DataObject) -> None:
    heads = data.draw(st.integers(1, 3))
    state = CacheState("head scores", heads)
    stored: list[list[tuple[int, float]]] = [[] for _ in range(heads)]
    seen = 0
    for _ in range(data.draw(st.integers(1, 6))):
        count = data.draw(st.integers(0, 5))
        state.append(count)
        for row in stored:
            row += [(seen + i, 0.0) for i in range(count)]
        seen += count
        added = np.array([[data.draw(st.integers(0, 9)) for _ in row] for row in stored], np.float32).reshape(heads, -1)
        state.add_scores(added)
        stored = [
            [(p, s + float(a)) for (p, s), a in zip(*pair, strict=True)] for pair in zip(stored, added, strict=True)
        ]
        keep = data.draw(st.integers(0, len(stored[0])))
        kept = [data.draw(st.permutations(range(len(row))))[:keep] for row in stored]
        state.keep(np.array(kept, np.int64).reshape(heads, keep))
        stored = [[row[i] for i in order] for row, order in zip(stored, kept, strict=True)]
        at = np.broadcast_to(state.positions, (heads, keep))
        assert state.scores is not None
        assert [list(zip(p, s, strict=True)) for p, s in zip(at.tolist(), state.scores.tolist(), strict=True)] == stored


# -- caches -----------------------------------------------------------------------------------------------------------


def test_evicting_cache_streaming_evicts_after_attention() -> None:
    cache = EvictingCache(Streaming.from_window(2, 6))
    assert len(grow(cache, 72)) == 72 and cache.finish_attention().tokens == 72  # limit 8, buffer 64
    assert len(grow(cache, 1)) == 73
    assert cache.finish_attention().positions.tolist() == [0, 1, *range(67, 73)]
    assert len(grow(cache, 3)) == 11 and cache.finish_attention().tokens == 11
    stored = cache.end_chunk()
    assert stored.positions.tolist() == [0, 1, *range(70, 76)] and stored.tokens_seen == 76
    assert stored.keys[0, :, 0].tolist() == stored.positions.tolist()


def test_evicting_cache_h2o_evicts_before_attention() -> None:
    cache = EvictingCache(H2OTokens(sink=1, recent=2, budget=5, buffer=4))
    assert len(grow(cache, 9)) == 9
    cache.finish_attention(np.array([0, 0, 0, 7, 0, 0, 8, 0, 0], np.float32))
    assert grow(cache, 1) == [0, 3, 6, 8, 9]
    cache.finish_attention(np.array([1, 1, 1, 1, 1], np.float32))
    assert cache.state.scores is not None and cache.state.scores.tolist() == [1, 8, 9, 1, 1]
    grow(cache, 2)
    assert cache.end_chunk().positions.tolist() == [0, 3, 6, 10, 11]


def test_evicting_cache_long_prompt_is_cut_before_attention() -> None:
    cache = EvictingCache(H2OTokens(sink=1, recent=2, budget=5, buffer=4))
    assert grow(cache, 20) == [0, 1, 2, 18, 19]


def test_evicting_cache_heads_keep_different_tokens() -> None:
    cache = EvictingCache(H2OHeads(recent=1, budget=2))
    grow(cache, 3, heads=2)
    stored = cache.finish_attention(np.array([[9, 0, 0], [0, 9, 0]], np.float32))
    assert stored.positions.tolist() == [[0, 2], [1, 2]] and stored.values[:, 0, 0].tolist() == [0, 1]


def test_evicting_cache_fixed_size_stays_constant() -> None:
    cache = EvictingCache(L2Fixed(budget=8, recent_ratio=0.25, skip_layers=()))
    rng = np.random.default_rng(0)
    for step in range(30):
        part = rng.standard_normal((2, 1, 4)).astype(np.float16)
        cache.append(part, part)
        stored = cache.finish_attention()
        assert stored.tokens == min(step + 1, 8) and stored.positions[..., -1].max() == step


def test_evicting_cache_ratio_stays_near_threshold() -> None:
    cache = EvictingCache(L2Ratio(keep_ratio=0.9, prune_after=20, skip_layers=()))
    lengths = []
    for _ in range(60):
        grow(cache, 1)
        lengths.append(cache.finish_attention().tokens)
    assert lengths[19:23] == [20, 19, 20, 19] and set(lengths[20:]) == {19, 20}


def test_evicting_cache_blocks_wait_for_update_interval() -> None:
    policy = H2OBlocks(
        block_tokens=2,
        sink=2,
        recent=2,
        budget=8,
        update_interval=3,
        trigger_min_tokens=12,
        ema_alpha=0.5,
        skip_layers=(),
    )
    cache = EvictingCache(policy)
    lengths = []
    grow(cache, 12)
    for step in range(12):
        weights = np.zeros((2, 12 if step == 0 else 1, cache.state.tokens), np.float32)
        weights[:, :, 4] = 1
        cache.finish_attention(weights=weights)
        if step == 0:
            assert cache.state.scores is not None and cache.state.scores[4] == 0.5  # the mean over heads and queries
        lengths.append(cache.state.tokens)
        grow(cache, 1)
    # 15 tokens end in half a block, which stays next to the 8 of the budget; 12 and more are needed for the next cut
    assert lengths == [12, 13, 14, 9, 10, 11, 8, 9, 10, 11, 8, 9]
    assert 4 in cache.snapshot.positions.tolist()


def test_evicting_cache_skip_layers_are_never_cut() -> None:
    for layer, expected in ((1, 9), (2, 3)):
        cache = EvictingCache(Streaming(sink=1, budget=3, skip_layers=(0, 1)), layer)
        grow(cache, 9)
        assert cache.finish_attention().tokens == expected and cache.snapshot.layer == layer


def test_evicting_cache_accepts_every_dtype() -> None:
    for dtype in (np.float16, np.float32, np.uint16):
        cache = EvictingCache(L2Fixed(budget=3, skip_layers=()))
        part = np.arange(24).reshape(2, 6, 2).astype(dtype)
        cache.append(part, part)
        assert cache.finish_attention().keys.tolist() == part[:, :3].tolist() and cache.snapshot.keys.dtype == dtype


def test_evicting_cache_invalid_calls_are_refused() -> None:
    cache = EvictingCache(Streaming(), 4)
    with pytest.raises(KvmnnError, match="layer 4: nothing has been appended"):
        cache.finish_attention()
    with pytest.raises(KvmnnError, match="layer 4: nothing has been appended"):
        _ = cache.snapshot
    part = tokens(0, 2)
    cache.append(part, part)
    for other in (part.astype(np.float16), tokens(0, 2, heads=2), part[:, :, :1]):
        with pytest.raises(KvmnnError, match=r"does not continue float32 \[1, token, 2\]"):
            cache.append(other, other)
    with pytest.raises(KvmnnError, match="layer 4: keys have shape"):
        cache.append(part, part[:, :1])
    with pytest.raises(KvmnnError, match="sums and weights: expected only one"):
        cache.finish_attention(np.zeros(2, np.float32), weights=np.zeros((1, 1, 2)))
    with pytest.raises(KvmnnError, match="keeps no scores"):
        cache.finish_attention(np.zeros(2, np.float32))
    assert cache.snapshot.tokens == 2


def test_evicting_cache_repr_is_one_line() -> None:
    cache = EvictingCache(Streaming(budget=5, sink=1), 3)
    assert repr(cache) == f"EvictingCache({cache.policy!r}, layer=3, empty)"
    cache.append(np.zeros((2, 9, 4), np.float16), np.zeros((2, 9, 4), np.float16))
    cache.finish_attention()
    assert repr(cache) == f"EvictingCache({cache.policy!r}, layer=3, 5 of 9 tokens, 2 KV heads of 4, float16)"
