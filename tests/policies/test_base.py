"""What the base does for every policy, and how little a policy of one's own has to say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest
from policy_models import fit, make, view

from kvmnn import KvmnnError
from kvmnn.policies import POLICIES, Budgeted, EvictingCache, Full, LayerView, Moment, Policy, View, create


def test_prompt_only() -> None:
    for name in ("knorm", "observed_attention", "streaming_press"):
        policy = make(name, {"budget": 5})
        assert policy.choose(fit(policy, view(60, new=60, seen=60))) is not None
        assert policy.choose(fit(policy, view(60, new=1, seen=60))) is None
        assert policy.choose(fit(policy, view(60, new=20, seen=80))) is None


def test_budgets_round_as_their_originals() -> None:
    assert [create("knorm", keep_ratio=1 - 0.9).size(20), create("l2_ratio", keep_ratio=0.5).size(7)] == [1, 4]  # type: ignore[attr-defined]
    assert all(issubclass(policy, Budgeted) for policy in POLICIES.values())


@dataclass(frozen=True, kw_only=True)
class EveryOther(Policy):
    """The least that a policy can be."""

    name = "every_other"

    def rule(self, view: View) -> np.ndarray:
        return np.arange(0, view.tokens, 2)


@dataclass(frozen=True, kw_only=True)
class AboveMean(Policy):
    """Each row its own number of tokens."""

    name = "above_mean"
    needs: ClassVar = "scores"

    def rule(self, view: View) -> list[np.ndarray]:
        return [np.flatnonzero(row > row.mean()) for row in view.row_scores()]


@dataclass(frozen=True, kw_only=True)
class AboveMeanByHead(AboveMean):
    name = "above_mean_by_head"
    needs: ClassVar = "head scores"


def test_the_least_that_a_policy_can_be() -> None:
    policy = EveryOther(skip_layers=(1,))
    assert policy.keep(LayerView(tokens=5)).tolist() == [0, 2, 4]
    assert policy.choose(LayerView(tokens=5, layer=1)) is None
    assert policy.choose(LayerView(tokens=5), Moment.CHUNK_END) is None
    assert policy.choose(LayerView(tokens=5, moment=Moment.APPENDED)) is None
    assert policy.options() == {"skip_layers": (1,)}
    assert (policy.needs, policy.by_head, policy.needs_attention, policy.needs_norms) == ("lengths",) + (False,) * 3
    cache = EvictingCache(policy)
    cache.append(*np.zeros((2, 1, 7, 2), np.float32))
    assert cache.attended().positions.tolist() == [0, 2, 4, 6]


def test_rows_of_different_lengths() -> None:
    scores = np.array([[1, 2, 3], [0, 0, 9]], np.float32)
    one = AboveMean()
    assert one.keep(LayerView(tokens=3, scores=scores[0])).tolist() == [2]
    stacked = one.choose_stacked(View(tokens=3, scores=scores))
    assert stacked is not None and [row.tolist() for row in stacked] == [[2], [2]]
    assert isinstance(stacked, np.ndarray)
    scores[1] = [5, 0, 5]
    stacked = one.choose_stacked(View(tokens=3, scores=scores))
    assert isinstance(stacked, list) and [row.tolist() for row in stacked] == [[2], [0, 2]]
    with pytest.raises(KvmnnError, match="layer 2: above_mean_by_head keeps different numbers of tokens in heads"):
        AboveMeanByHead().choose(LayerView(tokens=3, layer=2, scores=scores))


def test_keeping_everything_is_a_policy() -> None:
    full = Full()
    assert (full.evicts, full.skip_layers, full.options(), full.needs) == (False, (), {}, "lengths")
    assert all(policy.moments for policy in POLICIES.values()) and full.name not in POLICIES
    assert create("full") == full
    for moment in Moment:
        assert full.choose(LayerView(tokens=9), moment) is None
        assert full.keep(LayerView(tokens=3), moment).tolist() == [0, 1, 2]
    with pytest.raises(KvmnnError, match="full has no option 'skip_layers': expected none"):
        create("full", skip_layers=(0,))
