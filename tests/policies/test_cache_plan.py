"""Plans of a policy for a stored layer, and how they are written."""

from __future__ import annotations

import numpy as np
import pytest

from kvmnn.errors import OptionError
from kvmnn.policies import POLICIES, LayerState, ScoredPolicy, create_policy
from kvmnn.policies.plan import CachePlan, PolicyLayerPlan, check_plannable, plan_layer

RNG = np.random.default_rng(7)
NORMS = RNG.random((2, 12)).astype(np.float32)


def planned(name, *, tokens=12, layer=0, norms=NORMS, positions=None, **options):
    return plan_layer(create_policy(name, **options), layer, tokens, 64 * tokens, lambda: norms, positions)


def test_plan_layer_of_length_policy_reads_no_keys():
    def never():
        raise AssertionError("keys were read")

    kept = plan_layer(create_policy("streaming", sink=2, budget=5), 0, 12, 768, never)
    assert kept.plan_entry == {"layer": 0, "remove": 12, "pairs": [[0, 2], [9, 3]]}
    assert (kept.tokens_after, kept.bytes_after) == (5, 320)
    skipped = plan_layer(create_policy("knorm", budget=5, skip_layers=(1,)), 1, 12, 768, never)
    assert skipped.skipped and skipped.plan_entry == {"layer": 1, "remove": 0, "pairs": []}


def test_plan_layer_per_head_rows_have_own_pairs():
    kept = planned("knorm", budget=5)
    rows = [sorted(np.argsort(row)[:5].tolist()) for row in NORMS]
    entry = kept.plan_entry
    assert "pairs" not in entry and entry["remove"] == 12
    for runs, row in zip(entry["heads"], rows, strict=True):
        assert [token for begin, size in runs for token in range(begin, begin + size)] == row
    assert kept.to_dict()["positions"] is None


def test_plan_layer_equal_heads_share_one_row():
    one = planned("knorm", budget=5, norms=NORMS[:1])
    same = planned("knorm", budget=5, norms=NORMS[[0, 0]])
    assert one.plan_entry == same.plan_entry and "pairs" in one.plan_entry
    latest = planned("l2_fixed", budget=4, recent_ratio=1.0, skip_layers=())
    assert latest.plan_entry["pairs"] == [[8, 4]]


def test_plan_layer_unordered_tokens_use_positions():
    order = RNG.permutation(12)
    positions = np.arange(100, 112)[order]
    kept = planned("streaming", sink=2, budget=5, positions=positions)
    assert sorted(positions[kept.kept_indices]) == [100, 101, 109, 110, 111]
    assert (np.diff(kept.kept_indices) > 0).all()
    held = planned("l2_fixed", budget=5, recent_ratio=0.4, skip_layers=(), norms=NORMS[:1], positions=positions)
    in_text = planned("l2_fixed", budget=5, recent_ratio=0.4, skip_layers=(), norms=NORMS[:1, np.argsort(order)])
    assert sorted(positions[held.kept_indices] - 100) == in_text.kept_indices.tolist()


def test_plan_layer_positions_of_remaining_tokens():
    positions = np.array([0, 1, 2, 50, 51, 60])
    assert planned("recent_only", tokens=6, budget=4, skip_layers=(), positions=positions).to_dict()["positions"] == [
        [2, 1],
        [50, 2],
        [60, 1],
    ]
    whole = planned("recent_only", tokens=6, budget=9, positions=positions, layer=5)
    assert whole.kept_indices is None and whole.to_dict()["positions"] == [[0, 3], [50, 2], [60, 1]]


