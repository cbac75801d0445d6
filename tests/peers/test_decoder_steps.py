"""Logits, caches and attention of a session's steps equal torch's, whatever the cache holds."""

from __future__ import annotations

import numpy as np
import pytest

TOLERANCE = 1e-4
TOKENS = 240
PREFIX = 200


@pytest.fixture(scope="module")
def ids(read):
    return read("enum.py.txt", TOKENS)


@pytest.fixture(scope="module")
def present(decoder, ids):
    """torch's cache after the prefix."""
    return decoder.step(ids[:PREFIX], np.arange(PREFIX), decoder.empty()).present_pairs


def largest(found, expected):
    return float(np.abs(found - expected).max())


def both(session, decoder, ids, first, past):
    """One step of each, compared in all that it gives; torch's step."""
    positions = np.arange(first, first + len(ids))
    ours, theirs = session.step(ids, positions, past), decoder.step(ids, positions, past)
    assert largest(ours.logits, theirs.logits) < TOLERANCE
    for layer in range(decoder.layers):
        assert largest(ours.attentions[layer], theirs.attentions[layer]) < TOLERANCE
        for mine, other in zip(ours.present_pairs[layer], theirs.present_pairs[layer], strict=True):
            assert largest(mine, other) < TOLERANCE
    return theirs


@pytest.mark.parametrize("size", [TOKENS, 1, 7, 37])
def test_steps_with_full_cache_equal_torch(session, decoder, ids, size):
    past = decoder.empty()
    for first in range(0, TOKENS, size):
        past = both(session, decoder, ids[first : first + size], first, past).present_pairs


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1, 24])
def test_steps_with_tokens_cut_everywhere_equal_torch(session, decoder, ids, present, seed, size):
    random = np.random.default_rng(seed)
    kept = np.sort(random.choice(PREFIX, int(random.integers(1, PREFIX)), replace=False))
    past = [tuple(np.ascontiguousarray(array[:, :, kept]) for array in pair) for pair in present]
    both(session, decoder, ids[PREFIX : PREFIX + size], PREFIX, past)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("size", [1, 24])
def test_steps_with_unequal_layers_and_heads_equal_torch(session, decoder, ids, present, seed, size):
    random = np.random.default_rng(seed)
    past = []
    for pair in present:
        length = int(random.integers(0, PREFIX + 1))
        kept = np.stack([np.sort(random.choice(PREFIX, length, replace=False)) for _ in range(decoder.heads)])
        past.append(tuple(np.take_along_axis(array, kept[None, :, :, None], axis=2) for array in pair))
    both(session, decoder, ids[PREFIX : PREFIX + size], PREFIX, past)


def test_steps_with_restarted_positions_differ(session, decoder, ids, present):
    """The control: torch is compared at true positions, and others do not pass."""
    kept = np.arange(0, PREFIX, 3)
    past = [tuple(np.ascontiguousarray(array[:, :, kept]) for array in pair) for pair in present]
    theirs = decoder.step(ids[PREFIX : PREFIX + 1], np.array([PREFIX]), past)
    wrong = session.step(ids[PREFIX : PREFIX + 1], np.array([len(kept)]), past)
    assert largest(wrong.logits, theirs.logits) > 1
