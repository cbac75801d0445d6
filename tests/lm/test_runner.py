"""Runner: a model under a policy, against the same decoder in numpy with EvictingCache, and on the shipped model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from repository import FIXTURES
from slow_cases import mark_most_slow
from tiny_decoders import Numpy, Tiny

from kvmnn.errors import KvmnnError, OptionError
from kvmnn.lm.runner import Runner
from kvmnn.lm.session import DecoderSession
from kvmnn.lm.tokenizer import Tokenizer
from kvmnn.policies import EvictingCache, Policy, create_policy

SHIPPED = FIXTURES / "lm"
STEPS = [9, 1, 1, 4, 1, 1, 5, 1, 2, 1, 1, 1, 3, 1]
CUTS: list[tuple[str, dict[str, Any]]] = [
    ("recent_only", {"budget": 7, "skip_layers": ()}),
    ("recent_only", {"budget": 7, "skip_layers": (0,)}),
    ("recent_only", {"budget": 7, "skip_layers": (1,)}),
    ("streaming", {"budget": 8, "sink": 2}),
    ("l2_fixed", {"budget": 8, "recent_ratio": 0.5, "skip_layers": ()}),
    ("l2_ratio", {"keep_ratio": 0.7, "prune_after": 8, "skip_layers": (0,)}),
    ("h2o_heads", {"budget": 8, "recent": 3}),
    ("h2o_decayed", {"budget": 8, "sink": 1}),
    ("h2o_decayed_heads", {"budget": 8, "sink": 1, "decay": 1.0, "skip_layers": (0,)}),
    ("h2o_blocks", {"budget": 8, "sink": 2, "recent": 2, "block_tokens": 2, "update_interval": 2,
                    "trigger_min_tokens": 6, "skip_layers": ()}),
]  # fmt: skip
FORMS = {
    "grouped heads": Tiny(kv_heads=2, groups=3),
    "one kv head": Tiny(kv_heads=1, groups=4),
    "fp16 cache": Tiny(half=True),
    "three axes": Tiny(form="rank3"),
    "optimum's mask": Tiny(mask="first"),
    "three layers": Tiny(layers=3, groups=1),
}

CASES = [
    (form, name, options)
    for form in FORMS
    for name, options in CUTS
    if form != "optimum's mask" or 1 not in options.get("skip_layers", ())  # layer 0 must not be the shorter one there
]

SLACKS = (4, None, 0, 100)
SLACK_CASES = [
    (*case, slack)
    for number, case in enumerate(CASES)
    for slack in (SLACKS if case[0] in ("grouped heads", "fp16 cache") else SLACKS[number % 4 : number % 4 + 1])
]
"""Each policy with each form of a graph, and with each slack on two of them."""


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, DecoderSession]:
    folder = tmp_path_factory.mktemp("tiny")
    return {
        name: DecoderSession.open(form.save(folder / f"{number}.onnx"), attentions=True, cache=False)
        for number, (name, form) in enumerate(FORMS.items())
    }


class Reference:
    """A `Numpy` decoder whose layers' caches are `EvictingCache`s."""

    def __init__(self, form: Tiny, policy: Policy) -> None:
        self.model, self.policy = Numpy(form), policy
        self.caches = [EvictingCache(policy, layer) for layer in range(form.layers)]
        self.seen = 0

    def feed(self, ids: np.ndarray) -> np.ndarray:
        past = self.model.empty()
        if self.seen:
            past = [(c.snapshot.keys[None], c.snapshot.values[None]) for c in self.caches]
        positions = np.arange(self.seen, self.seen + len(ids))
        logits, present = self.model.step(ids, positions, past)
        for cache, (keys, values), weights in zip(self.caches, present, self.model.attentions, strict=True):
            new = [side[0, :, -len(ids) :].astype(np.float32) for side in (keys, values)]
            cache.append(*new)
            cache.finish_attention(weights=weights.astype(np.float32) if "scores" in self.policy.requires else None)
        self.seen += len(ids)
        return logits


