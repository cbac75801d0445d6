"""The geometry and the rotary parameters that the header of a ``.gguf`` model says; its tensors are not read."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ...dense import RopeConfig
from ...errors import KvmnnError, SourceError
from ...files.mapped import MappedFile, read_head
from ...text import pluralize
from .windows import WINDOW_RULES, WINDOW_SIZE_KEY

GGUF_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_VALUE_BYTES_BY_TYPE = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the types of values: integers, float32 (6), booleans (7), float64 (12)."""
_IS_SIGNED_BY_TYPE = {0: False, 1: True, 2: False, 3: True, 4: False, 5: True, 10: False, 11: True}
"""Those that are integers, and whether they have a sign."""
_TYPE_FLOAT32, _TYPE_BOOL, _TYPE_STRING, _TYPE_ARRAY = 6, 7, 8, 9
_INTERLEAVED_ARCHITECTURES = frozenset(
    (
        *("arcee", "arctic", "baichuan", "bailingmoe", "bailingmoe3", "chameleon", "chatglm", "cohere2"),
        *("cohere2moe", "command-r", "deci", "deepseek", "deepseek2", "deepseek2-ocr", "deepseek32"),
        *("deepseek4", "dots3note", "eagle3", "ernie4_5", "ernie4_5-moe", "glm-dsa", "granite"),
        *("granite_swa", "granitehybrid", "granitemoe", "graniteswitch", "internlm2", "llada", "llama"),
        *("llama-embed", "llama4", "maincoder", "minicpm", "mistral3", "mistral4", "mllama", "muse-glimmer"),
        *("nanbeige", "neo-bert", "olmo", "plm", "smollm3", "starcoder", "xverse"),
    )
)
"""Architectures whose pairs are neighbours (LLAMA_ROPE_TYPE_NORM in llama.cpp)."""
_SHARED_KV_ARCHITECTURES = ("gemma3n",)
"""Architectures whose layers share K, though older files do not say how many do."""
_MAX_KEYS, _MAX_AXES = 1 << 16, 8
MAX_LAYERS = 1 << 16


class GgufGeometry(NamedTuple):
    """Of a model: kv heads of each layer, and values of a head in K."""

    architecture: str
    kv_heads: tuple[int, ...]
    head_dim: int


def is_gguf(path: str) -> bool:
    """Whether a file is a model of llama.cpp."""
    return read_head(path, len(GGUF_MAGIC)) == GGUF_MAGIC


def read_gguf_fields(path: str) -> tuple[str, dict[str, Any]]:
    """Return the architecture of a model and the fields of its header; errors as `read_gguf_geometry`."""
    fields = GgufHeader(path).read_fields()
    return _get_architecture(path, fields), fields


def read_architecture(path: str) -> str:
    """The architecture of a model; errors as `read_gguf_geometry`."""
    return _get_architecture(path, GgufHeader(path).read_fields())


def read_rotary_dim(path: str) -> int | None:
    """Dimensions of a head that RoPE turns; None where the model does not say it. Errors as `read_gguf_geometry`."""
    fields = GgufHeader(path).read_fields()
    return parse_positive_int(fields.get(f"{_get_architecture(path, fields)}.rope.dimension_count"))


def _get_architecture(path: str, fields: dict[str, Any]) -> str:
    name = fields.get("general.architecture")
    if not isinstance(name, str):
        raise SourceError(f"{path}: does not say its architecture")
    return name


def read_gguf_geometry(path: str, num_layers: int) -> GgufGeometry:
    """What a model says of the `num_layers` layers of its cache.

    Raises
    ------
    SourceError
        When the file is no GGUF file, is damaged, has fewer layers, or does not say the kv heads of these.
    """
    fields = GgufHeader(path).read_fields()
    name = _get_architecture(path, fields)
    num_blocks = parse_positive_int(fields.get(f"{name}.block_count"))
    if num_blocks is not None and num_blocks < num_layers:
        raise SourceError(f"{path}: the model has {pluralize(num_blocks, 'layer')}, the cache has {num_layers}")
    heads = fields.get(f"{name}.attention.head_count")
    kv_heads = fields.get(f"{name}.attention.head_count_kv", heads)
    heads_by_layer = _expand_kv_heads(kv_heads, num_layers)
    embedding_length = parse_positive_int(fields.get(f"{name}.embedding_length"))
    num_heads = parse_positive_int(
        heads[0] if isinstance(heads, list) and heads else heads
    )  # as llama.cpp: the first layer's
    head_dim = parse_positive_int(fields.get(f"{name}.attention.key_length")) or (
        embedding_length // num_heads if embedding_length and num_heads else 0
    )
    if len(heads_by_layer) != num_layers or not all(heads_by_layer) or not head_dim:
        raise SourceError(f"{path}: does not say the kv heads and head_dim of {num_layers} layers")
    return GgufGeometry(name, heads_by_layer, head_dim)


