"""Scores from attention: groups, means and decay; non-finite values stay in their column."""

from __future__ import annotations

import numpy as np
import pytest
from policy_models import OPTIONS, make

from kvmnn import KvmnnError
from kvmnn.policies import POLICIES, LayerState, create_policy


def test_sum_columns_invalid_attention_is_refused() -> None:
    policy = create_policy("h2o_tokens")
    for weights, heads, message in (
        (np.zeros((3, 4)), 1, "expected floats"),
        (np.zeros((3, 1, 4), np.int32), 1, "expected floats"),
        (np.zeros((3, 1, 4)), 2, "3 query heads do not form groups for 2"),
        (np.zeros((3, 1, 4)), 0, "for 0 KV heads"),
    ):
        with pytest.raises(KvmnnError, match=message):
            policy.sum_columns(weights, heads)
    observed = create_policy("observed_attention", budget=1)
    with pytest.raises(KvmnnError, match="5 queries for 4 keys: expected at most as many"):
        observed.sum_columns(np.zeros((1, 5, 4)), 1)
    assert observed.sum_columns(np.ones((1, 3, 4)), 1).tolist() == [[0.0] * 4]
    assert observed.sum_columns(np.tri(3)[None], 1).tolist() == [[1.0, 1.0, 1.0]]
    with pytest.raises(KvmnnError, match="4 tokens: streaming_press needs more than its 4 sinks"):
        create_policy("streaming_press", budget=2).select(LayerState(tokens=4))


@pytest.mark.parametrize("name", [name for name in POLICIES if "scores" in POLICIES[name].requires])
def test_sum_columns_non_finite_attention_emits_no_warning(name: str) -> None:
    weights = np.ones((4, 3, 3), np.float32)
    weights[0, :, 0] = [np.inf, -np.inf, 1]
    weights[1, 0, 1] = np.nan
    sums = make(name, {**OPTIONS[name][0], "budget": 12}).sum_columns(weights, 2)
    row = sums if sums.ndim == 1 else sums[0]
    assert sums.shape == ((3,) if POLICIES[name].requires == "scores" else (2, 3)) and sums.dtype == np.float32
    assert np.isnan(row[:2]).all() and np.isfinite(row[2])
