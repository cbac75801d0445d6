"""How llama.cpp rotates K of each layer of a ``.gguf`` model, strictly; `gguf.read_rotary` serves compression."""

from __future__ import annotations

import struct
from typing import Any, Final

from ...dense.frequencies import RopeFrequencies
from ...errors import SourceError
from ..layer_rope import LayerRopes
from .gguf import GgufHeader, positive, read_rotary
from .model_layers import read_rotations
from .windows import SIZE, WINDOW_RULES

_FACTORS: Final = ("rope_freqs.weight", "blk.0.rope_freqs.weight")
_LONG_FACTORS: Final = ("rope_factors_short.weight", "blk.0.rope_factors_short.weight")
_FLOAT32: Final = 0
_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 1 << 20

_ALIKE_WITH_WINDOW: Final = ("llama", "phi3", "phimoe", "mistral3", "qwen2", "qwen3", "starcoder2")
"""Architectures whose header may have the size of a window, and whose layers are all rotated alike."""
_UNLIKE: Final = ("smollm3", "deepseek2", "deepseek2-ocr", "deepseek32", "deepseek4", "glm-dsa", "modern-bert")
"""Architectures with layers that are not rotated, with a part of K that is, or with windows of another theta."""


def read_gguf_rope(path: str, layers: int, head_dim: int, length: int) -> LayerRopes | None:
    """Read how K of each layer is rotated, in the order of elements that llama.cpp stores.

    Parameters
    ----------
    path
        A ``.gguf`` model.
    layers, head_dim
        Of the cache.
    length
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
    fields = header.fields(all_fields=True)
    name = fields.get("general.architecture")
    for key in ("dimension_count", "dimension_count_swa"):  # before frequencies are computed of very many
        dims = positive(fields.get(f"{name}.rope.{key}"))
        if dims is not None and dims > head_dim:
            raise SourceError(f"{path}: {dims} elements of a head are rotated, the cache has heads of {head_dim}")
    rotary, doubts = read_rotary(path)
    if rotary is None:
        return None
    if name in _UNLIKE or (fields.get(f"{name}.{SIZE}") and name not in (*_ALIKE_WITH_WINDOW, *WINDOW_RULES)):
        raise SourceError(
            f"{path}: layers of the architecture {name!r:.40} are rotated in different ways, which its header does not "
            "describe: --rope FOLDER names a model's config.json"
        )
    by_layer = read_rotations(path)[0]
    wanted = [by_layer.get(layer) for layer in range(layers)] if by_layer else [rotary] * layers
    kinds = [each for place, each in enumerate(wanted) if each not in wanted[:place]]
    ropes = [None if each is None else RopeFrequencies.from_rotary(each) for each in kinds]
    for rope in ropes:
        if rope is not None and rope.dims > head_dim:
            raise SourceError(f"{path}: {rope.dims} elements of a head are rotated, the cache has heads of {head_dim}")
    divided = _divide(header, fields, ropes, length)
    if doubts and not divided:
        raise SourceError(f"{path}: its scaling of the rotation is unknown ({doubts[0].removeprefix(f'{path}: ')})")
    return divided * layers if divided else tuple(ropes[kinds.index(each)] for each in wanted)


def _divide(
    header: GgufHeader, fields: dict[str, Any], ropes: list[RopeFrequencies | None], length: int
) -> tuple[RopeFrequencies, ...]:
    """Divide by factors that are a tensor of the model (Llama 3; Phi 3 has a set for short texts); empty without."""
    alignment = fields.get("general.alignment", _ALIGNMENT)
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
        raise SourceError(f"{header.label}: general.alignment is {alignment!r:.40}")
    found = header.find_tensor((*_FACTORS, *_LONG_FACTORS), alignment)
    if found is None:
        return ()
    name, shape, kind, data = found
    plain = ropes[0]
    if len(ropes) > 1 or plain is None:
        raise SourceError(f"{header.label}: {name}: nothing tells which layers it is for")
    if name in _LONG_FACTORS:
        limit = fields.get(f"{fields['general.architecture']}.rope.scaling.original_context_length")
        if type(limit) is not int or length > limit:
            raise SourceError(
                f"{header.label}: K of texts above {limit} tokens is rotated by their length at that time, which no "
                f"cache records, and this text has {length:,} tokens"
            )
    pairs = plain.dims // 2
    if kind != _FLOAT32 or shape != (pairs,):
        raise SourceError(f"{header.label}: {name}: expected {pairs} factors of float32")
    factors = struct.unpack(f"<{pairs}f", data(4 * pairs))
    if not all(0 < each < float("inf") for each in factors):
        raise SourceError(f"{header.label}: {name}: expected numbers above 0")
    return (plain.divided_by(factors),)
