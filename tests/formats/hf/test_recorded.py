"""Caches that transformers 5 and 4.50 filled: K and V of each layer are what the model gave it, at their positions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from conformance import unpack
from repository import FIXTURES

import kvmnn

CASES = 31


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Any]]:
    where = tmp_path_factory.mktemp("hf_layers")
    unpack(FIXTURES / "hf" / "layers.tar.xz", where)
    return where, [case for each in sorted(where.glob("*.json")) for case in json.loads(each.read_text())["cases"]]


def test_open_recorded_caches_have_expected_tokens_per_layer(cases: tuple[Path, list[Any]]) -> None:
    where, entries = cases
    assert len(entries) == CASES
    for case in entries:
        source = kvmnn.open(where / case["file"])
        with np.load(where / case["expected"]) as expected:
            assert list(source) == list(expected), case["file"]
            for name, words in expected.items():
                assert source[name].shape == words.shape, (case["file"], name)
                assert source[name].to_numpy().tobytes() == words.tobytes(), (case["file"], name)
        cache, said = source.engine_cache, source.completeness
        assert cache is not None and said is not None
        assert [state.kind for state in said.layers] == [layer["kind"] for layer in case["layers"]], case["file"]
        stored = [tuple(layer["positions"]) for layer in case["layers"] if layer["positions"][1]]
        runs = cache.layer_position_runs or (((0, case["tokens"]),),) * len(stored)
        assert [run for (run,) in runs] == stored, case["file"]
        assert cache.is_contiguous_prefix == (set(stored) == {(0, case["tokens"])}), case["file"]
        assert said.is_complete == all(layer["kind"] in ("full", "window") for layer in case["layers"]), case["file"]
        assert cache.batch == case["batch"]
