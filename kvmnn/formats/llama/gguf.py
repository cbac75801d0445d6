"""The header of a ``.gguf`` model: geometry, heads of each layer, sliding windows, and the rotation of K.

llama.cpp stores K and V of layers with a window in a separate cache. Headers list the layers as
``attention.sliding_window_pattern``: a boolean for each layer, or a period; without it, `load_arch_hparams` of each
architecture has a default. (Read from llama.cpp as of llama-cpp-python 0.3.36.)
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from ..._util.dataclass import dataclass
from ..._util.named_tuple import NamedTuple
from ..._util.text import pluralize
from ...arrays.completeness import LayerStateInfo
from ...dense import RopeConfig
from ...dense.rope import RopeFrequencies
from ...errors import KvmnnError, SourceError
from ...files.mapped_file import MappedFile, read_head
from ..rope_config import LayerRopes

WINDOW_PATTERN_KEY: Final = "attention.sliding_window_pattern"
WINDOW_SIZE_KEY: Final = "attention.sliding_window"


@dataclass(frozen=True, kw_only=True)
class WindowRule:
    """The sliding window that llama.cpp assumes for an architecture."""

    #: One of this many layers has full attention; None if the header must have the pattern.
    period: int | None
    #: Whether that is the first layer of a period; else the last.
    is_full_first: bool = False
    #: Default window size in tokens, if the header has none; None for no window.
    size: int | None = None
    #: Number of layers of the only variant that has windows; None for all.
    layers: int | None = None
    #: Default theta of layers with a window, if the header has none; None for the theta of the others.
    theta: float | None = None
    #: Whether layers with a window use the RoPE scaling of the others.
    is_scaled: bool = True
    #: Whether K of layers with full attention is rotated.
    is_full_rotated: bool = True


_WINDOW_ROPE_THETA: Final = 10000.0

WINDOW_RULES: Final[Mapping[str, WindowRule]] = {
    "afmoe": WindowRule(period=4, is_full_rotated=False),
    "cohere2": WindowRule(period=4, is_full_rotated=False),
    "cohere2moe": WindowRule(period=4, is_full_first=True, is_full_rotated=False),
    "dots3note": WindowRule(period=None, is_scaled=False),
    "exaone-moe": WindowRule(period=4, size=128, is_full_rotated=False),
    "exaone4": WindowRule(period=4, size=4096, layers=64, is_full_rotated=False),
    "gemma2": WindowRule(period=2, size=4096),
    "gemma3": WindowRule(period=6, theta=_WINDOW_ROPE_THETA, is_scaled=False),
    "gemma3n": WindowRule(period=5, theta=_WINDOW_ROPE_THETA, is_scaled=False),
    "gemma4": WindowRule(period=None, theta=_WINDOW_ROPE_THETA, is_scaled=False),
    "gpt-oss": WindowRule(period=2),
    "granite_swa": WindowRule(period=None),
    "laguna": WindowRule(period=4, is_full_first=True, is_scaled=False),
    "llama4": WindowRule(period=4, size=8192, is_full_rotated=False),
    "maple": WindowRule(period=None),
    "mellum": WindowRule(period=4),
    "mimo2": WindowRule(period=None, theta=_WINDOW_ROPE_THETA, is_scaled=False),
    "muse-glimmer": WindowRule(period=4, is_full_rotated=False),
    "olmo2": WindowRule(period=4, is_scaled=False),
    "plamo3": WindowRule(period=8, theta=_WINDOW_ROPE_THETA, is_scaled=False),
    "smallthinker": WindowRule(period=4, is_full_first=True, size=4096, is_full_rotated=False),
    "spark2_5": WindowRule(period=None),
    "step35": WindowRule(period=None, theta=_WINDOW_ROPE_THETA, is_scaled=False),
}
_SIZE_REQUIRED_ARCHITECTURES: Final = frozenset(
    ("afmoe", "gemma3", "laguna", "mellum", "olmo2", "plamo3", "smallthinker")
)
"""Architectures that have no window unless the header has a size, although related ones have a default."""
_WINDOWLESS_ARCHITECTURES: Final = frozenset(("phi3", "phimoe"))
"""Architectures whose window llama.cpp ignores."""
_FIRST_SHARED_BY_ARCHITECTURE: Final = {"gemma3n": 20}
"""First layer that uses K and V of earlier ones, for headers that lack their number."""


def find_windows(
    architecture: str, num_layers: int, fields: Mapping[str, Any] | None, label: str = ""
) -> list[bool] | None:
    """Return whether each of the layers of a model has a window."""
    rule = WINDOW_RULES.get(architecture)
    if fields is None:
        return None if rule is None or rule.period is None else _expand_period(rule, rule.period, num_layers)
    pattern, size = fields.get(f"{architecture}.{WINDOW_PATTERN_KEY}"), read_window_size(architecture, fields)
    if architecture in _WINDOWLESS_ARCHITECTURES or size == 0 or (size is None and pattern is None):
        return [False] * num_layers
    if isinstance(pattern, list):
        if len(pattern) < num_layers or not all(type(value) in (bool, int) for value in pattern):
            raise SourceError(
                f"{label}: {architecture}.{WINDOW_PATTERN_KEY} has {len(pattern):,} values, expected {num_layers:,}"
            )
        return [bool(value) for value in pattern[:num_layers]]
    if rule is not None and rule.layers not in (None, num_layers):
        return [False] * num_layers
    period = pattern if type(pattern) is int else rule.period if rule is not None else None
    return None if period is None else _expand_period(rule or WindowRule(period=period), period, num_layers)


def read_window_size(architecture: str, fields: Mapping[str, Any]) -> int | None:
    """Return the window size in tokens from a header; 0 for no window, None if unknown."""
    size = fields.get(f"{architecture}.{WINDOW_SIZE_KEY}")
    if type(size) is int and size >= 0:
        return size
    rule = WINDOW_RULES.get(architecture)
    return None if rule is None else 0 if architecture in _SIZE_REQUIRED_ARCHITECTURES else rule.size


def find_first_shared_layer(architecture: str, num_layers: int, fields: Mapping[str, Any]) -> int:
    """Return the first layer that uses K and V of earlier layers; `num_layers` if all have their own."""
    num_shared = fields.get(f"{architecture}.attention.shared_kv_layers")
    if type(num_shared) is int and 0 < num_shared < num_layers:
        return num_layers - num_shared
    return min(num_layers, _FIRST_SHARED_BY_ARCHITECTURE.get(architecture, num_layers))


def _expand_period(rule: WindowRule, period: int, num_layers: int) -> list[bool]:
    if period < 1:  # llama.cpp: every layer has a window
        return [True] * num_layers
    full_offset = 0 if rule.is_full_first else period - 1
    return [layer % period != full_offset for layer in range(num_layers)]


GGUF_MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_VALUE_BYTES_BY_TYPE = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value by its type: integers, float32 (6), booleans (7), float64 (12)."""
_IS_SIGNED_BY_TYPE = {0: False, 1: True, 2: False, 3: True, 4: False, 5: True, 10: False, 11: True}
"""Whether integers are signed, by their type."""
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
"""Architectures with layers that share K, whose older files lack their number."""
_MAX_KEYS, _MAX_AXES = 1 << 16, 8
MAX_LAYERS = 1 << 16


