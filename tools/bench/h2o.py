"""Measure the H2O planner: `python tools/bench/h2o.py` writes benchmarks/h2o.md and .json.

One core, everything warm, CPU time, medians over rounds in which all jobs take turns. A plan includes its pairs as
Python tuples, ready for `PackedCache.realloc`. Bandwidth counts the attention rows read, 10^9 bytes a second; numpy's
`add.reduceat`, which adds in an order of its own, and a plain loop over one chain of additions stand next to it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from common import interleaved, repeats, table, time_once, write_results

from kvmnn.policies.h2o import H2OConfig, H2OPlanner, plan_blocks, sum_by_block

HEADS, KEYS, BLOCK = 32, 32768, 64
TOKENS = 1 << 20
PLAN_LIMIT_MS, SUMS_LIMIT = 1.5, 10.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds; for trying the script out")
    rounds = 5 if parser.parse_args().quick else 31
    sums, plans = measure(sum_jobs(), rounds), measure(plan_jobs(), rounds)
    size = HEADS * KEYS * 4
    rates = {name: {key: size / seconds / 1e9 for key, seconds in found.items()} for name, found in sums.items()}
    print(
        write_results("h2o", "H2O planner", [sums_section(rates), plans_section(plans)], data(rates, plans)).read_text()
    )


def measure(jobs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, dict[str, float]]:
    """Seconds of each job: the median, and the least for what the machine can do when left alone."""
    repeat = {name: repeats(time_once(job)) for name, job in jobs.items()}

    def several(job: Callable[[], Any], count: int) -> Callable[[], None]:
        def run() -> None:
            for _ in range(count):
                job()

        return run

    loops = {name: several(job, repeat[name]) for name, job in jobs.items()}
    times = interleaved(loops, rounds, time.process_time)
    return {
        name: {"median": statistics.median(found) / repeat[name], "least": min(found) / repeat[name]}
        for name, found in times.items()
    }


def sum_jobs() -> dict[str, Callable[[], Any]]:
    rows = np.random.default_rng(0).random((HEADS, KEYS), dtype=np.float32)
    rows /= rows.sum(axis=1, keepdims=True)
    copy = np.empty_like(rows)
    out, starts = np.empty(KEYS // BLOCK, np.float32), np.arange(0, KEYS, BLOCK)
    jobs: dict[str, Callable[[], Any]] = {
        f"block_sums, {threads} engine threads": lambda t=threads: sum_by_block(
            rows, BLOCK, threads=t, tile=64, out=out
        )
        for threads in (1, 4)
    }
    jobs["one chain at a time"] = lambda: sum_by_block(rows, KEYS)
    jobs["np.add.reduceat, then sum over heads"] = lambda: np.add.reduceat(rows, starts, axis=1).sum(axis=0)
    jobs["np.copyto of the rows"] = lambda: np.copyto(copy, rows)
    return jobs


def plan_jobs() -> dict[str, Callable[[], Any]]:
    rng = np.random.default_rng(1)
    config = H2OConfig(target_lossy_ratio=3.5, heads=1, layers=1, layer_start=0, update_interval=1)
    random, equal = rng.random(TOKENS // BLOCK, dtype=np.float32), np.ones(TOKENS // BLOCK, np.float32)
    jobs: dict[str, Callable[[], Any]] = {
        "plan, random scores": lambda: plan_blocks(random, TOKENS, config).reserve_pairs,
        "plan, equal scores": lambda: plan_blocks(equal, TOKENS, config).reserve_pairs,
        "sort alone: np.argsort(-scores, kind='stable')": lambda: np.argsort(-random, kind="stable"),
    }

    def whole_call() -> None:
        planner = H2OPlanner(config)
        planner.meta.previous = TOKENS - 1
        planner.begin_call(TOKENS - 1)
        planner.end_call(random)

    jobs["Planner: begin and end, mean and plan included"] = whole_call
    return jobs


def sums_section(rates: dict[str, dict[str, float]]) -> str:
    rows = [[name, f"{rate['median']:.1f}", f"{rate['least']:.1f}"] for name, rate in rates.items()]
    return (
        f"## One decode step: {HEADS} heads x {KEYS:,} keys, float32, blocks of {BLOCK}\n\n"
        f"Aim: at least {SUMS_LIMIT:g} GB/s, with the engine's order of additions.\n\n"
        f"{table(['', 'GB/s, median', 'GB/s, best round'], rows)}\n"
    )


def plans_section(plans: dict[str, dict[str, float]]) -> str:
    rows = [[name, f"{1e3 * found['median']:.3f}", f"{1e3 * found['least']:.3f}"] for name, found in plans.items()]
    return (
        f"## One plan: {TOKENS:,} tokens, {TOKENS // BLOCK:,} blocks\n\nAim: less than {PLAN_LIMIT_MS:g} ms.\n\n"
        f"{table(['', 'ms, median', 'ms, best round'], rows)}\n"
    )


def data(rates: dict[str, dict[str, float]], plans: dict[str, dict[str, float]]) -> dict[str, Any]:
    return {
        "sums_gb_per_s": {name: {"median": rate["median"], "best": rate["least"]} for name, rate in rates.items()},
        "plan_ms": {
            name: {"median": 1e3 * found["median"], "best": 1e3 * found["least"]} for name, found in plans.items()
        },
        "limits": {"plan_ms": PLAN_LIMIT_MS, "sums_gb_per_s": SUMS_LIMIT},
    }


if __name__ == "__main__":
    main()
