"""The document of a packed cache: properties that its files do not record.

It is stored next to prefix-cache files (``<name>.kvmnn.json``) and in the metadata of derived files (bundles,
``.safetensors``), under the key ``kvmnn.cache``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .. import dtypes
from .._util.dataclass import dataclass
from .._util.text import format_range, pluralize
from ..errors import KvmnnError, ManifestError
from ..files.schema import JsonReader, parse_document
from .inference import describe_layout
from .layout import PackLayout

CACHE_SCHEMA: Final = "kvmnn-cache"
CACHE_SCHEMA_VERSION: Final = 1
METADATA_KEY: Final = "kvmnn.cache"
CACHE_SIDECAR_SUFFIX: Final = ".kvmnn.json"
CACHE_KINDS: Final = ("prefix", "live")
MAX_CACHE_INFO_BYTES = 64 << 20

_MAX_TOKENS = 2**31 - 1
#: Vocabularies have fewer; some engines replace placeholders of pictures by hashes of 30 to 32 bits.
MAX_TOKEN_ID: Final = 2**32 - 1
PositionRuns = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class LayerInfo:
    """Description of one layer of a packed cache."""

    #: From 0.
    layer: int
    #: Live tokens.
    tokens: int
    #: Capacity of the files in tokens.
    capacity: int
    #: Positions that K of the live tokens is rotated to, in order, as ``(begin, size)`` runs: those of the tokens in
    #: the text, unless `text_positions` gives others.
    positions: PositionRuns
    #: True positions of the live tokens in the text, where K was rotated to others since
    #: (`kvmnn mnn compact --rerotate`); None where `positions` are the true ones.
    text_positions: PositionRuns | None = None
    #: Kv heads and head_dim of the layer, if they differ from the cache's layout.
    heads: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= self.capacity:
            raise KvmnnError(
                f"layer {self.layer}: {self.tokens} tokens: expected at least 1 and at most the capacity of "
                f"{self.capacity}"
            )
        for name, runs in (("positions", self.positions), ("positions in the text", self.text_positions)):
            if runs is not None and sum(size for _, size in runs) != self.tokens:
                raise KvmnnError(f"layer {self.layer}: the {name} are not those of {self.tokens} tokens")

    @property
    def text_position_runs(self) -> PositionRuns:
        """Return the true positions of the live tokens in the text, as ``(begin, size)`` runs."""
        return self.positions if self.text_positions is None else self.text_positions


#: Kinds of state, as in `kvmnn.arrays.completeness`, of layers without K and V.
STATE_KINDS: Final = ("linear", "recurrent", "unknown")


@dataclass(frozen=True, kw_only=True)
class StateLayer:
    """A layer of a prefix cache whose two files store the state after the last token instead of K and V."""

    #: From 0.
    layer: int
    #: One of `STATE_KINDS`.
    kind: str
    #: Bytes of the file in place of K (convolution state), and of that in place of V (recurrent state).
    key_bytes: int
    value_bytes: int


def validate_token_ids(ids: Sequence[int] | npt.NDArray[Any], max_id: int = MAX_TOKEN_ID) -> npt.NDArray[Any]:
    """Return token ids as an array; `KvmnnError` unless there is at least one, each from 0 to `max_id`."""
    array = np.asarray(ids)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise KvmnnError("token ids: expected a list of at least one whole number")
    lowest, highest = int(array.min()), int(array.max())
    if lowest < 0 or highest > max_id:
        index, invalid_id = (array.argmin(), lowest) if lowest < 0 else (array.argmax(), highest)
        raise KvmnnError(f"token ids: number {index + 1:,}: expected one from 0 to {max_id:,}, found {invalid_id:,}")
    return array


@dataclass(frozen=True)
class TokenIdsFingerprint:
    """The token ids that a cache was made from, as a fingerprint."""

    #: Number of ids.
    count: int
    #: SHA-256 of the ids as little-endian 32-bit words.
    sha256: str
    #: Name for messages.
    where: str = field(default="the list", compare=False, repr=False)

    @classmethod
    def from_ids(cls, ids: Sequence[int] | npt.NDArray[Any], where: str = "the list") -> TokenIdsFingerprint:
        """Return the fingerprint of a list of ids; errors as `validate_token_ids`."""
        array = validate_token_ids(ids)
        return cls(array.size, hashlib.sha256(array.astype("<u4").tobytes()).hexdigest(), where)


@dataclass(frozen=True, kw_only=True)
class CacheInfo:
    """Description of a packed cache."""

    #: Kind of the files: ``prefix`` or ``live``.
    kind: str
    #: Name of the prefix; empty for other kinds.
    name: str
    #: Geometry and pack numbers.
    layout: PackLayout
    #: In order.
    layers: tuple[LayerInfo, ...]
    #: Fingerprint of the text's token ids, if specified.
    token_ids: TokenIdsFingerprint | None = None
    #: Fingerprint of the model's directory, if specified.
    model: str | None = None
    #: Position of the next token, if tokens before it were evicted; None if it follows the last stored one.
    next_position: int | None = None
    #: Layers without K and V, in order.
    states: tuple[StateLayer, ...] = ()
    #: What K and V have lost of what the engine computed, a sentence; empty where nothing is known.
    loss: str = ""

    @property
    def next_token_position(self) -> int:
        """Return the position of the next token, in the positions that K is rotated to."""
        end = max(begin + size for layer in self.layers for begin, size in layer.positions)
        return max(end, self.next_position or 0)

    @property
    def live_bytes(self) -> int:
        """Return the size in bytes of the live elements of all layers, K and V; for int8 without scales and biases."""
        return sum(sum(self.count_live_bytes(layer)) for layer in self.layers)

    def get_layer_layout(self, layer: LayerInfo) -> PackLayout:
        """Return the layout of a layer: the cache's, with the layer's own kv heads and head_dim if they differ."""
        if layer.heads is None:
            return self.layout
        return replace(self.layout, kv_heads=layer.heads[0], head_dim=layer.heads[1])

    @property
    def is_uniform(self) -> bool:
        """Return whether all layers have the same kv heads and head_dim."""
        return all(layer.heads is None for layer in self.layers)

    def count_live_bytes(self, layer: LayerInfo) -> tuple[int, int]:
        """Return the sizes in bytes of the live elements of a layer's K and V."""
        layout = self.get_layer_layout(layer)
        elements = layer.tokens * layout.kv_heads * layout.head_dim
        key_size, value_size = (1 if is_int8 else layout.itemsize for is_int8 in (layout.int8_keys, layout.int8_values))
        return elements * key_size, elements * value_size

    @property
    def file_bytes(self) -> int:
        """Return the number of bytes of the packed files of all layers."""
        layouts = [(self.get_layer_layout(layer), layer.capacity) for layer in self.layers]
        return self.state_bytes + sum(layout.key_bytes(n) + layout.value_bytes(n) for layout, n in layouts)

    @property
    def state_bytes(self) -> int:
        """Return the number of bytes of the files of layers without K and V."""
        return sum(state.key_bytes + state.value_bytes for state in self.states)

    @property
    def numbers(self) -> list[int]:
        """Return the layer numbers, in order."""
        return sorted([*(entry.layer for entry in self.layers), *(state.layer for state in self.states)])


