"""What a decoder is made of: sizes, norms, rotation and window of each layer, from a GGUF header."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Final

import numpy as np

from ..._util.dataclass import dataclass
from ...dense.rope import RopeFrequencies
from ...dtypes import Floats
from ...errors import ModelError
from ...formats.llama import gguf


@dataclass(frozen=True, kw_only=True)
class BlockFeatures:
    """How the block of an architecture differs from llama's."""

    #: Norms of each head of Q and K before the rotation.
    has_qk_norm: bool = False
    #: Norms of what attention and the feed-forward network give, before they are added.
    has_post_norms: bool = False
    #: ``"silu"`` or ``"gelu_tanh"``.
    activation: str = "silu"
    #: Whether embeddings are multiplied by the square root of the hidden size.
    scales_embedding: bool = False
    #: Whether Q, K and V are one tensor, and gate and up another.
    has_fused_projections: bool = False


SUPPORTED_ARCHITECTURES: Final[Mapping[str, BlockFeatures]] = {
    "llama": BlockFeatures(),
    "mistral3": BlockFeatures(),
    "granite": BlockFeatures(),
    "qwen2": BlockFeatures(),
    "qwen3": BlockFeatures(has_qk_norm=True),
    "gemma3": BlockFeatures(has_qk_norm=True, has_post_norms=True, activation="gelu_tanh", scales_embedding=True),
    "phi3": BlockFeatures(has_fused_projections=True),
}


@dataclass(frozen=True, kw_only=True)
class LayerConfig:
    """A layer: its rotation, and its window."""

    #: Radians a position of each pair, float32 ``[pair]``; words of a pair are half of the rotated words apart.
    frequencies: Floats
    #: Factor of the rotated words (YaRN); 1 for most.
    rope_scale: float
    #: Tokens that a token attends to, itself included; None for all.
    window: int | None


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A decoder."""

    architecture: str
    features: BlockFeatures
    hidden_size: int
    intermediate_size: int
    num_heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    norm_epsilon: float
    #: None where the header does not say how long a text may be.
    max_positions: int | None
    layers: tuple[LayerConfig, ...]
    #: Factor of Q K^T.
    attention_scale: float
    #: Factors of embeddings, of what a block adds, and divisor of the logits (granite).
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    #: Whether the embedding is the output matrix even where the file has one.
    has_tied_output: bool = False

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.layers)


def read_gguf_config(path: str, fields: Mapping[str, Any], vocab_size: int) -> DecoderConfig:
    """Read the configuration of a GGUF model.

    Parameters
    ----------
    path
        Of the file, for messages, windows and the rotation.
    fields
        All values of its header.
    vocab_size
        Rows of the embedding.

    Raises
    ------
    ModelError
        For an architecture that is not supported, and for values that a decoder cannot have.
    SourceError
        Where the file cannot be read.
    """
    architecture = fields.get("general.architecture")
    features = SUPPORTED_ARCHITECTURES.get(architecture) if isinstance(architecture, str) else None
    if features is None or not isinstance(architecture, str):
        raise ModelError(
            f"{path}: the architecture {architecture!r:.40} cannot be imported: expected one of "
            f"{', '.join(sorted(SUPPORTED_ARCHITECTURES))}"
        )
    header = _HeaderReader(path, architecture, fields)
    hidden_size, num_heads = header.read_size("embedding_length"), header.read_size("attention.head_count")
    num_layers = header.read_size("block_count")
    if num_layers > MAX_LAYERS:
        raise ModelError(f"{path}: has {num_layers:,} layers: expected at most {MAX_LAYERS}")
    kv_heads = header.read_size("attention.head_count_kv", num_heads)
    head_dim = header.read_size("attention.key_length", hidden_size // num_heads)
    if header.read_size("attention.value_length", head_dim) != head_dim:
        raise ModelError(f"{path}: heads of V differ from heads of K in size, which is not supported")
    check_head_counts(path, num_heads, kv_heads, head_dim)
    if header.read_size("expert_count", 0) > 1:
        raise ModelError(f"{path}: has experts (mixture of experts), which is not supported")
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        if header.read_float(key, 0.0):
            raise ModelError(f"{path}: has {key}, which is not supported")
    default_scale = 1 / np.sqrt(head_dim)
    if architecture == "gemma3" and num_layers == _GEMMA3_27B_LAYERS:  # as llama.cpp does for this size alone
        default_scale = 1 / np.sqrt(hidden_size // num_heads)
    config = DecoderConfig(
        architecture=architecture,
        features=features,
        hidden_size=hidden_size,
        intermediate_size=header.read_size("feed_forward_length"),
        num_heads=num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=vocab_size,
        norm_epsilon=header.read_float("attention.layer_norm_rms_epsilon", 1e-5),
        max_positions=_read_max_positions(header),
        layers=_read_layers(path, num_layers, head_dim, _read_rope_scale(header)),
        attention_scale=header.read_float("attention.scale", 0.0) or float(default_scale),
        embedding_scale=header.read_float("embedding_scale", 1.0),
        residual_scale=header.read_float("residual_scale", 1.0),
        logit_divisor=header.read_float("logit_scale", 1.0),
    )
    return replace(config, embedding_scale=float(np.sqrt(hidden_size))) if features.scales_embedding else config


MAX_LAYERS: Final = 512
_GEMMA3_27B_LAYERS: Final = 62


def check_head_counts(label: str, num_heads: int, kv_heads: int, head_dim: int) -> None:
    """Refuse numbers of heads that do not divide, and heads whose words are no pairs; `ModelError`."""
    if num_heads % kv_heads or head_dim % 2:
        raise ModelError(f"{label}: {num_heads} heads of {head_dim} do not share {kv_heads} kv heads")


def compute_yarn_scale(factor: float) -> float:
    """Return YaRN's factor of rotated words."""
    return 0.1 * math.log(factor) + 1 if factor > 1 else 1.0


