"""How K was rotated, found by trial: of trained models, of rows made for it, and of what is not rotated."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dense_samples import DTYPES, near_rows, rotated, sample, to_dtype
from repository import FIXTURES

from kvmnn import dense
from kvmnn.errors import KvmnnError
from kvmnn.lm.session import DecoderSession
from kvmnn.lm.tokenizer import Tokenizer

Words = np.ndarray[Any, Any]


def gpt(name: str) -> Words:
    """``[layer, kv_head, token, head_dim]`` of a model that rotates all 64 words of a head with theta 10000."""
    array: Words = np.load(FIXTURES / "kv_real" / f"{name}.npy").transpose(0, 2, 1, 3)
    return array


def keys(theta: float, dims: int, dim: int, pairing: str, positions: Any = None, dtype: str = "fp16") -> Words:
    """K of tokens that come again, a little different each time."""
    at = np.arange(500) if positions is None else positions
    return to_dtype(rotated(near_rows(np.random.default_rng(1), 2, 500, dim, 50), dims, theta, at, pairing), dtype)


@pytest.mark.parametrize("name", ["k_fp16", "k_fp32"])
def test_search_rope_keys_of_trained_model(name: str) -> None:
    for layer in gpt(name):
        assert dense.search_rope(layer) == dense.RopeConfig(theta=10000.0, dims=64)
        rounded = to_dtype(np.ascontiguousarray(layer, np.float32), "bf16")
        assert dense.search_rope(rounded[:, 100:300], np.arange(100, 300)) == dense.RopeConfig(theta=10000.0, dims=64)


def test_search_rope_keys_with_partial_rotation() -> None:
    """GPT-NeoX: 16 of 64 words."""
    tokenizer, session = Tokenizer.open_for_model(FIXTURES / "lm"), DecoderSession.open(FIXTURES / "lm")
    ids = tokenizer.encode((FIXTURES / "lm" / "texts" / "trace.py.txt").read_text(encoding="utf-8"))[:300]
    told = dense.RopeConfig(theta=10000.0, dims=16)
    layers = session.run_step(np.array(ids), np.arange(300), session.create_empty_past()).present_pairs
    found = [[dense.search_rope(part[0].astype(np.float16)) for part in layer] for layer in layers]
    assert [keys for keys, _ in found[:3]] == [told] * 3
    assert all(keys in (told, None) and values is None for keys, values in found)


def test_search_rope_values_and_noise_give_none() -> None:
    for layer in gpt("v_fp16"):
        assert dense.search_rope(layer) is None
    for dtype in DTYPES:
        for kind in ("noise", "zeros", "words", "few", "spikes", "cache"):
            assert dense.search_rope(sample(kind, dtype, 4, 600, 64, 2), dtype=dtype) is None, kind


@pytest.mark.parametrize(
    ("theta", "dims", "dim", "pairing"),
    [
        (1e4, 64, 64, "interleaved"),
        (5e5, 128, 128, "half"),
        (1e6, 128, 128, "half"),
        (1e4, 32, 80, "half"),
        (1e4, 64, 128, "interleaved"),
        (8e6, 96, 128, "interleaved"),
        (1e6, 256, 256, "half"),
    ],
)
def test_search_rope_usual_parameters(theta: float, dims: int, dim: int, pairing: str) -> None:
    assert dense.search_rope(keys(theta, dims, dim, pairing)) == dense.RopeConfig(theta, dims, pairing)


def test_search_rope_positions_with_gaps() -> None:
    positions = np.cumsum(np.random.default_rng(2).integers(1, 40, 500))
    for dtype in DTYPES:
        array = keys(1e4, 32, 64, "half", positions, dtype)
        assert dense.search_rope(array, positions) == dense.RopeConfig(dims=32)
        assert dense.search_rope(array, list(range(500))) is None


def test_search_rope_scaled_frequencies() -> None:
    scaling = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    told = dense.RopeConfig(5e5, 128, scaling={**scaling, "original_max_position_embeddings": 8192})
    plain = near_rows(np.random.default_rng(3), 1, 900, 128, 50).astype(np.float64)
    at = np.arange(900) * 5000
    angles = at[:, None] * (told.frequencies / 2.0**64 * 2 * np.pi)
    a, b = plain[..., :64], plain[..., 64:]
    turned = np.concatenate([a * np.cos(angles) - b * np.sin(angles), b * np.cos(angles) + a * np.sin(angles)], -1)
    found = dense.search_rope(turned.astype(np.float16), at)
    assert found is not None and np.array_equal(found.frequencies, told.frequencies)
    assert str(found) == "theta=500000,dims=128,scaling=llama3 with factor 8"


def test_search_rope_tiny_arrays_give_none() -> None:
    for shape in ((1, 1, 64), (2, 5, 1), (1, 2, 2), (3, 40, 7)):
        assert dense.search_rope(np.ones(shape, np.float16)) is None
    for array in (np.zeros((2, 0, 8), np.float16), np.zeros((0, 5, 8), np.float16)):
        assert dense.search_rope(array) is None
    with pytest.raises(KvmnnError, match="axes"):
        dense.search_rope(np.zeros((2, 2), np.float16))
    with pytest.raises(KvmnnError, match="positions has 3 entries"):
        dense.search_rope(np.zeros((1, 2, 4), np.float16), [1, 2, 3])
    with pytest.raises(KvmnnError, match="rotary is 'guess': expected a Rotary, 'auto' or None"):
        dense.encode(np.zeros((1, 2, 4), np.float16), rotary="guess")  # type: ignore[arg-type]


def test_encode_auto_rotary_uses_search_result() -> None:
    layers, values = gpt("k_fp16"), gpt("v_fp16")
    told = dense.RopeConfig(dims=64)
    assert dense.encode(layers[1], rotary="auto") == dense.encode(layers[1], rotary=told)
    assert dense.encode(values[1], rotary="auto") == dense.encode(values[1])
    mixed = [layers[0], values[0], layers[1], values[1]]
    assert dense.encode_many(mixed, rotary="auto") == dense.encode_many(mixed, rotary=[told, None, told, None])
    assert dense.encode_many(mixed[1::2], rotary="auto") == dense.encode_many(mixed[1::2])
    before, own = layers[2][:, :300], layers[2][:, 300:]
    found = dense.encode(own, history=before, rotary="auto", positions=np.arange(300, 512))
    assert found == dense.encode(own, history=before, rotary=told, positions=np.arange(300, 512))
    assert found == dense.encode(own, history=before, rotary="auto", positions=np.arange(44, 512))
    tables = dense.SharedTables.from_arrays([layers[0][:, :256]], rotary="auto")
    assert tables.data == dense.SharedTables.from_arrays([layers[0][:, :256]], rotary=told).data
    block = layers[0][:, 256:320]
    assert dense.encode(block, tables=tables, rotary="auto") == dense.encode(block, tables=tables)