@pytest.mark.parametrize(
    ("form", "name", "options", "slack"), mark_most_slow(SLACK_CASES, 2), ids=lambda value: str(value)[:40]
)
def test_runner_logits_equal_numpy_with_evicting_cache(
    sessions: Any, form: str, name: str, options: dict[str, Any], slack: int | None
) -> None:
    tolerance = 3e-2 if FORMS[form].half else 2e-4
    policy = create_policy(name, **options)
    reference, runner = Reference(FORMS[form], policy), Runner(sessions[form], policy, max_masked=slack)
    rng = np.random.default_rng(3)
    for count in STEPS:
        ids = rng.integers(0, FORMS[form].vocab, count)
        logits = runner.step(ids)
        expected = reference.feed(ids)
        assert logits.shape == expected.shape and logits.dtype == np.float32
        assert np.abs(logits - expected).max() < tolerance
        assert runner.cache.tokens == [cache.state.tokens for cache in reference.caches]
        if not FORMS[form].half:  # where scores of half precision tie, the sets may differ
            for layer, cache in enumerate(reference.caches):
                ours = np.broadcast_to(runner.cache.get_positions(layer), np.shape(cache.state.positions))
                assert np.array_equal(ours, np.sort(cache.state.positions, axis=-1))
    assert runner.timings.num_tokens == sum(STEPS) and runner.timings.model_seconds > 0 < runner.timings.policy_seconds


def test_runner_h2o_tokens_masks_evicted_before_attention(sessions: Any) -> None:
    """It evicts when tokens arrive: the evicted part of a long chunk is never attended, with slack or without."""
    policy = create_policy("h2o_tokens", budget=8, sink=1, recent=3, buffer=0)
    ids = np.random.default_rng(1).integers(0, 48, 40)
    found = []
    for slack in (0, 50):
        runner = Runner(sessions["grouped heads"], policy, max_masked=slack)
        found.append(np.concatenate([runner.step(ids[i : i + 5]) for i in range(0, 40, 5)]))
        assert runner.cache.tokens == [8, 8]
    assert np.abs(found[0] - found[1]).max() < 2e-4
    chunks = Runner(sessions["grouped heads"], policy)
    chunks.step(ids[:3])
    singles = Runner(sessions["grouped heads"], policy)
    for token in ids[:3]:
        singles.step([token])
    assert chunks.cache.tokens == singles.cache.tokens == [3, 3]


def test_runner_graph_with_bias_masks_per_head(sessions: Any) -> None:
    """Its heads are known, so that each can have a mask of its own."""
    for name, options in (("h2o_decayed_heads", {"budget": 8, "decay": 1.0}), ("streaming", {"budget": 8})):
        peaks = []
        for slack in (0, 50):
            runner = Runner(sessions["grouped heads"], create_policy(name, **options), max_masked=slack)
            runner.step(list(range(20)))
            for token in range(20, 40):
                runner.step([token])
            peaks.append(runner.cache.peak_nbytes)
        assert peaks[0] < peaks[1], name


def test_runner_default_skip_layers_may_exceed_small_model(tmp_path: Path) -> None:
    small = DecoderSession.open(Tiny(layers=1).save(tmp_path / "small.onnx"), cache=False)
    runner = Runner(small, create_policy("recent_only", budget=3))  # which never cuts layers 0 and 1
    runner.step([1, 2, 3, 4, 5])
    assert runner.cache.tokens == [5]
    with pytest.raises(OptionError, match="names layer 1, the model has 1 layer: expected 0 to 0"):
        Runner(small, create_policy("streaming", budget=5, skip_layers=(1,)))


