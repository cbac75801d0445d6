"""Every policy against its rule in plain Python, on keys and scores with ties, zeros, infinities and NaN."""

from __future__ import annotations

import math

import numpy as np
import policy_models as model
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmnn.errors import KvmnnError, OptionError
from kvmnn.policies import (
    H2OBlocks,
    H2OHeads,
    H2OTokens,
    KNorm,
    L2Fixed,
    L2Ratio,
    LayerState,
    ObservedAttention,
    Policy,
    RecentOnly,
    Streaming,
    StreamingPress,
    Trigger,
    create_policy,
)
from kvmnn.policies.h2o import H2OConfig, plan_blocks
from kvmnn.policies.layer_parameters import LayerParameters
from kvmnn.policies.policy import BudgetedPolicy
from kvmnn.policies.registry import POLICIES

RATIOS = st.sampled_from([0.0, 0.1, 0.29, 0.5, 0.7, 0.98, 1.0, 1.5]) | st.floats(0, 2)
SMALL = st.integers(0, 12)
MOMENTS = st.sampled_from(list(Trigger))
quick = settings(deadline=None, max_examples=60)


def norms(keys: model.Array) -> list[list[float]]:
    return [[model.norm(row) for row in head] for head in model.floats(keys)]


def by_head(policy: Policy, view: LayerState, heads: int, moment: Trigger = Trigger.AFTER_ATTENTION) -> list[list[int]]:
    kept = policy.select_or_all(view, moment)
    return np.broadcast_to(kept, (heads, kept.shape[-1])).tolist()


def share_of_prompt(tokens: int, compression: float) -> int:
    """What a press leaves, but that it may leave nothing."""
    return min(tokens, max(int(tokens * (1 - compression)), 1))


@given(model.keys(), RATIOS, st.integers(0, 30), st.sampled_from(["seed", "original"]))
@quick
def test_l2_ratio_equals_the_rule(keys: model.Array, ratio: float, prune_after: int, form: str) -> None:
    policy = L2Ratio(keep_ratio=ratio, prune_after=prune_after, form=form, skip_layers=())
    heads, tokens = keys.shape[:2]
    keep = math.ceil(ratio * tokens)
    expected = [model.l2_ratio(head, keep, prune_after, form) for head in norms(keys)]
    assert by_head(policy, LayerState(tokens=tokens, keys=keys), heads) == expected


@given(model.keys(), st.integers(0, 30), RATIOS, st.booleans())
@quick
def test_l2_fixed_equals_the_rule(keys: model.Array, budget: int, recent_ratio: float, high: bool) -> None:
    strategy = "keep_high" if high else "keep_low"
    policy = L2Fixed(budget=budget, recent_ratio=recent_ratio, strategy=strategy, skip_layers=())
    heads, tokens = keys.shape[:2]
    expected = [model.l2_fixed(head, budget, recent_ratio, high=high) for head in norms(keys)]
    view = LayerState(tokens=tokens, keys=keys)
    assert by_head(policy, view, heads) == expected
    if recent_ratio == 1:
        assert by_head(RecentOnly(budget=budget, skip_layers=()), view, heads) == expected


@given(model.keys(), st.floats(0, 1, exclude_max=True))
@quick
def test_knorm_equals_the_rule(keys: model.Array, compression: float) -> None:
    heads, tokens = keys.shape[:2]
    size = share_of_prompt(tokens, compression)
    found = by_head(KNorm(keep_ratio=1 - compression), LayerState(tokens=tokens, keys=keys), heads)
    if size == tokens:
        assert found == [list(range(tokens))] * heads
    else:
        assert found == [model.ranked(head)[:size] for head in norms(keys)]


@given(st.integers(0, 40), st.integers(0, 6), st.integers(1, 12), SMALL, MOMENTS)
@quick
def test_streaming_equals_the_rule(tokens: int, sink: int, window: int, buffer: int, moment: Trigger) -> None:
    policy = Streaming.from_window(sink, window, buffer)
    expected = model.streaming(tokens, sink, sink + window, buffer if moment is Trigger.AFTER_ATTENTION else 0)
    if moment is Trigger.AFTER_APPEND:
        expected = list(range(tokens))
    assert policy.select_or_all(LayerState(tokens=tokens), moment).tolist() == expected


