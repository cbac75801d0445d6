"""How llama.cpp rotates K of each layer of a ``.gguf`` model, strictly; `gguf.read_rotary` serves compression."""

from __future__ import annotations

import struct
from typing import Any, Final

from ...dense import Rotary
from ...dense.frequencies import RopeFrequencies
from ...errors import KvmnnError, SourceError
from ..layer_rope import LayerRopes
from .gguf import INTERLEAVED, GgufHeader

_FACTORS: Final = ("rope_freqs.weight", "blk.0.rope_freqs.weight")
_LONG_FACTORS: Final = ("rope_factors_short.weight", "blk.0.rope_factors_short.weight")
_FLOAT32: Final = 0
_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 1 << 20
_MAX_PAIRS: Final = 1 << 15

_GEMMA3: Final = ("gemma3", "gemma-embedding")
_GEMMA3_PATTERN, _GEMMA3_WINDOW_THETA = 6, 10000.0
_ALIKE_WITH_WINDOW: Final = ("llama", "gemma2", "phi3", "mistral3", "gpt-oss", "qwen2", "qwen3", "starcoder2")
"""Architectures with windows whose layers are all rotated alike."""
_UNLIKE: Final = ("llama4", "cohere2", "exaone4", "smollm3", "gemma3n", "gemma4", "deepseek2", "modern-bert")
"""Architectures with layers that are not rotated, or otherwise."""


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
    if not isinstance(name, str):
        raise SourceError(f"{path}: does not name its architecture")
    rope = {
        key.removeprefix(f"{name}.rope."): value for key, value in fields.items() if key.startswith(f"{name}.rope.")
    }
    if not {"dimension_count", "freq_base"} & rope.keys():
        return None
    window = fields.get(f"{name}.attention.sliding_window")
    if name in _UNLIKE or (window and name not in (*_ALIKE_WITH_WINDOW, *_GEMMA3)):
        raise SourceError(
            f"{path}: layers of the architecture {name!r} are rotated in different ways, which its header does not "
            "describe: --rope FOLDER names a model's config.json"
        )
    try:
        plain = _plain(path, name, rope, rope.get("freq_base", 10000.0), head_dim)
        full = _divide(header, plain, rope, fields.get("general.alignment", _ALIGNMENT), length)
        if name not in _GEMMA3:
            return (full,) * layers
        theta = rope.get("freq_base_swa", _GEMMA3_WINDOW_THETA)
        local = _plain(path, name, {"dimension_count": full.dims}, theta, head_dim)
    except (KvmnnError, TypeError) as error:
        raise error if isinstance(error, SourceError) else SourceError(f"{path}: {error}") from None
    return tuple(full if number % _GEMMA3_PATTERN == 0 else local for number in range(1, layers + 1))


def _plain(path: str, name: str, rope: dict[str, Any], theta: float, head_dim: int) -> RopeFrequencies:
    """The frequencies that the header gives, without factors of their own."""
    dims = rope.get("dimension_count", head_dim)
    if type(dims) is not int or not 2 <= dims <= head_dim:
        raise SourceError(f"{path}: {name}.rope.dimension_count is {dims!r:.40}, the cache has heads of {head_dim}")
    factor = rope.get("scaling.factor", rope.get("scale_linear"))
    kind = rope.get("scaling.type", "none" if not factor else "linear")
    scaling: dict[str, Any] | None = None
    if kind == "linear" and factor:
        scaling = {"rope_type": "linear", "factor": factor}
    elif kind == "yarn" and factor and "scaling.original_context_length" in rope:
        length = rope["scaling.original_context_length"]
        scaling = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": length}
    elif kind not in ("none", "longrope"):
        raise SourceError(f"{path}: rope scaling {kind!r:.40} is unknown")
    pairing = "interleaved" if name in INTERLEAVED else "half"
    return RopeFrequencies.from_rotary(Rotary(theta=theta, dims=dims, pairing=pairing, scaling=scaling))


def _divide(
    header: GgufHeader, plain: RopeFrequencies, rope: dict[str, Any], alignment: Any, length: int
) -> RopeFrequencies:
    """Divide by the factors that are a tensor of the model (Llama 3; Phi 3 has a set for short texts)."""
    if type(alignment) is not int or not 0 < alignment <= _MAX_ALIGNMENT:
        raise SourceError(f"{header.label}: general.alignment is {alignment!r:.40}")
    found = header.find_tensor((*_FACTORS, *_LONG_FACTORS), alignment)
    if found is None:
        return plain
    name, shape, kind, data = found
    if name in _LONG_FACTORS:
        limit = rope.get("scaling.original_context_length")
        if type(limit) is not int or length > limit:
            raise SourceError(
                f"{header.label}: K of texts above {limit} tokens is rotated by their length at that time, which no "
                f"cache records, and this text has {length:,} tokens"
            )
    if kind != _FLOAT32 or shape != (plain.dims // 2,) or plain.dims // 2 > _MAX_PAIRS:
        raise SourceError(f"{header.label}: {name}: expected {plain.dims // 2} factors of float32")
    factors = struct.unpack(f"<{plain.dims // 2}f", data(4 * (plain.dims // 2)))
    if not all(0 < each < float("inf") for each in factors):
        raise SourceError(f"{header.label}: {name}: expected numbers above 0")
    return plain.divided_by(factors)
