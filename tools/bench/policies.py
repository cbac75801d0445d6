"""The policies that look at keys against numpy: `python tools/bench/policies.py [--quick]` writes benchmarks/policies.*

The rival is what one would write in numpy: `np.linalg.norm(keys.astype(np.float32), axis=-1)`, argpartition, sort. CPU
times of one thread, interleaved, medians of ratios. With SIMD level "baseline" forced the kernels do without AVX2 and
F16C; numpy keeps what it has.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from common import interleaved, ratio, repeats, table, time_once, write_results

from kvmnn import _simd
from kvmnn.policies import (
    POLICIES,
    KNorm,
    L2Fixed,
    LayerState,
    Policy,
    ScoredPolicy,
    Trigger,
    compute_key_norms,
    create_policy,
)
from kvmnn.policies.layer_parameters import LayerParameters, Rotation

HEADS, TOKENS, DIMS, BUDGET = 32, 32768, 128, 1024
LIMITS = {"baseline": 5.0, "avx2": 15.0}

DECIDING: dict[str, dict[str, Any]] = {
    "l2_ratio": {"prune_after": 0},
    "h2o_tokens": {"buffer": 0},
    "h2o_blocks": {"block_tokens": 1, "update_interval": 1},
}
"""Options with which a policy decides at once, for one token, too."""

Array = npt.NDArray[Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; for trying the script out")
    options = parser.parse_args()
    rounds = 3 if options.quick else 9
    # normal numbers are enough: the time does not depend on the values but for subnormal ones
    keys = np.random.default_rng(0).standard_normal((HEADS, TOKENS, DIMS), np.float32)
    results = [case for dtype in (np.float16, np.float32) for case in cases(keys.astype(dtype, copy=False), rounds)]
    text = (
        f"{HEADS} heads, {TOKENS} tokens, head_dim {DIMS}, {BUDGET} tokens kept, one thread, CPU time. Limits: at "
        f"least {LIMITS['avx2']:g} x, and {LIMITS['baseline']:g} x at the baseline, for l2_fixed on fp16.\n\n"
    )
    header = ["what", "dtype", "SIMD level", "ms", "GB/s of keys", "numpy ms", "speed-up"]
    rows = [
        [
            r["what"],
            r["dtype"],
            r["level"],
            f"{r['ms']:.1f}",
            f"{r['gb_s']:.1f}",
            f"{r['numpy_ms']:.0f}",
            f"{r['speedup']:.1f} x" + ("" if r["limit"] is None else f" (>= {r['limit']:g})"),
        ]
        for r in results
    ]
    section = f"## Norms and choice\n\n{text}{table(header, rows)}\n"
    costs = decisions(keys.astype(np.float16), rounds)
    data = {"norms_and_choice": results, "decisions": costs}
    path = write_results("policies", "Eviction policies", [section, decisions_section(costs)], data)
    print(path.read_text())


def cases(keys: Array, rounds: int) -> list[dict[str, Any]]:
    view = LayerState(tokens=TOKENS, layer=2, keys=keys)
    fixed, half, press = L2Fixed(budget=BUDGET), L2Fixed(budget=BUDGET, recent_ratio=0.5), KNorm(budget=BUDGET)
    pairs: list[tuple[str, Callable[[], Any], Callable[[], Any], bool]] = [
        ("l2_fixed", lambda: fixed.select_or_all(view), lambda: numpy_fixed(keys, 0), True),
        ("l2_fixed, half recent", lambda: half.select_or_all(view), lambda: numpy_fixed(keys, BUDGET // 2), False),
        ("knorm", lambda: press.select_or_all(view), lambda: numpy_knorm(keys), False),
        ("norms alone", lambda: compute_key_norms(keys), lambda: numpy_norms(keys), False),
    ]
    found = []
    before = _simd.simd_level()
    for level in _simd.simd_levels():
        for what, ours, theirs, limited in pairs:
            _simd.set_simd_level(level)
            times = interleaved({"kvmnn": ours, "numpy": theirs}, rounds, time.thread_time)
            seconds = float(np.median(times["kvmnn"]))
            found.append(
                {
                    "what": what,
                    "dtype": str(keys.dtype),
                    "level": level,
                    "ms": seconds * 1e3,
                    "gb_s": keys.nbytes / seconds / 1e9,
                    "numpy_ms": float(np.median(times["numpy"])) * 1e3,
                    "speedup": ratio(times, "numpy", "kvmnn"),
                    "limit": LIMITS.get(level) if limited and keys.dtype == np.float16 else None,
                }
            )
            print({key: value for key, value in found[-1].items() if key in ("what", "dtype", "level", "speedup")})
    _simd.set_simd_level(before)
    return found


# -- what one decision of every policy costs ------------------------------------------------------------------------


NUM_LAYERS, LAYER = 32, 2
SCORED_ROUNDS = 3
"""Of scored policies, whose decisions take up to seconds."""

SCORED_OPTIONS = {"composed": {"policies": "keydiff+snapkv"}}


def decisions(keys: Array, rounds: int) -> list[dict[str, Any]]:
    """Median CPU time of one `keep`: of a long cache, and of a full one after one more token."""
    found = []
    for name in (*POLICIES, *SCORED_OPTIONS):
        row: dict[str, Any] = {"policy": name}
        for what, tokens in (("long_us", TOKENS), ("step_us", BUDGET + 1)):
            policy = create_policy(
                name, budget=BUDGET, skip_layers=(), **DECIDING.get(name, SCORED_OPTIONS.get(name, {}))
            )
            view = seen_by(policy, keys[:, :tokens])
            moment = Trigger.AFTER_ATTENTION if Trigger.AFTER_ATTENTION in policy.triggers else Trigger.AFTER_APPEND
            kept = policy.select(view, moment)
            assert kept is not None or name == "simlayerkv", name  # which leaves layers whole that do not look there

            def job(policy: Policy = policy, view: LayerState = view, moment: Trigger = moment) -> object:
                return policy.select(view, moment)

            repeat = repeats(time_once(job))
            num_rounds = min(rounds, SCORED_ROUNDS) if isinstance(policy, ScoredPolicy) else rounds
            times = interleaved({name: job}, num_rounds, time.thread_time, repeat)
            row[what] = float(np.median(times[name])) * 1e6
        found.append(row)
    return found


def seen_by(policy: Policy, keys: Array) -> LayerState:
    tokens = keys.shape[1]
    scores = np.random.default_rng(1).random((HEADS, tokens), np.float32)
    if isinstance(policy, ScoredPolicy):
        window = policy.query_window
        count = tokens if window is None else min(window, tokens)
        queries = np.random.default_rng(2).standard_normal((HEADS, count, DIMS), np.float32) if count else None
        rotation = Rotation((10000.0 ** (-np.arange(DIMS // 2) / (DIMS // 2))).astype(np.float32))
        return LayerState(
            tokens=tokens, layer=LAYER, keys=keys, values=keys[::-1], queries=queries,
            parameters=LayerParameters(NUM_LAYERS, rotation),
        )  # fmt: skip
    return LayerState(tokens=tokens, keys=keys, scores=scores[0] if policy.requires == "scores" else scores)


def decisions_section(costs: list[dict[str, Any]]) -> str:
    rows = [[r["policy"], f"{r['long_us'] / 1e3:.3f} ms", f"{r['step_us']:.0f} us"] for r in costs]
    header = ["policy", f"{TOKENS} tokens to {BUDGET}", f"{BUDGET + 1} tokens to {BUDGET}"]
    return (
        f"## One decision of one layer\n\nfp16, {HEADS} heads, head_dim {DIMS}, one thread, CPU time; moving K "
        f"and V is not in it. Queries, where a policy needs them, are of {HEADS} heads.\n\n{table(header, rows)}\n"
    )


def numpy_norms(keys: Array) -> Array:
    return np.linalg.norm(keys.astype(np.float32, copy=False), axis=-1)


def numpy_fixed(keys: Array, protected: int) -> Array:
    zone, count = TOKENS - protected, BUDGET - protected
    norms = numpy_norms(keys[:, :zone])
    chosen = np.sort(np.argpartition(norms, count, axis=1)[:, :count], axis=1)
    recent = np.broadcast_to(np.arange(zone, TOKENS), (HEADS, protected))
    return np.concatenate([chosen, recent], axis=1)


def numpy_knorm(keys: Array) -> Array:
    norms = numpy_norms(keys)
    chosen = np.argpartition(norms, BUDGET, axis=1)[:, :BUDGET]
    order = np.argsort(np.take_along_axis(norms, chosen, axis=1), axis=1)
    return np.take_along_axis(chosen, order, axis=1)


if __name__ == "__main__":
    main()