def test_runner_unsupported_models_are_refused(sessions: Any, tmp_path: Path) -> None:
    blind = DecoderSession.open(Tiny(positions=False).save(tmp_path / "blind.onnx"), cache=False)
    with pytest.raises(KvmnnError, match="no input for positions"):
        Runner(blind, create_policy("streaming"))
    assert Runner(blind).step([1, 2, 3]).shape == (3, 48)
    silent = DecoderSession.open(Tiny().save(tmp_path / "silent.onnx"), cache=False)
    with pytest.raises(KvmnnError, match="needs attention probabilities"):
        Runner(silent, create_policy("h2o_decayed"))
    runner = Runner(silent)
    for ids in ([], [[1]], [48], [-1], [1.5]):
        with pytest.raises(KvmnnError, match="ids"):
            runner.step(ids)
    assert runner.cache.num_seen == 0
    cut_first = Runner(
        DecoderSession.open(Tiny(mask="first").save(tmp_path / "first.onnx"), cache=False),
        create_policy("recent_only", budget=3, skip_layers=(1,)),
        max_masked=0,
    )
    cut_first.step([1, 2, 3, 4, 5])
    with pytest.raises(KvmnnError, match="onnxruntime failed"):
        cut_first.step([6])
    with pytest.raises(KvmnnError, match="reset"):
        cut_first.step([6])
    cut_first.reset()
    assert cut_first.step([1, 2]).shape == (2, 48)
    fused = DecoderSession.open(Tiny(form="gqa").save(tmp_path / "fused.onnx"), cache=False)
    with pytest.raises(KvmnnError, match="equally many tokens"):
        Runner(fused, create_policy("recent_only", budget=3, skip_layers=(1,)))
    with pytest.raises(OptionError, match="skip_layers names layer 7, the model has 2 layers: expected 0 to 1"):
        Runner(fused, create_policy("recent_only", budget=3, skip_layers=(0, 7)))
    with pytest.raises(KvmnnError, match="slack"):
        Runner(silent, max_masked=-1)
    with pytest.raises(KvmnnError, match="positions"):
        Runner(silent, positions="restarted")  # type: ignore[arg-type]
    with pytest.raises(KvmnnError, match="arm82"):
        Runner(silent, packed="arm82")
    with pytest.raises(KvmnnError, match="holds fp16"):
        Runner(silent, packed="arm64-fp16")


# -- the shipped model -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def shipped() -> DecoderSession:
    return DecoderSession.open(SHIPPED, attentions=True, cache=False)


@pytest.fixture(scope="module")
def text() -> np.ndarray:
    tokenizer = Tokenizer.open_for_model(SHIPPED)
    raw = (SHIPPED / "texts" / "calendar.py.txt").read_text(encoding="utf-8")
    return np.concatenate([[tokenizer.bos], tokenizer.encode(raw)])[:700]


def read(runner: Runner, ids: np.ndarray, chunk: int = 4) -> np.ndarray:
    return np.concatenate([runner.step(ids[i : i + chunk], end_chunk=True) for i in range(0, len(ids), chunk)])


ROOMY = {"l2_ratio": {"prune_after": 5000, "keep_ratio": 0.5}, "h2o_heads": {"recent": 100}}


@pytest.mark.parametrize(
    "name", mark_most_slow(["l2_ratio", "l2_fixed", "recent_only", "streaming", "streaming_press", "h2o_tokens",
             "h2o_blocks", "h2o_heads", "h2o_decayed", "h2o_decayed_heads", "knorm", "observed_attention"], 5),
)  # fmt: skip
def test_runner_large_budget_equals_full_cache(shipped: DecoderSession, text: np.ndarray, name: str) -> None:
    budget = {} if name == "l2_ratio" else {"budget": 5000}
    policy = create_policy(name, **budget, **ROOMY.get(name, {}))
    full, cut = Runner(shipped), Runner(shipped, policy)
    assert np.array_equal(read(full, text[:80]), read(cut, text[:80]))
    for ours, theirs in zip(cut.cache.copy_layers(), full.cache.copy_layers(), strict=True):
        assert np.array_equal(ours.keys, theirs.keys) and np.array_equal(ours.values, theirs.values)


@pytest.mark.slow
def test_runner_cache_sizes_equal_the_budget(shipped: DecoderSession, text: np.ndarray) -> None:
    """And for the lazy caches the budget and at most the surplus that is documented."""
    for name, more in (("recent_only", {"skip_layers": ()}), ("streaming", {}), ("h2o_decayed", {}),
                       ("h2o_decayed_heads", {}), ("h2o_heads", {"recent": 50})):  # fmt: skip
        runner = Runner(shipped, create_policy(name, budget=100, **more))
        for chunk in range(0, 150, 3):
            runner.step(text[chunk : chunk + 3])
            assert runner.cache.tokens == [min(100, chunk + 3)] * 6
    lazy = Runner(shipped, create_policy("h2o_tokens", budget=100))
    lengths = []
    for i in range(240):
        lazy.step(text[i : i + 1])
        lengths.append(lazy.cache.tokens[3])
    assert max(lengths) == 164 and min(lengths[164:]) == 100
    lazy.cache.end_chunk()
    assert lazy.cache.tokens == [100] * 6


