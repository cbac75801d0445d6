"""Policies from the command line."""

from __future__ import annotations

import json

import numpy as np
import pytest

from kvmnn.errors import KvmnnError, OptionError
from kvmnn.evaluation.runner import compute_cell_key
from kvmnn.evaluation.settings import (
    Configuration,
    EvaluationSettings,
    ProjectDefinition,
    expand_configurations,
    parse_ratios,
    resolve_configurations,
)
from kvmnn.lm.documents import Document
from kvmnn.policies import POLICIES, FullCache, LayerState
from kvmnn.policies.option_parser import parse_ints


def test_expand_configurations_pairs_policies_with_budgets():
    found = expand_configurations(["streaming:sink=8", "recent_only"], [64, 128], (0,))
    assert [(entry.label, dict(entry.options)) for entry in found] == [
        ("streaming 64 skip_layers=0 sink=8", {"budget": 64, "sink": 8, "skip_layers": (0,)}),
        ("streaming 128 skip_layers=0 sink=8", {"budget": 128, "sink": 8, "skip_layers": (0,)}),
        ("recent_only 64 skip_layers=0", {"budget": 64, "skip_layers": (0,)}),
        ("recent_only 128 skip_layers=0", {"budget": 128, "skip_layers": (0,)}),
    ]


def test_expand_configurations_spec_with_size_is_used_once():
    found = expand_configurations(["streaming:budget=99", "l2_ratio:keep_ratio=0.5", "full"], [64, 128])
    assert [entry.policy for entry in found] == ["streaming", "l2_ratio", "full"]
    assert found[0].options["budget"] == 99
    assert found[1].options["keep_ratio"] == 0.5
    assert found[2].create_policy() == FullCache()


@pytest.mark.parametrize("budget", ["125%", "100%", "-1", "x"])
def test_resolve_configurations_refuses_budgets_that_the_command_refuses(budget):
    with pytest.raises(OptionError, match=r"not a whole number of tokens or a share below 100%"):
        resolve_configurations(["streaming"], [budget], 100)
    assert resolve_configurations(["streaming"], ["99.5%"], 200)[0].create_policy().budget == 199


def test_resolve_configurations_unused_budgets_are_refused():
    for specs in (["h2o_engine"], ["full", "h2o_engine:block_tokens=8"], ["full"]):
        with pytest.raises(OptionError, match="a budget of 64 and 128 tokens has no effect here"):
            expand_configurations(specs, [64, 128])
    with pytest.raises(OptionError, match="h2o_engine: it has none: target_lossy_ratio, or target_keep_ratio with"):
        resolve_configurations(["h2o_engine"], 64, 100)
    assert len(expand_configurations(["full", "h2o_engine", "streaming"], [64, 128])) == 4
    assert expand_configurations([], [64]) == []


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_expand_configurations_accepts_every_policy(name):
    (found,) = expand_configurations([name], [700])
    policy = found.create_policy()
    assert policy.name == name
    assert policy.budget == 700
    assert Configuration.from_dict(json.loads(json.dumps(found.to_dict()))) == found
    assert json.dumps(found.identity)


def test_expand_configurations_values_have_declared_types():
    (found,) = expand_configurations(["l2_fixed:recent_ratio=1,strategy=keep_high,skip_layers=none"], [10])
    assert found.options == {"budget": 10, "recent_ratio": 1.0, "strategy": "keep_high", "skip_layers": ()}
    (found,) = expand_configurations(["h2o_tokens:recent=25%,sink=10%"], [130])
    assert (found.options["recent"], found.options["sink"]) == (32, 13)
    (found,) = expand_configurations(["h2o_tokens:budget=40,recent=50%"], [130])
    assert found.options["recent"] == 20


def test_configuration_random_policy_uses_its_seed():
    (found,) = expand_configurations(["l2_fixed:strategy=random,skip_layers=none"], [5])
    view = LayerState(tokens=40, keys=np.zeros((2, 40, 4), np.float32))
    first, again, other = (found.create_policy(seed).select_or_all(view).tolist() for seed in ((1, 2), (1, 2), (1, 3)))
    assert first == again
    assert first != other
    assert "generator" not in found.identity["options"]


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("stream", "unknown policy 'stream': expected full or one of l2_ratio"),
        ("streaming:sinks=3", "streaming has no option 'sinks': expected"),
        ("streaming:sink", "'streaming:sink': 'sink' is not option=value"),
        ("streaming:sink=3,sink=4", "says sink twice"),
        ("streaming:sink=x", "streaming: sink is 'x': expected a whole number"),
        ("streaming:sink=-1", "streaming: sink is '-1': expected a whole number"),
        ("streaming:sink=64", "leaves no window after 64 sinks"),
        ("l2_fixed:recent_ratio=much", "recent_ratio is 'much': expected a number"),
        ("l2_fixed:strategy=best", "strategy is 'best'"),
        ("l2_fixed:skip_layers=a", "'a': expected whole numbers such as 0[+]1, or none"),
        ("full:budget=3", "full has no option 'budget'"),
        ("l2_fixed:generator=1", "l2_fixed has no option 'generator': expected budget, keep_ratio"),
    ],
)
def test_expand_configurations_invalid_spec_is_refused(spec, message):
    with pytest.raises((KvmnnError, TypeError), match=message):
        expand_configurations([spec], [64])


def test_expand_configurations_share_needs_a_length():
    with pytest.raises(KvmnnError, match="a share of what"):
        expand_configurations(["h2o_tokens:keep_ratio=0.5,recent=50%"], [])


def test_parse_ints_and_parse_ratios_lists():
    assert parse_ints("0+1,2") == (0, 1, 2)
    assert parse_ints("none") == parse_ints("") == ()
    assert parse_ratios("0.2+1") == (0.2, 1.0)
    for wrong in ("nan", "1+x", "inf"):
        with pytest.raises(KvmnnError, match="expected"):
            parse_ratios(wrong)


def test_cell_keys_follow_the_content_of_profiles_not_their_names(tmp_path):
    document = Document(name="a.txt", ids=np.arange(9), nbytes=20, sha256="0" * 64)

    def compute_keys(name):
        path = str(tmp_path / name)
        settings = EvaluationSettings(lossless={"kv_lossless_codec": "transform", "kv_lossless_profile": path})
        plain = EvaluationSettings()
        configurations = (
            Configuration("codec", codec=f"transform:profile={tmp_path / 'p.kvmp'},kl=0.01"),
            Configuration("policy", "qfilter", {"profile": str(tmp_path / "p.kvmp"), "budget": 8}),
        )
        keys = [compute_cell_key("score", "0" * 64, entry, document, plain, {}) for entry in configurations]
        return [*keys, compute_cell_key("score", "0" * 64, Configuration("full"), document, settings, {})]

    (tmp_path / "p.kvmp").write_bytes(b"first")
    (tmp_path / "copy.kvmp").write_bytes(b"first")
    first = compute_keys("p.kvmp")
    assert first == compute_keys("copy.kvmp") and len(set(first)) == 3
    (tmp_path / "p.kvmp").write_bytes(b"second")
    assert not set(first) & set(compute_keys("p.kvmp"))


def test_configuration_identity_has_defaults_and_no_label():
    one = Configuration("a", "streaming", {"budget": 512}, "p", ProjectDefinition("E1", "x"))
    two = Configuration("b", "streaming", {"budget": 512, "sink": 4, "skip_layers": ()})
    assert one.identity == two.identity
    assert one.identity != Configuration("a", "streaming", {"budget": 512}, positions="stored").identity
