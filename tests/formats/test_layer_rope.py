"""RoPE of each layer from configurations: supported scalings are read, others refused by name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rope_model import plain_frequencies

from kvmnn.dense import RopeConfig
from kvmnn.dense.rope import RopeFrequencies
from kvmnn.errors import SourceError
from kvmnn.formats.rope_config import LayerRopes, read_config_layer_ropes

PLAIN = RopeConfig(theta=1e6, dims=64)
LOCAL = RopeConfig(theta=1e4, dims=64)
LENGTH = {"original_max_position_embeddings": 8192}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LENGTH}
LINEAR, YARN = {"type": "linear", "factor": 4}, {"rope_type": "yarn", "factor": 4, **LENGTH}
BY_KIND = {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}
LONGROPE = {"type": "longrope", "short_factor": [1.0] * 32}
KINDS = ["sliding_attention"] * 3 + ["full_attention"]


def read(tmp_path: Path, fields: dict[str, Any], layers: int = 4, length: int = 4096) -> LayerRopes | None:
    (tmp_path / "config.json").write_text(json.dumps({"head_dim": 64, "rope_theta": 1e6} | fields))
    return read_config_layer_ropes(str(tmp_path), layers, 64, length)[0]


def same(found: LayerRopes | None, expected: list[RopeConfig | None]) -> bool:
    assert found is not None
    pairs = zip(found, expected, strict=True)
    return all((a is None) == (b is None) and (a is None or a.is_equivalent(_of(b))) for a, b in pairs)


def _of(rotary: RopeConfig | None) -> RopeFrequencies:
    assert rotary is not None
    return RopeFrequencies.from_config(rotary)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, PLAIN),
        ({"text_config": {"rope_theta": 1e4}}, LOCAL),
        ({"rope_scaling": LLAMA3}, RopeConfig(theta=1e6, dims=64, scaling=LLAMA3)),
        ({"rope_scaling": LINEAR}, RopeConfig(theta=1e6, dims=64, scaling=LINEAR)),
        ({"rope_scaling": YARN}, RopeConfig(theta=1e6, dims=64, scaling=YARN)),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}}, PLAIN),
        ({"rope_scaling": {"type": "dynamic", "factor": 4}, "max_position_embeddings": 4096}, PLAIN),
        (
            {"rope_scaling": {"type": "dynamic", "alpha": 1000}},
            RopeConfig(theta=1e6, dims=64, scaling={"type": "ntk", "factor": 1000}),
        ),
        ({"partial_rotary_factor": 0.5}, RopeConfig(theta=1e6, dims=32)),
        ({"model_type": "cohere"}, RopeConfig(theta=1e6, dims=64, pairing="interleaved")),
        ({"model_type": "ernie4_5"}, RopeConfig(theta=1e6, dims=64, pairing="interleaved")),
        ({"layer_types": KINDS, "model_type": "gpt_oss"}, PLAIN),
    ],
)  # fmt: skip
def test_config_rope_equal_layers(tmp_path, fields, expected) -> None:
    assert same(read(tmp_path, fields), [expected] * 4)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"layer_types": KINDS, "rope_parameters": BY_KIND}, [LOCAL] * 3 + [PLAIN]),
        ({"layer_types": KINDS, "rope_local_base_freq": 1e4}, [LOCAL] * 3 + [PLAIN]),
        ({"sliding_window_pattern": 2, "rope_local_base_freq": 1e4}, [LOCAL, PLAIN] * 2),
        ({"model_type": "gemma3_text", "rope_local_base_freq": 1e4}, [LOCAL] * 4),
        ({"layer_types": KINDS, "rope_local_base_freq": 1e4, "rope_scaling": {"type": "linear", "factor": 8}},
         [LOCAL] * 3 + [RopeConfig(theta=1e6, dims=64, scaling={"type": "linear", "factor": 8})]),
        ({"no_rope_layers": [1, 1, 1, 0]}, [PLAIN] * 3 + [None]),
        ({"no_rope_layer_interval": 2}, [PLAIN, None] * 2),
        ({"layer_types": KINDS, "model_type": "exaone4"}, [PLAIN] * 3 + [None]),
        ({"model_type": "cohere2"}, [RopeConfig(theta=1e6, dims=64, pairing="interleaved")] * 3 + [None]),
    ],
)  # fmt: skip
def test_config_rope_different_layers(tmp_path, fields, expected) -> None:
    assert same(read(tmp_path, fields), expected)


def test_config_rope_longrope_uses_short_factors(tmp_path) -> None:
    factors = np.linspace(1, 4, 32).tolist()
    rope = {"type": "longrope", "short_factor": factors, "long_factor": [8.0] * 32, **LENGTH}
    found = read(tmp_path, {"rope_scaling": rope})
    assert found is not None and found[0] is not None
    expected = plain_frequencies(1e6, 64) / factors
    np.testing.assert_allclose(found[0].turns * (2 * np.pi / 2.0**64), expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"rope_scaling": LONGROPE | LENGTH}, "above 8192 tokens by their length"),
        ({"rope_scaling": LONGROPE}, "above None tokens by their length"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}, "max_position_embeddings": 2048}, "above 2048 tokens"),
        ({"rope_scaling": {"type": "proportional"}}, "rope_type 'proportional' is unknown: expected one of default"),
        (
            {"rope_scaling": {**LONGROPE, "short_factor": [1.0], "original_max_position_embeddings": 1 << 20}},
            "expected 32 numbers above 0",
        ),
        ({"layer_types": KINDS[1:]}, "layer_types is of 3 layers, the cache has 4"),
        (
            {"layer_types": KINDS, "rope_parameters": {"full_attention": {"rope_theta": 1e6}}},
            "nothing of layers of the kind 'sliding_attention'",
        ),
        ({"rope_local_base_freq": 1e4, "model_type": "other"}, "nothing tells which layers have a window"),
        ({"no_rope_layers": [1]}, "no_rope_layers is of 1 layers"),
        ({"kv_lora_rank": 512}, "K is latent"),
        ({"head_dim": 128}, "head_dim is 128, the cache has heads of 64"),
        ({"partial_rotary_factor": 2.0}, r"partial_rotary_factor is 2\.0: expected at most 1"),
        ({"head_dim": None, "hidden_size": 640, "num_attention_heads": 5}, "head_dim is 128, the cache has heads of"),
        ({"rope_scaling": {"type": "yarn"}}, "has no factor"),
        ({"rope_theta": -1}, "expected a number above 0"),
        ({"rope_parameters": [1]}, "rope_parameters is no object but list"),
    ],
)  # fmt: skip
def test_config_rope_unsupported_scaling_is_refused(tmp_path, fields, message) -> None:
    with pytest.raises(SourceError, match=f"config.json: .*{message}"):
        read(tmp_path, fields, length=10_000)


def test_config_rope_without_rotation_is_none(tmp_path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    assert read_config_layer_ropes(str(tmp_path / "config.json"), 2, 64, 10) == (None, [])
    with pytest.raises(SourceError, match=r"has neither config\.json nor llm_config\.json"):
        read_config_layer_ropes(str(tmp_path / "nowhere"), 2, 64, 10)


def test_config_rope_mrope_has_a_note(tmp_path) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"rope_theta": 1e6, "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}})
    )
    found, notes = read_config_layer_ropes(str(tmp_path), 1, 64, 10)
    assert found is not None and "right for tokens of text only" in notes[0]
