"""The H2O planner: `h2o-planner-vectors-1` (sums, plans, sequences of calls), and the plans of a live eviction."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvmnn.policies.h2o import (
    BlockPlan,
    CacheEdit,
    H2OConfig,
    H2OPlanner,
    LayerCallResult,
    PendingPlan,
    plan_blocks,
    sum_by_block,
)

from .common import CaseResult, Checker, run_list, unknown_lists
from .std_sort import sorted_as_libstdcxx

STALE = "Drop stale per-layer pending plan"

_TRIMMED = (
    *("manager", "layer_index", "kv_seq_len", "block_count", "global_step", "last_trigger_step", "triggered"),
    "final_keep_tokens_for_layer",
)


def run(folder: Path, index: dict[str, Any]) -> Iterator[CaseResult]:
    yield from run_list(index.get("cases", ()), "cases", _case)
    yield from unknown_lists(index, ("cases",))


def _case(case: dict[str, Any], check: Checker) -> None:
    kinds = {"plan": _calls, "sequence": _calls, "accumulate": _accumulate}
    if case.get("kind") not in kinds:
        raise ValueError(f"unknown kind {case.get('kind')!r}")
    kinds[case["kind"]](case, check)


# -- sums -------------------------------------------------------------------------------------------------------------

_PARAMS = {"num_head", "threads", "seq_len", "kv_len", "tile", "pack", "block_tokens", "packed_layout_bug"}


def _accumulate(case: dict[str, Any], check: Checker) -> None:
    check.known_fields({"params", "rows", "expected_block_acc"})
    params = case["params"]
    check.equal("params", sorted(params), sorted(_PARAMS))
    shape = params["num_head"], params["seq_len"], params["kv_len"]
    rows = np.array(case["rows"], np.float64).astype(np.float32).reshape(shape)
    if params["packed_layout_bug"]:
        rows = _as_read_from_packed(rows, params["tile"], params["pack"])
    sums = sum_by_block(rows, params["block_tokens"], threads=params["threads"], tile=params["tile"])
    _floats(check, "expected_block_acc", sums, case["expected_block_acc"])


def _as_read_from_packed(rows: npt.NDArray[np.float32], tile: int, pack: int) -> npt.NDArray[np.float32]:
    """What the reference reads where it takes a packed tile ``[columns / pack][query][pack]`` for plain rows."""
    heads, queries, keys = rows.shape
    read = np.empty_like(rows)
    for start in range(0, keys, tile):
        count = min(tile, keys - start)
        stride = -(-count // pack) * pack
        padded = np.zeros((heads, queries, stride), np.float32)
        padded[:, :, :count] = rows[:, :, start : start + count]
        packed = padded.reshape(heads, queries, -1, pack).transpose(0, 2, 1, 3).reshape(heads, queries, stride)
        read[:, :, start : start + count] = packed[:, :, :count]
    return read


# -- calls ------------------------------------------------------------------------------------------------------------


class StdSortPlanner(H2OPlanner):
    """Breaks ties as the reference's own sort happens to."""

    def select_blocks(self, scores: npt.NDArray[np.float32], kv_len: int) -> BlockPlan:
        floor = plan_blocks(np.zeros(scores.size, np.float32), kv_len, self.config)
        first, last = floor.num_floor_blocks[0], scores.size - floor.num_floor_blocks[1]
        order = sorted_as_libstdcxx([(float(scores[block]), block) for block in range(first, last)])
        ranks = np.zeros(scores.size, np.float32)
        ranks[[block for _, block in order]] = range(len(order), 0, -1)
        return plan_blocks(ranks, kv_len, self.config)


def _calls(case: dict[str, Any], check: Checker) -> None:
    check.known_fields(
        {"config", "init", "forwards", "expected", "expected_previous", "tie_sensitive", "reference_std_sort"}
    )
    events, previous = Replay(case, H2OPlanner).run()
    other, _ = Replay(case, StdSortPlanner).run()
    _events(check, "call", events, case["expected"])
    check.field("expected_previous", previous)
    check.field("tie_sensitive", any(not _same(a, b) for a, b in zip(events, other, strict=True)))
    if "reference_std_sort" in case or case["tie_sensitive"]:
        _events(check, "std::sort, call", other, case["reference_std_sort"])


