"""How the projects of presets measure, on a model whose logits are known."""

from __future__ import annotations

import math
from types import SimpleNamespace

import numpy as np
import pytest

from kvmnn.evaluation.records import ProjectCell
from kvmnn.evaluation.row_builder import _build_project_numbers
from kvmnn.evaluation.scoring import compute_nll, measure_by_definition
from kvmnn.evaluation.settings import ProjectDefinition

VOCAB = 6
RANDOM = np.random.default_rng(11)
IDS = RANDOM.integers(0, VOCAB, 11)
TABLE = RANDOM.standard_normal((11, VOCAB)).astype(np.float32)
NLL, HITS = compute_nll(TABLE[:-1], IDS[1:])


class Model:
    """Rows of a table; layer 0 keeps all tokens, layer 1 four."""

    def __init__(self):
        self.seen = 0
        self.chunks = []

    @property
    def cache(self):
        return SimpleNamespace(tokens=[self.seen, min(self.seen, 4)])

    def step(self, ids, *, end_chunk=False):
        self.chunks.append((len(ids), end_chunk))
        self.seen += len(ids)
        return TABLE[self.seen - len(ids) : self.seen]


def test_measure_by_definition_token_by_token():
    model = Model()
    found = measure_by_definition(model, IDS, ProjectDefinition("E1", "x"), skipped_layers=(0,))
    assert model.chunks == [(1, False)] * 10  # n - 1 tokens are scored, the last one is not fed
    assert (found.weight, found.scored_tokens, found.text_tokens) == (10, 10, 11)
    assert found.weighted_nll == pytest.approx(NLL.sum(), rel=1e-12)
    assert found.hits == HITS.sum()
    assert found.final_cache_tokens == 4
    assert found.ttft_seconds + 9 * found.tpot_seconds == pytest.approx(found.seconds)


def test_measure_by_definition_final_size_is_of_first_cut_layer():
    assert measure_by_definition(Model(), IDS, ProjectDefinition("E1", "x"), skipped_layers=()).final_cache_tokens == 10


@pytest.mark.parametrize("chunk", [2, 3, 4, 5, 11, 1024])
def test_measure_by_definition_in_chunks(chunk):
    model = Model()
    found = measure_by_definition(model, IDS, ProjectDefinition("E2", "x", chunk), skipped_layers=())
    sizes = [min(chunk, 11 - begin) for begin in range(0, 11, chunk)]
    assert model.chunks == [(size, True) for size in sizes]
    weighted, weight, hits = 0.0, 0, 0
    for begin in range(0, 11, chunk):
        inner = slice(begin, min(begin + chunk, 11) - 1)  # predictions of tokens of the same chunk
        if inner.stop > inner.start:
            size = min(chunk, 11 - begin)
            weighted += NLL[inner].mean() * size
            weight += size
            hits += HITS[inner].sum()
    assert found.weighted_nll == pytest.approx(weighted, rel=1e-12)
    assert (found.weight, found.hits) == (weight, hits)
    assert found.chunks_left_out == sizes.count(1)
    assert math.isfinite(found.weighted_nll)


def test_measure_by_definition_one_token_scores_nothing():
    assert measure_by_definition(Model(), IDS[:1], ProjectDefinition("E1", "x"), ()).scored_tokens == 0


def test_project_numbers_too_short_times_have_no_speed():
    sizes = {"weight": 9, "weighted_nll": 9.0, "hits": 3, "scored_tokens": 9, "text_tokens": 10}
    cells = [ProjectCell(**sizes, seconds=seconds, final_cache_tokens=4) for seconds in (2.0, 0.0)]
    found = _build_project_numbers(ProjectDefinition("E1", "x"), cells, None, None, 2)
    assert found.tokens_per_second == 5.0
