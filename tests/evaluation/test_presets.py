"""The projects' own tables."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from kvmnn.errors import KvmnnError
from kvmnn.evaluation.presets import PRESETS, expand_preset
from kvmnn.policies import LayerState, Streaming


def test_expand_preset_knorm_fixed():
    found = expand_preset("knorm-fixed")
    assert [entry.policy for entry in found] == ["full", *(["l2_fixed"] * 3 + ["recent_only"]) * 3]
    assert [entry.options.get("budget") for entry in found] == [None, *[256] * 4, *[512] * 4, *[1024] * 4]
    assert [entry.options["strategy"] for entry in found[1:4]] == ["keep_low", "keep_high", "random"]
    assert all(entry.options["recent_ratio"] == 0.2 for entry in found if entry.policy == "l2_fixed")
    assert all(entry.options["skip_layers"] == (0, 1) for entry in found[1:])
    assert all((entry.definition.evaluation, entry.definition.chunk) == ("E1", 1) for entry in found)


def test_expand_preset_knorm_fixed_with_script_arguments():
    found = expand_preset(
        "knorm-fixed:fix_kv_sizes=256+512,strategies=keep_low+random,keep_ratio=0.1+0.2+0.3,skip_layers=none"
    )
    assert len(found) == 1 + 2 * (2 * 3 + 1)
    assert {entry.options["recent_ratio"] for entry in found if entry.policy == "l2_fixed"} == {0.1, 0.2, 0.3}
    assert all(entry.options["skip_layers"] == () for entry in found[1:])
    assert len({entry.label for entry in found}) == len(found)


def test_expand_preset_knorm_ratio():
    found = expand_preset("knorm-ratio:keep_ratios=1.0+0.5,prune_after=100")
    assert [entry.policy for entry in found] == ["full", "l2_ratio", "l2_ratio"]
    assert found[2].options == {"keep_ratio": 0.5, "prune_after": 100, "skip_layers": (0, 1)}
    assert found[2].create_policy().form == "seed"
    assert expand_preset("knorm-ratio", skip_layers=(3,))[1].options["skip_layers"] == (3,)


def test_expand_preset_streaming_h2o():
    found = expand_preset("streaming-h2o")
    assert [entry.label for entry in found] == [
        "baseline",
        "streaming_8_256",
        "streaming_8_512",
        "h2o_4_32_256",
        "h2o_8_32_256",
        "h2o_8_64_512",
    ]
    assert found[1].create_policy() == Streaming.from_window(8, 256)
    assert found[2].create_policy().budget == 520
    last = found[5].create_policy()
    assert (last.budget, last.sink, last.recent, last.buffer) == (512, 8, 64, 64)
    assert [entry.definition.chunk for entry in found] == [1024, 256, 512, 256, 256, 512]
    assert all(entry.definition.evaluation == "E2" and entry.definition.speed for entry in found)


def test_expand_preset_can_omit_entries():
    labels = [
        entry.label for entry in expand_preset("knorm-fixed:fix_kv_sizes=512,strategies=keep_low,skip_layers=none")
    ]
    assert labels == ["baseline", "fix 512 keep_low 0.2", "recent_only 512"]
    spec = "knorm-fixed:fix_kv_sizes=512,strategies=keep_low,keep_ratios=0.1+0.2+0.3,no_baseline,no_recent_only"
    assert [entry.definition.label for entry in expand_preset(spec)] == [f"fix 512 keep_low 0.{n}" for n in (1, 2, 3)]
    for name in PRESETS:
        assert [entry.label for entry in expand_preset(name)[1:]] == [
            entry.label for entry in expand_preset(f"{name}:no_baseline")
        ]


def test_expand_preset_ablation_changes_one_thing_at_a_time():
    entries = expand_preset("knorm-ablation:keep_ratio=0.7,prune_after=20,fix_kv_size=16,recent=0.25")
    _, first, threshold, order, pure, hybrid = (entry.create_policy() for entry in entries)
    assert len({(entry.keep_ratio, entry.skip_layers) for entry in (first, threshold, order)}) == 1
    keys = np.random.default_rng(3).standard_normal((2, 21, 4)).astype(np.float32)
    views = {n: LayerState(tokens=n, keys=keys[:, :n], layer=5) for n in (20, 21)}
    assert first.select(views[20]) is not None  # the paper's code cuts at the threshold, the project above it
    assert threshold.select(views[20]) is None and order.select(views[20]) is None
    one, other = threshold.select_or_all(views[21]), order.select_or_all(views[21])
    assert one.tolist() != other.tolist() and np.sort(one).tolist() == other.tolist()  # the order, and nothing else
    assert (pure.recent_ratio, hybrid.recent_ratio, pure.budget, hybrid.budget) == (0.0, 0.25, 16, 16)
    assert replace(hybrid, recent_ratio=0.0) == pure


def test_expand_preset_streaming_h2o_sizes_follow_options():
    def labels(options):
        return [entry.label for entry in expand_preset(f"streaming-h2o:{options},no_baseline")]

    assert labels("capacity=1024") == ["streaming_8_1024", "h2o_4_32_1024", "h2o_8_32_1024", "h2o_8_64_1024"]
    assert labels("heavy_hitter=100,sink=4,recent=20") == ["streaming_4_124", "h2o_4_20_124"]
    assert labels("recent=16+64,sink=2,capacity=128") == ["streaming_2_128", "h2o_2_16_128", "h2o_2_64_128"]
    assert [entry.options["budget"] for entry in expand_preset("streaming-h2o:capacity=128,sink=2,no_baseline")] == [
        130,
        128,
        128,
    ]


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_expand_preset_entries_name_preset_and_project_label(name):
    for entry in expand_preset(name):
        skipped = "+".join(map(str, entry.options.get("skip_layers", ())))
        ours = entry.definition.label + (f" skip_layers={skipped}" if skipped else "")  # what the project does not say
        assert (entry.preset, entry.label) == (name, ours)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("knorm", "unknown preset 'knorm': expected one of knorm-fixed, knorm-ratio, knorm-ablation, streaming-h2o"),
        (
            "knorm-ratio:keep_ratio=1",
            "preset knorm-ratio has no option 'keep_ratio': expected keep_ratios, prune_after",
        ),
        ("streaming-h2o:window=4", "preset streaming-h2o has no option 'window': expected sink, heavy_hitter, recent"),
        ("streaming-h2o:heavy_hitter=4,capacity=8", "capacity is sink [+] heavy_hitter [+] recent: say one"),
        ("streaming-h2o:capacity=20", "capacity 20 has no room for 4 sinks and 32 recent"),
        ("knorm-ratio:no_recent_only", "preset knorm-ratio has no option 'no_recent_only'"),
        ("knorm-fixed:no_baseline=maybe", "no_baseline takes no value"),
        ("knorm-fixed:keep_ratio=0.1,keep_ratios=0.2", "are the same: say one"),
        ("knorm-fixed:strategies", "'strategies' is not option=value"),
        ("knorm-ablation:keep_ratio=0.1+0.2", "keep_ratio is '0.1[+]0.2': expected one share"),
        ("knorm-fixed:strategies=best", "strategy is 'best'"),
        ("knorm-fixed:fix_kv_sizes=many", "expected whole numbers"),
        ("knorm-ratio:keep_ratios=-1", "keep_ratio is -1"),
        ("knorm-ratio:prune_after=1+2", "prune_after"),
    ],
)
def test_expand_preset_invalid_spec_is_refused(spec, message):
    with pytest.raises(KvmnnError, match=message):
        expand_preset(spec)
