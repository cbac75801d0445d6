"""The engine's planner on models: against a planner called layer by layer on the same decoder in numpy."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_cases import mark_most_slow
from tiny_decoders import Numpy, Tiny

from kvmnn.errors import KvmnnError, ModelError
from kvmnn.lm import DecoderSession, Runner
from kvmnn.policies import EvictingCache, H2OEngine
from kvmnn.policies.h2o import CacheEdit, H2OPlanner
from kvmnn.policies.h2o.planner import H2OStats, merge_stats

FORM = Tiny(layers=5, kv_heads=2, groups=2)
STEPS = [30, *[1] * 40, 3, 1, 1, 5, *[1] * 30]
OPTIONS: list[dict[str, Any]] = [
    {"update_interval": 3, "target_lossy_ratio": 2.0},
    {"update_interval": 1, "target_lossy_ratio": 3.5, "layer_start": 0},
    {"update_interval": 7, "target_mode": "static", "target_keep_ratio": 0.4, "layer_start": 1, "layer_end": 3},
    {"update_interval": 4, "target_lossy_ratio": 2.0, "cadence": "tokens", "ema_alpha": 0.5},
]
SMALL = {"block_tokens": 4, "sink_tokens": 2, "recent_tokens": 6, "trigger_min_tokens": 24}


class Reference:
    """The decoder in numpy; its layers' caches are cut by a planner that is called in the engine's order."""

    def __init__(self, policy: H2OEngine) -> None:
        self.model, self.seen = Numpy(FORM), 0
        self.planner: H2OPlanner = policy.create_planner(FORM.layers, 2 * FORM.kv_heads * FORM.head_dim * 4)
        self.layers = self.model.empty()
        self.positions = [np.empty(0, np.int64) for _ in range(FORM.layers)]

    def feed(self, ids: np.ndarray) -> np.ndarray:
        decode = self.seen > 0
        expected = self._calls(copy.deepcopy(self.planner), len(ids), decode, None)  # what begins drop, by a copy
        places = np.arange(self.seen, self.seen + len(ids))
        for layer, found in enumerate(expected):
            if found.remove:
                kept = np.concatenate([np.arange(begin, begin + size) for begin, size in found.reserve])
                self.layers[layer] = tuple(part[:, :, kept] for part in self.layers[layer])  # type: ignore[assignment]
                self.positions[layer] = self.positions[layer][kept]
        before = [found.kv_before for found in expected]
        logits, self.layers = self.model.step(ids, places, self.layers)
        self.positions = [np.concatenate([old, places]) for old in self.positions]
        rows = [weights.astype(np.float32) for weights in self.model.attentions]
        assert self._calls(self.planner, len(ids), decode, rows, before) == expected
        self.seen += len(ids)
        return logits

    def _calls(
        self,
        planner: H2OPlanner,
        new: int,
        decode: bool,
        rows: list[np.ndarray] | None,
        before: list[int] | None = None,
    ) -> list[CacheEdit]:
        found = []
        for layer in range(FORM.layers):
            held = before[layer] if before else self.layers[layer][0].shape[2]
            found.append(
                planner.begin_call(held, new, decode=decode, layer=layer if planner.cadence == "tokens" else None)
            )
            blank = np.zeros((FORM.heads, new, found[-1].kv_after + new), np.float32)
            planner.end_call(rows=blank if rows is None else rows[layer])
        planner.end_step()
        return found


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> DecoderSession:
    path = tmp_path_factory.mktemp("tiny") / "model.onnx"
    return DecoderSession.open(FORM.save(path), attentions=True, cache=False)


@pytest.mark.parametrize("options", OPTIONS, ids=lambda value: str(value)[:50])
@pytest.mark.parametrize(("slack", "packed"), mark_most_slow([(0, "x86-avx2"), (None, None)], 2))
def test_h2o_engine_equals_planner_called_layer_by_layer(
    session: DecoderSession, options: dict[str, Any], slack: int | None, packed: str | None
) -> None:
    policy = H2OEngine(**SMALL, **options)  # type: ignore[arg-type]
    reference, runner = Reference(policy), Runner(session, policy, max_masked=slack, packed=packed)
    rng = np.random.default_rng(5)
    for count in STEPS:
        ids = rng.integers(0, FORM.vocab, count)
        assert np.abs(runner.step(ids) - reference.feed(ids)).max() < 2e-3
        for layer in range(FORM.layers):
            assert np.array_equal(runner.cache.get_positions(layer), reference.positions[layer])
    figures, metrics = runner.cache.collect_h2o_stats(), reference.planner.metrics
    assert figures is not None and figures.h2o_total_evict_tokens == metrics.h2o_total_evict_tokens > 0
    for name in ("h2o_keep_ratio", "h2o_lossy_ratio", "h2o_last_evict_tokens", "h2o_target_keep_effective"):
        assert getattr(figures, name) == getattr(metrics, name)
    held = [len(positions) for positions in reference.positions]
    assert [layer.tokens_kept for layer in figures.layers] == held == runner.cache.tokens
    evicting = reference.planner.config.evicting_layers
    for layer in figures.layers:
        assert (layer.triggers > 0) <= (layer.layer in evicting)
        planned = sum(state.pending_plan is not None for state in [reference.planner.layers[layer.layer]])
        assert layer.h2o_total_evict_tokens >= sum(STEPS) - layer.tokens_kept
        assert planned or layer.h2o_total_evict_tokens == sum(STEPS) - layer.tokens_kept
    assert H2OStats.from_dict(figures.to_dict()) == figures


def test_merge_stats_adds_counts_and_keeps_last_ratios(session: DecoderSession) -> None:
    runner = Runner(session, H2OEngine(**SMALL, update_interval=2))  # type: ignore[arg-type]
    found = []
    for seed in (1, 2):
        runner.reset()
        ids = np.random.default_rng(seed).integers(0, FORM.vocab, 60)
        for part in (ids[:30], *ids[30:].reshape(-1, 1)):
            runner.step(part)
        figures = runner.cache.collect_h2o_stats()
        assert figures is not None
        found.append(figures)
    both = merge_stats(found)
    assert both is not None and merge_stats([]) is None
    assert both.h2o_total_evict_tokens == sum(one.h2o_total_evict_tokens for one in found)
    assert both.h2o_lossy_ratio == found[1].h2o_lossy_ratio
    assert [layer.tokens_seen for layer in both.layers] == [120] * FORM.layers
    assert both.layers[3].tokens_kept == sum(one.layers[3].tokens_kept for one in found)


def test_h2o_engine_unsupported_models_are_refused(session: DecoderSession, tmp_path: Path) -> None:
    with pytest.raises(KvmnnError, match="layer_nums is 32, the model has 5 layers"):
        Runner(session, H2OEngine(layer_nums=32))
    with pytest.raises(KvmnnError, match="decides for all layers of a model together"):
        cache = EvictingCache(H2OEngine())
        cache.append(np.zeros((1, 4, 2), np.float32), np.zeros((1, 4, 2), np.float32))
    grouped = DecoderSession.open(Tiny(form="gqa").save(tmp_path / "gqa.onnx"), attentions=False, cache=False)
    with pytest.raises((KvmnnError, ModelError)):
        Runner(grouped, H2OEngine())
