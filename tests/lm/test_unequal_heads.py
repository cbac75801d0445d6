"""Heads of one layer that keep different numbers of tokens: what is masked is not attended to."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from tiny_decoders import Tiny

from kvmnn.errors import KvmnnError
from kvmnn.lm.cache import MASKED_BIAS
from kvmnn.lm.runner import Runner
from kvmnn.lm.session import DecoderSession
from kvmnn.policies import create_policy

IDS = np.random.default_rng(8).integers(0, 48, 70)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> DecoderSession:
    path = tmp_path_factory.mktemp("tiny") / "model.onnx"
    return DecoderSession.open(Tiny(queries=True).save(Path(path)), attentions=True, cache=False)


@pytest.mark.parametrize("max_masked", [None, 0])
@pytest.mark.parametrize("name", ["keydiff", "snapkv"])
def test_runner_attends_to_what_each_head_keeps(session: DecoderSession, name: str, max_masked: int | None) -> None:
    policy = create_policy(name, budget=16, wrapper="ada", safeguard=0.0)
    runner = Runner(session, policy, max_masked=max_masked)
    runner.step(IDS[:50])
    biases, counts = [], set()
    for layer in range(2):
        heads = runner.cache.list_head_positions(layer)
        assert sum(map(len, heads)) == 2 * 16
        counts |= {len(head) for head in heads}
        bias = np.full((1, 4, 1, 50), MASKED_BIAS, np.float32)
        for query_head in range(4):
            bias[0, query_head, 0, heads[query_head // 2]] = 0
        biases.append(bias)
    assert counts != {16}
    past = session.run_step(IDS[:50], np.arange(50), session.create_empty_past()).present_pairs
    for number in range(50, 60):
        found = runner.step(IDS[number : number + 1])
        biases = [np.concatenate([bias, np.zeros((1, 4, 1, 1), np.float32)], axis=3) for bias in biases]
        step = session.run_step(IDS[number : number + 1], np.array([number]), past, biases)
        past = step.present_pairs
        np.testing.assert_allclose(found, step.logits, rtol=1e-4, atol=1e-4)


def test_runner_cuts_unequal_heads_again(session: DecoderSession) -> None:
    policy = create_policy("keydiff", budget=16, wrapper="ada", safeguard=0.0, phase="both", interval=4)
    runner = Runner(session, policy)
    runner.step(IDS[:50])
    before = [{*map(int, head)} for head in runner.cache.list_head_positions(0)]
    for number in range(50, 54):
        runner.step(IDS[number : number + 1])
    after = [{*map(int, head)} for head in runner.cache.list_head_positions(0)]
    assert sum(map(len, after)) == 2 * 16
    for old, new in zip(before, after, strict=True):
        assert new <= old | {50, 51, 52, 53}


def test_runner_without_bias_refuses_unequal_heads(tmp_path: Path) -> None:
    session = DecoderSession.open(Tiny(queries=True).save(tmp_path / "model.onnx"), bias=False, cache=False)
    runner = Runner(session, create_policy("keydiff", budget=16, wrapper="ada", safeguard=0.0))
    with pytest.raises(KvmnnError, match="keydiff keeps different numbers of tokens in heads of one layer"):
        runner.step(IDS[:50])