class Replay:
    """One case: a planner, the tokens that each layer object holds, and the events of its calls."""

    def __init__(self, case: dict[str, Any], kind: type[H2OPlanner]) -> None:
        self.case = case
        self.config = _config(case["config"])
        self.planner = kind(self.config, on_invalid="engine")
        self.events: list[dict[str, Any]] = []
        managers = {manager for forward in case["forwards"] for manager in forward["managers"]}
        init = dict(case["init"])
        past = init.pop("past", 0)
        of_layer = init.pop("past_layer", {})
        self.tokens = {manager: list(range(of_layer.get(str(manager), past))) for manager in managers}
        self.arrived = {manager: len(held) for manager, held in self.tokens.items()}
        self.planner.meta.previous = past
        self._state(**init)

    def _state(
        self,
        scores: dict[str, list[float]] | None = None,
        pending: dict[str, dict[str, Any]] | None = None,
        steps: tuple[int, int, int] = (0, 0, 0),
        metric: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        planner = self.planner
        for layer, values in (scores or {}).items():
            planner.layers[int(layer)].scores = np.array(values, np.float64).astype(np.float32)
        for layer, made in (pending or {}).items():
            planner.layers[int(layer)].pending_plan = PendingPlan(made["remove"], tuple(made["pairs"]))
        planner.clock.global_step, planner.clock.last_trigger, planner.clock.cursor = steps
        planner.metrics.h2o_keep_ratio, planner.metrics.h2o_lossy_ratio = (float(np.float32(value)) for value in metric)

    def run(self) -> tuple[list[dict[str, Any]], int]:
        previous = self.planner.meta.previous
        for step, forward in enumerate(self.case["forwards"]):
            unknown = set(forward) - {"in_decode", "add", "managers", "acc", "acc_seed", "remove_all"}
            if unknown:
                raise ValueError(f"forward has fields {sorted(unknown)}, which this runner does not know")
            if forward.get("remove_all"):
                self.planner.meta.remove = self.planner.meta.previous
            for number, manager in enumerate(forward["managers"]):
                self._call(
                    forward, manager, lambda blocks, f=forward, s=step, m=manager, n=number: _acc(f, s, m, n, blocks)
                )
            previous = self.planner.end_step()
        return self.events, previous

    def _call(self, forward: dict[str, Any], manager: int, acc: Callable[[int], npt.NDArray[np.float32]]) -> None:
        planner, held = self.planner, self.tokens[manager]
        before = len(held)
        todo = planner.begin_call(before, forward["add"], decode=bool(forward["in_decode"]))
        applied = planner.meta.remove, planner.meta.reserve
        start = before - todo.remove
        held[start:] = [held[start + begin + i] for begin, size in todo.reserve for i in range(size)]
        if len(held) != todo.kv_after:
            raise ValueError(f"{len(held)} tokens after the plan, the planner says {todo.kv_after}")
        held += range(self.arrived[manager], self.arrived[manager] + forward["add"])
        self.arrived[manager] += forward["add"]
        call = planner.end_call(acc(self.config.count_blocks(len(held))))
        self.events.append(self._event(manager, todo, applied, call))

    def _event(self, manager: int, todo: CacheEdit, applied: Any, call: LayerCallResult) -> dict[str, Any]:
        planner = self.planner
        state, clock = planner.layers[call.layer], planner.clock
        metrics = planner.metrics.to_dict()
        del metrics["h2o_evict_us"]
        return {
            "manager": manager,
            "layer_index": call.layer,
            "h2o_enabled": int(call.is_enabled),
            "kv_before": todo.kv_before,
            "pending_ready_before": int(todo.was_pending),
            "applied_remove": applied[0],
            "applied_reserve": [number for pair in applied[1] for number in pair],
            "kv_after_apply": todo.kv_after,
            "kv_seq_len": call.kv_len,
            "block_count": call.num_blocks,
            "global_step": clock.global_step,
            "token_step": clock.token_step,
            "last_trigger_step": clock.last_trigger,
            "triggered": int(call.has_triggered),
            "scores_ema": call.scores.tolist() if call.is_enabled else [],
            "scores_after": state.scores.tolist(),
            "plan": _plan_event(call.plan),
            "pending": {
                "ready": int(state.pending_plan is not None),
                "remove": state.pending_plan.remove if state.pending_plan else 0,
                "pairs": list(state.pending_plan.flat_pairs) if state.pending_plan else [],
            },
            "final_keep_tokens_for_layer": call.final_keep,
            "metrics": metrics,
            "token_runs": _runs(self.tokens[manager]),
            "errors": [STALE] if todo.is_stale else [],
        }


def _config(config: dict[str, Any]) -> H2OConfig:
    names = {
        **{name: name for name in ("layer_start", "layer_end", "block_tokens", "sink_tokens", "recent_tokens")},
        **{name: name for name in ("target_keep_ratio", "target_lossy_ratio", "ema_alpha", "update_interval")},
        "trigger_min_tokens": "trigger_min_tokens",
        "layer_nums": "layers",
        "num_head": "heads",
    }
    others = {"h2o_enable", "target_mode", "kv_num_head", "head_dim", "bytes", "quant_key", "quant_value"}
    unknown = set(config) ^ (set(names) | others)
    if unknown:
        raise ValueError(f"config has or lacks {sorted(unknown)}")
    return H2OConfig(
        **{name: config[key] for key, name in names.items()},
        enable=bool(config["h2o_enable"]),
        target_mode="static" if config["target_mode"] == 0 else "adaptive",
        quantised=bool(config["quant_key"] or config["quant_value"]),
        bytes_per_token=2 * config["kv_num_head"] * config["head_dim"] * config["bytes"],
    )


def _acc(forward: dict[str, Any], step: int, manager: int, number: int, blocks: int) -> npt.NDArray[np.float32]:
    sums = np.zeros(blocks, np.float32)
    if "acc" in forward:
        given = forward["acc"][number if len(forward["acc"]) > 1 else 0][:blocks]
        sums[: len(given)] = np.array(given, np.float64)
    elif "acc_seed" in forward:
        numbers = np.arange(blocks) * 7919 + step * 104729 + manager * 1299709 + forward["acc_seed"] * 15485863
        sums[:] = numbers % 1000 / 64
    return sums


def _plan_event(made: BlockPlan | None) -> dict[str, Any] | None:
    if made is None:
        return None
    size = made.bytes_per_token or 0
    return {
        "keep": made.keep.astype(int).tolist(),
        "target_before_floor": made.target_before_floor,
        "target_keep": made.target,
        "floor_dominates": int(made.floor_dominates),
        "quantized_keep": made.quantized_keep,
        "kept_tokens": made.num_kept_tokens,
        "final_keep_tokens": made.num_final_tokens,
        "evicted": made.num_evicted,
        "reserve_meta_bytes": made.reserve_bytes,
        "candidate_pairs": made.retained_runs.reshape(-1).tolist(),
        "raw_before": made.kv_len * size,
        "raw_after": made.num_final_tokens * size,
    }


def _runs(tokens: list[int]) -> list[int]:
    runs: list[int] = []
    for token in tokens:
        if runs and token == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += [token, 1]
    return runs


# -- comparing --------------------------------------------------------------------------------------------------------


def _events(check: Checker, label: str, computed: list[dict[str, Any]], expected: Any) -> None:
    check.equal(f"{label}s", len(computed), len(expected))
    for number, (event, wanted) in enumerate(zip(computed, expected, strict=False)):
        if set(wanted) not in (set(event), set(_TRIMMED)):
            check.problems.append(f"{label} {number}: has the fields {sorted(wanted)}")
        if len(wanted) == len(_TRIMMED) and (event["triggered"] or event["pending_ready_before"]):
            check.problems.append(f"{label} {number}: trimmed although something happened")
        for name, value in wanted.items():
            if not _same(event.get(name), value):
                check.equal(f"{label} {number} {name}", event.get(name), value)


def _same(computed: Any, expected: Any) -> bool:
    """Equal, where any float is meant as the float32 nearest to it."""
    if isinstance(expected, dict):
        return (
            isinstance(computed, dict)
            and computed.keys() == expected.keys()
            and all(_same(computed[key], expected[key]) for key in expected)
        )
    if isinstance(expected, list):
        return isinstance(computed, list) and len(computed) == len(expected) and all(map(_same, computed, expected))
    if isinstance(expected, float) and isinstance(computed, int | float):
        return np.float32(computed) == np.float32(expected)
    return bool(computed == expected)


def _floats(check: Checker, name: str, computed: npt.NDArray[np.float32], expected: list[float]) -> None:
    wanted = np.array(expected, np.float64).astype(np.float32)
    if computed.shape != wanted.shape or not np.array_equal(computed, wanted):
        check.equal(name, computed.tolist(), wanted.tolist())
