"""Prompts answered from the store: the engine generates the same tokens as by itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from engine_client import GEOMETRY, PREFIX_IDS, QUERY_IDS, Engine, needs_engine, unpack_fixture

import kvmnn
from kvmnn.calibration.maker import build_linear_tables, build_transform_tables
from kvmnn.cli.entry_point import main
from kvmnn.formats.mnn import compute_fingerprint
from kvmnn.formats.options import PackedOptions
from kvmnn.packed.inference import PackedGeometry
from kvmnn.profiles import LayerGeometry, Profile, ProfileInfo, Statistics
from kvmnn.store import PrefixStore, read_layer_caches, write_prefix

pytestmark = needs_engine

PROMPTS = {
    "whole": [*PREFIX_IDS, *QUERY_IDS],
    "cut inside a block": [*PREFIX_IDS[:37], *QUERY_IDS],
    "cut at a block": [*PREFIX_IDS[:32], *QUERY_IDS],
    "one token": [*PREFIX_IDS[:1], *QUERY_IDS],
}
STORED = {"whole": 50, "cut inside a block": 37, "cut at a block": 32, "one token": 1}
BLOCK = 16
SHARED = 2 * BLOCK
TEXTS = (PREFIX_IDS, [*PREFIX_IDS[:SHARED], *np.random.RandomState(79).randint(0, 250, 21).tolist()])
LAYOUT = PackedGeometry(backend="x86-avx2")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_fixture("model", tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def store(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the engine's own prefix, in blocks of 16 tokens, that was copied to another place."""
    folder = tmp_path_factory.mktemp("stored")
    prefix = unpack_fixture("prefix", folder)
    (folder / "ids.json").write_text(json.dumps(PREFIX_IDS))
    said = ["--token-ids", folder / "ids.json", "--model", model, *GEOMETRY, "--block-tokens", BLOCK]
    assert main([str(word) for word in ("store", "put", folder / "first", prefix, *said)]) == 0
    shutil.copytree(folder / "first", folder / "copied")
    shutil.rmtree(folder / "first")
    return folder / "copied"


@pytest.mark.slow
@pytest.mark.parametrize("prompt", PROMPTS)
def test_engine_generates_same_tokens_from_store(model: Path, store: Path, tmp_path: Path, prompt: str) -> None:
    ids = PROMPTS[prompt]
    with Engine(model, tmp_path / "own") as engine:
        wanted = engine.call("generate", ids, 4)
    (tmp_path / "prompt.json").write_text(json.dumps(ids))
    said = ["--token-ids", tmp_path / "prompt.json", "--model", model]
    target = ["--backend", "x86-avx2", "--name", "p", "-o", tmp_path / "ready"]
    assert main([str(word) for word in ("store", "get", store, *said, *target)]) == 0
    with PrefixStore(store, create=False) as found:
        tokens = found.match(ids, model=compute_fingerprint(str(model)))
    assert tokens == STORED[prompt]
    assert answer(model, tmp_path / "scratch", tmp_path / "ready", ids, tokens) == wanted


