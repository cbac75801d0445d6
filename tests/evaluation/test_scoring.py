"""Log-probabilities against plain float64, and which tokens are scored."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvmnn.errors import KvmnnError
from kvmnn.evaluation import divergence
from kvmnn.evaluation.records import LossSums
from kvmnn.evaluation.scoring import compute_nll, score_document, summarize


class Table:
    """A model whose logits are rows of a table, one for each position."""

    def __init__(self, table):
        self.table = table
        self.fed = []

    def step(self, ids, *, end_chunk=False):
        begin = sum(len(chunk) for chunk, _ in self.fed)
        self.fed.append((ids.tolist(), end_chunk))
        return self.table[begin : begin + len(ids)]


@given(st.integers(0, 2**32), st.integers(1, 9), st.integers(1, 40), st.sampled_from([1e-3, 1.0, 300.0]))
def test_compute_nll_equals_float64_softmax(seed, tokens, vocab, scale):
    random = np.random.default_rng(seed)
    logits = (random.standard_normal((tokens, vocab)) * scale).astype(np.float32)
    targets = random.integers(0, vocab, tokens)
    nll, hits = compute_nll(logits, targets)
    for row, target, found, hit in zip(logits.astype(np.float64), targets, nll, hits, strict=True):
        expected = math.log(math.fsum(math.exp(x - row[target]) for x in row)) if np.ptp(row) < 500 else None
        if expected is not None:
            assert found == pytest.approx(expected, rel=1e-12, abs=1e-12)
        assert hit == (row.argmax() == target)
        assert found >= 0


def test_compute_nll_keeps_logits_and_ignores_block_size(monkeypatch):
    logits = np.random.default_rng(1).standard_normal((7, 11)).astype(np.float32)
    targets = np.arange(7)
    before = logits.copy()
    whole = compute_nll(logits, targets)
    monkeypatch.setattr(divergence, "_BLOCK_ELEMENTS", 25)
    parts = compute_nll(logits, targets)
    assert np.array_equal(whole[0], parts[0])
    assert np.array_equal(whole[1], parts[1])
    assert np.array_equal(logits, before)


def test_compute_nll_masked_words_and_equal_logits():
    logits = np.array([[0.0, 0.0, -np.inf]], np.float32)
    nll, hits = compute_nll(logits, np.array([1]))
    assert nll[0] == math.log(2)
    assert not hits[0]  # of equal logits the lower id is the most probable


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 64])
def test_score_document_does_not_depend_on_chunk(chunk):
    random = np.random.default_rng(5)
    ids = random.integers(0, 8, 12)
    table = random.standard_normal((11, 8)).astype(np.float32)
    model, seen = Table(table), []
    found = score_document(model, ids, chunk=chunk, tail_start=6, on_step=seen.append)
    nll, hits = compute_nll(table, ids[1:])
    assert [token for part, _ in model.fed for token in part] == ids[:-1].tolist()
    assert all(end == (chunk > 1) for _, end in model.fed)
    assert (found.every.tokens, found.deep.tokens) == (11, 5)
    assert found.every.nll == pytest.approx(nll.sum(), rel=1e-12)
    assert found.deep.nll == pytest.approx(nll[6:].sum(), rel=1e-12)
    assert found.every.hits == hits.sum()
    assert found.deep.hits == hits[6:].sum()
    assert seen == [min(begin + chunk, 11) for begin in range(0, 11, chunk)]


def test_score_document_short_text_has_no_deep_tokens():
    found = score_document(Table(np.zeros((3, 4), np.float32)), np.zeros(4, np.int64), chunk=2, tail_start=3)
    assert found.deep.tokens == 0
    assert summarize(LossSums(0, 0.0, 0)).to_dict() == {"tokens": 0, "nll": None, "perplexity": None, "accuracy": None}


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_score_document_non_finite_logits_name_position(value):
    table = np.zeros((6, 4), np.float32)
    table[4, 2] = value
    with pytest.raises(KvmnnError, match="logits at position 4 give no finite log-probability"):
        score_document(Table(table), np.full(7, 2), chunk=3, tail_start=0)


def test_summarize_loss_sums():
    assert summarize(LossSums(4, 2.0, 1)).to_dict() == {
        "tokens": 4,
        "nll": 0.5,
        "perplexity": math.exp(0.5),
        "accuracy": 0.25,
    }
    assert summarize(LossSums(1, 1000.0, 0)).perplexity is None


def test_score_document_prompt_is_the_first_step():
    class Fed:
        def __init__(self):
            self.steps = []

        def step(self, ids, *, end_chunk=False):
            self.steps.append((len(ids), end_chunk))
            return np.zeros((len(ids), 3), np.float32)

    for prompt, chunk, steps in (
        (5, 1, [(5, True), (1, False), (1, False)]),
        (3, 2, [(3, True), (2, True), (2, True)]),
        (1, 4, [(1, True), (4, True), (2, True)]),
        (50, 4, [(7, True)]),
        (0, 4, [(4, True), (3, True)]),
    ):
        fed = Fed()
        scored = score_document(fed, np.zeros(8, np.int64), chunk=chunk, prompt=prompt, tail_start=6)
        assert fed.steps == steps
        assert (scored.every.tokens, scored.deep.tokens) == (7, 1)