@given(st.integers(1, 40), st.integers(0, 12), st.floats(0, 1, exclude_max=True))
@quick
def test_streaming_press_equals_the_rule(tokens: int, sink: int, compression: float) -> None:
    """The best by (score, age): 0 for what is to be pruned, 1 for the rest."""
    size = share_of_prompt(tokens, compression)
    if tokens <= sink:
        return
    scores = [0 if sink <= i < sink + tokens - size else 1 for i in range(tokens)]
    expected = sorted(model.ranked(scores, highest=True)[:size])
    found = StreamingPress(keep_ratio=1 - compression, sink=sink).select_or_all(LayerState(tokens=tokens))
    assert found.tolist() == expected


@given(model.rows(), SMALL, SMALL, st.integers(0, 30), SMALL, MOMENTS)
@quick
def test_h2o_tokens_equals_the_rule(
    rows: model.Array, sink: int, recent: int, budget: int, buffer: int, moment: Trigger
) -> None:
    policy = H2OTokens(sink=sink, recent=recent, budget=budget, buffer=buffer)
    for row in rows:
        expected = model.h2o_tokens(row.tolist(), budget, sink, recent, buffer if moment is Trigger.AFTER_APPEND else 0)
        if moment is Trigger.AFTER_ATTENTION:
            expected = list(range(row.size))
        assert policy.select_or_all(LayerState(tokens=row.size, scores=row), moment).tolist() == expected


@given(model.rows(), SMALL, SMALL)
@quick
def test_h2o_heads_equals_the_rule(rows: model.Array, heavy: int, recent: int) -> None:
    policy = H2OHeads(recent=recent, budget=recent + heavy)
    expected = [model.h2o_heads(row.tolist(), recent + heavy, recent) for row in rows]
    assert by_head(policy, LayerState(tokens=rows.shape[1], scores=rows), rows.shape[0]) == expected


@given(st.integers(1, 3), st.integers(1, 3), st.integers(0, 14), st.floats(0, 1, exclude_max=True), st.integers(0, 99))
@quick
def test_observed_attention_equals_the_rule(heads: int, group: int, tokens: int, compression: float, seed: int) -> None:
    """Weights are multiples of 1/64 and groups powers of 2, so that every sum is exact in any order."""
    group = 1 << (group - 1)
    rng = np.random.default_rng(seed)
    weights = np.tril(rng.integers(0, 64, (heads * group, tokens, tokens))).astype(np.float32) / 64
    policy = ObservedAttention(keep_ratio=1 - compression)
    view = LayerState(tokens=tokens, scores=policy.sum_columns(weights, heads))
    size = share_of_prompt(tokens, compression)
    expected = []
    for head in range(heads):
        rows = weights[head * group : (head + 1) * group]
        scores = [
            float(np.float32(rows[:, :, k].sum()) / np.float32(tokens - k) / np.float32(group)) for k in range(tokens)
        ]
        expected.append(list(range(tokens)) if size == tokens else model.ranked(scores, highest=True)[:size])
    assert by_head(policy, view, heads) == expected


@given(model.rows(70), st.integers(1, 9), SMALL, SMALL, st.integers(0, 60))
@quick
def test_h2o_blocks_equals_the_planner_and_keeps_its_budget(
    rows: model.Array, block: int, sink: int, recent: int, budget: int
) -> None:
    """What the planner keeps of the blocks' sums; never more than complete blocks above the budget."""
    policy = H2OBlocks(
        block_tokens=block, sink=sink, recent=recent, budget=budget, trigger_min_tokens=1, skip_layers=()
    )
    scores, tokens = rows[0], rows.shape[1]
    kept = policy.select(LayerState(tokens=tokens, scores=scores))
    if tokens == 0:
        assert kept is None
        return
    sums = []
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, tokens, block):
            total = np.float32(0)
            for score in scores[start : start + block]:
                total = total + score
            sums.append(total)
    made = plan_blocks(sums, tokens, policy._build_config(tokens))
    assert made.target_before_floor == min(max(1, budget), tokens)
    assert kept is not None and kept.tolist() == made.list_kept_tokens().tolist()


