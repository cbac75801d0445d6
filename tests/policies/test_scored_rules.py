"""Scored policies against their formulas in plain Python, one head and one token at a time."""

from __future__ import annotations

import math

import numpy as np
import policy_models as model
import pytest

from kvmnn.errors import KvmnnError
from kvmnn.policies import LayerState, create_policy
from kvmnn.policies.layer_parameters import LayerParameters, Rotation

TOKENS, HEADS, GROUP, DIMS = 50, 2, 2, 8
ROTATION = Rotation(np.array([1.0, 0.3, 0.1, 0.02], np.float32))


def draw(seed: int = 1) -> LayerState:
    rng = np.random.default_rng(seed)
    keys, values = rng.standard_normal((2, HEADS, TOKENS, DIMS)).astype(np.float32)
    queries = (2 * rng.standard_normal((HEADS * GROUP, TOKENS, DIMS))).astype(np.float32)
    weights = rng.standard_normal((HEADS * GROUP, DIMS, 12)).astype(np.float32)
    return LayerState(
        tokens=TOKENS, layer=1, keys=keys, values=values, queries=queries,
        parameters=LayerParameters(4, ROTATION, lambda: weights),
    )  # fmt: skip


def attend(layer: LayerState, query_head: int, query: int) -> list[float]:
    """The attention of one query to the keys up to its own."""
    keys = layer.keys[query_head // GROUP]
    powers = [math.exp(float(layer.queries[query_head, query] @ keys[j]) / math.sqrt(DIMS)) for j in range(query + 1)]
    return [power / sum(powers) for power in powers] + [0.0] * (TOKENS - query - 1)


def snapkv(layer: LayerState, head: int, window: int, kernel: int) -> list[float]:
    observed = TOKENS - window
    scores = [0.0] * observed
    for query_head in range(head * GROUP, head * GROUP + GROUP):
        rows = [attend(layer, query_head, query) for query in range(observed, TOKENS)]
        means = [sum(row[j] for row in rows) / window for j in range(observed)]
        for j in range(observed):
            near = [means[i] for i in range(j - kernel // 2, j + kernel // 2 + 1) if 0 <= i < observed]
            scores[j] += sum(near) / kernel / GROUP
    return scores + [math.inf] * window


def tova(layer: LayerState, head: int) -> list[float]:
    rows = [attend(layer, query_head, TOKENS - 1) for query_head in range(HEADS * GROUP)]
    return [sum(row[j] for row in rows) for j in range(TOKENS - 1)] + [math.inf]


def keydiff(layer: LayerState, head: int) -> list[float]:
    units = [row / math.sqrt(sum(float(x) ** 2 for x in row)) for row in layer.keys[head]]
    anchor = sum(units) / TOKENS
    return [-float(unit @ anchor) / math.sqrt(float(anchor @ anchor)) for unit in units]


def rotate(vector: np.ndarray, position: int, direction: int) -> np.ndarray:
    out = np.zeros(DIMS)
    for i, frequency in enumerate(ROTATION.frequencies):
        cos, sin = math.cos(position * frequency), direction * math.sin(position * frequency)
        out[i], out[i + 4] = vector[i] * cos - vector[i + 4] * sin, vector[i + 4] * cos + vector[i] * sin
    return out


def expected_attention(layer: LayerState, head: int, future: int, sink: int) -> list[float]:
    scores = [0.0] * (TOKENS - sink)
    for query_head in range(head * GROUP, head * GROUP + GROUP):
        plain = [rotate(layer.queries[query_head, t], t, -1) for t in range(sink, TOKENS)]
        matrix = sum(np.array([rotate(unit, TOKENS + j, 1) for unit in np.eye(DIMS)]).T for j in range(future)) / future
        mean = matrix @ (sum(plain) / len(plain))
        spread = sum(np.outer(q - sum(plain) / len(plain), q - sum(plain) / len(plain)) for q in plain) / len(plain)
        spread = matrix @ spread @ matrix.T
        later_keys = layer.keys[head, sink:].astype(float)
        powers = [math.exp(mean @ key / math.sqrt(DIMS) + key @ spread @ key / DIMS / 2) for key in later_keys]
        for j, power in enumerate(powers):
            scores[j] += power / sum(powers) / GROUP
    norms = [math.sqrt(sum(float(x) ** 2 for x in row)) for row in layer.values[head, sink:]]
    return [math.inf] * sink + [score * norm for score, norm in zip(scores, norms, strict=True)]


def choose(scores: list[float], size: int) -> list[int]:
    return sorted(model.ranked(scores, highest=True)[:size])


FORMULAS = [
    ("snapkv", {"window": 9, "kernel": 3}, lambda layer, head: snapkv(layer, head, 9, 3)),
    ("tova", {}, tova),
    ("keydiff", {}, keydiff),
    ("expected_attention", {"future": 6, "sink": 3}, lambda layer, head: expected_attention(layer, head, 6, 3)),
]


@pytest.mark.parametrize(("name", "options", "formula"), FORMULAS)
def test_scored_policy_equals_its_formula(name, options, formula) -> None:
    for seed in range(3):
        layer = draw(seed)
        expected = [choose(formula(layer, head), 20) for head in range(HEADS)]
        assert create_policy(name, budget=20, **options).select_or_all(layer).tolist() == expected


def test_ada_gives_heads_one_budget() -> None:
    layer = draw()
    scores = [keydiff(layer, head) for head in range(HEADS)]
    safe = [choose(row, 4) for row in scores]
    flat = sorted(((head, j) for head in range(HEADS) for j in range(TOKENS)), key=lambda at: -scores[at[0]][at[1]])
    chosen = {(head, j) for head in range(HEADS) for j in safe[head]}
    for at in flat:
        if len(chosen) < 2 * 20:
            chosen.add(at)
    policy = create_policy("keydiff", budget=20, wrapper="ada")
    found = policy.select_stacked(layer)
    assert [row.tolist() for row in found] == [sorted(j for at, j in chosen if at == head) for head in range(HEADS)]
    with pytest.raises(KvmnnError, match="keeps different numbers of tokens in heads of one layer"):
        policy.select(layer)


def test_critical_weighs_the_second_half_by_the_output() -> None:
    layer = draw()
    weights = layer.parameters.read_output_weights()
    expected = []
    for head in range(HEADS):
        scores = keydiff(layer, head)
        first = choose(scores, 10)
        norms = [
            sum(np.abs(layer.values[head, j] @ weights[h]).sum() for h in range(head * GROUP, head * GROUP + GROUP)) / 2
            for j in range(TOKENS)
        ]
        weighted = [math.inf if j in first else (scores[j] + 1e-4) * norms[j] for j in range(TOKENS)]
        expected.append(choose(weighted, 20))
    assert create_policy("keydiff", budget=20, wrapper="critical").select_or_all(layer).tolist() == expected


def test_chunkkv_keeps_whole_chunks_of_all_heads() -> None:
    layer = draw()
    sums = [sum(keydiff(layer, head)[j] for head in range(HEADS)) for j in range(TOKENS)]
    means = [sum(sums[b : b + 8]) / len(sums[b : b + 8]) for b in range(0, TOKENS, 8)]
    chunks = choose(means, int(7 * 20 / 50))
    expected = [j for chunk in chunks for j in range(8 * chunk, min(8 * chunk + 8, TOKENS))]
    policy = create_policy("keydiff", budget=20, wrapper="chunkkv", chunk=8)
    assert policy.select_or_all(layer).tolist() == [expected] * HEADS


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("snapkv", {"phase": "prefill"}, "phase is 'prefill': expected one of prompt, decoding, both"),
        ("snapkv", {"wrapper": "pyramid"}, "wrapper is 'pyramid': expected one of none, ada"),
        ("snapkv", {"wrapper": "block"}, "wrapper 'block' is for policies that look at keys and values only"),
        ("snapkv", {"chunk": 9}, "chunk is for wrappers chunk, chunkkv, entropy_chunkkv, block, not 'none'"),
        ("snapkv", {"kernel": 4}, "kernel is 4: expected an odd number"),
        ("keydiff", {"safeguard": 1.5}, "safeguard is 1.5: expected a number from 0 to 1"),
        ("non_causal", {"phase": "both"}, "needs the queries of all tokens"),
        ("simlayerkv", {"wrapper": "ada"}, "expected none"),
    ],
)
def test_scored_policy_refuses_options(name, options, message) -> None:
    with pytest.raises(KvmnnError, match=message):
        create_policy(name, budget=8, **options)


def test_scored_policy_names_what_is_missing() -> None:
    whole = draw()
    for name, fields, message in [
        ("cur", {"values": None}, "needs the values"),
        ("snapkv", {"queries": None}, "needs queries, which only a model computes"),
        ("non_causal", {"queries": whole.queries[:, :7]}, "queries of all 50 tokens, found 7"),
        ("snapkv", {"queries": whole.queries[:3]}, "query heads that form groups for 2 KV heads"),
        ("pyramidkv", {"parameters": None}, "needs the number of layers"),
    ]:
        state = LayerState(**{**{key: getattr(whole, key) for key in vars(whole)}, **fields})
        with pytest.raises(KvmnnError, match=f"^layer 1: {name} .*{message}|^layer 1: {name} {message}"):
            create_policy(name, budget=8).select(state)
    with pytest.raises(KvmnnError, match="needs the output weights of attention"):
        state = LayerState(tokens=TOKENS, layer=1, keys=whole.keys, values=whole.values)
        create_policy("keydiff", budget=8, wrapper="critical").select(state)
