"""The projects' own tables."""

from __future__ import annotations

import pytest

from kvmnn.errors import KvmnnError
from kvmnn.evaluation.setup.presets import PRESETS, preset
from kvmnn.policies import Streaming


def test_knorm_fixed():
    found = preset("knorm-fixed")
    assert [entry.policy for entry in found] == ["full", *(["l2_fixed"] * 3 + ["recent_only"]) * 3]
    assert [entry.options.get("budget") for entry in found] == [None, *[256] * 4, *[512] * 4, *[1024] * 4]
    assert [entry.options["strategy"] for entry in found[1:4]] == ["keep_low", "keep_high", "random"]
    assert all(entry.options["recent_ratio"] == 0.2 for entry in found if entry.policy == "l2_fixed")
    assert all(entry.options["skip_layers"] == (0, 1) for entry in found[1:])
    assert all((entry.definition.evaluation, entry.definition.chunk) == ("E1", 1) for entry in found)


def test_knorm_fixed_with_the_scripts_own_arguments():
    found = preset(
        "knorm-fixed:fix_kv_sizes=256+512,strategies=keep_low+random,keep_ratio=0.1+0.2+0.3,skip_layers=none"
    )
    assert len(found) == 1 + 2 * (2 * 3 + 1)
    assert {entry.options["recent_ratio"] for entry in found if entry.policy == "l2_fixed"} == {0.1, 0.2, 0.3}
    assert all(entry.options["skip_layers"] == () for entry in found[1:])
    assert len({entry.label for entry in found}) == len(found)


def test_knorm_ratio():
    found = preset("knorm-ratio:keep_ratios=1.0+0.5,prune_after=100")
    assert [entry.policy for entry in found] == ["full", "l2_ratio", "l2_ratio"]
    assert found[2].options == {"keep_ratio": 0.5, "prune_after": 100, "skip_layers": (0, 1)}
    assert found[2].make().form == "seed"
    assert preset("knorm-ratio", skip_layers=(3,))[1].options["skip_layers"] == (3,)


def test_streaming_h2o():
    found = preset("streaming-h2o")
    assert [entry.label for entry in found] == [
        "baseline",
        "streaming_8_256",
        "streaming_8_512",
        "h2o_4_32_256",
        "h2o_8_32_256",
        "h2o_8_64_512",
    ]
    assert found[1].make() == Streaming.lazy(8, 256)
    assert found[2].make().budget == 520
    last = found[5].make()
    assert (last.budget, last.sink, last.recent, last.buffer) == (512, 8, 64, 64)
    assert [entry.definition.chunk for entry in found] == [1024, 256, 512, 256, 256, 512]
    assert all(entry.definition.evaluation == "E2" and entry.definition.speed for entry in found)


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_every_entry_names_its_preset_and_its_projects_label(name):
    for entry in preset(name):
        skipped = "+".join(map(str, entry.options.get("skip_layers", ())))
        ours = entry.definition.label + (f" skip_layers={skipped}" if skipped else "")  # what the project does not say
        assert (entry.preset, entry.label) == (name, ours)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("knorm", "unknown preset 'knorm': expected one of knorm-fixed, knorm-ratio, streaming-h2o"),
        (
            "knorm-ratio:keep_ratio=1",
            "preset knorm-ratio has no option 'keep_ratio': expected keep_ratios, prune_after",
        ),
        ("streaming-h2o:sink=4", "preset streaming-h2o has no option 'sink': expected none"),
        ("knorm-fixed:strategies=best", "strategy is 'best'"),
        ("knorm-fixed:fix_kv_sizes=many", "expected whole numbers"),
        ("knorm-ratio:keep_ratios=-1", "keep_ratio is -1"),
        ("knorm-ratio:prune_after=1+2", "prune_after"),
    ],
)
def test_what_cannot_be(spec, message):
    with pytest.raises(KvmnnError, match=message):
        preset(spec)