@pytest.mark.slow
@pytest.mark.parametrize(
    "policy",
    [create_policy("streaming", budget=96), create_policy("l2_fixed", budget=96, recent_ratio=0.5),
    create_policy("h2o_decayed", budget=96),
     create_policy("h2o_decayed_heads", budget=96), create_policy("h2o_tokens", budget=96)],
    ids=lambda policy: policy.name,
)  # fmt: skip
def test_runner_packed_cache_equals_plain(shipped: DecoderSession, text: np.ndarray, policy: Policy) -> None:
    plain, packed = Runner(shipped, policy), Runner(shipped, policy, packed="x86-avx2")
    assert np.array_equal(read(plain, text[:200]), read(packed, text[:200]))
    for ours, theirs in zip(packed.cache.copy_layers(), plain.cache.copy_layers(), strict=True):
        assert np.array_equal(ours.keys, theirs.keys) and np.array_equal(ours.values, theirs.values)
        assert np.array_equal(ours.positions, theirs.positions)


@pytest.mark.slow
def test_runner_slack_does_not_change_logits(shipped: DecoderSession, text: np.ndarray) -> None:
    policy = create_policy("h2o_decayed_heads", budget=96)
    at_once, later = Runner(shipped, policy, max_masked=0), Runner(shipped, policy, max_masked=64)
    assert np.abs(read(at_once, text[:300]) - read(later, text[:300])).max() < 1e-4
    assert later.cache.peak_nbytes > at_once.cache.peak_nbytes
    for layer in range(6):
        assert np.array_equal(at_once.cache.get_positions(layer), later.cache.get_positions(layer))


@pytest.mark.slow
def test_runner_stored_positions_raise_perplexity(shipped: DecoderSession, text: np.ndarray) -> None:
    """The classic mistake: places in the cut cache instead of places in the text."""
    policy = create_policy("streaming", budget=128)
    right, wrong = (_perplexity(read(Runner(shipped, policy, positions=p), text), text) for p in ("true", "stored"))  # type: ignore[arg-type]
    assert right < 14 and wrong > 3 * right


def _perplexity(logits: np.ndarray, ids: np.ndarray, first: int = 256) -> float:
    z = logits[:-1].astype(np.float64)
    z -= z.max(axis=-1, keepdims=True)
    nll = np.log(np.exp(z).sum(axis=-1)) - z[np.arange(len(z)), ids[1:]]
    return float(np.exp(nll[first:].mean()))


@pytest.mark.slow
def test_runner_scores_equal_softmax_of_queries_and_keys(
    shipped: DecoderSession, text: np.ndarray, tmp_path: Path
) -> None:
    """Of a plain graph the rotated queries are taken out; the softmax with the keys is numpy's, in float64."""
    ids = text[:160]
    runner = Runner(shipped, create_policy("h2o_decayed_heads", budget=1000, sink=0, decay=1.0))
    shared = Runner(shipped, create_policy("h2o_decayed", budget=1000, decay=0.9))
    for run in (runner, shared):
        read(run, ids, 7)
    model = onnx.load(str(SHIPPED / "model.onnx"))
    queries = [next(n.input[0] for n in model.graph.node if n.name == f"layers.{i}/qk") for i in range(6)]
    model.graph.output.extend(onnx.helper.make_tensor_value_info(q, onnx.TensorProto.FLOAT, None) for q in queries)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feed: dict[str, Any] = {"input_ids": ids[None], "position_ids": np.arange(160)[None]}
    feed["attention_mask"] = np.ones((1, 160), np.int64)
    feed |= {
        f"past_key_values.{i}.{kind}": np.zeros((1, 4, 0, 64), np.float32)
        for i in range(6)
        for kind in ("key", "value")
    }
    taken = session.run(queries + [f"present.{i}.key" for i in range(6)], feed)
    ages = np.arange(160)
    last_of_chunk = np.minimum((ages // 7 + 1) * 7, 160)
    for layer in range(6):
        q, k = (array[0].astype(np.float64) for array in (taken[layer], taken[6 + layer]))
        weights = q @ k.transpose(0, 2, 1) / 8
        weights[:, np.triu(np.ones((160, 160), bool), 1)] = -np.inf
        weights = np.exp(weights - weights.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        assert np.allclose(runner.cache.get_scores(layer), weights.sum(axis=1), rtol=1e-3, atol=1e-4)
        fading = weights.sum(axis=0) * (0.9 ** (160 - last_of_chunk))[:, None]
        assert np.allclose(shared.cache.get_scores(layer), fading.sum(axis=0), rtol=1e-3, atol=1e-4)