def test_h2o_blocks_from_lossy_ratio_equals_the_engine() -> None:
    for lossy in (1.0, 2.5, 3.0, 3.5, 7.0):
        policy = H2OBlocks.from_lossy_ratio(lossy, block_tokens=1, sink=0, recent=0)
        for tokens in range(1, 400):
            made = plan_blocks(np.zeros(tokens), tokens, policy._build_config(tokens))
            expected = plan_blocks(
                np.zeros(tokens),
                tokens,
                H2OConfig(block_tokens=1, sink_tokens=0, recent_tokens=0, target_lossy_ratio=lossy),
            )
            assert made.target == expected.target
    assert H2OBlocks() == H2OBlocks.from_lossy_ratio(3.0)


@given(st.lists(st.integers(1, 90), max_size=6), st.integers(0, 4), st.integers(1, 20))
@quick
def test_policy_budget_and_equal_ratio_agree(lengths: list[int], sink: int, budget: int) -> None:
    for tokens in lengths:
        ratio = budget / tokens
        if math.ceil(ratio * tokens) != budget:
            continue
        view = LayerState(tokens=tokens)
        assert (
            RecentOnly(keep_ratio=ratio, skip_layers=()).select_or_all(view).tolist()
            == RecentOnly(budget=budget, skip_layers=()).select_or_all(view).tolist()
        )
        if budget > sink:
            assert (
                Streaming(keep_ratio=ratio, sink=sink).select_or_all(view).tolist()
                == Streaming(budget=budget, sink=sink).select_or_all(view).tolist()
            )


@given(st.integers(1, 300), st.floats(0, 1, exclude_min=True), st.sampled_from(["knorm", "streaming_press"]))
@quick
def test_prompt_policy_small_share_keeps_at_least_one_token(tokens: int, share: float, name: str) -> None:
    keys = np.arange(tokens, dtype=np.float32).reshape(1, tokens, 1)
    options = {"sink": 0} if name == "streaming_press" else {}
    kept = np.atleast_2d(
        create_policy(name, keep_ratio=share, **options).select_or_all(LayerState(tokens=tokens, keys=keys))
    )
    assert kept.shape[1] == max(1, int(share * tokens))


@pytest.mark.parametrize("name", sorted(name for name, kind in POLICIES.items() if issubclass(kind, BudgetedPolicy)))
def test_policy_small_share_of_eight_tokens_keeps_at_least_one(name: str) -> None:
    scores = np.arange(8, dtype=np.float32)
    policy = create_policy(name, keep_ratio=0.05, skip_layers=())
    ones = np.ones((2, 8, 4), np.float32)
    view = LayerState(
        tokens=8,
        keys=ones,
        values=ones,
        queries=ones,
        parameters=LayerParameters(2),
        scores=np.tile(scores, (2, 1)) if policy.is_per_head else scores,
    )
    if name == "streaming":
        with pytest.raises(OptionError, match=r"keep_ratio of 0\.05 is 1 of 8 tokens and leaves no window after 4 "):
            policy.select_or_all(view)
        return
    for moment in policy.triggers:
        assert policy.select_or_all(view, moment).shape[-1] >= 1


@given(st.integers(1, 200), st.floats(0, 1.5, exclude_min=True), st.integers(0, 12))
@quick
def test_streaming_share_is_refused_like_its_budget(tokens: int, share: float, sink: int) -> None:
    size = math.ceil(share * tokens)
    view = LayerState(tokens=tokens)
    policy = Streaming(keep_ratio=share, sink=sink)
    if size >= tokens or size > sink:
        expected = (
            list(range(tokens)) if size >= tokens else Streaming(budget=size, sink=sink).select_or_all(view).tolist()
        )
        assert policy.select_or_all(view).tolist() == expected
        return
    with pytest.raises(KvmnnError, match="leaves no window"):
        Streaming(budget=size, sink=sink)
    with pytest.raises(OptionError, match="leaves no window"):
        policy.select_or_all(view)
