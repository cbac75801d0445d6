"""Decoders of two to four layers with random weights, as checkpoints of transformers and as GGUF files."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, VOCAB = 32, 48, 4, 4, 2, 257
_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "torch_dtype": "float32",
}
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}  # fmt: skip
_GGUF_NAMES = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    **{f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"},
    "self_attn.o_proj": "attn_output",
    "self_attn.qkv_proj": "attn_qkv",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    **{f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")},
    "mlp.gate_up_proj": "ffn_up",
}
_GEMMA_NAMES = _GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


@dataclass(frozen=True)
class TinyModel:
    """A model by its settings: those of config.json, and those of the GGUF header that do not follow from it."""

    architecture: str
    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    header: dict[str, Any] = field(default_factory=dict)
    head_dim: int = HIDDEN // HEADS
    has_biases: bool = False
    #: False for what GGUF files of llama.cpp cannot say.
    has_gguf: bool = True

    @property
    def settings(self) -> dict[str, Any]:
        """The document of config.json."""
        sizes = {"head_dim": self.head_dim} if self.head_dim != HIDDEN // HEADS else {}
        return _COMMON | {"model_type": self.model_type} | sizes | self.config


MODELS = {
    "llama": TinyModel("llama", "llama"),
    "llama_bias": TinyModel("llama", "llama", {"attention_bias": True, "mlp_bias": True}, head_dim=16, has_biases=True),
    "llama_tied": TinyModel("llama", "llama", {"tie_word_embeddings": True}),
    "llama3_rope": TinyModel("llama", "llama", {"rope_theta": 500000.0, "rope_scaling": _LLAMA3}),
    "llama_linear": TinyModel(
        "llama",
        "llama",
        {"rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
    ),
    "llama_yarn": TinyModel(
        "llama",
        "llama",
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
    ),
    "mistral_window": TinyModel("llama", "mistral", {"sliding_window": 12}, has_gguf=False),
    "mistral3": TinyModel("mistral3", "mistral"),
    "qwen2": TinyModel("qwen2", "qwen2", has_biases=True),
    "qwen2_window": TinyModel(
        "qwen2",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2},
        has_biases=True,
        has_gguf=False,
    ),
    "qwen3": TinyModel("qwen3", "qwen3", head_dim=16),
    "granite": TinyModel(
        "granite",
        "granite",
        {
            "attention_multiplier": 0.2,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "logits_scaling": 5.0,
        },
        {"attention.scale": 0.2, "embedding_scale": 3.0, "residual_scale": 0.4, "logit_scale": 5.0},
    ),
    "phi3": TinyModel("phi3", "phi3", {"pad_token_id": 0}),
    "phi3_partial": TinyModel(
        "phi3", "phi3", {"pad_token_id": 0, "partial_rotary_factor": 0.5}, {"rope.dimension_count": 4}
    ),
    "phi3_long": TinyModel(
        "phi3",
        "phi3",
        {
            "pad_token_id": 0,
            "original_max_position_embeddings": 128,
            "rope_scaling": {
                "rope_type": "longrope",
                "short_factor": [1.0, 1.1, 1.3, 1.5],
                "long_factor": [2.0, 2.5, 3.0, 3.5],
            },
        },
        {
            "rope.scaling.original_context_length": 128,
            "rope.scaling.attn_factor": math.sqrt(1 + math.log(4) / math.log(128)),
        },
    ),
    "gemma3": TinyModel(
        "gemma3",
        "gemma3_text",
        {
            "sliding_window": 12,
            "query_pre_attn_scalar": 16,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_theta": 1000000.0,
            "rope_local_base_freq": 10000.0,
            "hidden_activation": "gelu_pytorch_tanh",
            "tie_word_embeddings": True,
        },
        {"attention.sliding_window": 12},
        head_dim=16,
        has_gguf=False,  # its windows come in sixes there: fixtures/lm_import has the real one's logits
    ),
}


def build_weights(model: TinyModel) -> dict[str, np.ndarray]:
    """All tensors by their names in checkpoints, float32."""
    rng = np.random.Generator(np.random.PCG64(17))
    hd, is_gemma = model.head_dim, model.model_type == "gemma3_text"
    q_rows, kv_rows = HEADS * hd, KV_HEADS * hd

    def draw(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape, np.float32) * np.float32(0.3)).astype(np.float32)

    def draw_norm(size: int) -> np.ndarray:
        return draw(size) if is_gemma else 1 + draw(size)

    weights = {"model.embed_tokens.weight": draw(VOCAB, HIDDEN)}
    for layer in range(LAYERS):
        parts: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (q_rows, HIDDEN), "self_attn.k_proj": (kv_rows, HIDDEN),
            "self_attn.v_proj": (kv_rows, HIDDEN), "self_attn.o_proj": (HIDDEN, q_rows),
            "mlp.gate_proj": (INNER, HIDDEN), "mlp.up_proj": (INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
        }  # fmt: skip
        if model.model_type == "phi3":
            parts = {
                "self_attn.qkv_proj": (q_rows + 2 * kv_rows, HIDDEN), "self_attn.o_proj": (HIDDEN, q_rows),
                "mlp.gate_up_proj": (2 * INNER, HIDDEN), "mlp.down_proj": (HIDDEN, INNER),
            }  # fmt: skip
        prefix = f"model.layers.{layer}."
        for name, shape in parts.items():
            weights[f"{prefix}{name}.weight"] = draw(*shape)
            has_bias = model.has_biases and (
                model.model_type != "qwen2" or name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
            )
            if has_bias:
                weights[f"{prefix}{name}.bias"] = draw(shape[0])
        norms = ["input_layernorm", "post_attention_layernorm"]
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] * is_gemma
        for name in norms:
            weights[f"{prefix}{name}.weight"] = draw_norm(HIDDEN)
        if model.architecture in ("qwen3", "gemma3"):
            for name in ("self_attn.q_norm", "self_attn.k_norm"):
                weights[f"{prefix}{name}.weight"] = draw_norm(hd)
    weights["model.norm.weight"] = draw_norm(HIDDEN)
    if not model.settings["tie_word_embeddings"]:
        weights["lm_head.weight"] = draw(VOCAB, HIDDEN)
    return weights


def write_checkpoint(folder: Path, model: TinyModel, *, shards: int = 1) -> None:
    """Write the model as transformers saves it, with an index where there are several files."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model.settings))
    weights = list(build_weights(model).items())
    names = [f"model-{index + 1:05}-of-{shards:05}.safetensors" for index in range(shards)]
    names = names if shards > 1 else ["model.safetensors"]
    weight_map = {}
    for index, name in enumerate(names):
        part = dict(weights[index::shards])
        (folder / name).write_bytes(build_safetensors(part))
        weight_map |= dict.fromkeys(part, name)
    if shards > 1:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def build_safetensors(tensors: dict[str, np.ndarray], type_name: str = "F32") -> bytes:
    """The bytes of a .safetensors file of tensors whose words are of `type_name`."""
    header, position = {}, 0
    for name, values in tensors.items():
        end = position + values.nbytes
        header[name] = {"dtype": type_name, "shape": list(values.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + b"".join(values.tobytes() for values in tensors.values())


def build_gguf_parts(model: TinyModel) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """The header's fields, and the tensors by their names in GGUF files."""
    name, settings, hd = model.architecture, model.settings, model.head_dim
    fields: dict[str, Any] = {
        "general.architecture": name,
        f"{name}.context_length": 512,
        f"{name}.embedding_length": HIDDEN,
        f"{name}.block_count": LAYERS,
        f"{name}.feed_forward_length": INNER,
        f"{name}.attention.head_count": HEADS,
        f"{name}.attention.head_count_kv": KV_HEADS,
        f"{name}.attention.layer_norm_rms_epsilon": float(np.float32(1e-5)),
        f"{name}.attention.key_length": hd,
        f"{name}.attention.value_length": hd,
        f"{name}.rope.freq_base": float(settings.get("rope_theta", 10000.0)),
        f"{name}.rope.dimension_count": hd,
        **{f"{name}.{key}": value for key, value in model.header.items()},
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))],
        "tokenizer.ggml.scores": [0.0] * VOCAB,
        "tokenizer.ggml.token_type": [2, *[6] * 256],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    names = _GEMMA_NAMES if name == "gemma3" else _GGUF_NAMES
    tensors = {}
    for key, values in build_weights(model).items():
        if name in ("llama", "granite", "mistral3") and (".q_proj." in key or ".k_proj." in key):
            values = _permute_rows(values, HEADS if ".q_proj." in key else KV_HEADS)
        tensors[_rename_tensor(key, names)] = values + 1 if name == "gemma3" and "norm" in key else values
    scaling = settings.get("rope_scaling") or {}
    if scaling.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _compute_llama3_factors(settings["rope_theta"], hd)
    if scaling.get("rope_type") == "longrope":
        for kind in ("short", "long"):
            tensors[f"rope_factors_{kind}.weight"] = np.array(scaling[f"{kind}_factor"], np.float32)
    return fields, tensors


