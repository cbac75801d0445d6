"""Evictions that the caller decides on, layer by layer: what is left equals a plain cache, whatever was stored."""

from __future__ import annotations

import numpy as np
import pytest
from slow_cases import mark_most_slow

from kvmnn.errors import KvmnnError
from kvmnn.runtime import LosslessRuntime, RuntimeConfig

LAYERS, HEADS, DIM = 3, 2, 16


def runtime(threads: int = 0) -> LosslessRuntime:
    keys = {
        "enable": True, "runtime_enable": True, "codec": "gear_delta", "runtime_mode": "store", "front_n": 2,
        "block_tokens": 16, "hot_sink_tokens": 2, "hot_recent_tokens": 5, "async_threads": threads,
    }  # fmt: skip
    document = {f"kv_lossless_{key}": value for key, value in keys.items()}
    config = RuntimeConfig.from_engine(document | {"kv_h2o_trigger_min_tokens": 10, "kv_h2o_update_interval": 1})
    return LosslessRuntime(config, layers=LAYERS, kv_heads=HEADS, head_dim=DIM, dtype="fp16")


@pytest.mark.parametrize("threads", [0, 2])
@pytest.mark.parametrize("seed", mark_most_slow(range(4), 4))
def test_evict_remaining_rows_equal_a_plain_cache(seed: int, threads: int) -> None:
    rng = np.random.default_rng(seed)
    store = runtime(threads)
    plain = [np.zeros((2, HEADS, 0, DIM), np.float16) for _ in range(LAYERS)]
    places = [np.empty(0, np.int64) for _ in range(LAYERS)]
    seen = evicted = blocks = 0
    for step in range(60):
        new = int(rng.integers(20, 90)) if step == 0 else int(rng.integers(1, 4))
        for layer in range(LAYERS):
            rows = (rng.integers(0, 40, (2, HEADS, new, DIM)) / 8).astype(np.float16)
            plain[layer] = np.concatenate([plain[layer], rows], axis=2)
            places[layer] = np.concatenate([places[layer], np.arange(seen, seen + new)])
            store.append_call(layer, rows[0], rows[1])
            store.end_call()
        store.end_step()
        seen += new
        layer = int(rng.integers(LAYERS))
        count = plain[layer].shape[2]
        stays = np.sort(rng.choice(count, int(rng.integers(count - count // 12, count + 1)), replace=False))
        edges = np.flatnonzero(np.diff(np.isin(np.arange(count), stays), prepend=False, append=False)).reshape(-1, 2)
        store.evict(layer, [(int(begin), int(end - begin)) for begin, end in edges])
        plain[layer], places[layer] = plain[layer][:, :, stays], places[layer][stays]
        evicted += count - len(stays)
        for number in range(LAYERS):
            found = store.read_layer(number)
            assert found.keys.tobytes() == plain[number][0].tobytes()
            assert found.values.tobytes() == plain[number][1].tobytes()
            assert np.array_equal(found.positions, places[number])
        blocks = max(blocks, sum(one.blocks for one in store.collect_metrics().layers))
    store.wait()
    metrics = store.collect_metrics()
    assert metrics.h2o_total_evict_tokens == evicted and blocks > 0
    assert store.resident_bytes == metrics.held_bytes
    assert metrics.lossy_ratio == pytest.approx(seen * LAYERS / sum(one.tokens for one in metrics.layers))
    store.close()


def test_evict_invalid_ranges_are_refused() -> None:
    store = runtime()
    rows = np.ones((HEADS, 20, DIM), np.float16)
    store.append_call(0, rows, rows)
    with pytest.raises(KvmnnError, match="expected between two steps"):
        store.evict(0, [(0, 5)])
    store.end_call()
    for layer in (1, 2):
        store.append_call(layer, rows, rows)
        store.end_call()
    store.end_step()
    for wrong in ([(0, 21)], [(5, 3), (4, 2)], [(-1, 3)], [(3, 0)]):
        with pytest.raises(KvmnnError, match="are no ascending ranges of its 20 tokens"):
            store.evict(1, wrong)
    with pytest.raises(KvmnnError, match="layer is 3"):
        store.evict(3, [(0, 5)])
    store.evict(1, [])
    assert [store.read_layer(layer).tokens for layer in range(LAYERS)] == [20, 0, 20]
