"""Divergence from the full cache's distributions, next to plain numpy over all logits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from repository import FIXTURES
from tiny_decoders import Tiny

from kvmnn.errors import KvmnnError
from kvmnn.evaluation import divergence, evaluate
from kvmnn.evaluation.divergence import (
    ReferenceComparer,
    ReferenceWriter,
    compute_token_scores,
    summarize_divergence,
)
from kvmnn.evaluation.scoring import list_steps
from kvmnn.evaluation.settings import EvaluationSettings
from kvmnn.lm.documents import Document
from kvmnn.lm.runner import Runner
from kvmnn.lm.session import DecoderSession
from kvmnn.policies import create_policy

SETTINGS = {"timing": False, "tokens": 90, "chunk": 4}


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=1, keepdims=True))


def complete_divergence(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    log_p, log_q = log_softmax(first), log_softmax(second)
    return (np.exp(log_p) * (log_p - log_q)).sum(axis=1)


def measured(folder: Path, first: np.ndarray, second: np.ndarray, step: int = 7):
    path = folder / "reference"
    with ReferenceWriter(path) as writer:
        for begin in range(0, len(first), step):
            part = first[begin : begin + step]
            writer.add(part, compute_token_scores(part, np.zeros(len(part), np.int64)))
    with ReferenceComparer(path) as comparer:
        for begin in range(0, len(second), step):
            part = second[begin : begin + step]
            comparer.add(part, compute_token_scores(part, np.zeros(len(part), np.int64)))
        return comparer.to_divergence(len(first) // 2)


def by_token(found) -> np.ndarray:
    import base64

    return np.frombuffer(base64.b64decode(found.kl), "<f4").astype(np.float64)


def logits_of(seed: int, tokens: int = 40, vocab: int = 500, scale: float = 3) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, scale, (tokens, vocab)).astype(np.float32)


@pytest.mark.parametrize("noise", [1e-3, 0.1, 3])
def test_divergence_of_stored_words_equals_complete(tmp_path: Path, noise: float) -> None:
    first = logits_of(1, vocab=60, scale=1)  # every word has more than the least probability
    second = first + logits_of(2, vocab=60, scale=1) * np.float32(noise)
    found = by_token(measured(tmp_path, first, second))
    np.testing.assert_allclose(found, complete_divergence(first, second), rtol=1e-6)


@pytest.mark.parametrize(("noise", "at_least"), [(0.01, 0.98), (1, 0.98), (8, 0.9)])
def test_divergence_is_a_lower_bound(tmp_path: Path, noise: float, at_least: float) -> None:
    first = logits_of(1, vocab=5000)
    second = first + logits_of(2, vocab=5000) * np.float32(noise / 3)
    found, complete = by_token(measured(tmp_path, first, second)), complete_divergence(first, second)
    assert (found <= complete * (1 + 1e-6)).all()
    assert found.mean() >= at_least * complete.mean()


def test_divergence_with_a_bucket_by_plain_loops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(divergence, "MAX_STORED_TOKENS", 20)
    first, second = logits_of(1, tokens=9, scale=1), logits_of(2, tokens=9, scale=1)
    p, q = np.exp(log_softmax(first)), np.exp(log_softmax(second))
    wanted = []
    for token in range(9):
        stored = np.argsort(first[token])[-20:]
        others = np.setdiff1d(np.arange(500), stored)
        terms = [p[token, word] * np.log(p[token, word] / q[token, word]) for word in stored]
        rest_p, rest_q = p[token, others].sum(), q[token, others].sum()
        wanted.append(sum(terms) + rest_p * np.log(rest_p / rest_q))
    np.testing.assert_allclose(by_token(measured(tmp_path, first, second, 4)), wanted, rtol=1e-6)


def test_equal_logits_have_no_divergence(tmp_path: Path) -> None:
    first = logits_of(5)
    stats = summarize_divergence([measured(tmp_path, first, first)])
    assert stats is not None
    assert (stats.tokens, stats.kl, stats.kl_p99, stats.agreement) == (40, 0, 0, 1)


def test_summary_pools_the_tokens_of_documents(tmp_path: Path) -> None:
    parts, complete, equal = [], [], []
    for seed, tokens in ((1, 30), (2, 50)):
        first, second = logits_of(seed, tokens, 60, 1), logits_of(seed + 7, tokens, 60, 1)
        parts.append(measured(tmp_path, first, second))
        complete.append(complete_divergence(first, second))
        equal.append(first.argmax(axis=1) == second.argmax(axis=1))
    every, deep = summarize_divergence(parts), summarize_divergence(parts, deep=True)
    assert every is not None and deep is not None
    pooled = np.concatenate(complete)
    assert every.kl == pytest.approx(pooled.mean(), rel=1e-6)
    assert every.kl_p99 == pytest.approx(np.percentile(pooled, 99), rel=1e-6)
    assert every.agreement == np.concatenate(equal).mean()
    tails = np.concatenate([complete[0][15:], complete[1][25:]])
    assert (deep.tokens, deep.kl) == (40, pytest.approx(tails.mean(), rel=1e-6))
    assert summarize_divergence([parts[0], None]) is None


def test_skipped_steps_of_a_configuration_are_those_of_the_full_cache(tmp_path: Path) -> None:
    first, second = logits_of(1, vocab=60, scale=1), logits_of(2, vocab=60, scale=1)
    measured(tmp_path, first, second)
    with ReferenceComparer(tmp_path / "reference") as comparer:
        comparer.skip(14)
        comparer.add(second[14:21], compute_token_scores(second[14:21], np.zeros(7, np.int64)))
        found = comparer.to_divergence(0)
    wanted = complete_divergence(first[14:21], second[14:21])
    np.testing.assert_allclose(by_token(found), [0] * 14 + wanted.tolist(), rtol=1e-6)


def test_reference_that_lacks_steps_is_not_there(tmp_path: Path) -> None:
    logits = logits_of(1)
    scores = compute_token_scores(logits, np.zeros(40, np.int64))
    with ReferenceWriter(tmp_path / "a") as writer:
        writer.add(logits, scores)
        writer.skip(3)
        writer.add(logits, scores)
    with pytest.raises(ZeroDivisionError), ReferenceWriter(tmp_path / "b") as writer:
        writer.add(logits, scores)
        raise ZeroDivisionError
    assert not (tmp_path / "a").exists() and not (tmp_path / "b").exists()


def test_other_logits_than_the_reference_are_refused(tmp_path: Path) -> None:
    first = logits_of(1)
    with pytest.raises(KvmnnError, match="logits of 7 tokens and 500 words: expected 7 and 499"):
        measured(tmp_path, first, first[:, :499])
    masked = first.copy()
    masked[3, first[3].argmax()] = -np.inf
    with np.errstate(all="ignore"), pytest.raises(KvmnnError, match="scored token 3: no probability"):
        measured(tmp_path, first, masked)


# -- whole evaluations ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    Tiny().save(folder / "model.onnx")
    return folder


def document(seed: int) -> Document:
    ids = np.random.default_rng(seed).integers(0, 40, 91)
    name, digest = f"text {seed}", f"{seed:064x}"
    return Document(name=name, ids=ids, nbytes=400, sha256=digest, begins_with_bos=False, requested_tokens=90)


def test_evaluate_divergence_equals_numpy_over_all_logits(model: Path) -> None:
    texts = [document(1), document(2)]
    result = evaluate(model, texts, "streaming:budget=16", settings=EvaluationSettings(**SETTINGS), jobs=0)
    complete, equal = [], []
    session = DecoderSession.open(model)
    for text in texts:
        logits = []
        for policy in (None, create_policy("streaming", budget=16)):
            runner = Runner(session, policy)
            steps = [runner.step(text.ids[begin:end], end_chunk=True) for begin, end in list_steps(90, 4)]
            logits.append(np.concatenate(steps))
        complete.append(complete_divergence(*logits))
        equal.append(logits[0].argmax(axis=1) == logits[1].argmax(axis=1))
    row = result.rows[1]
    assert result.rows[0].divergence is None and row.divergence is not None and row.deep_divergence is not None
    assert row.divergence.tokens == 180
    assert row.divergence.kl == pytest.approx(np.concatenate(complete).mean(), rel=1e-5)
    assert row.divergence.kl_p99 == pytest.approx(np.percentile(np.concatenate(complete), 99), rel=1e-5)
    assert row.divergence.agreement == np.concatenate(equal).mean()
    assert row.deep_divergence.kl == pytest.approx(np.mean([part[45:] for part in complete]), rel=1e-5)
    assert row.documents[1].divergence is not None
    assert row.documents[1].divergence.kl == pytest.approx(complete[1].mean(), rel=1e-5)
    cut = np.concatenate([part[20:] for part in complete])  # the step that exceeds the budget is the last whole one
    assert row.cut_divergence is not None and row.cut_divergence.tokens == len(cut) == 140
    assert row.cut_divergence.kl == pytest.approx(cut.mean(), rel=1e-5) and row.cut_divergence.kl > row.divergence.kl
    assert row.cut_divergence.agreement == np.concatenate([part[20:] for part in equal]).mean()
    low, high = sorted(part[20:].mean() for part in complete)  # the bootstrap of two texts has their range
    assert (row.cut_divergence.kl_low, row.cut_divergence.kl_high) == pytest.approx((low, high), rel=1e-5)
    assert "kl_low" not in row.documents[1].to_dict()["cut_divergence"]
    (line,) = (line for line in result.format_table().splitlines() if line.startswith("| streaming 16 |"))
    assert f"| {row.cut_divergence.kl:.5f} | [{low:.5f}, {high:.5f}] |" in line
    assert {"cut_divergence.kl_low", "divergence.kl_high"} <= set(result.to_csv().splitlines()[0].split(","))
    assert "KL after cut (nats)" in result.format_table(120) and "same top-1 after cut" in result.to_text("latex")
    assert "divergence.kl_p99" in result.to_csv().splitlines()[0]


QUANT, LATE = "kivi:group=4,v_group=4,recent=0", "kivi:group=4,v_group=4,recent=200"


def test_evaluate_rows_without_a_loss_have_no_divergence_after_it(model: Path) -> None:
    settings = EvaluationSettings(**SETTINGS | {"prompt": 40})
    short = document(3)
    short = replace(short, ids=short.ids[:31])
    texts, codecs = [document(1), short], ["none", QUANT, LATE]
    result = evaluate(
        model, texts, ["streaming:budget=16", "knorm:budget=200"], codecs=codecs, settings=settings, jobs=0
    )
    rows = {row.label: row for row in result.rows}
    counts = {label: row.cut_divergence and row.cut_divergence.tokens for label, row in rows.items()}
    late, later = "knorm 200", LATE
    assert counts == {
        "full": None,
        "streaming 16": 50,
        late: None,
        QUANT: 50,
        f"streaming 16 + {QUANT}": 50,
        f"{late} + {QUANT}": 50,
        later: None,
        f"streaming 16 + {later}": 50,
        f"{late} + {later}": None,
    }
    assert [text.evicted for text in rows["streaming 16"].documents] == [True, False]
    assert rows["streaming 16"].documents[1].cut_divergence is None
    table = result.format_table()
    assert "| streaming 16 (*) |" in table and f"| {late} * |" in table and "| 200 (prompt) |" in table
    assert "Marked (*), as nothing was evicted of text 3 before the last token was scored" in table
    assert f"Marked *, as no scored token saw a quantised cache: {later}; {late} + {later}: quality" in table
    kinds = {label: row.kind for label, row in rows.items()}
    assert (kinds[later], kinds[late], kinds[f"{late} + {later}"], kinds[f"{late} + {QUANT}"]) == (
        *("not cut", "not cut", "not cut", "LOSSY"),
    )
    assert f"| {later} * | not cut |" in table and rows[later].is_untried and rows[later].to_dict()["untried"]
    assert rows[f"streaming 16 + {later}"].quantized_share == 0 and rows["streaming 16"].quantized_share is None
    few = f"Little of what was kept at the end is quantised: streaming 16 + {later} (0%); {late} + {later} (0%)."
    assert few in table
    csv = result.to_csv().splitlines()
    assert csv[0].startswith("label,document,scope,") and csv[1].startswith("full,,all texts,")
    assert csv[2].startswith("full,text 1,text,")


def test_evaluate_resumed_baseline_gives_its_distributions_again(model: Path, tmp_path: Path) -> None:
    texts, settings, cells = [document(1), document(2)], EvaluationSettings(**SETTINGS), tmp_path / "cells"
    first = evaluate(model, texts, settings=settings, jobs=0, store=cells)
    assert first.rows[0].divergence is None
    for policies in ("streaming:budget=16", ["streaming:budget=16", "recent_only:budget=16"]):
        resumed = evaluate(model, texts, policies, settings=settings, jobs=0, store=cells)
        whole = evaluate(model, texts, policies, settings=settings, jobs=0)
        assert [row.divergence for row in resumed.rows] == [row.divergence for row in whole.rows]
        assert all(row.divergence is not None for row in resumed.rows[1:])
    assert cells.read_bytes().count(b"\n") == 2 * 3


def test_evaluate_baseline_of_a_prefix_store_has_no_distributions(model: Path, tmp_path: Path) -> None:
    settings = EvaluationSettings(**SETTINGS, prefix_store=str(tmp_path / "store"))
    first = evaluate(model, document(1), "streaming:budget=16", settings=settings, jobs=0)
    again = evaluate(model, document(1), "streaming:budget=16", settings=settings, jobs=0)
    assert first.rows[1].divergence is not None and again.rows[1].divergence is None
    assert not any("distributions" in note for note in first.notes)
    assert any("which has no distributions" in note for note in again.notes)


@pytest.mark.slow
def test_evaluate_divergence_in_workers_equals_that_in_process(tmp_path: Path) -> None:
    texts = [FIXTURES / "lm" / "texts" / name for name in ("calendar.py.txt", "trace.py.txt")]
    settings = EvaluationSettings(tokens=64, chunk=16, timing=False)
    runs = [
        evaluate(FIXTURES / "lm", texts, "recent_only:budget=16", settings=settings, jobs=jobs, store=tmp_path / name)
        for jobs, name in ((0, "one"), (3, "two"), (2, "one"))
    ]
    assert runs[0].rows[1].divergence is not None
    assert len({str(run.rows[1].divergence) for run in runs}) == 1
