"""Texts that begin with K and V from a store equal those after the same rows, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import transform_samples
from repository import FIXTURES
from tiny_decoders import Tiny

from kvmnn import KvmnnError, LayerCache
from kvmnn.lm import RunOptions, StoredPrefixes, compute_fingerprint, generate
from kvmnn.lm.generation import generate_tokens
from kvmnn.lm.runner import Runner
from kvmnn.lm.session import DecoderSession
from kvmnn.policies import create_policy
from kvmnn.runtime import RuntimeConfig
from kvmnn.store import BackendUnavailableError, PrefixStore
from kvmnn.store.remote.key_values import CircuitBreaker

SHIPPED = FIXTURES / "lm"
IDS = np.random.default_rng(3).integers(0, 40, 90).tolist()


@pytest.fixture(scope="module", params=[Tiny(), Tiny(half=True, layers=3)], ids=["fp32", "fp16"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    request.param.save(folder / "model.onnx")
    return folder


@pytest.fixture
def session(model: Path) -> DecoderSession:
    return DecoderSession.open(model, cache=False)


@pytest.fixture
def prefixes(model: Path, tmp_path: Path):
    with PrefixStore(tmp_path / "store", block_tokens=16) as store:
        yield StoredPrefixes(store, compute_fingerprint(model))


@pytest.mark.parametrize("shared", [1, 15, 16, 37, 48, 89])
def test_begin_text_logits_equal_the_same_rows(session, prefixes, shared: int) -> None:
    runner = Runner(session)
    runner.step(IDS[:shared])
    assert prefixes.put_text(runner, IDS[:shared]).tokens == shared
    expected = [runner.step(IDS[shared:]), runner.step([1]), runner.step([2, 3])]
    again = Runner(session)
    found = prefixes.begin_text(again, IDS)
    assert (
        found.tokens == shared and again.cache.num_seen == shared and again.cache.tokens == [shared] * len(found.layers)
    )
    for ids, logits in zip((IDS[shared:], [1], [2, 3]), expected, strict=True):
        assert again.step(ids).tobytes() == logits.tobytes()
    for one, other in zip(again.cache.copy_layers(), runner.cache.copy_layers(), strict=True):
        assert one.keys.tobytes() == other.keys.tobytes() and one.values.tobytes() == other.values.tobytes()


def test_put_text_passes_on_what_the_prefix_had_lost(session, model: Path, tmp_path: Path) -> None:
    """The unit that ends within a block is replaced by one of the rows that were loaded, and new ones."""
    runner = Runner(session)
    runner.step(IDS[:20])
    with PrefixStore(tmp_path / "store") as store:
        prefixes, name = StoredPrefixes(store, compute_fingerprint(model)), compute_fingerprint(model)
        store.put(IDS[:20], runner.cache.copy_layers(), model=name, loss="rounded by a cast")
        again = Runner(session)
        again.step(IDS[prefixes.begin_text(again, IDS).tokens :])
        assert prefixes.put_text(again, IDS).stored_from == 0
        assert store.get(IDS, model=name).label == "LOSSY"
        prefixes.begin_text(runner, [5, 6])
        runner.step([5, 6])
        prefixes.put_text(runner, [5, 6])
        assert store.get([5, 6], model=name).label is None


@pytest.mark.parametrize("held", ["packed", "lossless"])
def test_begin_text_packed_and_lossless_caches(session, prefixes, held: str) -> None:
    runner = Runner(session)
    runner.step(IDS[:70])
    prefixes.put_text(runner, IDS[:70])
    expected = runner.step(IDS[70:])
    runtime = RuntimeConfig.from_engine(
        {"kv_lossless_enable": True, "kv_lossless_runtime_mode": "store", "kv_lossless_scope": "front_n"}
    )
    backend = "arm64-fp16" if session.interface.dtype is np.float16 else "x86-avx2"
    other = Runner(session, packed=backend) if held == "packed" else Runner(session, lossless=runtime)
    assert prefixes.begin_text(other, IDS).tokens == 70
    assert other.step(IDS[70:]).tobytes() == expected.tobytes()


def test_begin_text_always_computes_the_last_token(session, prefixes) -> None:
    runner = Runner(session)
    runner.step(IDS)
    prefixes.put_text(runner, IDS)
    assert prefixes.begin_text(runner, IDS).tokens == len(IDS) - 1
    assert prefixes.begin_text(runner, IDS[:1]).tokens == 0 and runner.cache.num_seen == 0


def test_generate_tokens_begins_with_stored_prefix_and_stores(session, prefixes) -> None:
    runner = Runner(session)
    plain = generate_tokens(runner, IDS, 6)
    first = generate_tokens(runner, IDS, 6, prefixes=prefixes)
    assert plain.store is None and plain.ids == first.ids
    assert first.store is not None and first.store.put is not None
    assert (first.store.tokens, first.store.put.tokens, first.store.put.known_tokens) == (0, 95, 0)
    second = generate_tokens(runner, [*IDS, *first.ids], 4, prefixes=prefixes)
    assert second.store is not None and second.store.put is not None
    assert (second.store.tokens, second.store.put.tokens, second.store.put.known_tokens) == (95, 99, 95)
    assert second.ids == generate_tokens(runner, [*IDS, *first.ids], 4).ids


def test_generate_tokens_notes_attention_for_transform_stores(model, tmp_path: Path) -> None:
    session = DecoderSession.open(model, attentions=True, cache=False)
    interface = session.interface
    dims = interface.head_dim
    geometry = transform_samples.create_geometries(interface.layers, interface.kv_heads, dims, dims, None)
    profile = transform_samples.create_profile(geometry)
    runner = Runner(session)
    generated = generate_tokens(runner, IDS, 6)
    ids = [*IDS, *generated.ids[:-1]]
    caches = runner.cache.copy_layers()
    step = session.run_step(np.array(ids), np.arange(len(ids)), session.create_empty_past())
    weights = np.array([np.tril(each, -1).sum(axis=1) for each in step.attentions])
    weights = weights.reshape(interface.layers, interface.kv_heads, -1, len(ids)).mean(axis=2)
    attention = weights / np.maximum(np.arange(len(ids))[::-1], 1)
    expected = {}
    for name, drawn in (("noted", None), ("with", attention), ("without", None)):
        store = PrefixStore(tmp_path / name, codec="transform", profile=profile, codec_options={"kl": 0.5})
        with store:
            if name == "noted":
                used = generate_tokens(runner, IDS, 6, prefixes=StoredPrefixes(store, "tiny")).store
                assert used is not None and used.put is not None and used.put.is_lossy
            else:
                store.put(ids, caches, model="tiny", attention=drawn)
            expected[name] = [row.keys.tobytes() + row.values.tobytes() for row in store.get(ids, model="tiny").layers]
    assert expected["noted"] == expected["with"] != expected["without"]


def test_generate_tokens_unwritable_store_costs_no_text(session, prefixes, tmp_path: Path) -> None:
    (tmp_path / "store" / "staging").write_text("in the way")
    runner = Runner(session)
    made = generate_tokens(runner, IDS, 6, prefixes=prefixes)
    assert made.ids == generate_tokens(runner, IDS, 6).ids
    assert made.store is not None and made.store.put is not None
    assert "staging: cannot be written: " in made.store.put.notes[0]
    assert "95 tokens: nothing was stored: " in str(made.store.put)


def test_load_initial_mismatched_layers_are_refused(session, model) -> None:
    runner = Runner(session)
    runner.step(IDS[:8])
    rows = runner.cache.copy_layers()
    with pytest.raises(KvmnnError, match="reset the runner first"):
        runner.load_initial(rows)
    runner.reset()
    with pytest.raises(KvmnnError, match=r"layers of 8 tokens: .* has \d"):
        runner.load_initial(rows[:-1])
    with pytest.raises(KvmnnError, match="at least one token"):
        runner.load_initial([])
    with pytest.raises(KvmnnError, match="expected layer 0"):
        runner.load_initial(rows[::-1])
    heads = [LayerCache(layer=row.layer, keys=row.keys[:1], values=row.values[:1]) for row in rows]
    with pytest.raises(KvmnnError, match=r"layer 0, fp\d\d \[1, 8"):
        runner.load_initial(heads)
    dims = [LayerCache(layer=row.layer, keys=row.keys, values=row.values[..., :-1]) for row in rows]
    with pytest.raises(KvmnnError, match=r"layer 0, fp\d\d \[2, 8, \d+\] and \[2, 8, \d+\]: expected layer 0"):
        runner.load_initial(dims)
    kind = np.float32 if rows[0].dtype == "fp16" else np.float16
    cast = [LayerCache(layer=r.layer, keys=r.keys.astype(kind), values=r.values.astype(kind)) for r in rows]
    with pytest.raises(KvmnnError, match=f"expected layer 0, {rows[0].keys.dtype.name}"):
        runner.load_initial(cast)
    gaps = [LayerCache(layer=r.layer, keys=r.keys, values=r.values, positions=np.arange(8) * 2) for r in rows]
    with pytest.raises(KvmnnError, match="layer 0: holds not all tokens of a text's beginning"):
        runner.replay_step(gaps, 8)
    assert runner.cache.num_seen == 0
    runner.load_initial(rows)
    assert runner.cache.num_seen == 8


def test_compute_fingerprint_covers_graph_and_weights(tmp_path: Path) -> None:
    inside = Tiny().save(tmp_path / "model.onnx")
    folder = tmp_path / "parts"
    folder.mkdir()
    outside = Tiny().save(folder / "model.onnx", location="weights.bin")
    shutil.copytree(folder, tmp_path / "copy")
    assert compute_fingerprint(tmp_path / "copy") == compute_fingerprint(outside) != compute_fingerprint(inside)
    weights = tmp_path / "copy" / "weights.bin"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert compute_fingerprint(tmp_path / "copy") != compute_fingerprint(outside)
    assert len(compute_fingerprint(inside)) == 64


@pytest.mark.slow
def test_generate_with_store_equals_without(tmp_path: Path) -> None:
    prompt = (SHIPPED / "texts" / "calendar.py.txt").read_text()[:600]
    expected = generate(SHIPPED, prompt, max_tokens=4)
    with PrefixStore(tmp_path / "store") as store:
        first = generate(SHIPPED, prompt, max_tokens=4, store=store)
        again = generate(SHIPPED, prompt, create_policy("streaming", budget=64), max_tokens=4, store=store)
        other = generate(SHIPPED, prompt, max_tokens=4, store=store, options=RunOptions(chunk=64))
    assert expected.full.text == first.full.text == again.full.text == other.full.text
    assert first.full.generation.store is not None and first.full.generation.store.tokens == 0
    tokens = first.prompt_tokens - 1
    assert again.full.generation.store is not None and again.full.generation.store.tokens == tokens
    assert again.cut is not None and again.cut.generation.store is None
    assert "computed from the beginning" in " ".join(again.notes)
    assert f"prompt from the store  {tokens:,} tokens" in str(again)
    assert "put into the store: " in str(first) and "prompt from the store" not in str(expected)
    assert again.to_dict()["full"]["store"]["tokens"] == tokens and "store" not in expected.to_dict()["full"]


def test_generate_backend_outage_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the lookup nor the put gets an answer."""

    def away(*_: object) -> None:
        raise BackendUnavailableError("the engine is away")

    with PrefixStore("memory://told-once") as store:
        monkeypatch.setattr(CircuitBreaker, "_with_retry", away)
        made = str(generate(SHIPPED, "Once upon", max_tokens=2, store=store))
        monkeypatch.undo()
    assert made.count("the engine is away") == 1
