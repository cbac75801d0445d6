"""A checkpoint of transformers, ``config.json`` and ``.safetensors`` files: its configuration and its weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import numpy as np

from ..._util.dataclass import dataclass
from ...dtypes import Floats
from ...errors import KvmnnError, ModelError, SourceError
from ...files.mapped_file import MappedFile
from ...files.schema import read_object
from ...formats import safetensors
from ...formats.rope_config import parse_layer_ropes
from ..windows import list_windows
from .config import (
    MAX_LAYERS,
    SUPPORTED_ARCHITECTURES,
    DecoderConfig,
    LayerConfig,
    check_head_counts,
    compute_yarn_scale,
)
from .import_result import RESULT_FILE
from .weights import TensorNames

_NUMPY_TYPES: Final[Mapping[str, str]] = {"F32": "<f4", "F16": "<f2", "BF16": "<u2"}
# Of a chunk that is converted at once: large enough for numpy, small next to any model.
_CHUNK_VALUES: Final = 1 << 20
_MODEL_TYPES: Final[Mapping[str, str]] = {
    **{name: name for name in ("llama", "granite", "qwen2", "qwen3", "phi3")},
    **dict.fromkeys(("mistral", "ministral", "mistral3"), "mistral3"),
    **dict.fromkeys(("gemma3_text", "gemma3"), "gemma3"),
}
"""``model_type`` of configurations, by which GGUF architecture is the same block."""
_PREFIXES: Final = ("model.", "language_model.model.", "model.language_model.")
"""What begins the names of a language model's tensors, by itself and as a part of a larger model."""


@dataclass(frozen=True)
class CheckpointTensor:
    """A tensor's entry in a ``.safetensors`` file."""

    file: MappedFile
    type_name: str
    shape: tuple[int, ...]
    #: Of the first byte, from the beginning of the file.
    offset: int


