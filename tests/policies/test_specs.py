"""Policies as people write them."""

from __future__ import annotations

import numpy as np
import pytest

from kvmnn import KvmnnError
from kvmnn.policies import POLICIES, Full, LayerView, Streaming
from kvmnn.policies.specs import make, numbers, options_of, parse_spec


def test_a_name_with_options() -> None:
    assert parse_spec("streaming") == ("streaming", {})
    assert parse_spec("l2_fixed:strategy=random,skip_layers=0+1") == (
        "l2_fixed",
        {"strategy": "random", "skip_layers": "0+1"},
    )
    for wrong, message in (("a:b", "'b' is not option=value"), ("a:b=1,b=2", "says b twice")):
        with pytest.raises(KvmnnError, match=message):
            parse_spec(wrong)


def test_a_policy_for_each_budget() -> None:
    assert list(options_of("streaming:sink=25%", (8, 16), (1,))) == [
        ("streaming", {"budget": 8, "sink": 2, "skip_layers": (1,)}),
        ("streaming", {"budget": 16, "sink": 4, "skip_layers": (1,)}),
    ]
    assert list(options_of("streaming:keep_ratio=0.5", (8, 16))) == [("streaming", {"keep_ratio": 0.5})]
    assert list(options_of("streaming")) == [("streaming", {})]


def test_a_budget_holds_in_every_layer_unless_somebody_says_otherwise() -> None:
    ((_, options),) = options_of("recent_only", (96,))
    assert make("recent_only", options).skip_layers == ()
    for name in POLICIES:
        ((_, options),) = options_of(name, (700,))
        assert make(name, options).skip_layers == ()
    ((_, options),) = options_of("l2_fixed:skip_layers=0+1", (96,))
    assert options["skip_layers"] == (0, 1)
    ((_, options),) = options_of("l2_fixed", (96,), (5,))
    assert options["skip_layers"] == (5,)


def test_the_full_cache_takes_nothing() -> None:
    assert list(options_of("full", (8, 16), (0,))) == [("full", {})]
    assert make("full", {}) == Full()
    with pytest.raises(KvmnnError, match="full has no option 'budget': expected none"):
        list(options_of("full:budget=3"))


def test_made() -> None:
    assert make("streaming", {"budget": 8}) == Streaming(budget=8)
    view = LayerView(tokens=40, keys=np.zeros((2, 40, 4), np.float32))
    options = {"budget": 5, "strategy": "random", "skip_layers": ()}
    first, again, other = (make("l2_fixed", options, seed).keep(view).tolist() for seed in ((1,), (1,), (2,)))
    assert first == again != other


def test_every_policy_can_be_asked_for() -> None:
    for name in POLICIES:
        ((found, options),) = options_of(name, (700,))
        assert make(found, options).name == name


def test_numbers() -> None:
    assert numbers("0+1,2") == (0, 1, 2) and numbers("none") == numbers("") == ()
    with pytest.raises(KvmnnError, match=r"'a': expected whole numbers such as 0\+1, or none"):
        numbers("a")