def _rename_tensor(name: str, names: dict[str, str]) -> str:
    root, _, kind = name.rpartition(".")
    top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    if root in top:
        return f"{top[root]}.{kind}"
    _, _, layer, part = root.split(".", 3)
    return f"blk.{layer}.{names[part]}.{kind}"


def _permute_rows(values: np.ndarray, heads: int) -> np.ndarray:
    halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(values.shape)


def _compute_llama3_factors(theta: float, head_dim: int) -> np.ndarray:
    factors = []
    for pair in range(head_dim // 2):
        turns = 128 * theta ** (-2 * pair / head_dim) / (2 * math.pi)
        smooth = min(max((turns - 1.0) / 3.0, 0.0), 1.0)
        factors.append(1 / ((1 - smooth) / 8.0 + smooth))
    return np.array(factors, np.float32)


def build_gguf(fields: dict[str, Any], tensors: dict[str, np.ndarray], *, alignment: int = 32) -> bytes:
    """The bytes of a GGUF file with float32 tensors."""
    blocks = {
        name: (values.shape, 0, np.ascontiguousarray(values, "<f4").tobytes()) for name, values in tensors.items()
    }
    return build_gguf_of_blocks(fields, blocks, alignment=alignment)


def build_gguf_of_blocks(
    fields: dict[str, Any], tensors: dict[str, tuple[tuple[int, ...], int, bytes]], *, alignment: int = 32
) -> bytes:
    """The bytes of a GGUF file; of each tensor its shape, the number of its type, and its bytes."""
    header = struct.pack("<4sIQQ", b"GGUF", 3, len(tensors), len(fields))
    for name, value in fields.items():
        header += _pack_text(name) + _pack_value(value)
    data = b""
    for name, (shape, type_number, blocks) in tensors.items():
        data += bytes(-len(data) % alignment)
        header += _pack_text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape[::-1], type_number, len(data))
        data += blocks
    return header + bytes(-len(header) % alignment) + data


def _pack_text(text: str) -> bytes:
    data = text.encode()
    return struct.pack("<Q", len(data)) + data


def _pack_value(value: Any) -> bytes:
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + _pack_text(value)
    if isinstance(value, int):
        return struct.pack("<II", 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value[0], str):
        return struct.pack("<IIQ", 9, 8, len(value)) + b"".join(map(_pack_text, value))
    if isinstance(value[0], float):
        return struct.pack(f"<IIQ{len(value)}f", 9, 6, len(value), *value)
    return struct.pack(f"<IIQ{len(value)}i", 9, 5, len(value), *value)