class _HeaderReader:
    def __init__(self, path: str, architecture: str, fields: Mapping[str, Any]) -> None:
        self.path, self.architecture, self.fields = path, architecture, fields

    def read_size(self, key: str, default: int | None = None) -> int:
        value = self.fields.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and all(entry == value[0] for entry in value):
            value = value[0]
        if type(value) is not int or value < 0 or (value == 0 and default != 0):
            raise ModelError(f"{self.path}: {self.architecture}.{key} is {value!r:.40}: expected one number above 0")
        return value

    def read_float(self, key: str, default: float) -> float:
        value = self.fields.get(f"{self.architecture}.{key}", default)
        if not isinstance(value, float) or not np.isfinite(value):
            raise ModelError(f"{self.path}: {self.architecture}.{key} is {value!r:.40}: expected a number")
        return value


def _read_max_positions(header: _HeaderReader) -> int | None:
    # Above the original length, files with factors for long texts rotate all tokens by those; ours are for short ones.
    for key in ("rope.scaling.original_context_length", "context_length"):
        value = gguf.parse_positive_int(header.fields.get(f"{header.architecture}.{key}"))
        if value is not None and (key == "context_length" or header.architecture == "phi3"):
            return value
    return None


def _read_rope_scale(header: _HeaderReader) -> float:
    """The factor of rotated words: YaRN's by its formula, Phi 3's as the header has it."""
    scale = header.read_float("rope.scaling.attn_factor", 1.0)
    factor = header.read_float("rope.scaling.factor", 1.0)
    if header.fields.get(f"{header.architecture}.rope.scaling.type") == "yarn":
        scale *= compute_yarn_scale(factor)
    return scale


def _read_layers(path: str, num_layers: int, head_dim: int, rope_scale: float) -> tuple[LayerConfig, ...]:
    # max_tokens of 0: factors for short texts, which all texts within the original length have
    ropes = gguf.read_gguf_layer_ropes(path, num_layers, head_dim, 0)
    if ropes is None:
        ropes = (RopeFrequencies.from_config(gguf.build_rotary(path, theta=10000.0, dims=head_dim)),) * num_layers
    model_layers = gguf.read_model_layers(path)
    windows = [None] * num_layers if model_layers is None else [layer.state.window for layer in model_layers]
    layers = []
    for rope, window in zip(ropes, windows, strict=True):
        if rope is None:
            raise ModelError(f"{path}: has layers whose K is not rotated, which is not supported")
        layers.append(
            LayerConfig(
                frequencies=rope.radians,
                rope_scale=rope_scale,
                window=window,
            )
        )
    return tuple(layers)
