"""An evaluation with a prefix store: the same numbers bit for bit, and what was scored before is not computed again."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_decoders import Tiny

from kvmnn import KvmnnError
from kvmnn.evaluation import evaluate, scoring
from kvmnn.evaluation.settings import EvaluationSettings
from kvmnn.lm.documents import Document
from kvmnn.lm.runner import Runner
from kvmnn.lm.session import DecoderSession
from kvmnn.policies import create_policy
from kvmnn.store import PrefixStore

SHARED = np.random.default_rng(3).integers(0, 40, 60)
POLICIES = (
    "streaming:budget=16,skip_layers=none",
    "l2_fixed:budget=16,skip_layers=none",
    "h2o_decayed:budget=16,skip_layers=none",
)
TIMES = ("seconds", "model_seconds", "policy_seconds", "tokens_per_second", "stored_tokens")
DIVERGENCES = ("divergence", "deep_divergence", "cut_divergence")  # a store has scores, no distributions


MODELS = {"fp32": Tiny(), "fp16": Tiny(half=True, layers=3)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: model.save(tmp_path_factory.mktemp(name) / "model.onnx").parent for name, model in MODELS.items()}


def document(name: str, seed: int, shared: int = 60, tokens: int = 90) -> Document:
    rest = np.random.default_rng(seed).integers(0, 40, tokens + 1 - shared)
    ids = np.concatenate([SHARED[:shared], rest]).astype(np.int64)
    return Document(
        name=name, ids=ids, nbytes=400, sha256=f"{seed:064x}", begins_with_bos=False, requested_tokens=tokens
    )


TEXTS = [document("one", 1), document("two", 2), document("three", 3, shared=45, tokens=70)]


def measured(model: Path, store: Path | None, policies=POLICIES, texts=TEXTS, **settings):
    options = {"tokens": 90, "timing": False, "traces": True, "slack": 4, **settings}
    return evaluate(
        model, texts, policies, settings=EvaluationSettings(prefix_store=store and str(store), **options), jobs=0
    )


def numbers(result) -> str:
    """All that a run has but times, divergences, and what a store did."""

    dropped = {*TIMES, *DIVERGENCES, "prefix_store", "notes"}

    def without(value):
        if isinstance(value, dict):
            return {key: without(entry) for key, entry in value.items() if key not in dropped}
        return [without(entry) for entry in value] if isinstance(value, list) else value

    return json.dumps(without(result.to_dict()), sort_keys=True)


def check_divergences(result, wanted) -> int:
    """Check that divergences are those of a run without a store, or all missing; return how many there are."""
    found = [entry for row in result.rows for entry in (row, *row.documents)]
    expected = [entry for row in wanted.rows for entry in (row, *row.documents)]
    measured_pairs = [pair for pair in zip(found, expected, strict=True) if pair[0].divergence is not None]
    for entry, without in measured_pairs:
        assert [getattr(entry, name) for name in DIVERGENCES] == [getattr(without, name) for name in DIVERGENCES]
    assert not any(entry.cut_divergence for entry in found if entry.divergence is None)
    return len(measured_pairs)


def taken(result) -> list[list[int | None]]:
    return [[text.stored_tokens for text in row.documents] for row in result.rows]


@pytest.mark.slow
def test_evaluate_unwritable_store_costs_no_score(models: dict[str, Path], tmp_path: Path) -> None:
    model = models["fp32"]
    with PrefixStore(tmp_path / "store"):
        (tmp_path / "store" / "staging").write_text("in the way")
    found = measured(model, tmp_path / "store")
    assert numbers(found) == numbers(measured(model, None))
    assert any("nothing was stored: " in note and "staging" in note for note in found.notes)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps", "first", "again"),
    [
        ("fp16", {"chunk": 1, "prompt": 40}, [[0, 59, 44], [0, 40, 40], [40, 40, 40]], [89, 89, 69]),
        ("fp32", {"chunk": 1}, [[0, 59, 44], [0, 0, 0], [0, 0, 0]], [89, 89, 69]),
        ("fp32", {"chunk": 16}, [[0, 48, 32], [0, 16, 16], [16, 16, 16]], [64, 64, 48]),
        ("fp16", {"chunk": 7, "prompt": 60}, [[0, 60, 0], [0, 60, 0], [60, 60, 60]], [81, 81, 60]),
        ("fp32", {"chunk": 1, "prompt": 80}, [[0, 0, 0], [0, 0, 0], [80, 80, 0]], [89, 89, 0]),
    ],
)
def test_evaluate_with_store_equals_without(
    models: dict[str, Path], tmp_path: Path, name: str, steps, first, again
) -> None:
    """Policies that begin with their first step's rows, one that cannot, and the full cache at any step."""
    model = models[name]
    wanted = measured(model, None, **steps)
    with PrefixStore(tmp_path / "s", block_tokens=16):
        pass
    for expected in (first, [again, first[2], first[2]]):
        found = measured(model, tmp_path / "s", **steps)
        assert numbers(found) == numbers(wanted)
        assert taken(found) == [*expected, [None] * 3]
        # Compared with the full cache are texts of which no score of it came from the store.
        num_computed = expected[0].count(0)
        assert check_divergences(found, wanted) == 3 * (num_computed + (num_computed == 3))
    assert any("came from the prefix store" in note for note in found.notes)
    assert any("store or not: h2o_decayed" in note for note in found.notes)
    assert found.rows[0].tokens_per_second is None and wanted.rows[0].tokens_per_second is not None
    assert "prefix_store" not in wanted.to_dict()["settings"]