def compute_file_sizes(info: CacheInfo, layer: LayerInfo) -> tuple[int, int]:
    """Return the sizes of the files of K and V of a layer in bytes."""
    layout = info.get_layer_layout(layer)
    return layout.key_bytes(layer.capacity), layout.value_bytes(layer.capacity)


def merge_runs(runs: Iterable[tuple[int, int]]) -> PositionRuns:
    """Merge neighbouring ``(begin, size)`` runs."""
    merged: list[tuple[int, int]] = []
    for begin, size in runs:
        if merged and begin == merged[-1][0] + merged[-1][1]:
            merged[-1] = (merged[-1][0], merged[-1][1] + size)
        else:
            merged.append((begin, size))
    return tuple(merged)


def cache_info_to_dict(info: CacheInfo) -> dict[str, Any]:
    """Return the description as JSON values."""
    layout, ids = info.layout, info.token_ids
    return {
        "schema": CACHE_SCHEMA,
        "schema_version": CACHE_SCHEMA_VERSION,
        "kind": info.kind,
        "name": info.name,
        "kv_heads": layout.kv_heads,
        "head_dim": layout.head_dim,
        "dtype": layout.dtype,
        "lP": layout.lP,
        "hP": layout.hP,
        "flash_block": layout.flash_block,
        # For ``--json`` only: documents are written of float caches.
        **({"int8": "both" if layout.int8_values else "keys"} if layout.is_quantized else {}),
        **({"lP8": layout.lP8, "hP8": layout.hP8} if layout.is_quantized else {}),
        "token_ids": ids and {"count": ids.count, "sha256": ids.sha256},
        "model": info.model,
        **({} if info.next_position is None else {"next_position": info.next_position}),
        "layers": [_layer_to_dict(layer) for layer in info.layers],
        **({"states": [vars(layer) for layer in info.states]} if info.states else {}),
        **({"loss": info.loss} if info.loss else {}),
    }


