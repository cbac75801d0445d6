"""What prefixes must have in common to share anything: the model, the precision, and the shapes of its layers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .. import dtypes
from ..arrays.layer_cache import LayerCache
from ..arrays.opaque_state import MAX_STATE_NAME, OpaqueState
from ..checks import shown
from ..dtypes import DType, Words
from ..errors import ArrayTypeError, KvmnnError
from ..files.json_document import Node, parse
from ..text import count

KEY_BYTES = 16
MAX_LAYERS = 4096
MAX_MODEL = 256
"""Characters of a fingerprint."""

_MAX_HEADS = 1 << 16
_MAX_HEAD_DIM = 1 << 20
_MAX_DOCUMENT = 1 << 20
_MAX_STATES = 1 << 14


class LayerShape(NamedTuple):
    """The shape of a layer's K and V, but for the tokens."""

    layer: int
    kv_heads: int
    head_dim: int
    value_dim: int
    """Words of V in one head: as many as K has, but for latent attention; 0 where there is no V."""

    @property
    def dims(self) -> tuple[int, int]:
        """Words of K and of V of a token in one head."""
        return self.head_dim, self.value_dim


class StateName(NamedTuple):
    """A state that is not K and V: its layer, and what the engine calls it."""

    layer: int
    name: str


@dataclass(frozen=True)
class Space:
    """A model, its precision and its layers: only within one do prefixes share blocks.

    Parameters
    ----------
    model
        Fingerprint of the model.
    dtype
        ``"fp16"``, ``"bf16"`` or ``"fp32"``.
    layers
        Those with full attention, in order: they share blocks.
    windows
        Those with a sliding window that contain the last tokens of their texts alone, in order. Their rows, and
        opaque state, are stored with each prefix, at its exact length (`kvmnn.store.prefix_state`).
    states
        Layer and name of each state that is not K and V, in order.
    """

    model: str
    dtype: str
    layers: tuple[LayerShape, ...]
    windows: tuple[LayerShape, ...] = ()
    states: tuple[StateName, ...] = ()

    @cached_property
    def key(self) -> bytes:
        """Key of the space, and of the empty prefix in it; other models, dtypes and shapes have others."""
        return hashlib.blake2b(b"kvmnn prefix store 1\n" + self.to_json().encode(), digest_size=KEY_BYTES).digest()

    @property
    def words(self) -> DType:
        """The element type."""
        return dtypes.by_name(self.dtype)

    @cached_property
    def parts(self) -> tuple[tuple[int, int], ...]:
        """K and V (0 and 1) of each layer, by its place among them, in the order of a unit's streams: V where it is."""
        return tuple((place, part) for place, shape in enumerate(self.layers) for part in range(2) if shape.dims[part])

    @property
    def needs_state(self) -> bool:
        """Whether a model resumes only where windows or state are stored, too."""
        return bool(self.windows or self.states)

    @property
    def all_layers(self) -> tuple[LayerShape, ...]:
        """All layers that have K and V, in order."""
        return tuple(sorted((*self.layers, *self.windows)))

    @property
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers with full attention."""
        return self.words.itemsize * sum(shape.kv_heads * sum(shape.dims) for shape in self.layers)

    def to_json(self) -> str:
        """The document, on one line."""
        document: dict[str, object] = {"model": self.model, "dtype": self.dtype, "layers": _listed(self.layers)}
        if self.needs_state:
            document |= {"windows": _listed(self.windows), "states": [list(state) for state in self.states]}
        return json.dumps(document, separators=(",", ":"), sort_keys=True)

    def __str__(self) -> str:
        """For people: ``6 layers, 4 kv heads x 64 dims, fp32``."""
        shapes = sorted({shape[1:] for shape in self.all_layers})
        sizes = " and ".join(
            f"{count(heads, 'kv head')} x {dims} dims{_values_said(dims, of_values)}"
            for heads, dims, of_values in shapes[:3]
        )
        states = f", {count(len(self.states), 'state')}" if self.states else ""
        return f"{len(self.all_layers)} layers, {sizes}{' and more' if len(shapes) > 3 else ''}, {self.dtype}{states}"


def _listed(shapes: Sequence[LayerShape]) -> list[list[int]]:
    return [list(shape if shape.value_dim != shape.head_dim else shape[:3]) for shape in shapes]


def said_apart(one: Space, other: Space) -> tuple[str, str]:
    """Two spaces of a model and dtype, such that they do not read alike."""
    if str(one) != str(other):
        return str(one), str(other)
    layers = zip(one.all_layers, other.all_layers, strict=False)
    first, second = next(((a, b) for a, b in layers if a != b), (None, None))
    if first is None or second is None:
        return f"state {_named(one.states)}", f"state {_named(other.states)}"
    return _layer_said(first), _layer_said(second)


def _named(states: Sequence[StateName]) -> str:
    names = [f"{state.name!r} of layer {state.layer}" for state in states[:3]]
    return ", ".join(names) + (" ..." if len(states) > len(names) else "") or "of no layer"


def _layer_said(shape: LayerShape) -> str:
    return f"a layer {shape.layer} of {count(shape.kv_heads, 'kv head')} x {shape.head_dim}, V {shape.value_dim}"


def _values_said(dims: int, of_values: int) -> str:
    if of_values == dims:
        return ""
    return f" (V {of_values})" if of_values else " (no V)"


def check_model(model: object) -> str:
    """A fingerprint; `KvmnnError` or `TypeError` for what is none."""
    if not isinstance(model, str):
        raise TypeError(f"model must be a string, the fingerprint of a model, not {type(model).__name__}")
    if not model or len(model) > MAX_MODEL or not model.isprintable():
        raise KvmnnError(f"model is {shown(model)}: expected a fingerprint of 1 to {MAX_MODEL} printable characters")
    return model


def space_of(
    layers: Sequence[LayerCache],
    model: str,
    windows: Sequence[LayerCache] = (),
    states: Sequence[OpaqueState] = (),
) -> Space:
    """The space that the caches of all layers belong to, which are in order; `windows` contain the last tokens alone.

    Raises
    ------
    KvmnnError
        For no layers, layers twice or in another order, of different dtypes, or shapes beyond all models.
    """
    shapes, of_windows = (
        tuple(LayerShape(cache.layer, cache.kv_heads, cache.head_dim, cache.value_dim) for cache in each)
        for each in (layers, windows)
    )
    found = {cache.dtype for cache in (*layers, *windows)}
    if len(found) > 1:
        raise KvmnnError(f"the layers are {' and '.join(sorted(found))}: expected one dtype")
    names = tuple(StateName(state.layer, state.name) for state in states)
    return _checked(Space(check_model(model), found.pop() if found else "fp16", shapes, of_windows, names))


def from_json(text: object, where: str) -> Space:
    """Check and take in a document; `ManifestError`, or another `KvmnnError`, that begins with `where`."""
    if not isinstance(text, str):
        raise KvmnnError(f"{where}: is no JSON text")
    root = parse(text, where, _MAX_DOCUMENT)
    dtype = root.at("dtype")
    if dtype.text() not in dtypes.BY_NAME:
        raise dtype.wrong(f"one of {', '.join(dtypes.BY_NAME)}")
    needs_state = "windows" in root.value
    shapes = _read_shapes(root.at("layers"), 0 if needs_state else 1)
    windows = _read_shapes(root.at("windows"), 0) if needs_state else ()
    states = []
    for entry in root.at("states").items(most=_MAX_STATES) if needs_state else ():
        layer, name = entry.items(least=2, most=2)
        states.append(StateName(layer.integer(0), name.text()))
    try:
        return _checked(Space(check_model(root.at("model").text()), dtype.text(), shapes, windows, tuple(states)))
    except KvmnnError as error:
        raise KvmnnError(f"{where}: {error}") from None


def _read_shapes(node: Node, least: int) -> tuple[LayerShape, ...]:
    shapes = []
    for entry in node.items(least=least, most=MAX_LAYERS):
        layer, heads, dims, *others = entry.items(least=3, most=4)
        of_values = others[0] if others else dims
        shapes.append(LayerShape(layer.integer(0), heads.integer(1), dims.integer(1), of_values.integer(0)))
    return tuple(shapes)


def _checked(space: Space) -> Space:
    numbers = [shape.layer for shape in space.layers]
    if space.needs_state:
        of_windows, states = [shape.layer for shape in space.windows], list(space.states)
        if numbers != sorted(set(numbers)) or of_windows != sorted(set(of_windows)) or states != sorted(set(states)):
            raise KvmnnError(f"the layers are {shown([numbers, of_windows])}: expected each once, in order")
        for state in space.states:
            if not 0 < len(state.name) <= MAX_STATE_NAME or not state.name.isprintable():
                raise KvmnnError(f"the name of a state is {shown(state.name)}")
        numbers = [shape.layer for shape in space.all_layers] or [0]
    if not numbers or len(numbers) > MAX_LAYERS:
        raise KvmnnError(f"there are {len(numbers):,} layers: expected 1 to {MAX_LAYERS:,}")
    if numbers != sorted(set(numbers)):
        raise KvmnnError(f"the layers are {shown(numbers)}: expected each once, in order")
    for shape in space.all_layers:
        if not (1 <= shape.kv_heads <= _MAX_HEADS and shape.head_dim >= 1 and max(shape.dims) <= _MAX_HEAD_DIM):
            raise KvmnnError(f"layer {shape.layer} has {shape.kv_heads:,} kv heads x {max(shape.dims):,} dims")
    return space


def split_windows(layers: Sequence[LayerCache], windows: Collection[int]) -> tuple[list[LayerCache], list[LayerCache]]:
    """Return the layers that contain all tokens, and those of `windows` that contain the last tokens alone.

    A layer with a window that still contains every token is one of the first: what is stored of it is complete for each
    beginning of its text.

    Raises
    ------
    KvmnnError
        For a layer with a window that contains other tokens than the last.
    ArrayTypeError
        For other objects.
    """
    full, last = [], []
    for cache in layers:
        if not isinstance(cache, LayerCache):
            raise ArrayTypeError(f"layers are {type(cache).__name__}: expected kvmnn.LayerCache")
        seen, size = cache.tokens_seen, cache.tokens
        if cache.layer not in windows or size == seen:
            full.append(cache)
            continue
        places = np.arange(seen - size, seen)
        if not size or cache.positions.shape != (size,) or not (cache.positions == places).all():
            raise KvmnnError(f"layer {cache.layer} has a window, and does not contain the last tokens of its text")
        last.append(cache)
    return full, sorted(last, key=lambda cache: cache.layer)


def checked_layers(layers: Sequence[LayerCache], tokens: int, windows: Sequence[LayerCache] = ()) -> list[LayerCache]:
    """The layers in order, each with K and V of all `tokens` tokens of the text and of no others; those of `windows`
    must end with the text.

    Raises
    ------
    KvmnnError
        For a cache of another number of tokens, or one that lacks tokens or has others in their places.
    """
    for cache in layers:
        if not isinstance(cache, LayerCache):
            raise ArrayTypeError(f"layers are {type(cache).__name__}: expected kvmnn.LayerCache")
    found = sorted(layers, key=lambda cache: cache.layer)
    for cache in windows:
        if cache.tokens_seen != tokens:
            raise KvmnnError(
                f"layer {cache.layer} has a window that ends behind {cache.tokens_seen:,} tokens, there are {tokens:,} "
                "token ids"
            )
    places = np.arange(tokens)
    for cache in found:
        if cache.tokens != tokens:
            raise KvmnnError(f"layer {cache.layer} holds {cache.tokens:,} tokens, there are {tokens:,} token ids")
        if not ((cache.positions == places).all() and (cache.ends == places + 1).all()):
            raise KvmnnError(
                f"layer {cache.layer} does not hold the tokens 0 to {tokens - 1:,} of its text, each once: a cache "
                "that was cut is no prefix"
            )
    return found


def parts_of(layers: Sequence[LayerCache]) -> list[Words]:
    """K and V of each layer, in the order of `Space.parts`."""
    return [words for cache in layers for words in (cache.keys, cache.values) if words.shape[2]]
