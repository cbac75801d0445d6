"""ModelCache against EvictingCache, layer by layer: random K, V and attention, every policy, with and without slack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from slow_cases import mark_most_slow

from kvmnn.errors import KvmnnError
from kvmnn.lm.cache import ModelCache, TokenGroup
from kvmnn.lm.kv_store import PackedStore, PlainStore
from kvmnn.lm.onnx.interface import DecoderInterface
from kvmnn.policies import EvictingCache, Policy, PolicyInput, create_policy

LAYERS, DIMS = 3, 8
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("l2_ratio", {"keep_ratio": 0.7, "prune_after": 20}),
    ("l2_ratio", {"keep_ratio": 0.7, "prune_after": 20, "form": "original"}),
    ("l2_fixed", {"budget": 12, "recent_ratio": 0.5}),
    ("l2_fixed", {"budget": 12, "recent_ratio": 0.25, "strategy": "keep_high", "skip_layers": (1,)}),
    ("recent_only", {"budget": 9}),
    ("recent_only", {"budget": 9, "skip_layers": (0, 1, 2)}),
    ("streaming", {"budget": 10, "sink": 2}),
    ("streaming", {"budget": 10, "sink": 2, "buffer": 5}),
    ("streaming_press", {"budget": 6, "sink": 1}),
    ("h2o_tokens", {"budget": 14, "sink": 2, "recent": 6, "buffer": 0}),
    ("h2o_tokens", {"budget": 14, "sink": 2, "recent": 6, "buffer": 7}),
    ("h2o_blocks", {"budget": 12, "sink": 2, "recent": 3, "block_tokens": 4, "update_interval": 3,
                    "trigger_min_tokens": 8, "skip_layers": (0,)}),
    ("h2o_blocks", {"budget": 12, "sink": 0, "recent": 0, "block_tokens": 4, "update_interval": 2,
                    "trigger_min_tokens": 8, "skip_layers": ()}),
    ("h2o_heads", {"budget": 12, "recent": 5}),
    ("h2o_decayed", {"budget": 12, "sink": 2, "recent": 5}),
    ("h2o_decayed", {"keep_ratio": 0.6, "decay": 1.0}),
    ("h2o_decayed_heads", {"budget": 12, "sink": 0, "decay": 0.9}),
    ("knorm", {"budget": 7}),
    ("observed_attention", {"budget": 7}),
]  # fmt: skip


@dataclass
class Returned:
    """What a model gives back."""

    present_pairs: list[tuple[np.ndarray, np.ndarray]]
    attentions: list[np.ndarray] | None
    seconds: float = 0.0
    num_summed: int = 1


def interface(kv_heads: int) -> DecoderInterface:
    fields: dict[str, Any] = dict.fromkeys(DecoderInterface.__dataclass_fields__)
    return DecoderInterface(
        **{**fields, "layers": LAYERS, "kv_heads": kv_heads, "head_dim": DIMS, "dtype": np.float32, "label": "random"}
    )


def empty(kv_heads: int, dtype: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    return [(np.zeros((1, kv_heads, 0, DIMS), dtype),) * 2 for _ in range(LAYERS)]


class Both:
    """A ModelCache, and an EvictingCache for each layer, fed the same."""

    def __init__(
        self, policy: Policy, seed: int, *, slack: int | None, kv_heads: int, group: int, dtype: Any, packed: bool
    ):
        self.rng = np.random.default_rng(seed)
        self.kv_heads, self.query_heads, self.dtype = kv_heads, kv_heads * group, dtype
        by_head = policy.requires in ("keys", "head scores")
        store = (
            PackedStore(interface(kv_heads), "x86-avx2", per_head=by_head)
            if packed
            else PlainStore(empty(kv_heads, dtype))
        )
        self.ours = ModelCache(
            store, num_layers=LAYERS, kv_heads=kv_heads, query_heads=self.query_heads, policy=policy, max_masked=slack,
            takes_bias=True,
        )  # fmt: skip
        self.theirs = [EvictingCache(policy, layer) for layer in range(LAYERS)]
        self.policy = policy

    def step(self, new: int) -> None:
        shape = (LAYERS, self.kv_heads, new, DIMS)
        keys, values = (self.rng.standard_normal(shape).astype(self.dtype) for _ in range(2))
        past, bias = self.ours.begin_step(new)
        present, attentions = [], []
        for layer, (old_keys, old_values) in enumerate(past):
            present.append(
                (
                    np.concatenate([old_keys, keys[None, layer]], axis=2),
                    np.concatenate([old_values, values[None, layer]], axis=2),
                )
            )
            slots = present[-1][0].shape[2]
            live = np.ones((1, 1, 1, slots), bool) if bias is None else bias[layer] == 0
            assert live.shape[1] in (1, self.query_heads) and live.shape[3] == slots
            weights = self.rng.random((self.query_heads, new, slots)).astype(np.float32)
            attended = self.theirs[layer].append(keys[layer], values[layer])
            assert (live[0].sum(axis=-1) == attended.tokens).all()
            attentions.append(np.where(live[0], weights, 0))
        self.ours.end_step(Returned(present, attentions))  # type: ignore[arg-type]
        for layer, cache in enumerate(self.theirs):
            mask = (
                np.ones_like(attentions[layer], bool)
                if bias is None
                else np.broadcast_to(bias[layer][0] == 0, attentions[layer].shape)
            )
            tokens = int(mask[0, 0].sum())
            weights = attentions[layer][mask].reshape(self.query_heads, new, tokens)
            cache.finish_attention(weights=weights if "scores" in self.policy.requires else None)

    def compare(self) -> None:
        assert self.ours.nbytes > 0 and self.ours.peak_nbytes >= self.ours.nbytes - 10**6
        for layer, (ours, cache) in enumerate(zip(self.ours.copy_layers(), self.theirs, strict=True)):
            theirs = cache.snapshot
            heads = np.broadcast_to(theirs.positions, (self.kv_heads, theirs.tokens))
            order = np.argsort(heads, axis=1)
            assert ours.tokens == theirs.tokens == self.ours.tokens[layer] and ours.tokens_seen == theirs.tokens_seen
            assert np.array_equal(
                np.broadcast_to(ours.positions, heads.shape), np.take_along_axis(heads, order, axis=1)
            )
            assert np.array_equal(ours.keys, np.take_along_axis(theirs.keys, order[:, :, None], axis=1))
            assert np.array_equal(ours.values, np.take_along_axis(theirs.values, order[:, :, None], axis=1))
            scores, kept = self.ours.get_scores(layer), cache.state.scores
            if kept is not None and scores is not None:
                expected = np.take_along_axis(np.atleast_2d(kept), order[: np.atleast_2d(kept).shape[0]], axis=1)
                assert np.allclose(np.atleast_2d(scores), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "options"), POLICIES, ids=lambda value: str(value)[:50])
@pytest.mark.parametrize(("slack", "forms"), mark_most_slow([(3, (0, 1, 2)), (None, (0,)), (0, (1,)), (1000, (2,))], 4))
def test_model_cache_equals_evicting_caches_for_every_policy(
    name: str, options: dict[str, Any], slack: int | None, forms: tuple[int, ...]
) -> None:
    for seed in forms:
        kv_heads, group, dtype = [(2, 1, np.float32), (1, 3, np.float16), (4, 2, np.float16)][seed]
        both = Both(create_policy(name, **{"skip_layers": (), **options}), seed, slack=slack, kv_heads=kv_heads,
        group=group,
                    dtype=dtype, packed=False)  # fmt: skip
        for number, new in enumerate([17, 1, 1, 4, 1, 1, 1, 6, 1, 1, 2, 1, 1, 1, 3, 1]):
            both.step(new)
            if number % 5 == 4:
                both.ours.end_chunk()
                for cache in both.theirs:
                    cache.end_chunk()
            both.compare()


@settings(max_examples=40, deadline=None)
@given(
    case=st.sampled_from(POLICIES),
    slack=st.none() | st.integers(0, 12),
    kv_heads=st.integers(1, 3),
    steps=st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=25),
    packed=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_model_cache_any_text_equals_evicting_caches(
    case: Any, slack: int | None, kv_heads: int, steps: Any, packed: bool, seed: int
) -> None:
    name, options = case
    both = Both(create_policy(name, **{"skip_layers": (), **options}), seed, slack=slack, kv_heads=kv_heads, group=2,
                dtype=np.float32, packed=packed)  # fmt: skip
    for new, ends in steps:
        both.step(new)
        if ends:
            both.ours.end_chunk()
            for cache in both.theirs:
                cache.end_chunk()
    both.compare()


def test_model_cache_slack_bounds_masked_slots() -> None:
    for slack, allowed in ((0, 0), (5, 5), (32, 32), (None, 1)):
        both = Both(create_policy("streaming", budget=10, sink=2), 1, slack=slack, kv_heads=2, group=1,
        dtype=np.float32,
                    packed=False)  # fmt: skip
        most = 0
        for _ in range(120):
            both.step(1)
            most = max(most, both.ours.nbytes)
        assert most == (10 + allowed) * 2 * DIMS * 4 * 2 * LAYERS
        assert both.ours.peak_nbytes == most + 2 * DIMS * 4 * 2 * LAYERS  # with the new token, before the cut


def test_model_cache_without_bias_evicting_new_tokens_is_refused() -> None:
    cache = ModelCache(
        PlainStore(empty(2, np.float32)), num_layers=LAYERS, kv_heads=2, query_heads=2, max_masked=0, takes_bias=False,
        policy=create_policy("h2o_tokens", budget=8, sink=1, recent=3, buffer=0),
    )  # fmt: skip
    with pytest.raises(KvmnnError, match="evicts some of 20 new tokens before attention"):
        cache.begin_step(20)


def test_token_group_keep_invalid_rows_are_refused() -> None:
    rows = TokenGroup((0, 1), 2)
    rows.append(5, 0)
    for kept in ([0, 0], [5], [-1], [[0], [1]]):
        with pytest.raises(KvmnnError):
            rows.keep(np.array(kept))
    rows.keep(np.array([4, 1]))
    assert [rows.get_layer_positions(layer).tolist() for layer in (0, 1)] == [[[1, 4]] * 2] * 2 and rows.num_masked == 3
    assert (rows.bias[:, :5] == 0).tolist() == [[False, True, False, False, True]] * 4


def test_packed_store_of_other_dtype_is_refused() -> None:
    with pytest.raises(KvmnnError, match="holds fp16, the cache of this model is fp32"):
        PackedStore(interface(2), "arm64-fp16", per_head=False)


@dataclass(frozen=True, kw_only=True)
class AboveMean(Policy):
    """Keeps as many tokens of each row as are above its mean."""

    name = "above_mean"
    requires: ClassVar = "scores"

    def select_tokens(self, view: PolicyInput) -> list[np.ndarray]:
        return [np.flatnonzero(row >= row.mean()) for row in view.get_row_scores()]


@dataclass(frozen=True, kw_only=True)
class AboveMeanByHead(AboveMean):
    name = "above_mean_by_head"
    requires: ClassVar = "head scores"


def test_model_cache_layers_may_keep_different_counts() -> None:
    both = Both(AboveMean(), 5, slack=3, kv_heads=2, group=1, dtype=np.float32, packed=False)
    for new in (9, 1, 4, 2, 7):
        both.step(new)
        both.compare()
    assert len(set(both.ours.tokens)) > 1


def test_model_cache_heads_must_keep_equal_counts() -> None:
    cache = ModelCache(PlainStore(empty(2, np.float32)), num_layers=LAYERS, kv_heads=2, query_heads=2, max_masked=0,
    takes_bias=True,
                       policy=AboveMeanByHead())  # fmt: skip
    cache.begin_step(4)
    weights = np.zeros((2, 4, 4), np.float32)
    weights[0, 0, 0] = weights[1, 0, 1:] = 1
    present = [(np.zeros((1, 2, 4, DIMS), np.float32),) * 2] * LAYERS
    with pytest.raises(KvmnnError, match=r"layer 0: above_mean_by_head keeps \[1, 3\] tokens: expected the same"):
        cache.end_step(Returned(present, [weights] * LAYERS))  # type: ignore[arg-type]
