"""The paired bootstrap against cases that can be worked out."""

from __future__ import annotations

import numpy as np
import pytest

from kvmnn.evaluation import scoring
from kvmnn.evaluation.scoring import MIN_DOCUMENTS_FOR_INTERVAL, compute_paired_interval


def test_paired_interval_of_two_documents():
    # A quarter of the draws is one document twice, a quarter the other: the bounds are the documents themselves.
    assert compute_paired_interval([0.1, 0.3], [1, 1], seed=1) == (
        pytest.approx(0.2),
        pytest.approx(0.1),
        pytest.approx(0.3),
    )


def test_paired_interval_of_one_document_is_none():
    assert compute_paired_interval([0.25], [7], seed=0) == (0.25, None, None)


def test_paired_interval_weights_documents_by_tokens():
    mean, low, high = compute_paired_interval([0.0, 1.0], [1, 3], seed=0)
    assert mean == 0.75
    assert (low, high) == (0.0, 1.0)


def test_paired_interval_of_many_documents_is_normal():
    values = np.random.default_rng(2).normal(0.5, 0.2, 400)
    mean, low, high = compute_paired_interval(values, np.ones(400), seed=3)
    error = values.std() / 20
    assert mean == pytest.approx(values.mean())
    assert low == pytest.approx(mean - 1.96 * error, abs=0.1 * error)
    assert high == pytest.approx(mean + 1.96 * error, abs=0.1 * error)


def test_paired_interval_depends_on_seed():
    values = [0.1, 0.5, 0.2, 0.9, 0.4]
    first = compute_paired_interval(values, [1] * 5, seed=1, resamples=50)
    assert first == compute_paired_interval(values, [1] * 5, seed=1, resamples=50)
    assert first != compute_paired_interval(values, [1] * 5, seed=2, resamples=50)


def test_paired_interval_draws_in_batches(monkeypatch):
    monkeypatch.setattr(scoring, "_MAX_DRAWS_PER_BATCH", 10)
    mean, low, high = compute_paired_interval([0.1, 0.5, 0.2], [1, 1, 1], seed=1, resamples=100)
    assert low < mean < high


def test_paired_interval_without_difference_is_zero():
    assert compute_paired_interval([0.0] * 5, [1, 2, 3, 4, 5], seed=0) == (0.0, 0.0, 0.0)


def test_paired_interval_of_few_documents_is_too_narrow():
    """Why `MIN_DOCUMENTS_FOR_INTERVAL` is what it is: how often an interval of 95 % holds the true mean, 0, of normal
    differences.
    """

    def holds(documents, tries=150):
        draws = np.random.default_rng(documents).normal(0, 1, (tries, documents))
        found = [
            compute_paired_interval(draw, [1] * documents, seed=i, resamples=500)[1:] for i, draw in enumerate(draws)
        ]
        return sum(low <= 0 <= high for low, high in found) / tries

    few, enough = holds(2), holds(MIN_DOCUMENTS_FOR_INTERVAL)
    assert few < 0.65  # one half, but for chance
    assert 0.84 < enough < 0.97
    assert holds(40) > enough - 0.04
