"""Published traces of requests in simulated stores: hit rates of each policy and size, and what a simulation takes.

Mooncake's traces are files of github.com/kvcache-ai/Mooncake, FAST25-release/traces (Apache-2.0):

    python tools/bench/store_traces.py conversation_trace.jsonl synthetic_trace.jsonl \\
        --json benchmarks/store_traces.json > benchmarks/store_traces.md
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from common import table

from kvmnn.store.simulation import SimulationReport, parse_model_shape, read_trace, simulate

SHAPE = "32x8x128,fp16"
SIZES_GB = (50, 200, 1000, 2000)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("traces", nargs="+", metavar="TRACE")
    parser.add_argument("--json", required=True, metavar="FILE")
    arguments = parser.parse_args()
    results = [measure(Path(path)) for path in arguments.traces]
    Path(arguments.json).write_text(json.dumps({"traces": results}, indent=1) + "\n")
    print("# Published traces in simulated stores\n")
    print(f"K and V of {SHAPE}, not compressed: {parse_model_shape(SHAPE).token_bytes:,} bytes a token. Whole files.")
    for result in results:
        print(f"\n## {result['trace']}\n")
        print(
            f"{result['requests']:,} requests, {result['tokens']:,} input tokens. Tokens that were found, % of these:\n"
        )
        columns = ["policy", *(f"{size:,} GB" for size in SIZES_GB), "no limit"]
        no_limit = f"{100 * result['unlimited_hit_rate']:.2f}"
        rows = [
            [policy, *(f"{100 * rate:.2f}" for rate in rates), no_limit]
            for policy, rates in result["hit_rates"].items()
        ]
        print(table(columns, rows))
        print(
            f"\nCPU time: reading {result['read_seconds']:.2f} s, {result['runs']} simulations "
            f"{result['run_seconds']:.2f} s."
        )


def measure(path: Path) -> dict[str, Any]:
    """Return hit rates by policy and size, and CPU times."""
    started = time.process_time()
    trace = read_trace(path)
    read = time.process_time()
    report = simulate(trace, parse_model_shape(SHAPE), sizes=[size * 10**9 for size in SIZES_GB])
    done = time.process_time()
    return {
        "trace": path.name,
        "format": report.format,
        "requests": report.requests,
        "tokens": report.tokens,
        "unlimited_hit_rate": report.unlimited_hit_rate,
        "hit_rates": collect_hit_rates(report),
        "runs": len(report.rows),
        "read_seconds": read - started,
        "run_seconds": done - read,
    }


def collect_hit_rates(report: SimulationReport) -> dict[str, list[float]]:
    """Return the hit rates of each policy by size."""
    rates: dict[str, list[float]] = {}
    for row in report.rows:
        if row.max_bytes is not None:
            rates.setdefault(row.policy, []).append(row.hit_rate)
    return rates


if __name__ == "__main__":
    main()