@pytest.mark.parametrize("name", [*POLICIES, "h2o_engine"])
def test_plan_layer_attention_policies_are_refused_by_name(name):
    options = {} if name == "h2o_engine" else {"budget": 600}
    policy = create_policy(name, **options)
    if isinstance(policy, ScoredPolicy):
        missing = sorted(policy.tensors - {"keys", "values"})
        if missing:
            with pytest.raises(OptionError, match=f"^{name} needs {' and '.join(missing)}, which a cache"):
                check_plannable(policy)
        elif name == "duo_attention":
            with pytest.raises(OptionError, match=f"^{name} keeps different numbers of tokens in heads"):
                check_plannable(policy)
        else:
            check_plannable(policy)
    elif policy.requires_attention:
        with pytest.raises(OptionError, match=f"^{name} needs attention, which a cache does not hold: .*streaming_pre"):
            check_plannable(policy)
    else:
        check_plannable(policy)
        kept = planned(name, tokens=1200, norms=RNG.random((2, 1200)).astype(np.float32), layer=3, **options)
        view = LayerState(tokens=1200, layer=3, norms=RNG.random((2, 1200)).astype(np.float32))
        assert kept.tokens_after == policy.select_or_all(view).shape[-1] == 600


def test_cache_plan_equal_layers_share_a_table_row():
    policy = create_policy("streaming", sink=2, budget=5, skip_layers=(2,))
    sizes = [12, 8, 12, 8, 12, 12, 5]
    layers = tuple(plan_layer(policy, n, size, 64 * size, lambda: NORMS) for n, size in enumerate(sizes))
    plan = CachePlan(policy=policy, layers=layers)
    assert str(plan) == (
        "streaming 5 skip_layers=2 sink=2: LOSSY, 5 of 8 to 12 tokens stay in 5 of 7 layers, 60.9 % of 4,416 bytes of "
        "K and V\n"
        "  layers  tokens  stay    bytes\n"
        "   0,4-5      12     5   41.7 %  ##.......###\n"
        "    --remove 12 --reserve 0:2,9:3\n"
        "     1,3       8     5   62.5 %  ##...###\n"
        "    --remove 8 --reserve 0:2,5:3\n"
        "       2      12    12  100.0 %  never cut\n"
        "       6       5     5  100.0 %  #####\n"
        "  1 token a letter: # kept, . dropped, 1 to 9 tenths kept"
    )
    assert not any("letter" in line or "#" in line for line in plan.format_lines(picture=False))
    assert all(len(line) <= 60 for line in plan.format_lines(width=60)[1:])


def test_render_map_letters_are_shares_of_all_heads():
    kept = PolicyLayerPlan(layer=0, tokens=5, nbytes=640, kept_indices=np.array([[0, 1, 2], [0, 2, 3]]))
    assert kept.render_map(1) == "#5#5." and kept.render_map(2) == "88."


@pytest.mark.parametrize(
    ("name", "options", "why"),
    [
        ("streaming", {"budget": 20}, "a text of 12 tokens fits its budget"),
        ("streaming", {"budget": 6, "buffer": 9}, "more are held until it cuts"),
        (
            "l2_ratio",
            {"budget": 5, "skip_layers": ()},
            "it cuts above prune_after 1,000, the text has 12 tokens: lower",
        ),
        ("recent_only", {"budget": 5, "skip_layers": (0,)}, "none of its layers is ever cut"),
        ("full", {}, "it keeps everything"),
    ],
)
def test_cache_plan_explains_why_nothing_is_evicted(name, options, why):
    plan = CachePlan(policy=create_policy(name, **options), layers=(planned(name, **options),))
    assert plan.label == "UNCHANGED" and "UNCHANGED, all tokens stay, 768 bytes of K and V: " in plan.format_lines()[0]
    assert why in plan.format_lines()[0]


def test_cache_plan_of_budget_zero_keeps_no_token():
    plan = CachePlan(
        policy=create_policy("recent_only", budget=0, skip_layers=()), layers=(planned("knorm", budget=0),)
    )
    assert plan.to_plan_entries() == [{"layer": 0, "remove": 12, "pairs": []}]
    assert "0 of 12 tokens stay, 0.0 %" in str(plan)
