"""Anonymous memory of a process that holds a cache in a runtime: `python runtime_memory.py MODE THREADS`."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

from kvmnn.policies.h2o import H2OConfig
from kvmnn.runtime import LosslessRuntime, RuntimeConfig

LAYERS, HEADS, HEAD_DIM, TOKENS, STEPS = 8, 4, 64, 4096, 16


def anonymous() -> int:
    """Bytes that the process holds now."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("RssAnon"))


def main(mode: str, threads: int) -> None:
    config = RuntimeConfig(
        enable=mode != "off",
        runtime_enable=True,
        codec="gear_delta",
        mode="store",
        front_n=LAYERS,
        async_threads=threads,
        decode_cache_blocks=0,
        prefetch_layers=1,
        h2o=H2OConfig(enable=False, trigger_min_tokens=1, update_interval=1),
    )
    rng = np.random.default_rng(0)
    line = np.linspace(0.5, 1.0, HEAD_DIM)
    before = anonymous()
    with LosslessRuntime(config, layers=LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="fp16") as runtime:

        def step(tokens: int) -> None:
            for layer in range(LAYERS):
                rows = (line + rng.integers(0, 2, (HEADS, tokens, HEAD_DIM)) / 64).astype(np.float16)
                runtime.begin_call(layer, rows, rows)
                runtime.end_call()
            runtime.end_step()

        step(TOKENS)
        peak = 0
        for _ in range(STEPS):
            step(1)
            peak = max(peak, anonymous() - before)
        runtime.wait()
        metrics = runtime.collect_metrics()
        held = sum(layer.held_bytes for layer in metrics.layers)
        raw = sum(layer.tokens for layer in metrics.layers) * HEADS * HEAD_DIM * 4
        document = {"after": anonymous() - before, "peak": peak, "held": held, "raw": raw}
        print(json.dumps(document | {"ratio": metrics.h2o_lossless_ratio}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
