"""`kv-policy-vectors-1`: the tokens that reference implementations of eviction policies keep, and in which order."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmnn.policies import (
    EvictingCache,
    H2OHeads,
    H2OTokens,
    KNorm,
    L2Fixed,
    L2Ratio,
    LayerState,
    ObservedAttention,
    Policy,
    Streaming,
    StreamingPress,
)

from .common import CaseResult, Checker, run_list, unknown_lists

Floats = npt.NDArray[Any]
Numbers = npt.NDArray[np.int64]

_FIELDS = {"name", "policy", "source", "params", "input", "expected", "order", "note"}
_SCORE_TOLERANCE = 1e-5  # the reference's sums are stored in seven digits


def run(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    yield from run_list(index.get("cases", ()), "cases", _case)
    yield from unknown_lists(index, ("cases",))


def _case(case: dict[str, Any], check: Checker) -> None:
    check.known_fields(_FIELDS)
    kind = case["policy"]
    if kind not in _KINDS:
        check.problems.append(f"unknown policy {kind!r}")
        return
    params, inputs, order, compare = _KINDS[kind]
    check.equal("unknown parameters", sorted(set(case["params"]) - params), [])
    check.equal("unknown inputs", sorted(set(case["input"]) - inputs), [])
    check.equal("order", case["order"], order)
    compare(case, check)


# -- one decision for each layer ------------------------------------------------------------------------------------


def _l2_original(case: dict[str, Any], check: Checker) -> None:
    _by_layer(L2Ratio.from_paper(**_skipping(case["params"])), case, check)


def _l2_ratio(case: dict[str, Any], check: Checker) -> None:
    _by_layer(L2Ratio(**_skipping(case["params"])), case, check)


def _l2_fixed(case: dict[str, Any], check: Checker) -> None:
    policy = _fixed(case["params"])
    if policy.strategy == "random":
        _random(policy, case, check)
    else:
        _by_layer(policy, case, check)


def _knorm(case: dict[str, Any], check: Checker) -> None:
    """kvpress rounds a share of less than one token down to none, kvmnn keeps the first of its ranking."""
    layers, policy = _layers(case), KNorm(keep_ratio=1 - case["params"]["compression_ratio"])
    expected = [
        [row or [_lowest_norm(head)] for row, head in zip(rows, keys, strict=True)]
        for rows, keys in zip(case["expected"], layers, strict=True)
    ]
    check.equal("kept", [_kept(policy, number, keys) for number, keys in enumerate(layers)], expected)


def _lowest_norm(keys: npt.NDArray[Any]) -> int:
    return int(np.square(keys.astype(np.float64)).sum(axis=-1).argmin())


def _by_layer(policy: Policy, case: dict[str, Any], check: Checker) -> None:
    layers = _layers(case)
    check.equal("kept", [_kept(policy, number, keys) for number, keys in enumerate(layers)], case["expected"])


def _random(policy: L2Fixed, case: dict[str, Any], check: Checker) -> None:
    """Which tokens the reference drew cannot be known; how many from where, and their order, can."""
    for number, (keys, expected) in enumerate(zip(_layers(case), case["expected"], strict=True)):
        tokens = keys.shape[1]
        size = policy.resolve_budget(tokens)
        untouched = tokens <= size or number in policy.skip_layers
        protected = 0 if untouched else min(int(size * policy.recent_ratio), tokens)
        kept = _kept(policy, number, keys)
        check.equal(f"layer {number}: heads", len(kept), len(expected))
        for what, rows in (("kvmnn", kept), ("reference", expected)):
            for row in rows:
                where = f"layer {number}, {what}: "
                length = tokens if untouched else max(size, protected)
                check.equal(f"{where}number of tokens", len(row), length)
                check.equal(f"{where}ascending, each once", row, sorted(set(row)))
                check.equal(f"{where}from the cache", all(0 <= token < tokens for token in row), True)
                check.equal(f"{where}latest", row[len(row) - protected :], list(range(tokens - protected, tokens)))


def _observed(case: dict[str, Any], check: Checker) -> None:
    policy = ObservedAttention(keep_ratio=1 - case["params"]["compression_ratio"])
    weights = np.array(case["input"]["attentions"], np.float32)
    heads = case["params"]["kv_heads"]
    view = LayerState(tokens=weights.shape[2], scores=policy.sum_columns(weights, heads))
    check.equal("kept", [_rows(policy.select_or_all(view), heads)], case["expected"])


def _streaming(case: dict[str, Any], check: Checker) -> None:
    params = case["params"]
    policy = Streaming(sink=params["start_size"], budget=params["start_size"] + params["recent_size"])
    kept = policy.select_or_all(LayerState(tokens=case["input"]["seq_len"]))
    check.equal("kept", [kept.tolist()], case["expected"])


def _streaming_press(case: dict[str, Any], check: Checker) -> None:
    """A set; where the sinks leave less to prune than must go, every set of the right size without the pruned ones."""
    sink, tokens = case["params"]["n_sink"], case["input"]["seq_len"]
    policy = StreamingPress(keep_ratio=1 - case["params"]["compression_ratio"], sink=sink)
    kept = sorted(policy.select_or_all(LayerState(tokens=tokens)).tolist())
    check.equal("sets", len(case["expected"]), 1)
    expected = sorted(case["expected"][0])
    if sink + tokens - len(kept) <= tokens:
        check.equal("kept", kept, expected)
        return
    for what, tokens_kept in (("kvmnn", kept), ("reference", expected)):
        check.equal(f"{what}: number of tokens", len(set(tokens_kept)), len(kept))
        check.equal(f"{what}: among the sinks", all(0 <= token < sink for token in tokens_kept), True)


# -- caches, step by step -------------------------------------------------------------------------------------------


def _fixed_loop(case: dict[str, Any], check: Checker) -> None:
    params = dict(case["params"])
    prefill = params.pop("prefill")
    policy = _fixed(params)
    (keys,) = _layers(case)
    cache = EvictingCache(policy)
    cache.append(keys[:, :prefill], keys[:, :prefill])
    found = []
    for token in range(prefill, keys.shape[1]):
        step = keys[:, token : token + 1]
        cache.append(step, step)
        found.append(_rows(cache.finish_attention().positions, keys.shape[0]))
    expected = case["expected"]
    check.equal("kept", found, [[row] if keys.shape[0] == 1 else row for row in expected])


def _streaming_cache(case: dict[str, Any], check: Checker) -> None:
    params = case["params"]
    policy = Streaming.from_window(params["n_sink"], params["window_size"], params["buffer"])
    steps = _steps(policy, case, None)
    check.equal("steps", len(steps), len(case["expected"]))
    for number, (step, expected) in enumerate(zip(steps, case["expected"], strict=False)):
        check.equal(f"step {number}", step, expected)


def _h2o_cache(case: dict[str, Any], check: Checker) -> None:
    params, expected = case["params"], case["expected"]
    policy = H2OTokens(
        sink=params["n_sink"], recent=params["recent_window"], budget=params["max_capacity"], buffer=params["buffer"]
    )
    heavy = params["max_capacity"] - policy.sink - policy.recent
    check.equal("heavy", heavy if params["heavy"] < 0 else max(0, heavy), params["heavy"])
    check.equal("expectations", sorted(expected), ["final_scores_approx", "steps"])
    final: list[Floats] = []
    steps = _steps(policy, case, case["input"]["column_sums"], final)
    check.equal("steps", len(steps), len(expected["steps"]))
    for number, (step, wanted) in enumerate(zip(steps, expected["steps"], strict=False)):
        check.equal(f"step {number}", {name: step[name] for name in wanted}, wanted)
    scores, wanted = final[-1], np.array(expected["final_scores_approx"], np.float64)
    check.equal("number of scores", scores.shape, wanted.shape)
    off = np.abs(scores - wanted) > _SCORE_TOLERANCE * np.maximum(1, np.abs(wanted))
    check.equal("scores that are off", np.flatnonzero(off).tolist(), [])


def _h2o_heads(case: dict[str, Any], check: Checker) -> None:
    recent = case["params"]["recent_size"]
    policy = H2OHeads(recent=recent, budget=recent + case["params"]["hh_size"])
    found, cache = [], EvictingCache(policy)
    sums = case["input"]["head_column_sums"]
    for count, added in zip(case["input"]["chunks"], sums, strict=True):
        attended = cache.append(*_blank(len(added), count))
        check.equal("sums for each attended token", len(added[0]), attended.tokens)
        found.append(_rows(cache.finish_attention(np.array(added, np.float32)).positions, len(added)))
    check.equal("kept", found, case["expected"])


def _steps(
    policy: Policy, case: dict[str, Any], sums: list[list[float]] | None, final: list[Floats] | None = None
) -> list[dict[str, Any]]:
    """What is attended and what is stored in every step, by true position."""
    found, cache = [], EvictingCache(policy)
    for number, count in enumerate(case["input"]["chunks"]):
        attended = cache.append(*_blank(1, count)).positions.tolist()
        stored = cache.finish_attention(None if sums is None else np.array(sums[number], np.float32))
        if case["params"]["force_evict_after_chunk"]:
            stored = cache.end_chunk()
        found.append({"attended": attended, "stored": stored.positions.tolist(), "seen": stored.tokens_seen})
        if final is not None and cache.state.scores is not None:
            final.append(cache.state.scores)
    return found


# -- helpers --------------------------------------------------------------------------------------------------------


def _skipping(params: dict[str, Any]) -> dict[str, Any]:
    return {**params, "skip_layers": tuple(params["skip_layers"])}


def _fixed(params: dict[str, Any]) -> L2Fixed:
    return L2Fixed(
        budget=params["fix_kv_size"],
        recent_ratio=params["keep_ratio"],
        strategy=params["strategy"],
        skip_layers=tuple(params.get("skip_layers", ())),
        generator=np.random.default_rng(0) if params["strategy"] == "random" else None,
    )


def _layers(case: dict[str, Any]) -> list[Floats]:
    return [np.array(layer, np.float32) for layer in case["input"]["layers"]]


def _blank(heads: int, tokens: int) -> tuple[Floats, Floats]:
    return np.zeros((heads, tokens, 1), np.float32), np.zeros((heads, tokens, 1), np.float32)


def _kept(policy: Policy, layer: int, keys: Floats) -> list[list[int]]:
    return _rows(policy.select_or_all(LayerState(tokens=keys.shape[1], layer=layer, keys=keys)), keys.shape[0])


def _rows(kept: Numbers, heads: int) -> list[list[int]]:
    """The kept tokens of each head."""
    return np.broadcast_to(kept, (heads, kept.shape[-1])).tolist()


Kind = tuple[set[str], set[str], str, Callable[[dict[str, Any], Checker], None]]

_KINDS: dict[str, Kind] = {
    "l2_compress_original": (
        {"keep_ratio", "prune_after", "skip_layers"},
        {"layers"},
        "ascending_norm",
        _l2_original,
    ),
    "l2_compress": ({"keep_ratio", "prune_after", "skip_layers"}, {"layers"}, "temporal", _l2_ratio),
    "fix_size_l2_compress": (
        {"fix_kv_size", "keep_ratio", "strategy", "skip_layers"},
        {"layers"},
        "temporal",
        _l2_fixed,
    ),
    "fix_size_l2_compress_loop": (
        {"fix_kv_size", "keep_ratio", "strategy", "skip_layers", "prefill"},
        {"layers"},
        "temporal",
        _fixed_loop,
    ),
    "kvpress_knorm": ({"compression_ratio"}, {"layers"}, "ascending_norm", _knorm),
    "kvpress_observed_attention": ({"compression_ratio", "kv_heads"}, {"attentions"}, "descending_score", _observed),
    "kvpress_streaming_llm": ({"compression_ratio", "n_sink"}, {"seq_len"}, "set", _streaming_press),
    "streaming_llm_compress": ({"start_size", "recent_size"}, {"seq_len"}, "temporal", _streaming),
    "StreamingDynamicCache": (
        {"n_sink", "window_size", "buffer", "force_evict_after_chunk"},
        {"chunks"},
        "temporal",
        _streaming_cache,
    ),
    "H2ODynamicCache": (
        {"n_sink", "recent_window", "max_capacity", "buffer", "heavy", "force_evict_after_chunk"},
        {"chunks", "column_sums"},
        "temporal",
        _h2o_cache,
    ),
    "H2OKVCache_LayerWise": ({"hh_size", "recent_size"}, {"chunks", "head_column_sums"}, "temporal", _h2o_heads),
}
