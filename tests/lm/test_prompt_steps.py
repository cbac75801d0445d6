"""A prompt read in steps: the same cache, plans and logits as in one step, and never more at once than its bound."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from slow_cases import mark_most_slow
from tiny_decoders import Tiny

from kvmnn.lm import DecoderSession, Runner
from kvmnn.lm import runner as prompt_steps
from kvmnn.lm.runner import compute_step_tokens, feed_prompt_steps
from kvmnn.policies import H2OEngine, create_policy
from kvmnn.runtime import RuntimeConfig

FORM = Tiny(layers=4, kv_heads=2, groups=2)
H2O: dict[str, Any] = {
    "block_tokens": 4, "sink_tokens": 2, "recent_tokens": 6, "trigger_min_tokens": 24, "update_interval": 2
}  # fmt: skip
BLOCKS = {name: H2O[name] for name in ("block_tokens", "trigger_min_tokens", "update_interval")} | {
    "sink": 2,
    "recent": 6,
}
LOSSLESS = {
    "kv_lossless_enable": True, "kv_lossless_runtime_enable": True, "kv_lossless_codec": "gear_delta",
    "kv_lossless_runtime_mode": "store", "kv_lossless_front_n": 4, "kv_lossless_block_tokens": 4,
    "kv_lossless_hot_sink_tokens": 0, "kv_lossless_hot_recent_tokens": 4, "kv_lossless_async_threads": 0,
    "kv_h2o_trigger_min_tokens": 8, "kv_h2o_update_interval": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> DecoderSession:
    path = tmp_path_factory.mktemp("tiny") / "model.onnx"
    return DecoderSession.open(FORM.save(path), attentions=True, cache=False)


@pytest.fixture
def step_tokens(monkeypatch: pytest.MonkeyPatch) -> int:
    """Few bytes a step, so that steps of a short prompt are at their least."""
    monkeypatch.setattr(prompt_steps, "MAX_STEP_BYTES", 1)
    monkeypatch.setattr(prompt_steps, "MIN_STEP_TOKENS", 7)
    return 7


def prompt(tokens: int) -> list[int]:
    return [int(token) for token in np.random.default_rng(tokens).integers(0, 40, tokens)]


@pytest.mark.parametrize("policy", [None, H2OEngine(**H2O), H2OEngine(**H2O, cadence="tokens")])
@pytest.mark.parametrize("lossless", [None, RuntimeConfig.from_engine(LOSSLESS)])
@pytest.mark.parametrize("tokens", mark_most_slow([30, 1, 45], 3))
def test_prompt_steps_equal_one_step(
    session: DecoderSession, step_tokens: int, policy: Any, lossless: Any, tokens: int
) -> None:
    whole, parts = (Runner(session, policy, lossless=lossless) for _ in range(2))
    expected = whole.step(prompt(tokens), end_chunk=True)
    pieces = list(feed_prompt_steps(parts, prompt(tokens)))
    assert [len(piece) for piece in pieces] == [min(step_tokens, tokens - i) for i in range(0, tokens, step_tokens)]
    assert np.allclose(np.concatenate(pieces), expected, atol=1e-4)
    if lossless is not None:
        for runner in (whole, parts):
            figures = runner.collect_runtime_stats()
            assert figures is not None and figures.h2o_lossless_raw_bytes == 0  # nothing is encoded at a prompt
    for token in prompt(40):
        assert np.allclose(parts.step([token]), whole.step([token]), atol=1e-3)
        assert parts.cache.tokens == whole.cache.tokens
    for one, other in zip(parts.cache.copy_layers(), whole.cache.copy_layers(), strict=True):
        assert np.array_equal(one.positions, other.positions)
        assert np.allclose(one.keys, other.keys, atol=1e-4)
    if policy is not None and tokens == 45:
        assert min(parts.cache.tokens) < parts.cache.num_seen


def test_prompt_steps_prompt_policy_gets_whole_prompt(session: DecoderSession, step_tokens: int) -> None:
    runner = Runner(session, create_policy("streaming", budget=16))
    assert [len(piece) for piece in feed_prompt_steps(runner, prompt(30))] == [30]


def test_prompt_steps_later_turn_is_one_step_with_planner(session: DecoderSession, step_tokens: int) -> None:
    runner = Runner(session, H2OEngine(**H2O))
    list(feed_prompt_steps(runner, prompt(30)))
    assert [len(piece) for piece in feed_prompt_steps(runner, prompt(16))] == [16]
    plain = Runner(session)
    list(feed_prompt_steps(plain, prompt(30)))
    assert [len(piece) for piece in feed_prompt_steps(plain, prompt(16))] == [7, 7, 2]


def test_prompt_steps_of_large_model_are_bounded(tmp_path: Path) -> None:
    """Whole prompts of 8,192 tokens would take 7 GB."""
    form = Tiny(layers=3, kv_heads=3, groups=3)
    for attentions in (False, True):
        session = DecoderSession.open(form.save(tmp_path / "model.onnx"), attentions=attentions, cache=False)
        for tokens in (64, 2048, 8192):
            size = min(tokens, compute_step_tokens(session, tokens))
            scores = size * tokens * 9 * 3 * 4  # three layers, or three copies of one
            assert size == prompt_steps.MIN_STEP_TOKENS or scores <= prompt_steps.MAX_STEP_BYTES


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("h2o_decayed", {"budget": 24}),
        ("h2o_decayed_heads", {"budget": 24}),
        ("observed_attention", {"budget": 24}),
        ("h2o_blocks", {**BLOCKS, "keep_ratio": 0.4, "skip_layers": ()}),
        ("snapkv", {"budget": 24, "window": 8}),
        ("expected_attention", {"budget": 24}),
    ],
)
def test_prompt_in_parts_equals_one_step(tmp_path, monkeypatch, policy, options) -> None:
    """Of a long prompt attention is summed and queries are joined part by part: the same cut, up to rounding."""
    Tiny(queries=True).save(tmp_path / "model.onnx")
    session = DecoderSession.open(tmp_path, attentions=create_policy(policy, **options).requires_attention)
    ids = np.random.default_rng(6).integers(0, 40, 70)
    runs, fed = [], []
    step = DecoderSession.run_step

    def counted(self, ids, *arguments, **options):
        fed.append(len(ids))
        return step(self, ids, *arguments, **options)

    monkeypatch.setattr(DecoderSession, "run_step", counted)
    for limit in (prompt_steps.MAX_ATTENTION_BYTES, 1):
        monkeypatch.setattr(prompt_steps, "MAX_ATTENTION_BYTES", limit)
        monkeypatch.setattr(prompt_steps, "MAX_UNREAD_ATTENTION_BYTES", limit)
        runner = Runner(session, create_policy(policy, **options))
        logits = [runner.step(ids[:60], end_chunk=True), runner.step(ids[60:], end_chunk=True)]
        runs.append((np.concatenate(logits), runner.cache.copy_layers(), runner.cache.get_scores(0)))
    assert fed == [60, 10, 16, 16, 16, 12, 10]
    (whole, layers, scores), (parts, part_layers, part_scores) = runs
    np.testing.assert_allclose(parts, whole, atol=1e-4)
    assert runner.cache.tokens[0] < 70 or policy == "h2o_blocks"
    if scores is not None:
        np.testing.assert_allclose(part_scores, scores, rtol=1e-4)
    for one, other in zip(layers, part_layers, strict=True):
        assert np.array_equal(one.positions, other.positions)
        np.testing.assert_allclose(other.keys, one.keys, atol=1e-5)
