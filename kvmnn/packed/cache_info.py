"""What packed files do not say about themselves, as a document that travels with them.

It lies beside prefix-cache files (``<name>.kvmnn.json``) and inside the metadata of what is made from them (bundles,
``.safetensors``), under the key ``kvmnn.cache``.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..errors import KvmnnError, ManifestError
from ..files.json_document import Node, parse
from .layout import PackLayout

SCHEMA: Final = "kvmnn-cache"
SCHEMA_VERSION: Final = 1
METADATA_KEY: Final = "kvmnn.cache"
SIDE_SUFFIX: Final = ".kvmnn.json"
KINDS: Final = ("prefix", "live")
MAX_BYTES = 64 << 20

_MAX_TOKENS = 2**31 - 1
MAX_TOKEN_ID: Final = 2**32 - 1
"""Vocabularies have fewer; some engines replace placeholders of pictures by hashes of 30 to 32 bits."""
Ranges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, kw_only=True)
class LayerInfo:
    """One layer's part of a cache.

    Parameters
    ----------
    layer
        From 0.
    tokens
        Live tokens.
    capacity
        Tokens that the files have room for.
    positions
        Positions that K of the live tokens is rotated to, in order, as ``(begin, size)`` runs: those of the tokens in
        the text, unless `text_positions` gives others.
    text_positions
        True positions of the live tokens in the text, where K was rotated to others since (`kvmnn compact --rerotate`);
        None where `positions` are the true ones.
    heads
        Kv heads and head_dim of the layer, where they are not those of the cache's layout.
    """

    layer: int
    tokens: int
    capacity: int
    positions: Ranges
    text_positions: Ranges | None = None
    heads: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if not 1 <= self.tokens <= self.capacity:
            raise KvmnnError(
                f"layer {self.layer}: {self.tokens} tokens: expected at least 1 and at most the capacity of "
                f"{self.capacity}"
            )
        if sum(size for _, size in self.positions) != self.tokens:
            raise KvmnnError(f"layer {self.layer}: the positions are not those of {self.tokens} tokens")
        if self.text_positions is not None and sum(size for _, size in self.text_positions) != self.tokens:
            raise KvmnnError(f"layer {self.layer}: the positions in the text are not those of {self.tokens} tokens")

    @property
    def text_runs(self) -> Ranges:
        """True positions of the live tokens in the text, as ``(begin, size)`` runs."""
        return self.positions if self.text_positions is None else self.text_positions


STATE_KINDS: Final = ("linear", "recurrent", "unknown")
"""Kinds of state, as `kvmnn.arrays.completeness` names them, that layers without K and V have."""


@dataclass(frozen=True, kw_only=True)
class StateLayer:
    """A layer of a prefix cache whose two files hold no K and V, but the state after the last token.

    Parameters
    ----------
    layer
        From 0.
    kind
        One of `STATE_KINDS`.
    key_bytes, value_bytes
        Of the file in the place of K (convolution state) and of that in the place of V (recurrent state).
    """

    layer: int
    kind: str
    key_bytes: int
    value_bytes: int


def check_ids(ids: Sequence[int] | npt.NDArray[Any], most: int = MAX_TOKEN_ID) -> npt.NDArray[Any]:
    """Token ids as an array; `KvmnnError` unless they are at least one, and each is from 0 to `most`."""
    array = np.asarray(ids)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise KvmnnError("token ids: expected a list of at least one whole number")
    least, largest = int(array.min()), int(array.max())
    if least < 0 or largest > most:
        place, wrong = (array.argmin(), least) if least < 0 else (array.argmax(), largest)
        raise KvmnnError(f"token ids: number {place + 1:,}: expected one from 0 to {most:,}, found {wrong:,}")
    return array


@dataclass(frozen=True)
class TokenIds:
    """The token ids that a cache was made from, as a fingerprint.

    Parameters
    ----------
    count
        How many they are.
    sha256
        Of them as little-endian 32-bit words.
    where
        What messages call them.
    """

    count: int
    sha256: str
    where: str = field(default="the list", compare=False, repr=False)

    @classmethod
    def of(cls, ids: Sequence[int] | npt.NDArray[Any], where: str = "the list") -> TokenIds:
        """The fingerprint of a list of ids; errors as `check_ids`."""
        array = check_ids(ids)
        return cls(array.size, hashlib.sha256(array.astype("<u4").tobytes()).hexdigest(), where)


@dataclass(frozen=True, kw_only=True)
class CacheInfo:
    """A cache of packed layers.

    Parameters
    ----------
    kind
        ``prefix`` or ``live``: what the files are or were.
    name
        Of the prefix; empty for other kinds.
    layout
        Geometry and pack numbers.
    layers
        In order.
    token_ids
        Of the text, where they were given.
    model
        Fingerprint of the model's directory, where it was given.
    next_position
        Position of the next token, where tokens before it were evicted; None where it follows the last stored one.
    states
        Layers without K and V, in order.
    """

    kind: str
    name: str
    layout: PackLayout
    layers: tuple[LayerInfo, ...]
    token_ids: TokenIds | None = None
    model: str | None = None
    next_position: int | None = None
    states: tuple[StateLayer, ...] = ()

    @property
    def continues_at(self) -> int:
        """Position of the next token, in the positions that K is rotated to."""
        end = max(begin + size for layer in self.layers for begin, size in layer.positions)
        return max(end, self.next_position or 0)

    @property
    def live_bytes(self) -> int:
        """Bytes of the live elements of all layers, K and V; of what is int8 the codes, without scales and biases."""
        return sum(sum(self.live_bytes_of(layer)) for layer in self.layers)

    def layout_of(self, layer: LayerInfo) -> PackLayout:
        """Layout of a layer: that of the cache, with its own kv heads and head_dim where they differ."""
        if layer.heads is None:
            return self.layout
        return replace(self.layout, kv_heads=layer.heads[0], head_dim=layer.heads[1])

    @property
    def is_uniform(self) -> bool:
        """Whether all layers have the same kv heads and head_dim."""
        return all(layer.heads is None for layer in self.layers)

    def live_bytes_of(self, layer: LayerInfo) -> tuple[int, int]:
        """Bytes of the live elements of a layer's K and V."""
        layout = self.layout_of(layer)
        words = layer.tokens * layout.kv_heads * layout.head_dim
        return (
            words * (1 if layout.int8_keys else layout.itemsize),
            words * (1 if layout.int8_values else layout.itemsize),
        )

    @property
    def file_bytes(self) -> int:
        """Bytes of the packed files of all layers."""
        return self.state_bytes + sum(
            self.layout_of(each).key_bytes(each.capacity) + self.layout_of(each).value_bytes(each.capacity)
            for each in self.layers
        )

    @property
    def state_bytes(self) -> int:
        """Bytes of the files of layers without K and V."""
        return sum(each.key_bytes + each.value_bytes for each in self.states)

    @property
    def numbers(self) -> list[int]:
        """Numbers of all layers, in order."""
        return sorted([*(each.layer for each in self.layers), *(each.layer for each in self.states)])