def list_cache_layer_counts(path: str) -> set[int]:
    """How many layers a cache of a model may have; empty where that is not known. Errors as `read_gguf_geometry`.

    Layers that predict further tokens are in the caches of some builds, and those without K of their own in none.
    """
    fields = GgufHeader(path).read_fields()
    name = _get_architecture(path, fields)
    kv_heads = fields.get(f"{name}.attention.head_count_kv")
    layer_counts = {
        parse_positive_int(fields.get(f"{name}.{key}")) for key in ("block_count", "decoder_block_count")
    } - {None}
    if isinstance(kv_heads, list):
        layer_counts |= {len(kv_heads), sum(map(bool, kv_heads))}
    num_shared, num_predicting = (
        parse_positive_int(fields.get(f"{name}.{key}")) or 0
        for key in ("attention.shared_kv_layers", "nextn_predict_layers")
    )
    if name in _SHARED_KV_ARCHITECTURES and not num_shared:
        return set()
    return {
        num_layers - num_shared - num_absent
        for num_layers in layer_counts
        if num_layers is not None
        for num_absent in (0, num_predicting)
    }


def read_gguf_rotary(path: str) -> tuple[RopeConfig | None, list[str]]:
    """How llama.cpp rotates K of a model, and one line for each thing that was passed over; None where nothing says it.

    Which words are pairs is the architecture's, by `llama_model_rope_type` of llama.cpp: side by side in
    `_INTERLEAVED_ARCHITECTURES`, half of the dimensions apart in others. Factors of single frequencies, which are a
    tensor, are not read.

    Raises
    ------
    SourceError
        As `read_gguf_geometry`, and for values that are no rotary parameters.
    """
    fields = GgufHeader(path).read_fields()
    name = _get_architecture(path, fields)
    rope = {
        key.removeprefix(f"{name}.rope."): value for key, value in fields.items() if key.startswith(f"{name}.rope.")
    }
    embedding_length, num_heads = (
        parse_positive_int(fields.get(f"{name}.embedding_length")),
        parse_positive_int(fields.get(f"{name}.attention.head_count")),
    )
    head_dim = parse_positive_int(fields.get(f"{name}.attention.key_length")) or (
        embedding_length // num_heads if embedding_length and num_heads else None
    )
    rotary_dims = parse_positive_int(rope.get("dimension_count")) or head_dim
    if not {"dimension_count", "freq_base"} & rope.keys() or rotary_dims is None:
        return None, [f"{path}: says no rotary parameters ({name}.rope.dimension_count): --rope gives them"]
    notes: list[str] = []
    rotary = build_rotary(
        path,
        theta=rope.get("freq_base", 10000.0),
        dims=rotary_dims,
        pairing="interleaved" if name in _INTERLEAVED_ARCHITECTURES else "half",
        scaling=_parse_scaling(path, rope, notes),
    )
    return rotary, notes


def build_rotary(path: str, **parameters: Any) -> RopeConfig:
    """Return the rotation with values of a header; `SourceError` for values that are no parameters of one."""
    try:
        return RopeConfig(**parameters)
    except (KvmnnError, TypeError) as error:
        raise SourceError(f"{path}: {error}") from None


def _parse_scaling(path: str, rope: dict[str, Any], notes: list[str]) -> dict[str, Any] | None:
    factor = rope.get("scaling.factor", rope.get("scale_linear"))
    kind = rope.get("scaling.type", "none" if factor is None else "linear")
    if kind == "linear" and factor:
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn" and factor and "scaling.original_context_length" in rope:
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": rope["scaling.original_context_length"],
        }
    if kind != "none":
        notes.append(f"{path}: rope scaling {kind!r:.40} is left out, which costs size only")
    return None


def _expand_kv_heads(value: Any, num_layers: int) -> tuple[int, ...]:
    """Kv heads of the layers of a cache, which may be fewer than the model's: those without K, or of another cache."""
    if not isinstance(value, list):
        return (parse_positive_int(value) or 0,) * num_layers
    nonzero_heads = tuple(heads for heads in value if heads)
    return (
        nonzero_heads
        if len(nonzero_heads) == num_layers
        else nonzero_heads[:1] * num_layers
        if len(set(nonzero_heads)) == 1
        else ()
    )


def _has_required_fields(fields: dict[str, Any]) -> bool:
    name = fields.get("general.architecture")
    required_keys = (
        "block_count",
        "embedding_length",
        "attention.head_count_kv",
        *([WINDOW_SIZE_KEY] if name in WINDOW_RULES else []),
    )
    return all(f"{name}.{key}" in fields for key in required_keys)


def parse_positive_int(value: Any) -> int | None:
    """Return a value of a header that is an integer above 0; None for all others."""
    return value if type(value) is int and value > 0 else None


