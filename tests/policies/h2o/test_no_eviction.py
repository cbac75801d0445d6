"""`explain_no_eviction` says of lengths up to a number what plans of all of them do."""

from __future__ import annotations

import random

import numpy as np
import pytest

from kvmnn.policies.h2o import H2OConfig
from kvmnn.policies.h2o.plan import explain_no_eviction, plan_blocks


@pytest.mark.parametrize("seed", range(12))
def test_explain_no_eviction_equals_plans_of_all_lengths(seed: int) -> None:
    draw = random.Random(seed)
    config = H2OConfig(
        block_tokens=draw.choice([1, 8, 16, 32, 64]),
        sink_tokens=draw.choice([0, 4, 32, 64]),
        recent_tokens=draw.choice([0, 16, 96, 256]),
        target_mode=draw.choice(["adaptive", "static"]),
        target_lossy_ratio=draw.choice([1.0, 1.5, 2.0, 3.0]),
        target_keep_ratio=draw.choice([0.1, 0.5, 0.9]),
        trigger_min_tokens=draw.choice([1, 64, 200]),
    )
    drops = False
    for tokens in range(1, 320):
        if tokens >= config.effective_trigger_tokens and not drops:
            drops = bool(plan_blocks(np.zeros(config.count_blocks(tokens), np.float32), tokens, config).num_evicted)
        if tokens % 9 == 0:
            assert (explain_no_eviction(config, tokens) is None) == drops, (config, tokens)
