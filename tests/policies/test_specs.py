"""Policy specs: names, options and budgets as users write them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvmnn import KvmnnError
from kvmnn.policies import POLICIES, FullCache, LayerState, Streaming, create_policy
from kvmnn.policies.option_parser import parse_ints
from kvmnn.policies.specs import build_policy, expand_spec, split_spec


def test_split_spec_parses_name_and_options() -> None:
    assert split_spec("streaming") == ("streaming", {})
    assert split_spec("l2_fixed:strategy=random,skip_layers=0+1") == (
        "l2_fixed",
        {"strategy": "random", "skip_layers": "0+1"},
    )
    for wrong, message in (("a:b", "'b' is not option=value"), ("a:b=1,b=2", "says b twice")):
        with pytest.raises(KvmnnError, match=message):
            split_spec(wrong)


def test_expand_spec_makes_a_policy_per_budget() -> None:
    assert list(expand_spec("streaming:sink=25%", (8, 16), (1,))) == [
        ("streaming", {"budget": 8, "sink": 2, "skip_layers": (1,)}),
        ("streaming", {"budget": 16, "sink": 4, "skip_layers": (1,)}),
    ]
    assert list(expand_spec("streaming:keep_ratio=0.5", (8, 16))) == [("streaming", {"keep_ratio": 0.5})]
    assert list(expand_spec("streaming")) == [("streaming", {})]


def test_expand_spec_budget_applies_to_every_layer_by_default() -> None:
    ((_, options),) = expand_spec("recent_only", (96,))
    assert build_policy("recent_only", options).skip_layers == ()
    for name in POLICIES:
        ((_, options),) = expand_spec(name, (700,))
        assert build_policy(name, options).skip_layers == ()
    ((_, options),) = expand_spec("l2_fixed:skip_layers=0+1", (96,))
    assert options["skip_layers"] == (0, 1)
    ((_, options),) = expand_spec("l2_fixed", (96,), (5,))
    assert options["skip_layers"] == (5,)


def test_expand_spec_full_cache_has_no_options() -> None:
    assert list(expand_spec("full", (8, 16), (0,))) == [("full", {})]
    assert build_policy("full", {}) == FullCache()
    with pytest.raises(KvmnnError, match="full has no option 'budget': expected none"):
        list(expand_spec("full:budget=3"))


def test_build_policy_seeds_random_policies() -> None:
    assert build_policy("streaming", {"budget": 8}) == Streaming(budget=8)
    view = LayerState(tokens=40, keys=np.zeros((2, 40, 4), np.float32))
    options = {"budget": 5, "strategy": "random", "skip_layers": ()}
    first, again, other = (
        build_policy("l2_fixed", options, seed).select_or_all(view).tolist() for seed in ((1,), (1,), (2,))
    )
    assert first == again != other


def test_expand_spec_accepts_every_policy() -> None:
    for name in POLICIES:
        ((found, options),) = expand_spec(name, (700,))
        assert build_policy(found, options).name == name


def test_parse_ints_accepts_plus_and_comma() -> None:
    assert parse_ints("0+1,2") == (0, 1, 2) and parse_ints("none") == parse_ints("") == ()
    with pytest.raises(KvmnnError, match=r"'a': expected whole numbers such as 0\+1, or none"):
        parse_ints("a")


def test_expand_spec_reads_yes_and_no() -> None:
    (found,) = expand_spec("expected_attention:covariance=no,value_norm=yes,keep_ratio=0.5")
    assert found == (
        "expected_attention",
        {
            "covariance": False,
            "value_norm": True,
            "keep_ratio": 0.5,
        },
    )
    with pytest.raises(KvmnnError, match="expected_attention: covariance is 'maybe': expected yes or no"):
        list(expand_spec("expected_attention:covariance=maybe"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"policies": "keydiff"}, "two or more"),
        ({"policies": "keydiff+nothing"}, "no scored policy"),
        ({"policies": "keydiff+snapkv@window"}, "NAME@option=value"),
        ({"policies": "keydiff+snapkv@wrapper=ada"}, "different numbers of tokens"),
        ({"policies": "keydiff+think"}, "keep_ratio of its own"),
        ({"policies": "think@keep_ratio=0.5+keydiff"}, "comes last"),
        ({"policies": "keydiff+compactor", "phase": "both"}, "expected phase prompt"),
        ({"policies": "keydiff+tova", "by_layer": (1, 2)}, "as options of these"),
    ],
)
def test_composed_invalid_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(KvmnnError, match=message):
        create_policy("composed", budget=10, **options)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("qfilter", {}, "expected profile=FILE"),
        ("duo_attention", {}, "expected pattern=FILE"),
        ("duo_attention", {"pattern": "x", "wrapper": "ada"}, "expected none"),
        ("think", {"phase": "both"}, "channels of a prompt"),
        ("keydiff", {"by_layer": (0, 0)}, "above 0"),
        ("keydiff", {"by_layer": (-1.0,)}, "share from 0 on"),
        ("keydiff", {"share_of": "all"}, "stored, seen"),
    ],
)
def test_scored_invalid_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(KvmnnError, match=message):
        create_policy(name, budget=10, **options)


def test_by_layer_spec_is_numbers_between_plus_signs() -> None:
    assert list(expand_spec("keydiff:by_layer=2+1+0.5", [10])) == [
        ("keydiff", {"budget": 10, "by_layer": (2.0, 1.0, 0.5)})
    ]