def _layer_to_dict(layer: LayerInfo) -> dict[str, Any]:
    """Return a layer as JSON values; keys of rotation are left out for caches that were never rotated."""
    fields: dict[str, Any] = {**vars(layer), "positions": [list(run) for run in layer.positions]}
    if fields.pop("text_positions") is not None:
        fields["text_positions"] = [list(run) for run in layer.text_position_runs]
    if (heads := fields.pop("heads")) is not None:
        fields |= {"kv_heads": heads[0], "head_dim": heads[1]}
    return fields


def dump_cache_info(info: CacheInfo) -> str:
    """Return the document as JSON text on one line."""
    return json.dumps(cache_info_to_dict(info))


def load_cache_info(text: str | bytes, where: str) -> CacheInfo:
    """Parse a document; `where` begins the messages of errors."""
    root = parse_document(text, where, MAX_CACHE_INFO_BYTES)
    root.check_schema(CACHE_SCHEMA, CACHE_SCHEMA_VERSION)
    if root.get("kind").read_str() not in CACHE_KINDS:
        raise root.get("kind").error(f"one of {', '.join(CACHE_KINDS)}")
    layers = tuple(_parse_layer(node) for node in root.get("layers").read_list(min_len=1))
    if [layer.layer for layer in layers] != sorted({layer.layer for layer in layers}):
        raise ManifestError(f"{where}: layers: are not in order, each once")
    states = tuple(_state(node) for node in root.get("states").read_list()) if "states" in root.value else ()
    if len({layer.layer for layer in layers} | {layer.layer for layer in states}) != len(layers) + len(states):
        raise ManifestError(f"{where}: states: a layer has two states")
    ids, model = root.get("token_ids"), root.get("model")
    dtype, block = root.get("dtype"), root.get("flash_block")
    if dtype.read_str() not in dtypes.DTYPES:
        raise dtype.error(f"one of {', '.join(dtypes.DTYPES)}")
    heads, head_dim, lP, hP = (_read_int32(root.get(key)) for key in ("kv_heads", "head_dim", "lP", "hP"))
    flash_block = None if block.value is None else block.read_int(1)
    layout = PackLayout(heads, head_dim, dtype.read_str(), lP, hP, flash_block)
    return CacheInfo(
        kind=root.get("kind").read_str(),
        name=root.get("name").read_str(),
        layout=layout,
        layers=layers,
        token_ids=None
        if ids.value is None
        else TokenIdsFingerprint(ids.get("count").read_int(1), ids.get("sha256").read_sha256()),
        model=None if model.value is None else model.read_sha256(),
        next_position=_read_int32(root.get("next_position")) if "next_position" in root.value else None,
        states=tuple(sorted(states, key=lambda layer: layer.layer)),
        loss=root.get("loss").read_str() if "loss" in root.value else "",
    )


def _state(node: JsonReader) -> StateLayer:
    kind = node.get("kind").read_str()
    if kind not in STATE_KINDS:
        raise node.get("kind").error(f"one of {', '.join(STATE_KINDS)}")
    sizes = node.get("key_bytes").read_int(1), node.get("value_bytes").read_int(1)
    return StateLayer(layer=node.get("layer").read_int(0), kind=kind, key_bytes=sizes[0], value_bytes=sizes[1])


