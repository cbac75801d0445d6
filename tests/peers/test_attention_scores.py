"""Scores that a cache accumulates while the model runs equal sums of torch's attention probabilities."""

from __future__ import annotations

import numpy as np
import pytest

from kvmnn.lm.runner import Runner
from kvmnn.policies import create_policy

TOKENS = 160
POLICIES = {
    "one set, never cut": create_policy("h2o_decayed", budget=4 * TOKENS, decay=1.0),
    "one set": create_policy("h2o_decayed", budget=48, recent=16, decay=1.0),
    "one set, fading": create_policy("h2o_decayed", budget=48, recent=16, decay=0.9),
    "a set for each head": create_policy("h2o_decayed_heads", budget=48, sink=0, recent=24, decay=1.0),
    "a set for each head, fading": create_policy("h2o_decayed_heads", budget=48, recent=16, decay=0.9),
    "the authors' form": create_policy("h2o_heads", budget=48, recent=24),
}


@pytest.fixture(scope="module")
def ids(read):
    return read("pprint.py.txt", TOKENS)


class Track:
    """One layer of torch's run: K, V, positions and scores, ``[head, token, ...]``."""

    def __init__(self, heads, head_dim):
        self.keys = self.values = np.zeros((1, heads, 0, head_dim), np.float32)
        self.positions = np.zeros((heads, 0), np.int64)
        self.scores = np.zeros((heads, 0))

    def add(self, pair, attention, positions, fade, shared):
        """A step's K and V, and its attention ``[head, query, key]`` summed over the queries."""
        self.keys, self.values = pair
        heads, new = len(self.positions), len(positions)
        self.positions = np.concatenate([self.positions, np.tile(positions, (heads, 1))], axis=1)
        sums = attention.sum(axis=1, dtype=np.float64)
        sums = np.broadcast_to(sums.sum(axis=0), sums.shape) if shared else sums
        self.scores = sums + np.pad(self.scores * fade, ((0, 0), (0, new)))

    def cut(self, kept):
        """Keep the tokens at the positions `kept`, ``[head, token]``."""
        indices = np.stack([np.searchsorted(row, wanted) for row, wanted in zip(self.positions, kept, strict=True)])
        self.positions = np.take_along_axis(self.positions, indices, 1)
        np.testing.assert_array_equal(self.positions, kept)
        self.scores = np.take_along_axis(self.scores, indices, 1)
        self.keys, self.values = (
            np.take_along_axis(array, indices[None, :, :, None], 2) for array in (self.keys, self.values)
        )


@pytest.mark.parametrize("size", [1, 4])
@pytest.mark.parametrize("name", POLICIES)
def test_attention_sums_equal_torch(session, decoder, ids, name, size):
    policy = POLICIES[name]
    shared = policy.requires == "scores"
    runner = Runner(session, policy)
    tracks = [Track(decoder.heads, decoder.head_dim) for _ in range(decoder.layers)]
    for first in range(0, TOKENS, size):
        chunk, positions = ids[first : first + size], np.arange(first, first + size)
        runner.step(chunk)
        step = decoder.step(chunk, positions, [(track.keys, track.values) for track in tracks])
        for layer, track in enumerate(tracks):
            fade = getattr(policy, "decay", 1.0) ** size
            track.add(step.present_pairs[layer], step.attentions[layer], positions, fade, shared)
            track.cut(np.broadcast_to(runner.cache.get_positions(layer), (decoder.heads, runner.cache.tokens[layer])))
            found = np.broadcast_to(runner.cache.get_scores(layer), track.scores.shape)
            np.testing.assert_allclose(found, track.scores, rtol=1e-4, atol=1e-4)
    assert runner.cache.tokens == [min(TOKENS, policy.budget)] * decoder.layers
