"""The planner and a packed cache together repeat an eviction that a running engine wrote to its files."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from kvmnn import H2OConfig, H2OPlanner, PackedCache, PackLayout


@pytest.fixture(scope="module")
def live(unpacked: Callable[[str], Path]) -> Path:
    return unpacked("real_kv") / "mnn_h2o_live"


def test_planner_and_packed_cache_repeat_engine_files_of_seven_steps(live):
    """From the configuration and the blocks that the attention favoured: every file of every step, stale rows too."""
    index = json.loads((live / "index.json").read_text())
    layout = PackLayout(
        kv_heads=index["kv_heads"], head_dim=index["head_dim"], dtype="fp32", lP=index["lP"], hP=index["hP"]
    )
    planner = H2OPlanner(H2OConfig(**index["config"], layers=2, heads=1))
    caches = [PackedCache(layout), PackedCache(layout)]
    favoured = {case["layer"]: case["reserve"] for case in index["cases"]}
    evictions = []
    for snapshot in index["snapshots"]:
        step, past = snapshot["step"], snapshot["past"]
        add = past if step == 0 else 1
        for layer, cache in enumerate(caches):
            files = [(live / f"s{step}_layer{layer}.{side}").read_bytes() for side in "kv"]
            new = layout.gather(*files, past - add, add, past_length=past, capacity=index["capacity"])
            todo = planner.begin_call(len(cache), add, decode=step > 0)
            cache.append(*new, remove=todo.remove, reserve=todo.reserve)
            sums = np.zeros(planner.config.count_blocks(len(cache)), np.float32)
            for begin, size in favoured[layer]:
                sums[begin // 8 : -(-(begin + size) // 8)] = 1
            planner.end_call(sums)
            assert len(cache) == past and cache.capacity == index["capacity"]
            assert [cache.key_buffer.tobytes(), cache.value_buffer.tobytes()] == files, (step, layer)
            if todo.remove:
                evictions.append((step, layer, todo.remove, [list(pair) for pair in todo.reserve]))
        assert planner.end_step() == past
    assert evictions == [
        (case["after_step"], case["layer"], case["remove"], case["reserve"]) for case in index["cases"]
    ]
    assert planner.metrics.h2o_total_evict_tokens == 2 * 80