class GgufGeometry(NamedTuple):
    """The geometry of a model: kv heads of each layer, and the head_dim of K."""

    architecture: str
    kv_heads: tuple[int, ...]
    head_dim: int


def is_gguf(path: str) -> bool:
    """Return whether a file is a llama.cpp model."""
    return read_head(path, len(GGUF_MAGIC)) == GGUF_MAGIC


class ModelFields(NamedTuple):
    """The header of a model: its architecture, and all fields."""

    architecture: str
    fields: Mapping[str, Any]

    @classmethod
    def read(cls, path: str) -> ModelFields:
        """Read the header of a file; `SourceError` where it is damaged, or does not say the architecture."""
        fields = GgufHeader(path).read_fields()
        architecture = fields.get("general.architecture")
        if not isinstance(architecture, str):
            raise SourceError(f"{path}: does not say its architecture")
        return cls(architecture, fields)

    def get(self, key: str, default: Any = None) -> Any:
        """Return a field whose name begins with the architecture."""
        return self.fields.get(f"{self.architecture}.{key}", default)

    def get_positive(self, key: str) -> int | None:
        """Return such a field if it is an integer above 0."""
        return parse_positive_int(self.get(key))

    @property
    def kv_heads(self) -> Any:
        """Kv heads: a number, or a list with that of each layer."""
        return self.get("attention.head_count_kv", self.get("attention.head_count"))

    @property
    def default_head_dim(self) -> int:
        """Size of a head if the header has none: the embedding over the heads; 0 if they are unknown."""
        heads, embedding_length = self.get("attention.head_count"), self.get_positive("embedding_length")
        num_heads = parse_positive_int(heads[0] if isinstance(heads, list) and heads else heads)  # as llama.cpp
        return embedding_length // num_heads if embedding_length and num_heads else 0


