"""Sessions that llama.cpp wrote of a model with sliding windows (fixtures/llama_windows)."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from engine_client import unpack
from repository import FIXTURES

import kvmnn
from kvmnn.arrays.source import Source
from kvmnn.store import read_layer_caches

LAYERS = 6
FULL = 5


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return unpack(FIXTURES / "llama_windows" / "files.tar.xz", tmp_path_factory.mktemp("windows"))


def read(files: Path, name: str) -> Source:
    return kvmnn.open(files / name, model=files / "model.gguf")


@pytest.mark.parametrize(
    ("name", "first"),
    [("long.session", 44), ("long.sequence", 284), ("short.session", 0)],
    ids=["long", "seq", "short"],
)
def test_open_reads_positions_of_every_layer(files: Path, name: str, first: int) -> None:
    """llama.cpp keeps 256 cells of a window and uses them again; a sequence file has the window's 16 tokens alone."""
    source = read(files, name)
    tokens = 12 if name.startswith("short") else 300
    assert source.engine_cache is not None and source.engine_cache.layer_position_runs is not None
    assert source.engine_cache.layer_position_runs == (((first, tokens - first),),) * FULL + (((0, tokens),),)
    assert source.completeness is not None and source.completeness.is_complete
    assert [state.window for state in source.completeness.layers] == [16] * FULL + [None]
    caches = read_layer_caches(source, with_windows=True)
    assert [(cache.tokens, cache.tokens_seen) for cache in caches] == [(tokens - first, tokens)] * FULL + [
        (tokens,) * 2
    ]


def test_session_and_sequence_agree_on_every_layer(files: Path) -> None:
    session, sequence = read(files, "long.session"), read(files, "long.sequence")
    for name in session:
        one, other = session[name].to_numpy(), sequence[name].to_numpy()
        assert np.array_equal(one[:, -other.shape[1] :], other), name


def test_first_layer_equals_the_model_computed_by_numpy(files: Path) -> None:
    """By numpy: embedding, norms, projection, and the rotation of layers with a window (theta 10,000)."""
    source, expected = read(files, "long.session"), np.load(files / "layer_0.key.npy")
    found = source["layer_0.key"].to_numpy().astype(np.float32)
    assert np.abs(found - expected[:, 44:]).max() < 2e-3
    assert np.abs(found - expected[:, :256]).max() > 1


def test_encode_and_decode_restore_the_session(files: Path, tmp_path: Path, run) -> None:
    for codec in ("mnn", "dense"):
        words = ("encode", files / "long.session", "--model", files / "model.gguf", "--codec", codec)
        assert "LOSSLESS" in run(*words, "-o", tmp_path / f"{codec}/").out
        run("decode", tmp_path / codec, "-o", tmp_path / f"{codec}.session")
        assert (tmp_path / f"{codec}.session").read_bytes() == (files / "long.session").read_bytes()
