"""A packed cache and the directory of its model, for the verbs that read them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import packed_samples
import pytest

TOKENS = 70


@pytest.fixture(autouse=True)
def one_session(shared_sessions: None) -> None:
    """The shipped model is opened once for all commands in a process."""


@pytest.fixture
def prefix(tmp_path, monkeypatch):
    """A prefix cache `p` of two layers as an engine on AVX2 leaves it, and the options that describe it."""
    monkeypatch.chdir(tmp_path)
    sample = packed_samples.write_prefix(Path("p"), packed_samples.arrays(2, 2, TOKENS, 6), capacity=114)
    return SimpleNamespace(arrays=sample.arrays, argv=["p", "--backend", "x86-avx2", *sample.options])


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "llm.mnn").write_bytes(b"graph")
    (folder / "llm_config.json").write_text('{"layer_nums": 2, "key_value_shape": [2, 1, 0, 2, 6]}')
    return folder
