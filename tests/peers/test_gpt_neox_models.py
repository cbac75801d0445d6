"""GPT-NeoX models with random weights: kvmnn's ONNX exports compute what torch computes."""

from __future__ import annotations

import json

import export_onnx
import numpy as np
import pytest
import torch
from torch_reference import TorchDecoder
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from kvmnn.lm.session import DecoderSession

TOKENS = 50
SIZES = {
    "vocab_size": 97,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 0,
}


def rotary(share, base):
    return {"rope_parameters": {"rope_type": "default", "partial_rotary_factor": share, "rope_theta": base}}


MODELS = {
    "as Pythia": rotary(0.25, 10000.0),
    "one after the other": {**rotary(0.5, 10000.0), "use_parallel_residual": False},
    "all of the head turns": {**rotary(1.0, 500.0), "hidden_act": "gelu_new"},
    "no biases": {**rotary(0.25, 10000.0), "attention_bias": False, "layer_norm_eps": 1e-3},
    "tied": {**rotary(0.25, 10000.0), "tie_word_embeddings": True},
}


@pytest.fixture(scope="module", params=MODELS)
def models(request, tmp_path_factory):
    """A model with random weights in torch, and its export in kvmnn."""
    torch.manual_seed(5)
    config = GPTNeoXConfig(**SIZES, **MODELS[request.param], attn_implementation="eager")
    model = GPTNeoXForCausalLM(config).eval()
    for parameter in model.parameters():  # norms and biases begin as ones and zeros
        torch.nn.init.normal_(parameter, std=0.3)
    folder = tmp_path_factory.mktemp("model")
    model.save_pretrained(folder)
    export_onnx.export(folder, folder / "model.onnx", attentions=True)
    return TorchDecoder(model), DecoderSession.open(folder, attentions=True, cache=False), folder


@pytest.mark.parametrize("size", [TOKENS, 1, 9])
def test_gpt_neox_steps_equal_torch(models, size):
    decoder, session, _ = models
    ids = np.random.default_rng(1).integers(0, SIZES["vocab_size"], TOKENS)
    past = decoder.empty()
    largest = 0.0
    for first in range(0, TOKENS, size):
        chunk = ids[first : first + size]
        positions = np.arange(first, first + len(chunk)) + 30  # true positions need not begin at 0
        ours, theirs = session.step(chunk, positions, past), decoder.step(chunk, positions, past)
        np.testing.assert_allclose(ours.logits, theirs.logits, rtol=0, atol=1e-4)
        for mine, other in zip(ours.attentions, theirs.attentions, strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-4)
        largest = max(largest, float(np.abs(theirs.logits).max()))
        past = theirs.present_pairs
    assert largest > 0.1


def test_gpt_neox_old_and_new_config_give_the_same_model(models, tmp_path):
    _, _, folder = models
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    rope = config.pop("rope_parameters")
    config |= {"rotary_pct": rope["partial_rotary_factor"], "rotary_emb_base": rope["rope_theta"]}
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    export_onnx.export(tmp_path, tmp_path / "model.onnx", attentions=True)
    assert (tmp_path / "model.onnx").read_bytes() == (folder / "model.onnx").read_bytes()
