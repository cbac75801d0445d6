"""H2O with scores that decay."""

from __future__ import annotations

import numpy as np
import pytest
from policy_models import view

from kvmnn import KvmnnError
from kvmnn.policies import EvictingCache, LayerState, create_policy


def test_h2o_decayed_scores_decay_once_per_token() -> None:
    """Every token decays the scores before it by the same factor, whatever the size of the steps."""
    rng = np.random.default_rng(7)
    policy = create_policy("h2o_decayed_heads", budget=8, sink=1, recent=3, decay=0.75)
    cache = EvictingCache(policy)
    expected: dict[int, np.ndarray] = {}
    for step in (5, 1, 3, 1, 2, 1):
        cache.append(*np.zeros((2, 2, step, 4), np.float32))
        weights = rng.random((2, step, cache.snapshot.tokens)).astype(np.float32)
        positions = np.broadcast_to(cache.state.positions, (2, cache.snapshot.tokens))
        before = {(head, int(p)): expected.get((head, int(p)), 0.0) for head in range(2) for p in positions[head]}
        after = {
            (head, int(p)): before[head, int(p)] * 0.75**step + float(weights[head, :, column].sum())
            for head in range(2)
            for column, p in enumerate(positions[head])
        }
        cache.finish_attention(weights=weights)
        assert cache.state.scores is not None
        expected = {}
        for head in range(2):
            order = sorted((p for h, p in after if h == head), key=lambda p: -after[head, p])
            if len(order) > 8:
                latest = sorted(order)[-3:]
                heavy = [p for p in order if p != 0 and p not in latest][:4]
                order = [0, *heavy, *latest]
            assert np.broadcast_to(cache.state.positions, (2, len(order)))[head].tolist() == sorted(order)
            expected |= {(head, p): after[head, p] for p in order}
            found = cache.state.scores[head]
            assert np.allclose(found, [after[head, p] for p in sorted(order)], rtol=1e-5)


def test_h2o_decayed_without_decay_and_sinks_equals_h2o_heads() -> None:
    fields = view(60, seed=5)
    plain = create_policy("h2o_decayed_heads", budget=12, sink=0, recent=5, decay=1)
    assert np.array_equal(
        plain.select_or_all(LayerState(**fields)),
        create_policy("h2o_heads", budget=12, recent=5).select_or_all(LayerState(**fields)),
    )
    scores = np.ones(3, np.float32)
    assert plain.score_accumulator.fold(scores, scores, 7).tolist() == [2, 2, 2]
    for options in ({"decay": 1.5}, {"decay": -0.1}, {"decay": True}, {"sink": 5, "recent": 8}, {"recent": -1}):
        with pytest.raises(KvmnnError):
            create_policy("h2o_decayed", budget=12, **options)