@pytest.mark.slow
def test_engine_texts_with_shared_blocks_are_answered(model: Path, tmp_path: Path) -> None:
    """Of two texts that begin alike the second put adds what is new and nothing else; both are answered from the store,
    and from a copy of it.
    """
    made_by, wanted, puts = compute_fingerprint(str(model)), [], []
    with PrefixStore(tmp_path / "first", block_tokens=BLOCK) as store:
        for number, ids in enumerate(TEXTS):
            live = tmp_path / f"live {number}"
            with Engine(model, live) as engine:
                wanted.append(engine.call("generate", [*ids, *QUERY_IDS], 4))
                cache = PackedOptions(geometry=LAYOUT, valid_tokens=(len(ids),), model=str(model), pid=engine.pid)
                layers = read_layer_caches(kvmnn.open(str(live), packed=cache))
                token_bytes = sum(each.nbytes for each in layers) // len(ids)
                files = {path: path.read_bytes() for path in (tmp_path / "first" / "units").glob("*/*")}
                puts.append(store.put(ids, layers, model=made_by))
                assert {path: path.read_bytes() for path in files} == files
        first, second = puts
        assert (first.known_tokens, first.raw_bytes) == (0, len(TEXTS[0]) * token_bytes)
        assert (second.known_tokens, second.raw_bytes) == (SHARED, (len(TEXTS[1]) - SHARED) * token_bytes)
        stats = store.stats()
        assert (stats.texts, stats.tokens) == (2, len(TEXTS[0]) + len(TEXTS[1]) - SHARED)
        assert stats.bytes == first.stored_bytes + second.stored_bytes
    assert wanted[0] != wanted[1]
    shutil.copytree(tmp_path / "first", tmp_path / "copied")
    for place in ("first", "copied"):
        with PrefixStore(tmp_path / place, create=False) as store:
            for number, ids in enumerate(TEXTS):
                prompt, ready = [*ids, *QUERY_IDS], tmp_path / f"{place} {number}"
                found = store.get(prompt, model=made_by)
                assert (found.tokens, found.notes) == (len(ids), ())
                write_prefix(found, prompt, str(ready), where=place, geometry=LAYOUT, name="p", model=str(model))
                assert answer(model, tmp_path / f"scratch {place} {number}", ready, prompt, len(ids)) == wanted[number]
        shutil.rmtree(tmp_path / place)


def answer(model: Path, scratch: Path, ready: Path, prompt: list[int], stored: int) -> list[int]:
    """What the engine generates after a prompt of which it loads the first `stored` tokens."""
    with Engine(model, scratch, ready) as engine:
        assert engine.call("prefix", "p") == 1, "the engine did not find the prefix"
        assert engine.call("generate", prompt[:stored], 0) == []
        found: list[int] = engine.call("generate", prompt[stored:], 4)
    return found


@pytest.mark.slow
def test_engine_continues_from_prefixes_by_a_profile(model: Path, tmp_path: Path) -> None:
    """From lossless streams as by itself; so from lossy ones, of 10 bits an element, which are not what was put.

    The model has random weights: other tokens are nearly as good as its best ones, and 8 bits give others.
    """
    made_by, random = compute_fingerprint(str(model)), np.random.RandomState(5)
    ids, texts = list(PREFIX_IDS), [random.randint(0, 250, 300).tolist() for _ in range(2)]
    caches, wanted = [], []
    for number, text in enumerate([*texts, ids]):
        live = tmp_path / f"live {number}"
        with Engine(model, live) as engine:
            wanted = engine.call("generate", [*text, *QUERY_IDS], 4)
            cache = PackedOptions(geometry=LAYOUT, valid_tokens=(len(text),), model=str(model), pid=engine.pid)
            caches.append(read_layer_caches(kvmnn.open(str(live), packed=cache)))
    statistics = Statistics([LayerGeometry.from_cache(layer, None) for layer in caches[0]])
    for text_layers in caches[:-1]:
        statistics.add(text_layers)
    tables = build_linear_tables(statistics, below=0)
    tables |= build_transform_tables(statistics, None, np.ones((len(caches[0]), 2)), below=0)
    info = ProfileInfo(model="engine", fingerprint=None, dtype="fp32", texts=(), layers=statistics.layers)
    profile = Profile(info, tables)
    for codec, options in (("profile", {}), ("transform", {"bits": 10})):
        place, prompt = tmp_path / codec, [*ids, *QUERY_IDS]
        with PrefixStore(place, block_tokens=BLOCK, codec=codec, profile=profile, codec_options=options) as store:
            put = store.put(ids, caches[-1], model=made_by)
            found = store.get(prompt, model=made_by)
        assert put.raw_bytes > (2 if codec == "transform" else 1) * put.stored_bytes
        is_equal = all(
            np.array_equal(a.keys, b.keys) and np.array_equal(a.values, b.values)
            for a, b in zip(found.layers, caches[-1], strict=True)
        )
        assert is_equal == (codec == "profile") and found.is_lossy == (codec == "transform")
        ready = tmp_path / f"{codec} ready"
        result = write_prefix(found, prompt, str(ready), where=codec, geometry=LAYOUT, name="p", model=str(model))
        assert ("LOSSY" in str(result)) == found.is_lossy
        assert answer(model, tmp_path / f"scratch {codec}", ready, prompt, len(ids)) == wanted
