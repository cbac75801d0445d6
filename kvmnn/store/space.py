"""What prefixes must have in common to share anything: the model, the precision, and the shapes of its layers."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from .. import dtypes
from ..arrays.layer_cache import LayerCache
from ..checks import shown
from ..dtypes import DType, Words
from ..errors import ArrayTypeError, KvmnnError
from ..files.json_document import parse
from ..text import count

KEY_BYTES = 16
MAX_LAYERS = 4096
MAX_MODEL = 256
"""Characters of a fingerprint."""

_MAX_HEADS = 1 << 16
_MAX_HEAD_DIM = 1 << 20
_MAX_DOCUMENT = 1 << 20


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
        In order.
    """

    model: str
    dtype: str
    layers: tuple[LayerShape, ...]

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
    def token_bytes(self) -> int:
        """Bytes of K and V of one token in all layers."""
        return self.words.itemsize * sum(shape.kv_heads * sum(shape.dims) for shape in self.layers)

    def to_json(self) -> str:
        """The document, on one line."""
        shapes = [list(shape if shape.value_dim != shape.head_dim else shape[:3]) for shape in self.layers]
        document = {"model": self.model, "dtype": self.dtype, "layers": shapes}
        return json.dumps(document, separators=(",", ":"), sort_keys=True)

    def __str__(self) -> str:
        """For people: ``6 layers, 4 kv heads x 64 dims, fp32``."""
        shapes = sorted({shape[1:] for shape in self.layers})
        sizes = " and ".join(
            f"{count(heads, 'kv head')} x {dims} dims{_values_said(dims, of_values)}"
            for heads, dims, of_values in shapes[:3]
        )
        return f"{len(self.layers)} layers, {sizes}{' and more' if len(shapes) > 3 else ''}, {self.dtype}"


def said_apart(one: Space, other: Space) -> tuple[str, str]:
    """Two spaces of a model and dtype, such that they do not read alike."""
    if str(one) != str(other):
        return str(one), str(other)
    first, second = next((a, b) for a, b in zip(one.layers, other.layers, strict=False) if a != b)
    return _layer_said(first), _layer_said(second)


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


def space_of(layers: Sequence[LayerCache], model: str) -> Space:
    """The space that the caches of all layers belong to, which are in order.

    Raises
    ------
    KvmnnError
        For no layers, layers twice or in another order, of different dtypes, or shapes beyond all models.
    """
    shapes = tuple(LayerShape(cache.layer, cache.kv_heads, cache.head_dim, cache.value_dim) for cache in layers)
    found = {cache.dtype for cache in layers}
    if len(found) > 1:
        raise KvmnnError(f"the layers are {' and '.join(sorted(found))}: expected one dtype")
    return _checked(Space(check_model(model), found.pop() if found else "fp16", shapes))


def from_json(text: object, where: str) -> Space:
    """Check and take in a document; `ManifestError`, or another `KvmnnError`, that begins with `where`."""
    if not isinstance(text, str):
        raise KvmnnError(f"{where}: is no JSON text")
    root = parse(text, where, _MAX_DOCUMENT)
    dtype = root.at("dtype")
    if dtype.text() not in dtypes.BY_NAME:
        raise dtype.wrong(f"one of {', '.join(dtypes.BY_NAME)}")
    shapes = []
    for entry in root.at("layers").items(least=1, most=MAX_LAYERS):
        layer, heads, dims, *others = entry.items(least=3, most=4)
        of_values = others[0] if others else dims
        shapes.append(LayerShape(layer.integer(0), heads.integer(1), dims.integer(1), of_values.integer(0)))
    try:
        return _checked(Space(check_model(root.at("model").text()), dtype.text(), tuple(shapes)))
    except KvmnnError as error:
        raise KvmnnError(f"{where}: {error}") from None


def _checked(space: Space) -> Space:
    numbers = [shape.layer for shape in space.layers]
    if not numbers or len(numbers) > MAX_LAYERS:
        raise KvmnnError(f"there are {len(numbers):,} layers: expected 1 to {MAX_LAYERS:,}")
    if numbers != sorted(set(numbers)):
        raise KvmnnError(f"the layers are {shown(numbers)}: expected each once, in order")
    for shape in space.layers:
        if not (1 <= shape.kv_heads <= _MAX_HEADS and shape.head_dim >= 1 and max(shape.dims) <= _MAX_HEAD_DIM):
            raise KvmnnError(f"layer {shape.layer} has {shape.kv_heads:,} kv heads x {max(shape.dims):,} dims")
    return space


def checked_layers(layers: Sequence[LayerCache], tokens: int) -> list[LayerCache]:
    """The layers in order, each with K and V of all `tokens` tokens of the text and of no others.

    Raises
    ------
    KvmnnError
        For a cache of another number of tokens, or one that lacks tokens or has others in their places.
    """
    for cache in layers:
        if not isinstance(cache, LayerCache):
            raise ArrayTypeError(f"layers are {type(cache).__name__}: expected kvmnn.LayerCache")
    found = sorted(layers, key=lambda cache: cache.layer)
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