def joined(runs: Iterable[tuple[int, int]]) -> Ranges:
    """``(begin, size)`` runs with neighbours made one."""
    found: list[tuple[int, int]] = []
    for begin, size in runs:
        if found and begin == found[-1][0] + found[-1][1]:
            found[-1] = (found[-1][0], found[-1][1] + size)
        else:
            found.append((begin, size))
    return tuple(found)


def to_dict(info: CacheInfo) -> dict[str, Any]:
    """The document."""
    layout, ids = info.layout, info.token_ids
    return {
        "schema": SCHEMA,
        "schema_version": SCHEMA_VERSION,
        "kind": info.kind,
        "name": info.name,
        "kv_heads": layout.kv_heads,
        "head_dim": layout.head_dim,
        "dtype": layout.dtype,
        "lP": layout.lP,
        "hP": layout.hP,
        "flash_block": layout.flash_block,
        **_int8(layout),
        "token_ids": ids and {"count": ids.count, "sha256": ids.sha256},
        "model": info.model,
        **({} if info.next_position is None else {"next_position": info.next_position}),
        "layers": [_layer_to_dict(each) for each in info.layers],
        **({"states": [vars(each) for each in info.states]} if info.states else {}),
    }


def _layer_to_dict(layer: LayerInfo) -> dict[str, Any]:
    """Return what the document has of a layer; it is unchanged for caches that were never rotated."""
    fields: dict[str, Any] = {**vars(layer), "positions": [list(run) for run in layer.positions]}
    if fields.pop("text_positions") is not None:
        fields["text_positions"] = [list(run) for run in layer.text_runs]
    if (heads := fields.pop("heads")) is not None:
        fields |= {"kv_heads": heads[0], "head_dim": heads[1]}
    return fields