def _read_int32(node: JsonReader) -> int:
    number = node.read_int(1)
    if number > _MAX_TOKENS:
        raise node.error("a 32-bit integer")
    return number


def _parse_layer(node: JsonReader) -> LayerInfo:
    runs = _parse_runs(node.get("positions"))
    text_runs = _parse_runs(node.get("text_positions")) if "text_positions" in node.value else None
    try:
        return LayerInfo(
            layer=node.get("layer").read_int(0),
            tokens=node.get("tokens").read_int(1),
            capacity=node.get("capacity").read_int(1),
            positions=runs,
            text_positions=text_runs,
            heads=_parse_heads(node),
        )
    except ManifestError:
        raise
    except KvmnnError as exc:
        raise ManifestError(f"{node.label}: {node.path}: {exc}") from None


def _parse_heads(node: JsonReader) -> tuple[int, int] | None:
    if "kv_heads" not in node.value:
        return None
    kv_heads, head_dim = (node.get(key).read_int(1) for key in ("kv_heads", "head_dim"))
    if max(kv_heads, head_dim) > _MAX_TOKENS:
        raise node.error("32-bit integers for kv_heads and head_dim")
    return kv_heads, head_dim


def _parse_runs(node: JsonReader) -> PositionRuns:
    runs = []
    for run in node.read_list(min_len=1):
        begin_node, size_node = run.read_list(min_len=2, max_len=2)
        begin, size = begin_node.read_int(0), size_node.read_int(1)
        if begin + size > _MAX_TOKENS:
            raise run.error(f"positions below {_MAX_TOKENS:,}")
        runs.append((begin, size))
    return tuple(runs)


_MAX_SHOWN_RUNS = 12


def build_cache_document(info: CacheInfo | None) -> dict[str, Any] | None:
    """Return the description of a cache with its sizes in bytes, for JSON."""
    if info is None:
        return None
    return {**cache_info_to_dict(info), "live_bytes": info.live_bytes, "file_bytes": info.file_bytes}


def describe_layouts(info: CacheInfo) -> str:
    """Return the layout of all layers as text; if heads differ, with those of each kind of layer."""
    if info.is_uniform:
        return describe_layout(info.layout)
    shared = describe_layout(info.layout).split(", ", 1)[1]
    kinds = dict.fromkeys((layout.kv_heads, layout.head_dim) for layout in map(info.get_layer_layout, info.layers))
    return f"{' or '.join(f'{heads} x {dims}' for heads, dims in kinds)} kv heads x dims by layer, {shared}"


def format_cache_summary(info: CacheInfo) -> str:
    """Format layers, layout, tokens and capacity on one line."""
    tokens = sorted({layer.tokens for layer in info.layers})
    capacities = sorted({layer.capacity for layer in info.layers})
    layers = pluralize(len(info.layers), "layer")
    if info.states:
        layers = f"K and V in {len(info.layers)} of {pluralize(len(info.numbers), 'layer')}"
    return f"{layers}, {describe_layouts(info)}, {format_range(tokens)} tokens, capacity {format_range(capacities)}"


def format_utilisation(info: CacheInfo) -> str:
    """Format live and padded bytes on one line."""
    live, total = info.live_bytes, info.file_bytes - info.state_bytes
    return f"{live:,} live bytes of {total:,} ({100 * live / total:.1f} %), {total - live:,} padding and room"


def has_evictions(layer: LayerInfo) -> bool:
    """Return whether a layer has other tokens than the first ones of the text."""
    return layer.text_position_runs != ((0, layer.tokens),)


def format_runs(runs: PositionRuns) -> str:
    """Format the first runs as ``begin:size``."""
    ellipsis = ", ..." if len(runs) > _MAX_SHOWN_RUNS else ""
    return ", ".join(f"{begin}:{size}" for begin, size in runs[:_MAX_SHOWN_RUNS]) + ellipsis


def describe_evicted_layers(info: CacheInfo) -> list[str]:
    """Return one line for each evicted layer: its positions in the text."""
    return [
        f"layer {layer.layer} holds the tokens {format_runs(layer.text_position_runs)}"
        + (f", K rotated to positions {format_runs(layer.positions)}" if layer.text_positions is not None else "")
        for layer in info.layers
        if has_evictions(layer)
    ]
