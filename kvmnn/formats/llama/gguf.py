"""The geometry and the rotary parameters that the header of a ``.gguf`` model says; its tensors are not read."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

from ...dense import Rotary
from ...errors import KvmnnError, SourceError
from ...files.mapped import MappedFile, head_of
from ...text import count
from .windows import SIZE, WINDOW_RULES

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_FIXED = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of the types of values: integers, float32 (6), booleans (7), float64 (12)."""
_INTEGERS = {0: False, 1: True, 2: False, 3: True, 4: False, 5: True, 10: False, 11: True}
"""Those that are integers, and whether they have a sign."""
_FLOAT, _BOOL, _STRING, _ARRAY = 6, 7, 8, 9
_NEIGHBOURS = frozenset(
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
_SHARING = ("gemma3n",)
"""Architectures whose layers share K, though older files do not say how many do."""
_MOST_KEYS, _MOST_AXES = 1 << 16, 8
MAX_LAYERS = 1 << 16


class Geometry(NamedTuple):
    """Of a model: kv heads of each layer, and values of a head in K."""

    architecture: str
    kv_heads: tuple[int, ...]
    head_dim: int


def is_gguf(path: str) -> bool:
    """Whether a file is a model of llama.cpp."""
    return head_of(path, len(MAGIC)) == MAGIC


def read_fields(path: str) -> tuple[str, dict[str, Any]]:
    """Return the architecture of a model and the fields of its header; errors as `read_geometry`."""
    fields = GgufHeader(path).fields()
    return _architecture(path, fields), fields


def architecture(path: str) -> str:
    """The architecture of a model; errors as `read_geometry`."""
    return _architecture(path, GgufHeader(path).fields())


def rotary_dim(path: str) -> int | None:
    """Dimensions of a head that RoPE turns; None where the model does not say it. Errors as `read_geometry`."""
    fields = GgufHeader(path).fields()
    return positive(fields.get(f"{_architecture(path, fields)}.rope.dimension_count"))


def _architecture(path: str, fields: dict[str, Any]) -> str:
    name = fields.get("general.architecture")
    if not isinstance(name, str):
        raise SourceError(f"{path}: does not say its architecture")
    return name


def read_geometry(path: str, layers: int) -> Geometry:
    """What a model says of the `layers` layers of its cache.

    Raises
    ------
    SourceError
        When the file is no GGUF file, is damaged, has fewer layers, or does not say the kv heads of these.
    """
    fields = GgufHeader(path).fields()
    name = _architecture(path, fields)
    blocks = positive(fields.get(f"{name}.block_count"))
    if blocks is not None and blocks < layers:
        raise SourceError(f"{path}: the model has {count(blocks, 'layer')}, the cache has {layers}")
    heads = fields.get(f"{name}.attention.head_count")
    kv_heads = fields.get(f"{name}.attention.head_count_kv", heads)
    of = _by_layer(kv_heads, layers)
    width = positive(fields.get(f"{name}.embedding_length"))
    whole = positive(heads[0] if isinstance(heads, list) and heads else heads)  # as llama.cpp: the first layer's
    head_dim = positive(fields.get(f"{name}.attention.key_length")) or (width // whole if width and whole else 0)
    if len(of) != layers or not all(of) or not head_dim:
        raise SourceError(f"{path}: does not say the kv heads and head_dim of {layers} layers")
    return Geometry(name, of, head_dim)


def cache_layers(path: str) -> set[int]:
    """How many layers a cache of a model may have; empty where that is not known. Errors as `read_geometry`.

    Layers that predict further tokens are in the caches of some builds, and those without K of their own in none.
    """
    fields = GgufHeader(path).fields()
    name = _architecture(path, fields)
    heads = fields.get(f"{name}.attention.head_count_kv")
    layers = {positive(fields.get(f"{name}.{key}")) for key in ("block_count", "decoder_block_count")} - {None}
    if isinstance(heads, list):
        layers |= {len(heads), sum(map(bool, heads))}
    shared, ahead = (
        positive(fields.get(f"{name}.{key}")) or 0 for key in ("attention.shared_kv_layers", "nextn_predict_layers")
    )
    if name in _SHARING and not shared:
        return set()
    return {held - shared - less for held in layers if held is not None for less in (0, ahead)}


def read_rotary(path: str) -> tuple[Rotary | None, list[str]]:
    """How llama.cpp rotates K of a model, and one line for each thing that was passed over; None where nothing says it.

    Which words are pairs is the architecture's, by `llama_model_rope_type` of llama.cpp: side by side in `_NEIGHBOURS`,
    half of the dimensions apart in others. Factors of single frequencies, which are a tensor, are not read.

    Raises
    ------
    SourceError
        As `read_geometry`, and for values that are no rotary parameters.
    """
    fields = GgufHeader(path).fields()
    name = _architecture(path, fields)
    rope = {
        key.removeprefix(f"{name}.rope."): value for key, value in fields.items() if key.startswith(f"{name}.rope.")
    }
    width, heads = (
        positive(fields.get(f"{name}.embedding_length")),
        positive(fields.get(f"{name}.attention.head_count")),
    )
    whole = positive(fields.get(f"{name}.attention.key_length")) or (width // heads if width and heads else None)
    dims = positive(rope.get("dimension_count")) or whole
    if not {"dimension_count", "freq_base"} & rope.keys() or dims is None:
        return None, [f"{path}: says no rotary parameters ({name}.rope.dimension_count): --rope gives them"]
    notes: list[str] = []
    rotary = make_rotary(
        path,
        theta=rope.get("freq_base", 10000.0),
        dims=dims,
        pairing="interleaved" if name in _NEIGHBOURS else "half",
        scaling=_scaling(path, rope, notes),
    )
    return rotary, notes


def make_rotary(path: str, **parameters: Any) -> Rotary:
    """Return the rotation with values of a header; `SourceError` for values that are no parameters of one."""
    try:
        return Rotary(**parameters)
    except (KvmnnError, TypeError) as error:
        raise SourceError(f"{path}: {error}") from None


def _scaling(path: str, rope: dict[str, Any], notes: list[str]) -> dict[str, Any] | None:
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


def _by_layer(said: Any, layers: int) -> tuple[int, ...]:
    """Kv heads of the layers of a cache, which may be fewer than the model's: those without K, or of another cache."""
    if not isinstance(said, list):
        return (positive(said) or 0,) * layers
    with_k = tuple(heads for heads in said if heads)
    return with_k if len(with_k) == layers else with_k[:1] * layers if len(set(with_k)) == 1 else ()


def _is_enough(fields: dict[str, Any]) -> bool:
    name = fields.get("general.architecture")
    wanted = ("block_count", "embedding_length", "attention.head_count_kv", *([SIZE] if name in WINDOW_RULES else []))
    return all(f"{name}.{key}" in fields for key in wanted)


def positive(value: Any) -> int | None:
    """Return a value of a header that is an integer above 0; None for all others."""
    return value if type(value) is int and value > 0 else None


class GgufHeader:
    """Keys and values at the beginning of the file."""

    def __init__(self, path: str) -> None:
        self._file, self._position, self._tensors = MappedFile(path), 0, 0
        if self._file.head(4) != MAGIC:
            raise SourceError(f"{self._file.label}: is no GGUF model: --model takes one beside a llama.cpp cache")

    @property
    def label(self) -> str:
        """What messages call the file."""
        return self._file.label

    def fields(self, *, all_fields: bool = False) -> dict[str, Any]:
        """Integers, float32, truth values, strings and lists of the first and the third; others are passed over.

        Vocabularies end the list unless `all_fields` are read, which `find_tensor` needs.
        """
        self._view(4)
        version, self._tensors, count = self._int(4), self._int(8), self._int(8)
        if version not in _VERSIONS or count > _MOST_KEYS:
            raise SourceError(f"{self._file.label}: GGUF version {version} with {count} keys is none that is read")
        found: dict[str, Any] = {}
        for _ in range(count):
            name = self._text()
            if name.startswith("tokenizer.") and not all_fields and _is_enough(found):
                break  # vocabularies take longer to read than all else, and stand last
            found[name] = self._value(self._int(4))
        return found

    def find_tensor(
        self, names: Collection[str], alignment: int
    ) -> tuple[str, tuple[int, ...], int, Callable[[int], bytes]] | None:
        """Return name, shape, number of the type and a reader of the first bytes of the first tensor of these `names`.

        Call it after `fields` with `all_fields`; `alignment` is the field ``general.alignment``.
        """
        if self._tensors > _MOST_KEYS:
            raise SourceError(f"{self._file.label}: has {self._tensors} tensors: expected at most {_MOST_KEYS}")
        found: tuple[str, tuple[int, ...], int, int] | None = None
        for _ in range(self._tensors):
            name, axes = self._text(), self._int(4)
            if axes > _MOST_AXES:
                raise SourceError(f"{self._file.label}: a tensor has {axes} axes: expected at most {_MOST_AXES}")
            shape = tuple(self._int(8) for _ in range(axes))
            kind, offset = self._int(4), self._int(8)
            if name in names and found is None:
                found = name, shape, kind, offset
        if found is None:
            return None
        name, shape, kind, offset = found
        start = -(-self._position // alignment) * alignment + offset
        return name, shape, kind, lambda nbytes: bytes(self._file.view(start, nbytes))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._text()
        if kind in _INTEGERS:
            return self._int(_FIXED[kind], signed=_INTEGERS[kind])
        if kind == _FLOAT:
            return float(struct.unpack("<f", bytes(self._view(_FIXED[kind])))[0])
        if kind == _BOOL:
            return self._int(1) != 0
        if kind in _FIXED:
            return self._view(_FIXED[kind])
        if kind != _ARRAY:
            raise SourceError(f"{self._file.label}: a value of the unknown type {kind} at offset {self._position}")
        inner, count = self._int(4), self._int(8)
        if inner in _FIXED and not (inner in (*_INTEGERS, _BOOL) and count <= MAX_LAYERS):
            return self._view(_FIXED[inner] * count)
        if inner == _ARRAY or count > self._file.size // 8:
            raise SourceError(f"{self._file.label}: a list of {count} values at offset {self._position}")
        return [self._view(self._int(8)) if inner == _STRING else self._value(inner) for _ in range(count)]

    def _text(self) -> str:
        length = self._int(8)
        return bytes(self._view(length)).decode("utf-8", "replace")

    def _int(self, nbytes: int, *, signed: bool = False) -> int:
        return int.from_bytes(bytes(self._view(nbytes)), "little", signed=signed)

    def _view(self, nbytes: int) -> Any:
        found = self._file.view(self._position, nbytes)
        self._position += nbytes
        return found
