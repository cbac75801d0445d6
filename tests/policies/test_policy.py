"""What the base class does for every policy, and how small a policy of one's own can be."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from policy_models import fit, make, view

from kvmnn import KvmnnError
from kvmnn.policies import (
    POLICIES,
    BudgetedPolicy,
    EvictingCache,
    FullCache,
    LayerState,
    Policy,
    PolicyInput,
    Trigger,
    create_policy,
)


def test_prompt_policies_evict_only_at_the_prompt() -> None:
    for name in ("knorm", "observed_attention", "streaming_press"):
        policy = make(name, {"budget": 5})
        assert policy.select(fit(policy, view(60, num_new=60, num_seen=60))) is not None
        assert policy.select(fit(policy, view(60, num_new=1, num_seen=60))) is None
        assert policy.select(fit(policy, view(60, num_new=20, num_seen=80))) is None


def test_policy_budgets_round_like_their_originals() -> None:
    assert [
        create_policy("knorm", keep_ratio=1 - 0.9).resolve_budget(20),
        create_policy("l2_ratio", keep_ratio=0.5).resolve_budget(7),
    ] == [
        1,
        4,
    ]  # type: ignore[attr-defined]
    assert all(issubclass(policy, BudgetedPolicy) for policy in POLICIES.values())


@dataclass(frozen=True, kw_only=True)
class EveryOther(Policy):
    """The least that a policy can be."""

    name = "every_other"

    def select_tokens(self, view: PolicyInput) -> np.ndarray:
        return np.arange(0, view.tokens, 2)


@dataclass(frozen=True, kw_only=True)
class AboveMean(Policy):
    """Each row its own number of tokens."""

    name = "above_mean"
    requires: ClassVar = "scores"

    def select_tokens(self, view: PolicyInput) -> list[np.ndarray]:
        return [np.flatnonzero(row > row.mean()) for row in view.get_row_scores()]


@dataclass(frozen=True, kw_only=True)
class AboveMeanByHead(AboveMean):
    name = "above_mean_by_head"
    requires: ClassVar = "head scores"


def test_minimal_policy_of_one_method_works() -> None:
    policy = EveryOther(skip_layers=(1,))
    assert policy.select_or_all(LayerState(tokens=5)).tolist() == [0, 2, 4]
    assert policy.select(LayerState(tokens=5, layer=1)) is None
    assert policy.select(LayerState(tokens=5), Trigger.CHUNK_END) is None
    assert policy.select(LayerState(tokens=5, trigger=Trigger.AFTER_APPEND)) is None
    assert policy.to_options() == {"skip_layers": (1,)}
    assert (policy.requires, policy.is_per_head, policy.requires_attention, policy.requires_norms) == ("lengths",) + (
        False,
    ) * 3
    cache = EvictingCache(policy)
    cache.append(*np.zeros((2, 1, 7, 2), np.float32))
    assert cache.finish_attention().positions.tolist() == [0, 2, 4, 6]


@dataclass(frozen=True, kw_only=True)
class Given(Policy):
    name = "given"
    indices: tuple[int, ...] = ()

    def select_tokens(self, view: PolicyInput) -> np.ndarray:
        return np.array(self.indices)


@pytest.mark.parametrize(
    ("indices", "reason"),
    [((0, 5, 35), "token 35"), ((3, -1), "token -1"), ((4, 0, 4), "token 4 more than once")],
)
def test_policy_selection_of_tokens_that_are_not_stored_is_refused(indices: tuple[int, ...], reason: str) -> None:
    with pytest.raises(KvmnnError, match=f"layer 2: given selects {reason}: expected distinct tokens among the 32 "):
        Given(indices=indices).select_or_all(LayerState(tokens=32, layer=2))
    assert Given(indices=(31, 0)).select_or_all(LayerState(tokens=32)).tolist() == [31, 0]


def test_policy_rows_of_different_lengths_when_stacked() -> None:
    scores = np.array([[1, 2, 3], [0, 0, 9]], np.float32)
    one = AboveMean()
    assert one.select_or_all(LayerState(tokens=3, scores=scores[0])).tolist() == [2]
    stacked = one.select_stacked(PolicyInput(tokens=3, scores=scores))
    assert stacked is not None and [row.tolist() for row in stacked] == [[2], [2]]
    assert isinstance(stacked, np.ndarray)
    scores[1] = [5, 0, 5]
    stacked = one.select_stacked(PolicyInput(tokens=3, scores=scores))
    assert isinstance(stacked, list) and [row.tolist() for row in stacked] == [[2], [0, 2]]
    with pytest.raises(KvmnnError, match="layer 2: above_mean_by_head keeps different numbers of tokens in heads"):
        AboveMeanByHead().select(LayerState(tokens=3, layer=2, scores=scores))


def test_full_cache_never_evicts() -> None:
    full = FullCache()
    assert (full.can_evict, full.skip_layers, full.to_options(), full.requires) == (False, (), {}, "lengths")
    assert all(policy.triggers for policy in POLICIES.values()) and full.name not in POLICIES
    assert create_policy("full") == full
    for moment in Trigger:
        assert full.select(LayerState(tokens=9), moment) is None
        assert full.select_or_all(LayerState(tokens=3), moment).tolist() == [0, 1, 2]
    with pytest.raises(KvmnnError, match="full has no option 'skip_layers': expected none"):
        create_policy("full", skip_layers=(0,))
