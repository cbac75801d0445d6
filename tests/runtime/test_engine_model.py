"""The engine's behaviour next to an independent model of its specification, on settings that no trace has."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from engine_store_model import StoreModel

from kvmnn.policies.h2o import BlockPlan, H2OPlanner
from kvmnn.runtime import LosslessRuntime, RuntimeConfig

_SWITCHED_ON = {"kv_lossless_enable": True, "kv_lossless_runtime_enable": True, "kv_lossless_codec": "gear_delta"}
_CHOICES: dict[str, list[Any]] = {
    "kv_lossless_runtime_mode": ["store", "store", "full", "probe", "other"],
    "kv_lossless_scope": ["front_n", "h2o_kept", "front_n_and_h2o_kept", "front_n+h2o_kept", "none", "other"],
    "kv_lossless_front_n": [-3, 0, 1, 2, 3, 9, 2**31 - 1],
    "kv_lossless_block_tokens": [-1, 0, 1, 2, 3, 5, 8, 16, 33],
    "kv_lossless_hot_recent_tokens": [-1, 0, 0, 1, 1, 5, 13, 500],
    "kv_lossless_hot_sink_tokens": [-1, 0, 1, 4, 90],
    "kv_lossless_kept_sample_layers": [-1, 0, 1, 2, 9],
    "kv_lossless_kept_sample_token_interval": [-1, 0, 1, 2, 3],
    "kv_lossless_front_sample_token_interval": [-1, 0, 1, 2, 3],
    "kv_lossless_store_disable_front": [False, False, True],
    "kv_lossless_store_bootstrap_tokens": [-1, 0, 1, 4, 8, 16, 32],
    "kv_lossless_store_grouped_step_tokens": [-1, 0, 1, 3, 4, 8, 9, 16, 24, 64],
    "kv_lossless_predictors_k": ["raw,delta_seq,xor_seq", "", "raw", "xor_seq ,\traw", "other", " "],
    "kv_lossless_predictors_v": ["raw,delta_seq", "", "delta_seq", "xor_seq"],
    "kv_lossless_async_threads": [-1, 0, 1, 1, 2],
    "kv_lossless_max_queue": [-1, 0, 1, 1, 2, 256],
    "kv_lossless_decode_cache_blocks": [-1, 0, 1, 2, 3, 64],
    "kv_lossless_strict_roundtrip_check": [False, True],
    "kv_h2o_enable": [False, True],
    "kv_h2o_layer_start": [-1, 0, 1, 2, 50],
    "kv_h2o_layer_end": [-7, -1, 0, 1, 3, 99],
    "kv_h2o_block_tokens": [0, 1, 4, 8, 16],
    "kv_h2o_sink_tokens": [-1, 0, 4, 8],
    "kv_h2o_recent_tokens": [-1, 0, 8, 16, 30],
    "kv_h2o_target_keep_ratio": [-1.0, 0.0, 0.3, 0.5, 0.7, 1.0, 2.0],
    "kv_h2o_target_mode": ["adaptive", "static", "other"],
    "kv_h2o_target_lossy_ratio": [0.5, 1.5, 2.0, 3.5, 1e30],
    "kv_h2o_update_interval": [-1, 0, 1, 2, 3, 5],
}
"""Values of every key that is not a switch, on both sides of its clamp."""
_BUSY = {
    "kv_lossless_scope": "front_n",
    "kv_lossless_front_n": 9,
    "kv_lossless_hot_recent_tokens": 1,
    "kv_lossless_hot_sink_tokens": 1,
    "kv_lossless_block_tokens": 2,
    "kv_lossless_async_threads": 1,
    "kv_lossless_max_queue": 1,
    "kv_lossless_front_sample_token_interval": 1,
    "kv_lossless_store_disable_front": False,
}
"""Layers that find the queue full."""
_TYPES = {"fp16": np.float16, "fp32": np.float32}


class _TellingPlanner(H2OPlanner):
    """A planner that says what it decided last: input of the model, as of the traces."""

    last: dict[str, Any] | None = None

    def select_blocks(self, scores: Any, kv_len: int) -> BlockPlan:
        made = super().select_blocks(scores, kv_len)
        floor, pairs = int(made.floor_dominates), made.retained_runs.tolist()
        self.last = {"floor": floor, "keep": made.num_final_tokens, "evict": made.num_evicted, "pairs": pairs}
        return made


class _Both:
    """kvmnn and the model on one random configuration, call by call."""

    def __init__(self, seed: int) -> None:
        self.seen: Counter[str] = Counter()
        draw = self.draw = random.Random(seed)
        self.rng = np.random.default_rng(seed)
        document = {key: draw.choice(values) for key, values in _CHOICES.items() if draw.random() < 0.93}
        document |= _SWITCHED_ON | {"kv_h2o_trigger_min_tokens": draw.choice([-5, 0, 1, 20, 40, 64])}
        if seed % 4 == 0:
            document |= _BUSY
        self.layers, self.heads, self.head_dim = draw.randint(1, 5), draw.randint(1, 3), draw.choice([2, 6, 8, 16])
        dtype, lazy = draw.choice(list(_TYPES)), seed % 4 == 0 or draw.random() < 0.5
        self.words, self.range = _TYPES[dtype], draw.choice([3, 1000])
        layer_nums = draw.choice([None] * 6 + [1, 2, 7])
        if layer_nums is not None:  # a result that comes late would meet a layer of another length
            document["kv_lossless_async_threads"] = 0
        believed = layer_nums or self.layers
        config = RuntimeConfig.from_engine(document, lenient=True)
        self.planner = _TellingPlanner(replace(config.h2o, layers=believed, heads=1), on_invalid="engine")
        self.runtime = LosslessRuntime(
            replace(config, layer_nums=believed),
            layers=self.layers,
            kv_heads=self.heads,
            head_dim=self.head_dim,
            dtype=dtype,
            behaviour="engine",
            on_invalid="engine",
            planner=self.planner,
            timing="lazy" if lazy else "eager",
        )
        self.model = StoreModel(document, self.layers, dtype, lazy=lazy, layer_nums=layer_nums)

    def forward(self, tokens: int) -> None:
        for layer in range(self.layers):
            shape = (2, self.heads, tokens, self.head_dim)
            repeats = self.draw.random() < 0.15
            new = np.full(shape, layer + 1) if repeats else self.rng.integers(1, 1 + self.range, shape)
            rows = new.astype(self.words)
            read, model_read = self.runtime.begin_call(layer, rows[0], rows[1]), self.model.begin(layer, rows)
            assert [part.tobytes() for part in read] == [part.tobytes() for part in model_read]
            self.planner.last = None
            sums = self.rng.random(self.planner.config.count_blocks(read[0].shape[1]), np.float32)
            event = self.runtime.end_call(sums=sums).to_dict()
            assert event == self.model.end(layer, self.planner.last)
            self.seen.update(event.keys())
            self.seen.update(one["hit"] for name in ("restore", "decode") for one in event.get(name, ()))
            self.seen["skip"] += any(one["skip"] for one in event.get("applied", ()))
            after = self.runtime.get_live_rows(layer)
            assert [part.tobytes() for part in after] == [part.tobytes() for part in self.model.rows[layer]]
        self.runtime.end_step()
        self.model.sync()

    def run(self) -> None:
        self.forward(self.draw.choice([1, 5, 40, 90, 160]))
        for _ in range(self.draw.choice([20, 40, 60])):
            what = self.draw.random()
            if what > 0.97:
                span = self.draw.randrange(100), self.draw.choice([0, 0, self.draw.randrange(120)])
                self.runtime.erase(*span)
                self.model.erase(*span)
            elif what > 0.95:
                keep = self.draw.random() < 0.6
                self.runtime.start_request(keep_cache=keep)
                self.model.start_request(keep)
            elif what > 0.94:
                self.runtime.reset()
                self.model.reset()
            tokens = self.draw.choice([1, 5, 30, 70] if 0.94 < what < 0.97 else [1, 1, 1, 1, 1, 2, 5])
            self.forward(tokens)


@pytest.mark.slow
def test_emulation_every_event_equals_the_model() -> None:
    seen: Counter[str] = Counter()
    for seed in range(40):
        both = _Both(seed)
        both.run()
        seen += both.seen
    expected = {"plan", "edit", "reset", "restore", "scatter", "shrink", "block", "applied", "decode", "miss", "skip"}
    assert expected | {"local_pos"} <= set(seen)