def read_architecture(path: str) -> str:
    """Return the architecture of a model; errors as `ModelFields.read`."""
    return ModelFields.read(path).architecture


def read_rotary_dim(path: str) -> int | None:
    """Return how many dimensions of a head RoPE rotates; None when the header does not contain it."""
    return ModelFields.read(path).get_positive("rope.dimension_count")


def read_gguf_geometry(path: str, num_layers: int) -> GgufGeometry:
    """Return the heads and head_dim that a model's header gives for the `num_layers` layers of its cache."""
    model = ModelFields.read(path)
    num_blocks = model.get_positive("block_count")
    if num_blocks is not None and num_blocks < num_layers:
        raise SourceError(f"{path}: the model has {pluralize(num_blocks, 'layer')}, the cache has {num_layers}")
    heads_by_layer = _expand_kv_heads(model.kv_heads, num_layers)
    head_dim = model.get_positive("attention.key_length") or model.default_head_dim
    if len(heads_by_layer) != num_layers or not all(heads_by_layer) or not head_dim:
        raise SourceError(f"{path}: does not say the kv heads and head_dim of {num_layers} layers")
    return GgufGeometry(model.architecture, heads_by_layer, head_dim)


def list_cache_layer_counts(path: str) -> set[int]:
    """List how many layers a cache of a model may have; empty if unknown.

    Layers that predict further tokens are in the caches of some builds, and those without K of their own in none.
    """
    model = ModelFields.read(path)
    kv_heads = model.get("attention.head_count_kv")
    layer_counts = {model.get_positive(key) for key in ("block_count", "decoder_block_count")} - {None}
    if isinstance(kv_heads, list):
        layer_counts |= {len(kv_heads), sum(map(bool, kv_heads))}
    num_shared = model.get_positive("attention.shared_kv_layers") or 0
    num_predicting = model.get_positive("nextn_predict_layers") or 0
    if model.architecture in _SHARED_KV_ARCHITECTURES and not num_shared:
        return set()
    return {
        num_layers - num_shared - num_absent
        for num_layers in layer_counts
        if num_layers is not None
        for num_absent in (0, num_predicting)
    }


