"""The map of a plan's blocks."""

from __future__ import annotations

import numpy as np

from kvmnn.policies.h2o import plan_blocks
from kvmnn.policies.h2o.plan import render_block_map

RNG = np.random.default_rng(4)


def test_render_block_map_many_blocks_fit_the_width():
    made = plan_blocks(RNG.random(1 << 14), 1 << 20)
    lines = render_block_map(made, 80)
    assert len(lines) <= 8 and all(len(line) <= 80 for line in lines)
    assert set("".join(line.split(None, 1)[1] for line in lines)) <= set("S#R.123456789")
    kept = made.keep.reshape(1, -1).mean()
    digits = [int(letter) for line in lines for letter in line.split(None, 1)[1] if letter.isdigit()]
    assert abs(np.mean(digits) / 10 - kept) < 0.05
