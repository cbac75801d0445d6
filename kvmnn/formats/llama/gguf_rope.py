"""How llama.cpp rotates K of each layer of a ``.gguf`` model, strictly; `gguf.read_rotary` serves compression."""

from __future__ import annotations

import struct
from typing import Any, Final

from ...dense.frequencies import RopeFrequencies
from ...errors import SourceError
from ..layer_rope import LayerRopes
from .gguf import GgufHeader, parse_positive_int, read_gguf_rotary
from .model_layers import read_rotations
from .windows import WINDOW_RULES, WINDOW_SIZE_KEY

_FACTOR_TENSORS: Final = ("rope_freqs.weight", "blk.0.rope_freqs.weight")
_SHORT_TEXT_FACTOR_TENSORS: Final = ("rope_factors_short.weight", "blk.0.rope_factors_short.weight")
_GGML_FLOAT32: Final = 0
_DEFAULT_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 1 << 20

_UNIFORM_ROPE_WINDOW_ARCHITECTURES: Final = ("llama", "phi3", "phimoe", "mistral3", "qwen2", "qwen3", "starcoder2")
"""Architectures whose header may have the size of a window, and whose layers are all rotated alike."""
_MIXED_ROPE_ARCHITECTURES: Final = (
    "smollm3",
    "deepseek2",
    "deepseek2-ocr",
    "deepseek32",
    "deepseek4",
    "glm-dsa",
    "modern-bert",
)
"""Architectures with layers that are not rotated, with a part of K that is, or with windows of another theta."""


def read_gguf_layer_ropes(path: str, num_layers: int, head_dim: int, num_tokens: int) -> LayerRopes | None:
    """Read how K of each layer is rotated, in the order of elements that llama.cpp stores.

    Parameters
    ----------
    path
        A ``.gguf`` model.
    num_layers, head_dim
        Of the cache.
    num_tokens
        Tokens of the text: some scalings depend on it.

    Returns
    -------
    None where the header has no rotary parameters.

    Raises
    ------
    SourceError
        When the file is no GGUF file or damaged, and for a rotation that kvmnn cannot compute.
    """
    header = GgufHeader(path)
    fields = header.read_fields(include_all=True)
    name = fields.get("general.architecture")
    for key in ("dimension_count", "dimension_count_swa"):  # before frequencies are computed of very many
        dims = parse_positive_int(fields.get(f"{name}.rope.{key}"))
        if dims is not None and dims > head_dim:
            raise SourceError(f"{path}: {dims} elements of a head are rotated, the cache has heads of {head_dim}")
    rotary, doubts = read_gguf_rotary(path)
    if rotary is None:
        return None
    if name in _MIXED_ROPE_ARCHITECTURES or (
        fields.get(f"{name}.{WINDOW_SIZE_KEY}") and name not in (*_UNIFORM_ROPE_WINDOW_ARCHITECTURES, *WINDOW_RULES)
    ):
        raise SourceError(
            f"{path}: layers of the architecture {name!r:.40} are rotated in different ways, which its header does not "
            "describe: --rope FOLDER names a model's config.json"
        )
    rotations = read_rotations(path)[0]
    rotary_by_layer = [rotations.get(layer) for layer in range(num_layers)] if rotations else [rotary] * num_layers
    distinct_rotaries = [
        layer_rotary
        for index, layer_rotary in enumerate(rotary_by_layer)
        if layer_rotary not in rotary_by_layer[:index]
    ]
    ropes = [
        None if layer_rotary is None else RopeFrequencies.from_config(layer_rotary)
        for layer_rotary in distinct_rotaries
    ]
    for rope in ropes:
        if rope is not None and rope.dims > head_dim:
            raise SourceError(f"{path}: {rope.dims} elements of a head are rotated, the cache has heads of {head_dim}")
    divided_ropes = _divide_by_factors(header, fields, ropes, num_tokens)
    if doubts and not divided_ropes:
        raise SourceError(f"{path}: its scaling of the rotation is unknown ({doubts[0].removeprefix(f'{path}: ')})")
    return (
        divided_ropes * num_layers
        if divided_ropes
        else tuple(ropes[distinct_rotaries.index(layer_rotary)] for layer_rotary in rotary_by_layer)
    )


def _divide_by_factors(
    header: GgufHeader, fields: dict[str, Any], ropes: list[RopeFrequencies | None], num_tokens: int
) -> tuple[RopeFrequencies, ...]:
    """Divide by factors that are a tensor of the model (Llama 3; Phi 3 has a set for short texts); empty without."""
    alignment = fields.get("general.alignment", _DEFAULT_ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
        raise SourceError(f"{header.label}: general.alignment is {alignment!r:.40}")
    tensor = header.find_tensor((*_FACTOR_TENSORS, *_SHORT_TEXT_FACTOR_TENSORS), alignment)
    if tensor is None:
        return ()
    name, shape, type_number, read_data = tensor
    rope = ropes[0]
    if len(ropes) > 1 or rope is None:
        raise SourceError(f"{header.label}: {name}: nothing tells which layers it is for")
    if name in _SHORT_TEXT_FACTOR_TENSORS:
        max_tokens = fields.get(f"{fields['general.architecture']}.rope.scaling.original_context_length")
        if type(max_tokens) is not int or num_tokens > max_tokens:
            raise SourceError(
                f"{header.label}: K of texts above {max_tokens} tokens is rotated by their length at that time, which "
                f"no "
                f"cache records, and this text has {num_tokens:,} tokens"
            )
    num_pairs = rope.dims // 2
    if type_number != _GGML_FLOAT32 or shape != (num_pairs,):
        raise SourceError(f"{header.label}: {name}: expected {num_pairs} factors of float32")
    factors = struct.unpack(f"<{num_pairs}f", read_data(4 * num_pairs))
    if not all(0 < factor < float("inf") for factor in factors):
        raise SourceError(f"{header.label}: {name}: expected numbers above 0")
    return (rope.divide_by(factors),)
