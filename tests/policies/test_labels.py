"""What policies are called in tables and documents."""

from __future__ import annotations

import numpy as np

from kvmnn.policies import FullCache, H2OBlocks, H2OEngine, L2Fixed, L2Ratio, RecentOnly, Streaming
from kvmnn.policies.registry import LabelledPolicy, format_label


def test_format_label_names_non_default_options() -> None:
    assert format_label(Streaming, {"budget": 64, "sink": 4, "buffer": 2}) == "streaming 64 buffer=2"
    assert format_label(L2Ratio, {"keep_ratio": 0.5, "skip_layers": ()}) == "l2_ratio 0.5"
    assert format_label(L2Ratio, {"skip_layers": (0, 2)}) == "l2_ratio skip_layers=0+2"


def test_format_label_includes_default_budget() -> None:
    assert format_label(Streaming, {}) == LabelledPolicy.from_policy(Streaming()).label == "streaming 512"
    assert format_label(H2OBlocks, {"skip_layers": ()}) == "h2o_blocks 0.3333"
    assert format_label(H2OEngine, {}) == "h2o_engine"  # which has none
    assert format_label(L2Ratio, {"keep_ratio": 0.123456, "skip_layers": ()}) == "l2_ratio 0.1235"


def test_format_label_includes_default_skip_layers() -> None:
    assert format_label(RecentOnly, {"budget": 96}) == "recent_only 96 skip_layers=0+1"
    assert LabelledPolicy.from_policy(RecentOnly(budget=96)).label == "recent_only 96 skip_layers=0+1"
    assert LabelledPolicy.from_policy(RecentOnly(budget=96, skip_layers=())).label == "recent_only 96"


def test_labelled_policy_from_policy_has_its_label() -> None:
    assert LabelledPolicy.from_policy(FullCache()) == LabelledPolicy()
    named = LabelledPolicy.from_policy(Streaming(budget=64, skip_layers=(3,)))
    assert (named.label, named.options) == ("streaming 64 skip_layers=3", {"skip_layers": (3,), "budget": 64})
    assert named.to_dict() == {
        "label": "streaming 64 skip_layers=3",
        "policy": "streaming",
        "options": {"skip_layers": [3], "budget": 64},
        "preset": None,
        "seed_method": None,
        "positions": "true",
    }
    drawn = LabelledPolicy.from_policy(L2Fixed(budget=4, strategy="random", generator=np.random.default_rng(0)))
    assert drawn.label == "l2_fixed 4 skip_layers=0+1 strategy=random"