class GgufHeader:
    """Keys and values at the beginning of the file."""

    def __init__(self, path: str) -> None:
        self._file, self._position, self._num_tensors = MappedFile(path), 0, 0
        if self._file.read_head(4) != GGUF_MAGIC:
            raise SourceError(f"{self._file.label}: is no GGUF model: --model takes one beside a llama.cpp cache")

    @property
    def label(self) -> str:
        """What messages call the file."""
        return self._file.label

    def read_fields(self, *, include_all: bool = False) -> dict[str, Any]:
        """Integers, float32, truth values, strings and lists of the first and the third; others are passed over.

        Vocabularies end the list unless `include_all` are read, which `find_tensor` needs.
        """
        self._read_bytes(4)
        version, self._num_tensors, num_keys = self._read_int(4), self._read_int(8), self._read_int(8)
        if version not in _SUPPORTED_VERSIONS or num_keys > _MAX_KEYS:
            raise SourceError(f"{self._file.label}: GGUF version {version} with {num_keys} keys is none that is read")
        fields: dict[str, Any] = {}
        for _ in range(num_keys):
            name = self._read_string()
            if name.startswith("tokenizer.") and not include_all and _has_required_fields(fields):
                break  # vocabularies take longer to read than all else, and stand last
            fields[name] = self._read_value(self._read_int(4))
        return fields

    def find_tensor(
        self, names: Collection[str], alignment: int
    ) -> tuple[str, tuple[int, ...], int, Callable[[int], bytes]] | None:
        """Return name, shape, number of the type and a reader of the first bytes of the first tensor of these `names`.

        Call it after `read_fields` with `include_all`; `alignment` is the field ``general.alignment``.
        """
        if self._num_tensors > _MAX_KEYS:
            raise SourceError(f"{self._file.label}: has {self._num_tensors} tensors: expected at most {_MAX_KEYS}")
        first_match: tuple[str, tuple[int, ...], int, int] | None = None
        for _ in range(self._num_tensors):
            name, num_axes = self._read_string(), self._read_int(4)
            if num_axes > _MAX_AXES:
                raise SourceError(f"{self._file.label}: a tensor has {num_axes} axes: expected at most {_MAX_AXES}")
            shape = tuple(self._read_int(8) for _ in range(num_axes))
            type_number, offset = self._read_int(4), self._read_int(8)
            if name in names and first_match is None:
                first_match = name, shape, type_number, offset
        if first_match is None:
            return None
        name, shape, type_number, offset = first_match
        start = -(-self._position // alignment) * alignment + offset
        return name, shape, type_number, lambda nbytes: bytes(self._file.view(start, nbytes))

    def _read_value(self, value_type: int) -> Any:
        if value_type == _TYPE_STRING:
            return self._read_string()
        if value_type in _IS_SIGNED_BY_TYPE:
            return self._read_int(_VALUE_BYTES_BY_TYPE[value_type], is_signed=_IS_SIGNED_BY_TYPE[value_type])
        if value_type == _TYPE_FLOAT32:
            return float(struct.unpack("<f", bytes(self._read_bytes(_VALUE_BYTES_BY_TYPE[value_type])))[0])
        if value_type == _TYPE_BOOL:
            return self._read_int(1) != 0
        if value_type in _VALUE_BYTES_BY_TYPE:
            return self._read_bytes(_VALUE_BYTES_BY_TYPE[value_type])
        if value_type != _TYPE_ARRAY:
            raise SourceError(
                f"{self._file.label}: a value of the unknown type {value_type} at offset {self._position}"
            )
        element_type, num_values = self._read_int(4), self._read_int(8)
        if element_type in _VALUE_BYTES_BY_TYPE and not (
            element_type in (*_IS_SIGNED_BY_TYPE, _TYPE_BOOL) and num_values <= MAX_LAYERS
        ):
            return self._read_bytes(_VALUE_BYTES_BY_TYPE[element_type] * num_values)
        if element_type == _TYPE_ARRAY or num_values > self._file.size // 8:
            raise SourceError(f"{self._file.label}: a list of {num_values} values at offset {self._position}")
        return [
            self._read_bytes(self._read_int(8)) if element_type == _TYPE_STRING else self._read_value(element_type)
            for _ in range(num_values)
        ]

    def _read_string(self) -> str:
        length = self._read_int(8)
        return bytes(self._read_bytes(length)).decode("utf-8", "replace")

    def _read_int(self, nbytes: int, *, is_signed: bool = False) -> int:
        return int.from_bytes(bytes(self._read_bytes(nbytes)), "little", signed=is_signed)

    def _read_bytes(self, nbytes: int) -> Any:
        data = self._file.view(self._position, nbytes)
        self._position += nbytes
        return data