@pytest.mark.slow
def test_evaluate_with_store_never_repeats_shared_prompt(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models["fp16"]
    measured(model, tmp_path / "s", texts=TEXTS[:1], prompt=50)
    fed: list[int] = []
    step = DecoderSession.run_step

    def counted(self, ids, *arguments, **options):
        fed.append(len(ids))
        return step(self, ids, *arguments, **options)

    monkeypatch.setattr(DecoderSession, "run_step", counted)
    measured(model, tmp_path / "s", POLICIES[:2], texts=TEXTS[1:2], prompt=50)
    assert fed.count(50) == 0
    assert sum(fed) == (90 - 59) + 2 * (90 - 50)


@pytest.mark.slow
@pytest.mark.parametrize("held", [{"packed": "x86-avx2"}, {"lossless": {"kv_lossless_enable": True}}])
def test_evaluate_with_store_packed_and_lossless_caches(tmp_path: Path, held) -> None:
    Tiny().save(tmp_path / "model.onnx")
    options = {"prompt": 40, "policies": POLICIES[:1], "slack": 0, "texts": TEXTS[:2]}
    wanted = measured(tmp_path, None, **options, **held)
    for _ in range(2):
        assert numbers(measured(tmp_path, tmp_path / "s", **options, **held)) == numbers(wanted)


def test_evaluate_with_store_other_settings_or_damage_miss(tmp_path: Path) -> None:
    Tiny().save(tmp_path / "model.onnx")
    store, one = tmp_path / "s", TEXTS[:1]
    measured(tmp_path, store, (), one, prompt=40)
    assert taken(measured(tmp_path, store, (), one, prompt=41)) == [[0]]
    assert taken(measured(tmp_path, store, (), one, prompt=40, chunk=2)) == [[0]]
    assert taken(measured(tmp_path, store, (), one, prompt=40)) == [[89]]
    wanted = numbers(measured(tmp_path, None, (), one, prompt=40))
    for file in store.glob("units/*/*.unit"):
        file.write_bytes(file.read_bytes()[:-2] + b"??")
    found = measured(tmp_path, store, (), one, prompt=40)
    assert taken(found) == [[0]] and numbers(found) == wanted
    assert any("damaged, was removed" in note for note in found.notes)


@pytest.mark.slow
def test_evaluate_with_store_other_logits_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were two first steps to have one hash, as here, the mark after the logits would still be of one of them."""
    Tiny().save(tmp_path / "model.onnx")
    with PrefixStore(tmp_path / "s", block_tokens=4):
        pass
    other = document("other", 9, shared=0)
    digest = scoring._digest_ids
    monkeypatch.setattr(scoring, "_digest_ids", lambda ids: np.append(digest(SHARED)[:8], digest(ids)[8:]))
    options = {"prompt": 40, "policies": POLICIES[:1]}
    wanted = numbers(measured(tmp_path, None, texts=[other], **options))
    measured(tmp_path, tmp_path / "s", texts=TEXTS[:1], **options)
    for _ in range(2):
        assert numbers(measured(tmp_path, tmp_path / "s", texts=[other], **options)) == wanted


def test_replay_step_invalid_rows_are_refused(tmp_path: Path) -> None:
    session = DecoderSession.open(Tiny().save(tmp_path / "model.onnx"), cache=False, attentions=True)
    runner = Runner(session)
    runner.step(SHARED[:20])
    rows = runner.cache.copy_layers()
    with pytest.raises(KvmnnError, match="K and V of 20 tokens: a step of 1 follows 20"):
        runner.replay_step(rows, 1)
    for name in ("h2o_decayed", "h2o_tokens"):
        with pytest.raises(KvmnnError, match=f"{name} cuts as tokens are fed"):
            Runner(session, create_policy(name, budget=8, skip_layers=())).replay_step(rows, 20)
    cut = Runner(session, create_policy("streaming", budget=8, skip_layers=()))
    cut.replay_step(rows, 10)
    with pytest.raises(KvmnnError, match="only first steps"):
        cut.replay_step(rows, 10)
