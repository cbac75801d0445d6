"""Rotary parameters: frequencies by hand and as transformers computes them, and what a config.json says."""

from __future__ import annotations

import math
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from kvmnn import dense
from kvmnn.dense import RopeConfig
from kvmnn.errors import KvmnnError


def radians(rotary: RopeConfig) -> Any:
    return rotary.frequencies.astype(np.float64) / 2.0**64 * 2 * math.pi


def test_rope_config_default_frequencies_are_exact() -> None:
    expected = 10000.0 ** (-2 * np.arange(32) / 64)
    assert np.allclose(radians(RopeConfig()), expected, rtol=1e-12)
    assert int(RopeConfig().frequencies[0]) == 2935890503282001226  # 2^64 / (2 pi), rounded


def test_rope_config_linear_and_ntk_scaling() -> None:
    plain = 10000.0 ** (-2 * np.arange(32) / 64)
    assert np.allclose(radians(RopeConfig(scaling={"type": "linear", "factor": 4})), plain / 4, rtol=1e-12)
    theta = 10000.0 * 8 ** (64 / 62)
    assert np.allclose(
        radians(RopeConfig(scaling={"rope_type": "ntk", "factor": 8})), theta ** (-2 * np.arange(32) / 64), rtol=1e-12
    )


def test_rope_config_yarn_scaling() -> None:
    """Qwen's parameters, by the formulas of modeling_rope_utils.py in plain numpy."""
    dims, theta, factor, length = 128, 1e6, 4.0, 32768

    def dim_of(turns: float) -> float:
        return dims * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = max(math.floor(dim_of(32)), 0), min(math.ceil(dim_of(1)), dims - 1)
    ramp = np.clip((np.arange(dims // 2) - low) / (high - low), 0, 1)
    plain = theta ** (-2 * np.arange(dims // 2) / dims)
    expected = plain / factor * ramp + plain * (1 - ramp)
    scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    assert np.allclose(radians(RopeConfig(theta, dims, scaling=scaling)), expected, rtol=1e-12)


def test_rope_config_llama3_scaling() -> None:
    theta, factor, low, high, length = 500000.0, 8.0, 1.0, 4.0, 8192
    expected = []
    for f in theta ** (-2 * np.arange(64) / 128):
        wave = 2 * math.pi / f
        if wave < length / high:
            expected.append(f)
        elif wave > length / low:
            expected.append(f / factor)
        else:
            smooth = (length / wave - low) / (high - low)
            expected.append((1 - smooth) * f / factor + smooth * f)
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": length,
    }
    assert np.allclose(radians(RopeConfig(theta, 128, scaling=scaling)), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"rope_theta": 5e5, "hidden_size": 4096, "num_attention_heads": 32}, RopeConfig(5e5, 128)),
        ({"rope_theta": 1e4, "head_dim": 64}, RopeConfig(1e4, 64)),
        (
            {"rotary_emb_base": 10000, "rotary_pct": 0.25, "hidden_size": 256, "num_attention_heads": 4},
            RopeConfig(1e4, 16),
        ),
        ({"model_type": "gptj", "rotary_dim": 64, "n_embd": 4096}, RopeConfig(1e4, 64, "interleaved")),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "head_dim": 128}, RopeConfig(1e6, 128)),
        ({"text_config": {"rope_theta": 1e4, "head_dim": 32}}, RopeConfig(1e4, 32)),
        ({"rope_theta": 1e4, "head_dim": 32, "rope_scaling": {"type": "dynamic", "factor": 2}}, RopeConfig(1e4, 32)),
        ({"model_type": "gpt2", "n_embd": 768}, None),
    ],
)
def test_rope_config_from_model_config(config: dict[str, Any], expected: RopeConfig | None) -> None:
    found = RopeConfig.from_config(config)
    assert (found is None) == (expected is None)
    if found and expected:
        assert (found.pairing, found.dims) == (expected.pairing, expected.dims)
        assert np.array_equal(found.frequencies, expected.frequencies)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"theta": 1}, "theta is 1"),
        ({"theta": float("nan")}, "theta is nan"),
        ({"theta": "x"}, "theta is 'x'"),
        ({"dims": 3}, "dims is 3: expected an even number"),
        ({"dims": 0}, "dims is 0"),
        ({"pairing": "both"}, "pairing is 'both'"),
        ({"scaling": {"type": "longrope"}}, "scaling is 'longrope'"),
        ({"scaling": {"type": "linear"}}, "has no factor"),
        ({"scaling": {"type": "linear", "factor": 0}}, "factor is 0"),
        ({"scaling": {"type": "yarn", "factor": 2}}, "has no original_max_position_embeddings"),
    ],
)
def test_rope_config_wrong_parameters_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(KvmnnError, match=message):
        RopeConfig(**options)


def test_inspect_rotated_stream_reports_rope() -> None:
    array = np.random.default_rng(1).standard_normal((2, 100, 32)).astype(np.float16)
    info = dense.inspect(dense.encode(np.concatenate([array, array], 1), rotary=RopeConfig(dims=32)))
    assert info.rotary and info.method == "rows" and info.table_set is None
    text = str(info)
    assert text.startswith("fp16 dense stream [2, 200, 32]: 25,600 -> ") and "method rows, rotary" in text
    assert info.to_dict()["ratio"] == 25600 / info.stream_bytes


@pytest.mark.parametrize(
    ("rotary", "said"),
    [
        (RopeConfig(dims=32), "theta=10000,dims=32"),
        (RopeConfig(theta=500000.0, dims=128), "theta=500000,dims=128"),
        (RopeConfig(theta=1234.5678, dims=4, pairing="interleaved"), "theta=1234.5678,dims=4,pairing=interleaved"),
        (RopeConfig(theta=1e12, dims=6), "theta=1e+12,dims=6"),
        (RopeConfig(dims=2), "dims=2,pairing=half, 0.159155 to 0.159155 turns a position"),
        (
            RopeConfig(dims=32, scaling={"type": "linear", "factor": 4}),
            "dims=32,pairing=half, 0.0397887 to 7.07555e-06 turns a position",
        ),
    ],
    ids=str,
)
def test_encode_stream_stores_its_rope_config(rotary: RopeConfig, said: str) -> None:
    array = np.random.default_rng(1).standard_normal((1, 100, 128)).astype(np.float16)
    stream = dense.encode(np.concatenate([array, array], 1), rotary=rotary)
    assert dense.inspect(stream).rope == said and f"rotary {said}" in str(dense.inspect(stream))
    for place in range(28, 80):  # whatever stands there: words, or an error of the format
        for changed in (0, 255):
            damaged = stream[:place] + bytes([changed]) + stream[place + 1 :]
            with suppress(KvmnnError):
                assert dense.inspect(damaged).rope != ""


def test_encode_with_tables_takes_rope_from_the_tables() -> None:
    array = np.random.default_rng(1).standard_normal((1, 200, 32)).astype(np.float16)
    array[:, 100:] = array[:, :100]
    tables = dense.SharedTables.from_arrays([array], rotary=RopeConfig(dims=32))
    info = dense.inspect(dense.encode(array, tables=tables))
    assert (info.rotary, info.rope, info.table_set) == (True, None, tables.id)
