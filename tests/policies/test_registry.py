"""One matrix over the registry: what every policy must do."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
from policy_models import BUDGETS, DIMS, HEADS, OPTIONS, acting, fit, make, view

from kvmnn import KvmnnError, policies
from kvmnn.policies import POLICIES, EvictingCache, LayerState, Trigger, create_policy, topk
from kvmnn.policies.layer_parameters import LayerParameters

CASES = {name: [{**more, **budget} for more in several for budget in BUDGETS] for name, several in OPTIONS.items()}


def matrix(**axes: Sequence[Any]) -> Callable[[Callable[..., None]], Callable[[str], None]]:
    """Run a check with all options of a policy and all values of `axes`: one item for each policy."""

    def decorate(check: Callable[..., None]) -> Callable[[str], None]:
        @pytest.mark.parametrize("name", OPTIONS)
        def run_cases(name: str) -> None:
            failures = []
            for options, *values in product(CASES[name], *axes.values()):
                named_values = dict(zip(axes, values, strict=True))
                try:
                    check(name, options, **named_values)
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(f"{options} {named_values}: {error!r}")
            assert not failures, "\n".join(failures)

        run_cases.__name__, run_cases.__doc__ = check.__name__, check.__doc__
        return run_cases

    return decorate


def test_policies_matrix_covers_registry() -> None:
    assert sorted(OPTIONS) == sorted(POLICIES)
    assert all(policy.name == name for name, policy in POLICIES.items())


@matrix(tied=[False, True])
def test_policy_kept_indices_are_valid_and_inputs_unchanged(name: str, options: dict[str, Any], tied: bool) -> None:
    policy = make(name, options)
    fields = view(60, tied=tied)
    before = fields["keys"].tobytes(), fields["scores"].tobytes()
    kept = policy.select_or_all(fit(policy, fields), acting(policy))
    assert kept.dtype == np.int64 and kept.ndim in (1, 2) and (kept.ndim == 1 or kept.shape[0] == HEADS)
    assert 0 < kept.shape[-1] < 60
    if name != "h2o_blocks":  # blocks of several tokens
        assert kept.shape[-1] == (12 if "budget" in options else 24)
    for row in np.atleast_2d(kept).tolist():
        assert len(set(row)) == len(row) and min(row) >= 0 and max(row) < 60
        if options.get("form") != "original" and name not in ("knorm", "observed_attention"):
            assert row == sorted(row)
    assert (fields["keys"].tobytes(), fields["scores"].tobytes()) == before


@matrix()
def test_policy_ties_keep_older_tokens(name: str, options: dict[str, Any]) -> None:
    """Among equal scores the oldest tokens are kept next to the protected ones."""
    policy = make(name, options)
    if "random" in (name, getattr(policy, "strategy", "")) or name in ("h2o_blocks", *UNTIED):
        return
    kept = policy.select_or_all(fit(policy, view(60, tied=True)), acting(policy))
    if policy.requires == "lengths":  # which have no ties: streaming keeps the oldest, others need not
        assert kept.tolist() == policy.select_or_all(fit(policy, view(60)), acting(policy)).tolist()
        if name not in ("streaming", "streaming_press"):
            return
    for row in np.atleast_2d(kept).tolist():
        recent = next((i for i, token in enumerate(row) if token != i), len(row))
        assert row[recent:] == list(range(60 - len(row) + recent, 60))


@matrix()
def test_policy_selection_is_repeatable(name: str, options: dict[str, Any]) -> None:
    answers = []
    for _ in range(2):
        policy = make(name, options)
        answers.append(policy.select_or_all(fit(policy, view(60)), acting(policy)).tolist())
    assert answers[0] == answers[1]


@matrix(tokens=[0, 1, 3, 4, 12])
def test_policy_few_tokens_are_all_kept(name: str, options: dict[str, Any], tokens: int) -> None:
    policy = make(name, {key: value for key, value in options.items() if key != "keep_ratio"}, budget=12)
    if options.get("form") == "original" and tokens >= 4:
        assert sorted(policy.select_or_all(fit(policy, view(tokens)))[0].tolist()) == list(range(tokens))
        return
    if name != "h2o_blocks":  # whose plans may keep everything, too
        assert policy.select(fit(policy, view(tokens)), acting(policy)) is None
    assert policy.select_or_all(fit(policy, view(tokens)), acting(policy)).tolist() == list(range(tokens))


@matrix()
def test_policy_budget_beyond_length_keeps_everything(name: str, options: dict[str, Any]) -> None:
    base = {key: value for key, value in options.items() if key not in ("budget", "keep_ratio")}
    for budget in ({"budget": 60}, {"budget": 10**12}, {"keep_ratio": 1.0}, {"keep_ratio": 7.5}):
        policy = make(name, base, **budget)
        kept = np.atleast_2d(policy.select_or_all(fit(policy, view(60)), acting(policy)))
        assert [sorted(row) for row in kept.tolist()] == [list(range(60))] * len(kept), budget


UNTIED = (
    "pyramidkv",
    "expected_attention",
    "capkv",
    "non_causal",
    "compactor",
    "leverage",
    "lagkv",
    "cur",
)  # whose scores of equal tokens differ, by rounding or by their place


ZERO = {  # what stays of 60 tokens, first and last, where the budget is 0
    "streaming": None,
    "h2o_heads": None,
    "h2o_decayed": None,
    "h2o_decayed_heads": None,
    "h2o_tokens": [0, 1, 56, 57, 58, 59],
    "h2o_blocks": [0, 1, 2, 3, 56, 57, 58, 59],
}


@matrix()
def test_policy_budget_of_zero_keeps_only_protected_tokens(name: str, options: dict[str, Any]) -> None:
    """Only protected tokens stay, or the policy explains why a budget of 0 is impossible."""
    base = {key: value for key, value in options.items() if key not in ("budget", "keep_ratio")}
    expected = ZERO.get(name, [])
    if expected is None:
        with pytest.raises(KvmnnError, match="a budget of 0 tokens"):
            make(name, base, budget=0)
        expected = []
        if name == "streaming":
            with pytest.raises(KvmnnError, match="a keep_ratio of 0 leaves no window after"):
                make(name, base, keep_ratio=0)
            return
    elif name != "h2o_blocks":
        policy = make(name, base, budget=0)
        assert np.atleast_2d(policy.select_or_all(fit(policy, view(60)), acting(policy))).tolist()[0] == expected
    policy = make(name, base, keep_ratio=0)
    kept = policy.select(fit(policy, view(60)), acting(policy))
    if name == "h2o_blocks":
        assert (
            kept is not None and len(kept) == 60
        )  # the engine's rule: where the protected blocks reach the target nothing goes
    else:
        assert kept is not None and np.atleast_2d(kept).tolist()[0] == expected


@matrix()
def test_policy_skip_layers_and_other_triggers_select_nothing(name: str, options: dict[str, Any]) -> None:
    policy = make(name, options, skip_layers=[1, 5])
    assert policy.skip_layers == (1, 5)
    for layer in range(7):
        kept = policy.select(fit(policy, view(60, layer=layer)), acting(policy))
        assert (kept is None) == (layer in (1, 5))
    for moment in set(Trigger) - policy.triggers:
        assert policy.select(fit(policy, view(60)), moment) is None


@matrix()
def test_policy_non_finite_values_are_ranked_without_warning(name: str, options: dict[str, Any]) -> None:
    """NaN goes first, infinities last or first by their size: nothing raises, nothing warns."""
    policy = make(name, options)
    fields = view(60)
    fields["keys"][:, 20] = np.nan
    fields["keys"][:, 21] = np.inf
    fields["keys"][:, 22] = -np.inf
    fields["keys"][:, 23] = -0.0
    fields["scores"][:, 20:24] = [np.nan, np.inf, -np.inf, -0.0]
    for row in np.atleast_2d(policy.select_or_all(fit(policy, fields), acting(policy))).tolist():
        if name == "h2o_blocks":
            assert not set(range(20, 24)) & set(row)  # one block, and its sum is NaN
        elif policy.requires == "keys" and not hasattr(policy, "strategy"):
            assert 23 in row and not {20, 21, 22} & set(row)
        elif policy.requires in ("scores", "head scores"):
            assert 21 in row and not {20, 22} & set(row)
        elif getattr(policy, "strategy", "") == "keep_high":
            assert {21, 22} <= set(row) and not {20, 23} & set(row)


@matrix(dtype=[np.float32, np.uint16])
def test_policy_other_dtypes_select_the_same(name: str, options: dict[str, Any], dtype: Any) -> None:
    policy = make(name, options)
    fields = view(60)
    exact = np.round(fields["keys"].astype(np.float32) * 4) / 4  # the same values in every type
    as_half = {**fields, "keys": exact.astype(np.float16)}
    there = exact if dtype is np.float32 else (exact.view(np.uint32) >> 16).astype(np.uint16)
    if "generator" in options:
        return
    found = policy.select_or_all(fit(policy, {**fields, "keys": there}), acting(policy))
    assert found.tolist() == policy.select_or_all(fit(policy, as_half), acting(policy)).tolist()


@matrix()
def test_policy_repr_and_options_recreate_it(name: str, options: dict[str, Any]) -> None:
    policy = make(name, options)
    more = {"generator": policy.generator} if "generator" in options else {}
    assert create_policy(name, **policy.to_options(), **more) == policy
    if not more:
        assert eval(repr(policy), vars(policies)) == policy
    with pytest.raises(dataclasses.FrozenInstanceError):
        policy.skip_layers = ()  # type: ignore[misc]


@matrix()
def test_policy_docstring_names_its_sources(name: str, options: dict[str, Any]) -> None:
    text = POLICIES[name].__doc__ or ""
    for word in ("Paper:", "arXiv", "Where it differs", "Parameters", "Notes"):
        assert word in text, word
    assert "Original:" in text


@matrix()
def test_policy_in_evicting_cache_keeps_rows_together(name: str, options: dict[str, Any]) -> None:
    """K, V, positions and scores stay together through prompt, decoding and chunk ends."""
    if name == "streaming" and "keep_ratio" in options:
        options = options | {"keep_ratio": 0.8}  # 0.4 of what each step of one token leaves soon leaves no window
    policy = make(name, options)
    cache, rng = EvictingCache(policy, layer=2, parameters=LayerParameters(7)), np.random.default_rng(3)
    text = rng.standard_normal((2, HEADS, 75, DIMS)).astype(np.float32)
    seen = 0
    for step in [30, *[1] * 20, 10, *[1] * 15]:
        attend = cache.append(*text[:, :, seen : seen + step])
        seen += step
        if policy.requires in ("scores", "head scores"):
            cache.finish_attention(weights=rng.random((2 * HEADS, step, attend.tokens)).astype(np.float32))
        elif policy.requires_queries:
            cache.finish_attention(queries=rng.standard_normal((2 * HEADS, step, DIMS)).astype(np.float32))
        else:
            cache.finish_attention()
        stored = cache.end_chunk() if step == 10 else cache.snapshot
        assert stored.tokens_seen == seen and stored.layer == 2
        at = np.broadcast_to(stored.positions, (HEADS, stored.tokens))
        for array, whole in ((stored.keys, text[0]), (stored.values, text[1])):
            assert np.array_equal(array, np.take_along_axis(whole, at[:, :, None], axis=1))
        assert cache.state.scores is None or cache.state.scores.shape[-1] == stored.tokens
    assert stored.tokens < 75


# -- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("l2", {}, "unknown policy 'l2': expected full or one of l2_ratio, "),
        ("h2o", {}, "did you mean h2o_tokens, h2o_blocks, "),
        ("knorm", {"ratio": 1}, "knorm has no option 'ratio': expected budget, keep_ratio, skip_layers"),
        ("knorm", {}, "knorm: expected a budget"),
        ("knorm", {"budget": 3, "keep_ratio": 0.5}, "expected only one"),
        ("knorm", {"budget": -1}, "budget is -1: expected at least 0"),
        ("knorm", {"keep_ratio": -0.1}, "keep_ratio is -0.1: expected a share"),
        ("knorm", {"keep_ratio": math.nan}, "keep_ratio is nan"),
        ("knorm", {"keep_ratio": math.inf}, "keep_ratio is inf"),
        ("knorm", {"budget": 1, "skip_layers": (-1,)}, "skip_layers is -1"),
        ("l2_ratio", {"budget": 1, "prune_after": -1}, "prune_after is -1"),
        ("l2_ratio", {"budget": 1, "form": "paper"}, "form is 'paper': expected 'seed' or 'original'"),
        ("l2_fixed", {"strategy": "best"}, "strategy is 'best': expected one of keep_low, keep_high, random"),
        ("l2_fixed", {"strategy": "random"}, "needs generator"),
        ("l2_fixed", {"generator": np.random.default_rng(0)}, "needs generator"),
        ("l2_fixed", {"recent_ratio": -1}, "recent_ratio is -1"),
        ("streaming", {"sink": 512}, "a budget of 512 tokens leaves no window after 512 sinks"),
        ("streaming", {"sink": -1}, "sink is -1"),
        ("h2o_tokens", {"recent": -1}, "recent is -1"),
        ("h2o_heads", {"budget": 511}, "a budget of 511 tokens is less than the 512 recent ones"),
        ("h2o_blocks", {"block_tokens": -1}, "block_tokens is -1"),
        ("h2o_blocks", {"ema_alpha": math.nan}, "ema_alpha is nan"),
    ],
)
def test_create_policy_invalid_options_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(KvmnnError, match=message):
        create_policy(name, **options)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("knorm", {"budget": 1.5}),
        ("knorm", {"budget": True}),
        ("knorm", {"keep_ratio": "half"}),
        ("l2_fixed", {"skip_layers": ("0",)}),
    ],
)
def test_create_policy_wrong_types_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="must be a"):
        create_policy(name, **options)


@pytest.mark.parametrize("name", [name for name in POLICIES if POLICIES[name].requires != "lengths"])
def test_policy_missing_inputs_are_refused(name: str) -> None:
    policy = make(name, {**OPTIONS[name][0], "budget": 12})
    with pytest.raises(KvmnnError, match=f"layer 3: {name} needs (the keys|scores)"):
        policy.select(LayerState(tokens=60, layer=3), acting(policy))
    if policy.requires in ("scores", "head scores"):
        wrong = np.zeros((60,) if policy.requires == "head scores" else (3, 60), np.float32)
        with pytest.raises(KvmnnError, match=r"needs scores \[.*found \["):
            policy.select(LayerState(tokens=60, scores=wrong), acting(policy))


@matrix()
def test_policy_stacked_layers_equal_single_layers(name: str, options: dict[str, Any]) -> None:
    if options.get("strategy") == "random":
        return  # draws again for each head
    policy = make(name, options)
    if policy.requires == "tensors":
        return  # one layer at a time
    layers = [view(60, seed=seed) for seed in (1, 2, 3)]
    alone = [policy.select_or_all(fit(policy, fields), acting(policy)) for fields in layers]
    axis = (lambda parts: np.stack([part[0] for part in parts])) if policy.requires == "scores" else np.concatenate
    stack = LayerState(
        tokens=60,
        scores=axis([fields["scores"] for fields in layers]),
        norms=np.concatenate([topk.compute_key_norms(fields["keys"]) for fields in layers]),
    )
    together = policy.select_stacked(stack, acting(policy))
    assert together is not None
    if policy.requires == "lengths":
        assert all(np.array_equal(together, kept) for kept in alone)
    else:
        rows = [row for kept in alone for row in np.atleast_2d(kept)]
        assert len(together) == len(rows) and all(map(np.array_equal, together, rows))
    assert policy.select_stacked(stack, next(moment for moment in Trigger if moment not in policy.triggers)) is None
