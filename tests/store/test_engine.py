"""Prompts answered from the store: the engine generates from what `get` wrote what it generates by itself."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from engine_client import GEOMETRY, PREFIX_IDS, QUERY_IDS, Engine, needs_engine, unpack_fixture

from kvmnn.cli.command import main
from kvmnn.formats.mnn import fingerprint
from kvmnn.store import PrefixStore

pytestmark = needs_engine

PROMPTS = {
    "whole": [*PREFIX_IDS, *QUERY_IDS],
    "cut inside a block": [*PREFIX_IDS[:37], *QUERY_IDS],
    "cut at a block": [*PREFIX_IDS[:32], *QUERY_IDS],
    "one token": [*PREFIX_IDS[:1], *QUERY_IDS],
}
STORED = {"whole": 50, "cut inside a block": 37, "cut at a block": 32, "one token": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack_fixture("model", tmp_path_factory.mktemp("engine"))


@pytest.fixture(scope="module")
def store(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store of the engine's own prefix, in blocks of 16 tokens, that was copied to another place."""
    folder = tmp_path_factory.mktemp("stored")
    prefix = unpack_fixture("prefix", folder)
    (folder / "ids.json").write_text(json.dumps(PREFIX_IDS))
    said = ["--token-ids", folder / "ids.json", "--model", model, *GEOMETRY, "--block-tokens", 16]
    assert main([str(word) for word in ("store", "put", folder / "first", prefix, *said)]) == 0
    shutil.copytree(folder / "first", folder / "copied")
    shutil.rmtree(folder / "first")
    return folder / "copied"


@pytest.mark.parametrize("prompt", PROMPTS)
def test_tokens_are_the_engines_own(model: Path, store: Path, tmp_path: Path, prompt: str) -> None:
    ids = PROMPTS[prompt]
    with Engine(model, tmp_path / "own") as engine:
        wanted = engine.call("generate", ids, 4)
    (tmp_path / "prompt.json").write_text(json.dumps(ids))
    said = ["--token-ids", tmp_path / "prompt.json", "--model", model]
    target = ["--backend", "x86-avx2", "--name", "p", "-o", tmp_path / "ready"]
    assert main([str(word) for word in ("store", "get", store, *said, *target)]) == 0
    with PrefixStore(store, create=False) as found:
        tokens = found.match(ids, model=fingerprint(str(model)))
    assert tokens == STORED[prompt]
    with Engine(model, tmp_path / "scratch", tmp_path / "ready") as engine:
        assert engine.call("prefix", "p") == 1, "the engine did not find the prefix"
        assert engine.call("generate", ids[:tokens], 0) == []
        assert engine.call("generate", ids[tokens:], 4) == wanted