def _int8(layout: PackLayout) -> dict[str, Any]:
    """For people and ``--json``; documents are written of float caches only."""
    if not layout.quantised:
        return {}
    return {"int8": "both" if layout.int8_values else "keys", "lP8": layout.lP8, "hP8": layout.hP8}


def to_json(info: CacheInfo) -> str:
    """The document as JSON text on one line."""
    return json.dumps(to_dict(info))


def from_json(text: str | bytes, where: str) -> CacheInfo:
    """Check and take in a document; `where` begins the messages of errors.

    Raises
    ------
    ManifestError
        Naming the path of what is wrong.
    """
    root = parse(text, where, MAX_BYTES)
    root.check_schema(SCHEMA, SCHEMA_VERSION)
    if root.at("kind").text() not in KINDS:
        raise root.at("kind").wrong(f"one of {', '.join(KINDS)}")
    layers = tuple(_layer(node) for node in root.at("layers").items(least=1))
    if [each.layer for each in layers] != sorted({each.layer for each in layers}):
        raise ManifestError(f"{where}: layers: are not in order, each once")
    states = tuple(_state(node) for node in root.at("states").items()) if "states" in root.value else ()
    if len({each.layer for each in layers} | {each.layer for each in states}) != len(layers) + len(states):
        raise ManifestError(f"{where}: states: a layer has two states")
    ids, model = root.at("token_ids"), root.at("model")
    return CacheInfo(
        kind=root.at("kind").text(),
        name=root.at("name").text(),
        layout=_layout(root),
        layers=layers,
        token_ids=None if ids.value is None else TokenIds(ids.at("count").integer(1), ids.at("sha256").sha256()),
        model=None if model.value is None else model.sha256(),
        next_position=_next_position(root),
        states=tuple(sorted(states, key=lambda each: each.layer)),
    )


def _state(node: Node) -> StateLayer:
    kind = node.at("kind").text()
    if kind not in STATE_KINDS:
        raise node.at("kind").wrong(f"one of {', '.join(STATE_KINDS)}")
    sizes = node.at("key_bytes").integer(1), node.at("value_bytes").integer(1)
    return StateLayer(layer=node.at("layer").integer(0), kind=kind, key_bytes=sizes[0], value_bytes=sizes[1])


def _next_position(root: Node) -> int | None:
    if "next_position" not in root.value:
        return None
    number = root.at("next_position").integer(1)
    if number > _MAX_TOKENS:
        raise root.at("next_position").wrong("a 32-bit integer")
    return number


def _layout(root: Node) -> PackLayout:
    dtype = root.at("dtype")
    if dtype.text() not in dtypes.BY_NAME:
        raise dtype.wrong(f"one of {', '.join(dtypes.BY_NAME)}")
    numbers = {key: root.at(key).integer(1) for key in ("kv_heads", "head_dim", "lP", "hP")}
    for key, number in numbers.items():
        if number > _MAX_TOKENS:
            raise root.at(key).wrong("a 32-bit integer")
    block = root.at("flash_block")
    return PackLayout(
        numbers["kv_heads"],
        numbers["head_dim"],
        dtype.text(),
        numbers["lP"],
        numbers["hP"],
        None if block.value is None else block.integer(1),
    )


def _layer(node: Node) -> LayerInfo:
    runs = _runs(node.at("positions"))
    text_runs = _runs(node.at("text_positions")) if "text_positions" in node.value else None
    try:
        return LayerInfo(
            layer=node.at("layer").integer(0),
            tokens=node.at("tokens").integer(1),
            capacity=node.at("capacity").integer(1),
            positions=runs,
            text_positions=text_runs,
            heads=_heads(node),
        )
    except ManifestError:
        raise
    except KvmnnError as exc:
        raise ManifestError(f"{node.where}: {node.path}: {exc}") from None


def _heads(node: Node) -> tuple[int, int] | None:
    if "kv_heads" not in node.value:
        return None
    heads, dims = (node.at(key).integer(1) for key in ("kv_heads", "head_dim"))
    if max(heads, dims) > _MAX_TOKENS:
        raise node.wrong("32-bit integers for kv_heads and head_dim")
    return heads, dims


def _runs(node: Node) -> Ranges:
    runs = []
    for run in node.items(least=1):
        begin, size = (each.integer(least) for each, least in zip(run.items(least=2, most=2), (0, 1), strict=True))
        if begin + size > _MAX_TOKENS:
            raise run.wrong(f"positions below {_MAX_TOKENS:,}")
        runs.append((begin, size))
    return tuple(runs)