def read_gguf_rotary(path: str) -> tuple[RopeConfig | None, list[str]]:
    """Return the RoPE parameters that llama.cpp uses for a model, and one line for each ignored parameter.

    None if the header has no rotary parameters. Which elements form a pair depends on the architecture, by
    `llama_model_rope_type` of llama.cpp: neighbours in `_INTERLEAVED_ARCHITECTURES`, elements half of the dimensions
    apart in others. Factors of single frequencies, which are a tensor, are not read.

    Raises
    ------
    SourceError
        The errors of `ModelFields.read`, and for invalid rotary parameters.
    """
    model = ModelFields.read(path)
    prefix = f"{model.architecture}.rope."
    rope = {key.removeprefix(prefix): value for key, value in model.fields.items() if key.startswith(prefix)}
    has_one_head_count = type(model.get("attention.head_count")) is int
    head_dim = model.get_positive("attention.key_length") or (model.default_head_dim if has_one_head_count else 0)
    rotary_dims = parse_positive_int(rope.get("dimension_count")) or head_dim
    if not {"dimension_count", "freq_base"} & rope.keys() or not rotary_dims:
        return None, [f"{path}: says no rotary parameters ({prefix}dimension_count): --rope gives them"]
    notes: list[str] = []
    rotary = build_rotary(
        path,
        theta=rope.get("freq_base", 10000.0),
        dims=rotary_dims,
        pairing="interleaved" if model.architecture in _INTERLEAVED_ARCHITECTURES else "half",
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
    """Return the kv heads of the layers of a cache, which may be fewer than the model's: not all have K in it."""
    if not isinstance(value, list):
        return (parse_positive_int(value) or 0,) * num_layers
    nonzero_heads = tuple(heads for heads in value if heads)
    if len(nonzero_heads) == num_layers:
        return nonzero_heads
    return nonzero_heads[:1] * num_layers if len(set(nonzero_heads)) == 1 else ()


def _has_required_fields(fields: dict[str, Any]) -> bool:
    name = fields.get("general.architecture")
    window_keys = (WINDOW_SIZE_KEY,) if name in WINDOW_RULES else ()
    required_keys = ("block_count", "embedding_length", "attention.head_count_kv", *window_keys)
    return all(f"{name}.{key}" in fields for key in required_keys)


def parse_positive_int(value: Any) -> int | None:
    """Return a value of a header that is an integer above 0; None for all others."""
    return value if type(value) is int and value > 0 else None


class GgufHeader:
    """The keys and values at the beginning of a .gguf file."""

    def __init__(self, path: str) -> None:
        self._file, self._position, self._num_tensors = MappedFile(path), 0, 0
        if self._file.read_head(4) != GGUF_MAGIC:
            raise SourceError(f"{self._file.label}: is no GGUF model: --model takes one next to a llama.cpp cache")

    @property
    def label(self) -> str:
        """Return the name of the file for messages."""
        return self._file.label

    @property
    def position(self) -> int:
        """Offset of what is read next."""
        return self._position

    def read_fields(self, *, include_all: bool = False) -> dict[str, Any]:
        """Read integers, float32, booleans, strings, and lists of integers or booleans; skip all others.

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
        first_match = next((entry for entry in list(self.iter_tensor_entries()) if entry[0] in names), None)
        if first_match is None:
            return None
        name, shape, type_number, offset = first_match
        start = -(-self.position // alignment) * alignment + offset
        return name, shape, type_number, lambda nbytes: bytes(self._file.view(start, nbytes))

    def iter_tensor_entries(self) -> Iterator[tuple[str, tuple[int, ...], int, int]]:
        """Yield name, shape (ggml's order of axes), number of the type and offset in the data of each tensor.

        Call it after `read_fields` with `include_all`.
        """
        if self._num_tensors > _MAX_KEYS:
            raise SourceError(f"{self._file.label}: has {self._num_tensors} tensors: expected at most {_MAX_KEYS}")
        for _ in range(self._num_tensors):
            name, num_axes = self._read_string(), self._read_int(4)
            if num_axes > _MAX_AXES:
                raise SourceError(f"{self._file.label}: a tensor has {num_axes} axes: expected at most {_MAX_AXES}")
            shape = tuple(self._read_int(8) for _ in range(num_axes))
            yield name, shape, self._read_int(4), self._read_int(8)

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


@dataclass(frozen=True, kw_only=True)
class ModelLayer:
    """A layer of a model."""

    #: The state that the model stores for it.
    state: LayerStateInfo
    #: Heads of K and V; 0 for layers without attention.
    kv_heads: int
    #: Values of a head of K and of V.
    head_dim: int
    value_dim: int


def read_model_layers(path: str) -> tuple[ModelLayer, ...] | None:
    """Return the layers of a model; None if its header lacks which layers have a window, heads or sizes.

    Layers that only predict further tokens are left out.
    """
    model = ModelFields.read(path)
    name, fields = model
    num_blocks = model.get_positive("block_count")
    if num_blocks is None or num_blocks > MAX_LAYERS:
        return None
    num_layers = num_blocks - (model.get_positive("nextn_predict_layers") or 0)
    windows = find_windows(name, num_layers, fields, path)
    kv_heads = model.kv_heads
    heads_by_layer = kv_heads[:num_layers] if isinstance(kv_heads, list) else [kv_heads] * num_layers
    has_all_heads = len(heads_by_layer) == num_layers and all(type(value) is int for value in heads_by_layer)
    if windows is None or num_layers < 1 or not has_all_heads:
        return None
    head_sizes = [_read_head_sizes(model, is_window) for is_window in (False, True)]
    if not all(map(all, head_sizes)):
        return None
    first_shared, window_size = find_first_shared_layer(name, num_layers, fields), read_window_size(name, fields)
    return tuple(
        ModelLayer(
            state=_make_layer_state(layer, is_window, first_shared, window_size),
            kv_heads=num_kv_heads,
            head_dim=head_sizes[is_window][0],
            value_dim=head_sizes[is_window][1],
        )
        for layer, (is_window, num_kv_heads) in enumerate(zip(windows, heads_by_layer, strict=True))
    )


def read_rotations(path: str) -> tuple[dict[int, RopeConfig | None], list[str]]:
    """Return the RoPE parameters of each layer (None: not rotated), and one line for each ignored parameter.

    Empty where all layers are rotated as `read_gguf_rotary` returns, or the header has no windows; errors as there.
    """
    model = ModelFields.read(path)
    model_layers, (rotary, notes) = read_model_layers(path), read_gguf_rotary(path)
    window_layers = [layer for layer in model_layers or () if layer.state.window]
    if model_layers is None or rotary is None or not window_layers:
        return {}, notes
    rule = WINDOW_RULES.get(model.architecture)
    window_rotary = build_rotary(
        path,
        theta=model.get("rope.freq_base_swa", (rule.theta if rule is not None else None) or rotary.theta),
        dims=model.get_positive("rope.dimension_count_swa") or min(rotary.dims, window_layers[0].head_dim),
        pairing=rotary.pairing,
        scaling=rotary.scaling if rule is None or rule.is_scaled else None,
    )
    full_rotary = rotary if rule is None or rule.is_full_rotated else None
    return {layer.state.layer: window_rotary if layer.state.window else full_rotary for layer in model_layers}, notes


def _read_head_sizes(model: ModelFields, is_window: bool) -> tuple[int, int]:
    """Return the head_dim of K and of V; 0 if unknown."""
    key, value = (
        (is_window and model.get_positive(f"attention.{part}_length_swa"))
        or model.get_positive(f"attention.{part}_length")
        or model.default_head_dim
        for part in ("key", "value")
    )
    return key, value or key


def _make_layer_state(layer: int, is_window: bool, first_shared: int, window: int | None) -> LayerStateInfo:
    state = LayerStateInfo(layer=layer, kind="window", window=window) if is_window else LayerStateInfo(layer=layer)
    if layer < first_shared:
        return state
    # llama.cpp: the last layer of the same kind that has its own, of which the last one has full attention
    return replace(state, kind="shared", shared_with=max(0, first_shared - (2 if is_window else 1)), included=False)


def list_unshared_layers(layers: tuple[ModelLayer, ...], *, is_window: bool) -> list[ModelLayer]:
    """Return the layers that have K and V of their own, with or without a window."""
    kind = "window" if is_window else "full"
    return [layer for layer in layers if layer.state.kind == kind and layer.kv_heads]


_FACTOR_TENSORS: Final = ("rope_freqs.weight", "blk.0.rope_freqs.weight")
_SHORT_TEXT_FACTOR_TENSORS: Final = ("rope_factors_short.weight", "blk.0.rope_factors_short.weight")
_GGML_FLOAT32: Final = 0
_DEFAULT_ALIGNMENT: Final = 32
_MAX_ALIGNMENT: Final = 1 << 20

_UNIFORM_ROPE_WINDOW_ARCHITECTURES: Final = ("llama", "phi3", "phimoe", "mistral3", "qwen2", "qwen3", "starcoder2")
"""Architectures whose header may have the size of a window, and whose layers are all rotated alike."""
_MIXED_ROPE_ARCHITECTURES: Final = (
    *("smollm3", "deepseek2", "deepseek2-ocr", "deepseek32", "deepseek4", "glm-dsa", "modern-bert"),
)
"""Architectures with unrotated layers, with partially rotated K, or with windows of another theta."""


def read_gguf_layer_ropes(path: str, num_layers: int, head_dim: int, num_tokens: int) -> LayerRopes | None:
    """Read the RoPE frequencies of each layer, in the element order that llama.cpp stores."""
    header = GgufHeader(path)
    fields = header.read_fields(include_all=True)
    name = fields.get("general.architecture")
    for key in ("dimension_count", "dimension_count_swa"):  # before frequencies are computed of very many
        _check_rotated_dims(path, parse_positive_int(fields.get(f"{name}.rope.{key}")) or 0, head_dim)
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
    distinct_rotaries: list[RopeConfig | None] = []
    for layer_rotary in rotary_by_layer:
        distinct_rotaries += [layer_rotary] if layer_rotary not in distinct_rotaries else []
    ropes = [None if rotary is None else RopeFrequencies.from_config(rotary) for rotary in distinct_rotaries]
    for rope in ropes:
        _check_rotated_dims(path, rope.dims if rope else 0, head_dim)
    divided_ropes = _divide_by_factors(header, fields, ropes, num_tokens)
    if doubts and not divided_ropes:
        raise SourceError(f"{path}: its scaling of the rotation is unknown ({doubts[0].removeprefix(f'{path}: ')})")
    if divided_ropes:
        return divided_ropes * num_layers
    return tuple(ropes[distinct_rotaries.index(layer_rotary)] for layer_rotary in rotary_by_layer)


def _check_rotated_dims(path: str, dims: int, head_dim: int) -> None:
    if dims > head_dim:
        raise SourceError(f"{path}: {dims} elements of a head are rotated, the cache has heads of {head_dim}")


def _divide_by_factors(
    header: GgufHeader, fields: dict[str, Any], ropes: list[RopeFrequencies | None], num_tokens: int
) -> tuple[RopeFrequencies, ...]:
    """Divide by frequency factors in a tensor of the model (Llama 3; Phi 3 for short texts); empty without."""
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
                f"no cache records, and this text has {num_tokens:,} tokens"
            )
    num_pairs = rope.dims // 2
    if type_number != _GGML_FLOAT32 or shape != (num_pairs,):
        raise SourceError(f"{header.label}: {name}: expected {num_pairs} factors of float32")
    factors = struct.unpack(f"<{num_pairs}f", read_data(4 * num_pairs))
    if not all(0 < factor < float("inf") for factor in factors):
        raise SourceError(f"{header.label}: {name}: expected numbers above 0")
    return (rope.divide_by(factors),)