class DecoderCheckpoint:
    """A folder with ``config.json`` and weights in one or several ``.safetensors`` files.

    Parameters
    ----------
    path
        The folder.

    Attributes
    ----------
    settings : dict
        The configuration of the language model.
    tensors : mapping
        `CheckpointTensor` by name: those of the language model, whose names begin as `prefix` does.
    prefix : str
        One of ``"model."``, ``"language_model.model."`` and ``"model.language_model."``.

    Raises
    ------
    SourceError
        When a file is missing or damaged.
    ModelError
        When there are weights of an element type other than F32, F16 and BF16, or none of a language model.
    """

    def __init__(self, path: str) -> None:
        self.label = path
        folder = Path(path)
        if not (folder / "config.json").is_file():
            raise SourceError(f"{path}: has no config.json: expected a checkpoint of transformers, or a .gguf file")
        settings = read_object(folder / "config.json", allow_nan=True)
        text_settings = settings.get("text_config")
        self.settings: dict[str, Any] = text_settings if isinstance(text_settings, dict) else settings
        _get_architecture(path, self.settings)  # before weights are looked for
        tensors: dict[str, CheckpointTensor] = {}
        for file_path in self._list_files(folder):
            file = MappedFile(file_path)
            header = safetensors.read_header(file)
            for entry in header.tensors:
                if entry.name in tensors:
                    raise SourceError(f"{file_path}: the tensor {entry.name!r:.80} is in another file as well")
                tensors[entry.name] = CheckpointTensor(
                    file, entry.kind, tuple(entry.shape), header.data_start + entry.begin
                )
        self.prefix = next((prefix for prefix in _PREFIXES if f"{prefix}embed_tokens.weight" in tensors), "")
        if not self.prefix:
            raise ModelError(f"{path}: has no token embedding (model.embed_tokens.weight)")
        # of a larger model, the output matrix lies next to the language model, not in it
        root = self.prefix.removesuffix("model.") if self.prefix != "model.language_model." else ""
        self.output_name = next((name for name in (f"{root}lm_head", "lm_head") if f"{name}.weight" in tensors), "")
        if not self.output_name:
            self.output_name = "lm_head"
        own_tensors = {
            name: tensor
            for name, tensor in tensors.items()
            if (name.startswith(self.prefix) or name == f"{self.output_name}.weight")
            and not name.endswith("rotary_emb.inv_freq")
        }
        for name, tensor in own_tensors.items():
            if tensor.type_name not in _NUMPY_TYPES:
                raise ModelError(
                    f"{path}: tensor {name!r:.80} is of the element type {tensor.type_name}: expected F32, F16 or BF16 "
                    "(quantized checkpoints are not read: import the model's GGUF file)"
                )
            if not tensor.shape or 0 in tensor.shape:
                raise SourceError(
                    f"{path}: tensor {name!r:.80} has the shape {list(tensor.shape)}: expected axes of at least 1"
                )
        self.tensors: Mapping[str, CheckpointTensor] = MappingProxyType(own_tensors)

    @staticmethod
    def _list_files(folder: Path) -> list[str]:
        index_path = folder / "model.safetensors.index.json"
        if index_path.is_file():
            weight_map = read_object(index_path).get("weight_map")
            if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
                raise SourceError(f"{index_path}: weight_map is no object of file names")
            names = sorted(set(weight_map.values()))
            if any(Path(name).name != name for name in names):
                raise SourceError(f"{index_path}: names files outside of its folder")
        else:
            names = sorted(path.name for path in folder.glob("*.safetensors"))
        if not names:
            hint = ": it is an imported model already" if (folder / RESULT_FILE).is_file() else ""
            raise SourceError(f"{folder}: has no .safetensors file{hint}")
        return [str(folder / name) for name in names]

    @property
    def names(self) -> TensorNames:
        """Names of the decoder's weights."""
        has_four_norms = self.settings.get("model_type") in ("gemma3_text", "gemma3")
        norms = (
            {
                "post_attention_norm": "post_attention_layernorm",
                "mlp_norm": "pre_feedforward_layernorm",
                "post_mlp_norm": "post_feedforward_layernorm",
            }
            if has_four_norms
            else {"mlp_norm": "post_attention_layernorm"}
        )
        return TensorNames(
            embedding=f"{self.prefix}embed_tokens",
            final_norm=f"{self.prefix}norm",
            output=self.output_name,
            block_prefix=f"{self.prefix}layers.{{layer}}.",
            parts={
                "input_norm": "input_layernorm",
                **{f"attention.{part}": f"self_attn.{part}_proj" for part in "qkvo"},
                **{f"attention.{part}_norm": f"self_attn.{part}_norm" for part in "qk"},
                **{f"mlp.{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
                **norms,
            },
            fused={
                "self_attn.qkv_proj": ("attention.q", "attention.k", "attention.v"),
                "mlp.gate_up_proj": ("mlp.gate", "mlp.up"),
            },
            # gemma's norms multiply by 1 + weight
            norm_offset=1.0 if has_four_norms else 0.0,
        )

    def read_rows(self, tensor: CheckpointTensor) -> Iterator[Floats]:
        """Read a tensor as float32 ``[row, value]``, in chunks of whole rows."""
        width = tensor.shape[-1]
        num_rows = math.prod(tensor.shape[:-1])
        numpy_type = np.dtype(_NUMPY_TYPES[tensor.type_name])
        row_bytes = width * numpy_type.itemsize
        rows_per_chunk = max(1, _CHUNK_VALUES // width)
        for data in tensor.file.iter_chunks(tensor.offset, num_rows * row_bytes, rows_per_chunk * row_bytes):
            words = np.ascontiguousarray(data).view(numpy_type).reshape(-1, width)
            if tensor.type_name == "BF16":
                yield (words.astype(np.uint32) << 16).view(np.float32)
            else:
                yield words.astype(np.float32)


def read_checkpoint_config(checkpoint: DecoderCheckpoint) -> DecoderConfig:
    """Read the configuration of a checkpoint.

    Raises
    ------
    ModelError
        For a ``model_type`` that is not supported, and for values that a decoder cannot have.
    SourceError
        Where the rotation is not described.
    """
    reader = _SettingsReader(checkpoint)
    settings = checkpoint.settings
    architecture = _get_architecture(checkpoint.label, settings)
    features = SUPPORTED_ARCHITECTURES[architecture]
    hidden_size, num_heads = reader.read_size("hidden_size"), reader.read_size("num_attention_heads")
    num_layers = reader.read_size("num_hidden_layers")
    if num_layers > MAX_LAYERS:
        raise ModelError(f"{checkpoint.label}: has {num_layers:,} layers: expected at most {MAX_LAYERS}")
    kv_heads = reader.read_size("num_key_value_heads", num_heads)
    head_dim = reader.read_size("head_dim", hidden_size // num_heads)
    check_head_counts(checkpoint.label, num_heads, kv_heads, head_dim)
    activation = settings.get("hidden_activation") or settings.get("hidden_act", "silu")
    if activation != {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}[features.activation]:
        raise ModelError(f"{checkpoint.label}: the activation {activation!r:.40} is not supported for {architecture}")
    for key in ("attn_logit_softcapping", "final_logit_softcapping", "use_bidirectional_attention"):
        if settings.get(key):
            raise ModelError(f"{checkpoint.label}: has {key}, which is not supported")
    query_scale = reader.read_float("query_pre_attn_scalar", 0.0) if architecture == "gemma3" else 0.0
    attention_scale = query_scale**-0.5 if query_scale else head_dim**-0.5
    is_granite = architecture == "granite"
    if is_granite:
        attention_scale = reader.read_float("attention_multiplier", 1.0)
    rope_scale, max_positions = _read_rope_scale(reader)
    return DecoderConfig(
        architecture=architecture,
        features=features,
        hidden_size=hidden_size,
        intermediate_size=reader.read_size("intermediate_size"),
        num_heads=num_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=checkpoint.tensors[f"{checkpoint.prefix}embed_tokens.weight"].shape[0],
        norm_epsilon=reader.read_float("rms_norm_eps", 1e-6),
        max_positions=max_positions,
        layers=_read_layers(checkpoint, num_layers, head_dim, rope_scale),
        attention_scale=attention_scale,
        embedding_scale=hidden_size**0.5
        if features.scales_embedding
        else reader.read_float("embedding_multiplier", 1.0)
        if is_granite
        else 1.0,
        residual_scale=reader.read_float("residual_multiplier", 1.0) if is_granite else 1.0,
        logit_divisor=reader.read_float("logits_scaling", 1.0) if is_granite else 1.0,
        has_tied_output=settings.get("tie_word_embeddings", architecture == "gemma3") is True,
    )


def _get_architecture(label: str, settings: Mapping[str, Any]) -> str:
    """Return the name that GGUF files have for the blocks of a configuration; `ModelError` if it is not supported."""
    model_type = settings.get("model_type")
    architecture = _MODEL_TYPES.get(model_type) if isinstance(model_type, str) else None
    if architecture is None:
        raise ModelError(
            f"{label}: the model type {model_type!r:.40} cannot be imported: expected one of "
            f"{', '.join(sorted(_MODEL_TYPES))}"
        )
    return architecture


class _SettingsReader:
    def __init__(self, checkpoint: DecoderCheckpoint) -> None:
        self.label, self.settings = checkpoint.label, checkpoint.settings

    def read_size(self, key: str, default: int | None = None) -> int:
        value = self.settings.get(key)
        value = default if value is None else value
        if type(value) is not int or not 0 < value < 1 << 31:
            raise ModelError(f"{self.label}/config.json: {key} is {value!r:.40}: expected a number above 0")
        return value

    def read_float(self, key: str, default: float) -> float:
        value = self.settings.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise ModelError(f"{self.label}: {key} is {value!r:.40}: expected a number")
        return float(value)


def _read_rope_scale(reader: _SettingsReader) -> tuple[float, int | None]:
    """Factor of rotated words, and the longest text that the rotation is right for; transformers' formulas."""
    settings = reader.settings
    max_positions = settings.get("max_position_embeddings")
    max_positions = max_positions if type(max_positions) is int and max_positions > 0 else None
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        return 1.0, max_positions  # kinds of layers with rotations of their own, which are not scaled so
    kind = rope.get("rope_type", rope.get("type", "default"))
    original = rope.get("original_max_position_embeddings", settings.get("original_max_position_embeddings"))
    factor, scale = rope.get("factor"), rope.get("attention_factor")
    if kind in ("longrope", "su") and max_positions is not None and type(original) is int and original > 1:
        # above the original length other factors would apply, to all tokens
        factor = max_positions / original if factor is None else factor
        if scale is None:
            scale = math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0
        return float(scale), original
    if kind == "yarn":
        if rope.get("mscale") is not None or rope.get("mscale_all_dim") is not None:
            raise ModelError(f"{reader.label}: has mscale in its rotation, which is not supported")
        if scale is None:
            scale = compute_yarn_scale(reader.read_float("factor", 1.0) if factor is None else float(factor))
        return float(scale), max_positions
    return 1.0, max_positions


def _read_layers(
    checkpoint: DecoderCheckpoint, num_layers: int, head_dim: int, rope_scale: float
) -> tuple[LayerConfig, ...]:
    settings = checkpoint.settings
    defaults: dict[str, Any] = {"rope_theta": 10000.0}
    if settings.get("model_type") in ("gemma3", "gemma3_text"):
        defaults = {"rope_theta": 1e6}
        rope = settings.get("rope_parameters")
        if not (isinstance(rope, dict) and any(isinstance(value, dict) for value in rope.values())):
            defaults["rope_local_base_freq"] = 10000.0
    try:  # 0 tokens: factors for short texts, which all texts within the original length have
        ropes = parse_layer_ropes({**defaults, **settings}, num_layers, head_dim, 0)
    except (KvmnnError, TypeError) as error:
        raise SourceError(f"{checkpoint.label}: {error}") from None
    if ropes is None or None in ropes:
        raise ModelError(f"{checkpoint.label}: its configuration does not describe how K of every layer is rotated")
    windows = list_windows(checkpoint.settings, num_layers, checkpoint.label)
    return tuple(
        LayerConfig(frequencies=rope.radians, rope_scale=rope_scale, window=window)
        for rope, window in zip(ropes, windows, strict=True)
        if rope is not None
    )
