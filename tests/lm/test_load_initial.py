"""Texts that continue from loaded K and V equal those after a prompt step, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_decoders import Tiny

from kvmnn import KvmnnError, LayerCache
from kvmnn.lm.runner import Runner
from kvmnn.lm.session import DecoderSession
from kvmnn.policies import create_policy
from kvmnn.runtime import RuntimeConfig

IDS = np.random.default_rng(3).integers(0, 40, 60)
PROMPT = 30
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("full", {}),
    ("recent_only", {"budget": 12, "skip_layers": ()}),
    ("recent_only", {"budget": 12, "skip_layers": (1,)}),
    ("streaming", {"budget": 12, "sink": 2}),
    ("l2_fixed", {"budget": 12, "recent_ratio": 0.5, "skip_layers": ()}),
    ("l2_ratio", {"keep_ratio": 0.7, "prune_after": 8, "skip_layers": (0,)}),
    ("knorm", {"budget": 12}),
    ("streaming_press", {"budget": 12}),
]
IDENTIFIERS = [f"{name} {'+'.join(map(str, options.get('skip_layers', ())))}".strip() for name, options in POLICIES]
HOLDING: dict[str, dict[str, Any]] = {
    "plain": {},
    "cut at once": {"max_masked": 0},
    "packed": {"packed": "x86-avx2"},
    "lossless": {"lossless": RuntimeConfig(mode="full", scope="front_n", front_n=1, block_tokens=8)},
}


@pytest.fixture(scope="module", params=[Tiny(), Tiny(half=True, layers=3)], ids=["fp32", "fp16"])
def session(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> DecoderSession:
    return DecoderSession.open(request.param.save(tmp_path_factory.mktemp("tiny") / "model.onnx"), cache=False)


def policy(name: str, options: dict[str, Any]):
    return None if name == "full" else create_policy(name, **options)


def rest(runner: Runner, begin: int = PROMPT) -> np.ndarray:
    return np.concatenate([runner.step(IDS[i : i + 1]) for i in range(begin, len(IDS))])


@pytest.mark.parametrize("holding", HOLDING)
@pytest.mark.parametrize(("name", "options"), POLICIES, ids=IDENTIFIERS)
def test_load_initial_equals_a_prompt_step(
    session: DecoderSession, name: str, options: dict[str, Any], holding: str
) -> None:
    if holding == "packed" and session.interface.dtype == np.float16:
        with pytest.raises(KvmnnError, match="layout x86-avx2 holds fp32, the cache of this model is fp16"):
            Runner(session, policy(name, options), **HOLDING[holding])
        return
    whole = Runner(session)
    whole.step(IDS[:PROMPT])
    rows = whole.cache.copy_layers()
    read, begun = (Runner(session, policy(name, options), **HOLDING[holding]) for _ in "ab")
    read.step(IDS[:PROMPT], end_chunk=True)
    begun.load_initial(rows)
    assert begun.cache.tokens == read.cache.tokens and begun.cache.num_seen == PROMPT
    same = "max_masked" in HOLDING[holding] or name == "full"  # else slots that are masked differ, and so do sums
    one, other = rest(read), rest(begun)
    assert (
        np.array_equal(one, other) if same else np.allclose(one, other, atol=3e-2 if rows[0].dtype == "fp16" else 1e-4)
    )
    for layer in range(session.interface.layers):
        assert np.array_equal(read.cache.get_positions(layer), begun.cache.get_positions(layer))
    for mine, theirs in zip(begun.cache.copy_layers(), read.cache.copy_layers(), strict=True):
        assert np.array_equal(mine.positions, theirs.positions) and mine.tokens_seen == theirs.tokens_seen


@pytest.mark.parametrize("name", ["knorm", "streaming_press"])
def test_load_initial_evicted_cache_continues(session: DecoderSession, name: str) -> None:
    """These two cut a prompt and nothing after it; `knorm` keeps other tokens in each head."""
    cut = Runner(session, create_policy(name, budget=12), max_masked=0)
    cut.step(IDS[:PROMPT])
    rows = cut.cache.copy_layers()
    assert rows[0].tokens == 12 and rows[0].tokens_seen == PROMPT
    begun = Runner(session)
    begun.load_initial(rows)
    assert np.array_equal(rest(cut), rest(begun))
    assert begun.cache.tokens == cut.cache.tokens == [42] * session.interface.layers
    for layer in range(session.interface.layers):
        assert np.array_equal(begun.cache.get_positions(layer), cut.cache.get_positions(layer))


def test_load_initial_layers_of_different_lengths(session: DecoderSession) -> None:
    """As after a policy that skips layer 0, alone and under another policy after it."""
    cut = Runner(session, create_policy("streaming_press", budget=12, skip_layers=(0,)), max_masked=0)
    cut.step(IDS[:PROMPT])
    rows = cut.cache.copy_layers()
    assert [row.tokens for row in rows] == [30, *[12] * (len(rows) - 1)]
    begun = Runner(session)
    begun.load_initial(rows)
    assert np.array_equal(rest(cut), rest(begun))
    assert begun.cache.tokens == [60, *[42] * (len(rows) - 1)]
    behind = Runner(session, create_policy("streaming", budget=8, sink=2))
    behind.load_initial(rows)
    rest(behind)
    assert behind.cache.tokens == [8] * len(rows)
    assert behind.cache.get_positions(0).tolist() == [0, 1, *range(54, 60)]
    assert behind.cache.get_positions(1).tolist() == behind.cache.get_positions(0).tolist()


def test_load_initial_mapped_rows_are_not_modified(session: DecoderSession, tmp_path: Path) -> None:
    whole = Runner(session)
    whole.step(IDS[:PROMPT])
    rows = []
    for row in whole.cache.copy_layers():
        for part in ("keys", "values"):
            np.save(tmp_path / f"{row.layer}.{part}.npy", getattr(row, part))
        parts = {part: np.load(tmp_path / f"{row.layer}.{part}.npy", mmap_mode="r") for part in ("keys", "values")}
        rows.append(LayerCache(layer=row.layer, **parts))
    before = [row.keys.tobytes() for row in rows]
    begun, cut = Runner(session), Runner(session, create_policy("recent_only", budget=9, skip_layers=()))
    for runner in (begun, cut):
        runner.load_initial(rows)
        rest(runner)
    assert begun.cache.tokens[0] == 60 and cut.cache.tokens[0] == 9
    assert [row.keys.tobytes() for row in rows] == before


@pytest.mark.parametrize(
    "form",
    [
        Tiny(positions=False),
        Tiny(form="gqa", rotary="given", head_dim=16),
        Tiny(form="standard-past"),
        Tiny(kv_heads=1, groups=4),
        Tiny(merged=True),
        Tiny(mask="first"),
    ],
    ids=["without positions", "gqa", "standard", "one head", "merged", "first"],
)
def test_load_initial_every_kind_of_graph(form: Tiny, tmp_path: Path) -> None:
    """Rows may be computed at once or one by one, which these models may round otherwise."""
    session = DecoderSession.open(form.save(tmp_path / "model.onnx"), cache=False)
    whole, begun = Runner(session), Runner(session)
    whole.step(IDS[:PROMPT])
    begun.load_initial(whole.cache.copy_layers())
    assert np.array_equal(rest(whole), rest(begun))


def test_load_initial_invalid_rows_are_refused(tmp_path: Path) -> None:
    blind = DecoderSession.open(Tiny(positions=False).save(tmp_path / "blind.onnx"), cache=False)
    session = DecoderSession.open(Tiny().save(tmp_path / "tiny.onnx"), attentions=True, cache=False)
    whole = Runner(session)
    whole.step(IDS[:8])
    rows = whole.cache.copy_layers()
    with pytest.raises(KvmnnError, match="h2o_engine ranks tokens by the attention that they drew"):
        Runner(session, create_policy("h2o_engine")).load_initial(rows)
    for name in ("h2o_decayed", "h2o_tokens", "observed_attention"):
        with pytest.raises(KvmnnError, match=f"{name} ranks tokens by the attention that they drew"):
            Runner(session, create_policy(name, budget=20)).load_initial(rows)
    gaps = [LayerCache(layer=r.layer, keys=r.keys, values=r.values, positions=np.arange(8) * 2) for r in rows]
    with pytest.raises(KvmnnError, match=r"blind.onnx has no input for positions: these lack tokens of their text"):
        Runner(blind).load_initial(gaps)
    Runner(blind).load_initial(rows)
    places = np.stack([np.arange(8), np.arange(8) + 1])
    heads = [LayerCache(layer=r.layer, keys=r.keys, values=r.values, positions=places) for r in rows]
    with pytest.raises(KvmnnError, match="recent_only keeps the same tokens in all heads: these hold different ones"):
        Runner(session, create_policy("recent_only", budget=4, skip_layers=())).load_initial(heads)
    further = LayerCache(layer=1, keys=rows[1].keys, values=rows[1].values, tokens_seen=9)
    with pytest.raises(KvmnnError, match="layer 1: 9 tokens seen, layer 0 8"):
        Runner(session).load_initial([rows[0], further])


def test_load_initial_rows_of_a_longer_text_are_refused(tmp_path: Path) -> None:
    """Positions 0 to 7 are there, but the text had more tokens, which were evicted: all layers agree on that."""
    blind = DecoderSession.open(Tiny(positions=False).save(tmp_path / "blind.onnx"), cache=False)
    session = DecoderSession.open(Tiny().save(tmp_path / "tiny.onnx"), cache=False)
    whole = Runner(session)
    whole.step(IDS[:8])
    rows = whole.cache.copy_layers()
    Runner(session).replay_step(rows, 4)
    further = [LayerCache(layer=r.layer, keys=r.keys, values=r.values, tokens_seen=9) for r in rows]
    with pytest.raises(KvmnnError, match="layer 0: holds not all tokens of a text's beginning"):
        Runner(session).replay_step(further, 4)
    with pytest.raises(KvmnnError, match=r"blind\.onnx has no input for positions: these lack tokens of their text"):
        Runner(blind).load_initial(further)
    Runner(session).load_initial(further)
