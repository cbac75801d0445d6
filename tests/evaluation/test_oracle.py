"""The oracle: attention of later tokens in a first run, and the shares of its headroom."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gate_models
import numpy as np
import pytest
from tiny_decoders import Tiny

from kvmnn.errors import KvmnnError
from kvmnn.evaluation import EvaluationSettings, evaluate
from kvmnn.evaluation.oracle import collect_later_attention, compute_headroom_shares, describe_headroom, list_cuts
from kvmnn.evaluation.scoring import list_steps
from kvmnn.lm.runner import Runner
from kvmnn.lm.session import DecoderSession
from kvmnn.policies.oracle import Oracle

IDS = np.random.default_rng(4).integers(0, 48, 91)


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> DecoderSession:
    path = tmp_path_factory.mktemp("tiny") / "model.onnx"
    return DecoderSession.open(Tiny(queries=True).save(Path(path)), attentions=True, cache=False)


@pytest.fixture(scope="module")
def attentions(session: DecoderSession) -> list[np.ndarray]:
    """Attention of the whole text, ``[query_head, query, key]``."""
    runner, found = Runner(session), []
    runner.on_step = lambda step: found.extend(step.attentions or [])
    runner.step(IDS[:-1])
    return found


@pytest.mark.parametrize(
    ("options", "chunk", "cuts"),
    [
        ({}, 1, [70]),
        ({"phase": "both", "interval": 8}, 1, [70, 78, 86]),
        ({"phase": "decoding", "interval": 2}, 3, [76, 82, 88]),
        ({"phase": "decoding", "interval": 100, "budget": 9}, 10, [80, 90]),
    ],
)
def test_collect_later_attention_sums_what_follows_each_cut(session, attentions, options, chunk, cuts) -> None:
    policy = Oracle(**{"budget": 20, **options})
    assert list_cuts(policy, list_steps(len(IDS) - 1, chunk, 70)) == cuts
    collect_later_attention(session, IDS, policy, chunk=chunk, prompt=70)
    assert list(policy.later_attention) == cuts
    for cut, layers in policy.later_attention.items():
        for sums, attention in zip(layers, attentions, strict=True):
            expected = attention[:, cut:].sum(axis=1).reshape(2, -1, 90).sum(axis=1)
            np.testing.assert_allclose(sums, expected, rtol=1e-4, atol=1e-5)


def test_oracle_keeps_what_later_tokens_attend_to(session, attentions) -> None:
    policy = Oracle(budget=12)
    collect_later_attention(session, IDS, policy, chunk=1, prompt=70)
    runner = Runner(session, policy)
    runner.step(IDS[:70])
    for layer, attention in enumerate(attentions):
        sums = attention[:, 70:, :70].sum(axis=1).reshape(2, -1, 70).sum(axis=1)
        for row, kept in zip(sums, runner.cache.get_positions(layer), strict=True):
            assert kept.tolist() == sorted(np.argsort(-row, kind="stable")[:12])


def test_oracle_refuses_other_texts_and_too_many_cuts(session) -> None:
    runner = Runner(session, Oracle(budget=12))
    with pytest.raises(KvmnnError, match="oracle knows what follows in texts that kvmnn eval scores"):
        runner.step(IDS[:70])
    long = np.zeros(20_000, np.int64)
    with pytest.raises(KvmnnError, match=r"oracle: 19,999 cuts of 19,999 tokens take .* a larger interval less often"):
        collect_later_attention(session, long, Oracle(budget=9, phase="both", interval=1), chunk=1, prompt=1)


@dataclass
class Row:
    """What shares are computed from."""

    label: str
    policy: str
    nll: float | None
    budget: int | None = 8
    keep_ratio: float | None = None
    is_full: bool = False
    prompt_only: bool = True
    codec: str | None = None


def test_headroom_shares_count_from_random_to_the_oracle() -> None:
    rows = [
        Row("full", "full", 1.0, None, is_full=True),
        Row("random 8", "random", 3.0),
        Row("oracle 8", "oracle", 1.5),
        Row("snapkv 8", "snapkv", 1.8),
        Row("keydiff 8", "keydiff", 3.75),
        Row("snapkv 9", "snapkv", 1.7, 9),
        Row("streaming 8", "streaming", 1.6, prompt_only=False),
        Row("oracle 8 + q4_0", "oracle", 2.0, codec="q4_0"),
    ]
    assert compute_headroom_shares(rows) == {"snapkv 8": pytest.approx(0.8), "keydiff 8": pytest.approx(-0.5)}
    (note,) = describe_headroom(rows)
    assert note.endswith("of the same budget (loss per token): snapkv 8 80 %; keydiff 8 -50 %.")
    share_note, above_note = describe_headroom([*rows, Row("tova 8", "tova", 1.4)])
    assert "tova 8 107 %" in share_note and above_note.startswith("Above 100 %: tova 8. The oracle keeps the tokens")
    assert list(describe_headroom(rows[:2])) == []
    (note,) = describe_headroom([rows[0], *rows[2:]])
    assert "add --policy random" in note
    rows[2].nll = 3.0
    assert compute_headroom_shares(rows) == {}


def test_evaluate_prints_shares_of_the_headroom(tmp_path: Path) -> None:
    folder = gate_models.write_model(tmp_path)
    settings = EvaluationSettings(tokens=60, prompt=40, chunk=4, timing=False)
    specs = ["oracle", "random", "snapkv:window=4", "keydiff:wrapper=ada"]
    results = evaluate(
        folder / "model", [str(folder / "texts" / "a.txt")], specs, budgets=[10], settings=settings, jobs=0
    )
    rows = {row.label: row for row in results.rows}
    assert results.refused == () and "oracle 10" in rows and rows["oracle 10"].policy == "oracle"
    assert rows["oracle 10"].tokens_kept == rows["random 10"].tokens_kept == (30, 30)
    (note,) = [note for note in results.notes if note.startswith("Share of the headroom")]
    assert "snapkv 10 window=4 " in note and "keydiff 10 wrapper=ada " in note
