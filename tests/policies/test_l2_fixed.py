"""The random strategy of `l2_fixed`."""

from __future__ import annotations

import numpy as np

from kvmnn.policies import L2Fixed, LayerState


def test_l2_fixed_random_is_uniform_and_independent_per_head() -> None:
    policy = L2Fixed(budget=10, recent_ratio=0.2, strategy="random", generator=np.random.default_rng(0), skip_layers=())
    counts = np.zeros(20, int)
    different = 0
    for _ in range(400):
        kept = policy.select_or_all(LayerState(tokens=22, keys=np.zeros((2, 22, 1), np.float32)))
        assert kept[:, 8:].tolist() == [[20, 21]] * 2
        different += kept[0].tolist() != kept[1].tolist()
        np.add.at(counts, kept[:, :8].reshape(-1), 1)
    assert different > 390 and counts.min() > 250 and counts.max() < 390  # 320 expected, deviation 14
