"""Rotary parameters out of configurations of models, of transformers and of MNN."""

from __future__ import annotations

import json

import pytest

from kvmnn import RopeConfig
from kvmnn.errors import SourceError
from kvmnn.formats import read_config_rotary

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LENGTH = {"original_max_position_embeddings": 8192}
CASES = {
    "llama": ({"rope_theta": 500000.0, "head_dim": 128}, RopeConfig(theta=500000.0, dims=128)),
    "heads": ({"rope_theta": 10000, "hidden_size": 512, "num_attention_heads": 8}, RopeConfig(dims=64)),
    "neox": (
        {"rotary_pct": 0.25, "rotary_emb_base": 10000, "hidden_size": 256, "num_attention_heads": 4},
        RopeConfig(dims=16),
    ),
    "phi": ({"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "head_dim": 80}, RopeConfig(dims=40)),
    "gptj": ({"rotary_dim": 64, "model_type": "gptj", "n_embd": 4096}, RopeConfig(dims=64, pairing="interleaved")),
    "version 5": (
        {"rope_parameters": {"rope_theta": 1e6, "rope_type": "default", "partial_rotary_factor": 0.5}, "head_dim": 64},
        RopeConfig(theta=1e6, dims=32),
    ),
    "linear": (
        {"rope_theta": 1e4, "head_dim": 64, "rope_scaling": {"type": "linear", "factor": 2.0}},
        RopeConfig(dims=64, scaling={"rope_type": "linear", "factor": 2.0}),
    ),
    "llama 3": (
        {"rope_theta": 5e5, "head_dim": 64, "rope_scaling": LLAMA3 | LENGTH},
        RopeConfig(theta=5e5, dims=64, scaling=LLAMA3 | LENGTH),
    ),
    "length next to it": (
        {"rope_theta": 5e5, "head_dim": 64, "rope_scaling": LLAMA3, "max_position_embeddings": 8192},
        RopeConfig(theta=5e5, dims=64, scaling=LLAMA3 | LENGTH),
    ),
    "yarn": (
        {"rope_theta": 1e6, "head_dim": 128, "rope_scaling": {"type": "yarn", "factor": 4.0} | LENGTH},
        RopeConfig(theta=1e6, dims=128, scaling={"rope_type": "yarn", "factor": 4.0} | LENGTH),
    ),
    "dynamic": (
        {"rope_theta": 1e4, "head_dim": 64, "rope_scaling": {"type": "dynamic", "factor": 4.0}},
        RopeConfig(dims=64),
    ),
    "of text": ({"text_config": {"rope_theta": 1e6, "head_dim": 64}, "head_dim": 8}, RopeConfig(theta=1e6, dims=64)),
    "of the cache": ({"rope_theta": 1e6}, RopeConfig(theta=1e6, dims=32)),
    "none": ({"model_type": "gpt2", "n_embd": 768}, None),
}


@pytest.mark.parametrize("name", CASES)
def test_config_rotary_of_models(tmp_path, name):
    fields, expected = CASES[name]
    (tmp_path / "config.json").write_text(json.dumps(fields))
    for path in (tmp_path, tmp_path / "config.json"):
        found, notes = read_config_rotary(str(path), 32)
        assert len(notes) == (expected is None)
        if expected is None:
            assert found is None
            continue
        assert found is not None and (found.dims, found.pairing) == (expected.dims, expected.pairing)
        assert found.frequencies.tolist() == expected.frequencies.tolist()


def test_config_rotary_of_mnn_export(tmp_path):
    (tmp_path / "config.json").write_text('{"llm_model": "llm.mnn", "precision": "low"}')
    (tmp_path / "llm_config.json").write_text('{"hidden_size": 64, "layer_nums": 2, "is_mrope": false}')
    found, notes = read_config_rotary(str(tmp_path), 16)
    assert found is None and "its configuration says no rotary parameters" in notes[0]
    (tmp_path / "llm_config.json").write_text('{"hidden_size": 64, "rope_theta": 1000000.0}')
    found, notes = read_config_rotary(str(tmp_path), 16)
    assert found is not None and (found.theta, found.dims, notes) == (1e6, 16, [])


def test_config_rotary_ignored_scaling_is_noted(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(
        '{"rope_theta": 1e4, "head_dim": 64, "rope_scaling": {"rope_type": "longrope", "long_factor": [1]}}'
    )
    found, notes = read_config_rotary(str(path), 64)
    assert found is not None and found.scaling is None
    assert notes == [f"{path}: rope_type 'longrope' is not known: it is left out, which costs size only"]
    types = {"sliding_attention": {"rope_theta": 1e4}, "full_attention": {"rope_theta": 1e6}}
    path.write_text(json.dumps({"head_dim": 64, "rope_parameters": types}))
    found, notes = read_config_rotary(str(path), 64)
    assert found is not None and found.theta == 1e6
    assert notes == [
        f"{path}: rope_parameters differs by layers: that of full_attention is taken for all, which costs size only"
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "holds no JSON object"),
        ("{", "is not JSON"),
        ('{"rope_theta": "x", "head_dim": 64}', "rope_theta is 'x': expected a number above 0"),
        ('{"rope_theta": 1e4, "head_dim": 63}', "dims is 63: expected an even number"),
        ('{"rope_theta": 1e4, "head_dim": [64]}', "head_dim must be an integer, not list"),
        ('{"rope_theta": 1e4, "hidden_size": "64", "num_attention_heads": 4}', "hidden_size must be an integer"),
        ('{"rope_theta": 1e4, "head_dim": 64, "rope_scaling": [1]}', "rope_scaling is no object but list"),
        ('{"rope_theta": 1e4, "head_dim": 64, "rope_scaling": {"type": "linear"}}', "has no factor"),
        ('{"rope_theta": NaN, "head_dim": 64}', "rope_theta is nan"),
        ('{"rope_theta": 1e4, "head_dim": 64, "partial_rotary_factor": -1}', "partial_rotary_factor is -1"),
        ('{"rotary_dim": "64"}', "dims must be an integer"),
        ('{"rope_theta": 1e4, "head_dim": 64, "rope_scaling": {"type": ["x"]}}', "passed over"),
    ],
)
def test_config_rotary_malformed_config_is_refused(tmp_path, text, message):
    path = tmp_path / "config.json"
    path.write_text(text)
    if message == "passed over":
        assert "is not known" in read_config_rotary(str(path), 64)[1][0]
        return
    with pytest.raises(SourceError) as caught:
        read_config_rotary(str(path), 64)
    assert str(caught.value).startswith(f"{path}: ") and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_config_rotary_without_config_is_refused(tmp_path):
    with pytest.raises(SourceError, match=r"has neither config\.json nor llm_config\.json"):
        read_config_rotary(str(tmp_path), 64)
