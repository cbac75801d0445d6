"""A long run of a runtime with threads, evictions and erasures: `python runtime_soak.py STEPS [THREADS]`.

Prints what was found as JSON: calls whose rows differ from a plain cache (all are compared), blocks that did not come
to be stored, fallbacks, and the anonymous memory after each tenth of the steps.
"""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from plain_cache import PlainLayer
from store_options import store_options

from kvmnn.policies.h2o import H2OConfig
from kvmnn.runtime import LosslessRuntime

LAYERS, HEADS, HEAD_DIM = 8, 2, 16
CONFIG = store_options(
    front_n=LAYERS,
    hot_recent_tokens=32,
    max_queue=8,
    decode_cache_blocks=8,
    decode_cache_bytes=1 << 16,
    h2o=H2OConfig(
        layer_start=2,
        block_tokens=8,
        sink_tokens=8,
        recent_tokens=32,
        target_lossy_ratio=1.5,
        trigger_min_tokens=150,
        update_interval=16,
    ),
)


def anonymous() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def run(steps: int, threads: int) -> dict[str, Any]:
    rng = np.random.default_rng(7)
    pool = (np.linspace(0.5, 1, HEAD_DIM) + rng.integers(0, 4, (4096, 2, HEADS, 1, HEAD_DIM)) / 64).astype("<f2")
    attention = rng.random((64, 2, 512), np.float32)
    plain = [PlainLayer(HEADS, HEAD_DIM, "<f2") for _ in range(LAYERS)]
    memory: list[int] = []
    different, began = 0, time.perf_counter()
    config = replace(CONFIG, async_threads=threads)
    with LosslessRuntime(config, layers=LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="fp16") as runtime:
        planner: Any = runtime._runtime.planner
        for position in range(steps):
            if position % 151 == 150:  # the layers that evict nothing would grow without end
                runtime.erase(64, position - 40)
                for rows in plain:
                    rows.erase(64, position - 40)
            for layer in range(LAYERS):
                plan = planner.layers[layer].pending_plan
                if plan is not None:
                    plain[layer].evict(plan.pairs, plan.remove)
                new = pool[(position * LAYERS + layer) * 37 % 4096]
                plain[layer].append(new, position)
                keys, values = runtime.begin_call(layer, new[0], new[1])
                different += keys.tobytes() != plain[layer].rows[0].tobytes()
                different += values.tobytes() != plain[layer].rows[1].tobytes()
                runtime.end_call(rows=attention[position % 64, :, : keys.shape[1]])
            runtime.end_step()
            if (position + 1) % (steps // 10) == 0:
                memory.append(anonymous())
                print(f"{position + 1} steps, {different} different, {memory[-1]} bytes", file=sys.stderr, flush=True)
        runtime.flush()
        metrics = runtime.collect_metrics()
        states = [piece.state for layer in runtime._runtime._layers for piece in layer.rows.segments[1:]]  # type: ignore[union-attr]
        return {
            "steps": steps,
            "seconds": time.perf_counter() - began,
            "different": different,
            "not_stored": sum(state != "stored" for state in states),
            "stored": len(states),
            "fallbacks": metrics.h2o_lossless_fallback_count,
            "updates": sum(layer.updates for layer in metrics.layers),
            "skips": metrics.h2o_lossless_backpressure_skip_count,
            "evicted": metrics.h2o_total_evict_tokens,
            "memory": memory,
        }


if __name__ == "__main__":
    print(json.dumps(run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4)))
