"""Why a live engine evicted what it evicted: its configuration, put into kvmnn's planner.

The attention that the engine saw is not recorded, but everything else follows from the configuration: when a layer
triggers, which blocks are protected, how many others join them, and that the plan waits for the layer's next call.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvmnn.policies.h2o import H2OConfig, H2OPlanner, plan_blocks

from .common import Checker


def check_plan(index: dict[str, Any], case: dict[str, Any], check: Checker) -> None:
    """The pairs are the planner's for some scores, and their sizes and protected blocks for all."""
    config, tokens = _config(index), case["past_before"]
    wanted = _attention(config, case["reserve"], tokens)
    made = plan_blocks(wanted, tokens, config)
    check.field("remove", made.window_tokens)
    check.field("reserve", [list(pair) for pair in made.reserve_pairs])
    check.field("past_after", made.num_final_tokens)
    kept = made.keep.copy()
    for name, scores in (("equal", np.zeros(len(wanted))), ("opposite", -wanted), ("rising", np.arange(len(wanted)))):
        other = plan_blocks(scores, tokens, config)
        check.equal(f"tokens kept with {name} scores", other.num_final_tokens, case["past_after"])
        kept &= other.keep
    sink, recent = made.num_floor_blocks
    protected = [*range(sink), *range(len(kept) - recent, len(kept))]
    check.equal("blocks kept whatever the scores", np.flatnonzero(kept).tolist(), protected)


def check_length(index: dict[str, Any], snapshot: dict[str, Any], check: Checker) -> None:
    """Steps from the prompt to this snapshot, planned call by call, leave every layer with the recorded length."""
    config = _config(index)
    planner = H2OPlanner(config)
    by_step = sorted(index["snapshots"], key=lambda entry: int(entry["step"]))
    lengths = [0] * config.layers
    for entry in by_step:
        if entry["step"] > snapshot["step"]:
            break
        first = entry is by_step[0]
        for layer in range(config.layers):
            todo = planner.begin_call(lengths[layer], entry["past"] if first else 1, decode=not first)
            lengths[layer] = todo.kv_after + (entry["past"] if first else 1)
            case = _case_of(index, layer, entry["step"])
            expected = case["reserve"] if case else []
            check.equal(f"layer {layer}, step {entry['step']}: pairs", [list(pair) for pair in todo.reserve], expected)
            planned = _case_of(index, layer, entry["step"] + 1)
            pairs = planned["reserve"] if planned else []
            planner.end_call(_attention(config, pairs, lengths[layer]))
        planner.end_step()
    check.equal("tokens of every layer", lengths, [snapshot["past"]] * config.layers)


def _config(index: dict[str, Any]) -> H2OConfig:
    return H2OConfig(**index["config"], layers=len(index["snapshots"][0]["files"]) // 2, heads=1)


def _case_of(index: dict[str, Any], layer: int, step: int) -> dict[str, Any] | None:
    """The eviction whose result the layer shows after `step`."""
    return next((case for case in index["cases"] if (case["layer"], case["after_step"]) == (layer, step)), None)


def _attention(config: H2OConfig, pairs: list[list[int]], tokens: int) -> npt.NDArray[np.float32]:
    """1 for blocks inside the pairs, 0 for the others."""
    sums = np.zeros(config.count_blocks(tokens), np.float32)
    for begin, size in pairs:
        sums[begin // config.effective_block_tokens : -(-(begin + size) // config.effective_block_tokens)] = 1
    return sums
