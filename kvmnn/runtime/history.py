"""K and V of all layers as they were computed once, to be run through a runtime again."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from ..arrays.layers import common_geometry, place_said, sorted_layers
from ..arrays.source import Source
from ..dtypes import Floats, KVPair, Words, by_name
from ..errors import KvmnnError, SourceError


@dataclass(frozen=True, eq=False)
class History:
    """K and V of every layer, token by token.

    Attributes
    ----------
    layers
        K and V, each ``[kv_head, token, head_dim]``, of one geometry and dtype.
    dtype
        ``"fp16"``, ``"bf16"`` or ``"fp32"``.
    """

    layers: tuple[KVPair, ...]
    dtype: str

    def __post_init__(self) -> None:
        shapes = {part.shape for layer in self.layers for part in layer}
        if len(shapes) != 1:
            raise KvmnnError(
                f"layers have shapes {', '.join(str(list(shape)) for shape in sorted(shapes))}: expected "
                "[kv_head, token, head_dim], the same for all"
            )
        if self.tokens == 0:
            raise KvmnnError("a history of no tokens: expected at least 1")

    @property
    def kv_heads(self) -> int:
        """Heads of each layer."""
        return int(self.layers[0][0].shape[0])

    @property
    def tokens(self) -> int:
        """Tokens of each layer."""
        return int(self.layers[0][0].shape[1])

    @property
    def head_dim(self) -> int:
        """Words of a token in one head."""
        return int(self.layers[0][0].shape[2])


def history_of(source: Source) -> History:
    """The K and V of a source.

    Raises
    ------
    SourceError
        For arrays that are no K and V, or of layers that differ in geometry or length.
    """
    arrays = sorted_layers(source)
    _, _, dtype = common_geometry(arrays, place_said(source))
    words = by_name(dtype).numpy

    def rows(index: int) -> Words:
        entry = arrays[index]
        array = entry.array.to_numpy()
        array = array.astype(array.dtype.newbyteorder("<")).view(words)
        return np.ascontiguousarray(array.transpose(1, 0, 2) if entry.token_major else array)

    layers = tuple((rows(index), rows(index + 1)) for index in range(0, len(arrays), 2))
    with _named(source):
        return History(layers, dtype)


@contextmanager
def _named(source: Source) -> Iterator[None]:
    """Errors about what `source` holds begin with its name."""
    try:
        yield
    except KvmnnError as error:
        raise SourceError(f"{place_said(source)}{error}") from None


def attention_of(source: Source, layers: int, tokens: int) -> tuple[Floats, ...]:
    """Attention probabilities of every layer, ``[head, query, key]``, in the order of the arrays.

    Raises
    ------
    SourceError
        As `check_attention`.
    """
    found: list[Floats] = []
    for array in source.arrays:
        values = array.to_numpy().astype(np.float32)
        found += [*values] if values.ndim == 4 else [values]
    with _named(source):
        check_attention(found, layers, tokens)
    return tuple(found)


def check_attention(attention: Sequence[Floats], layers: int, tokens: int) -> None:
    """Refuse attention of another number of layers, heads or tokens, and numbers that are no probabilities.

    Raises
    ------
    KvmnnError
        For any of these.
    """
    heads = attention[0].shape[0] if attention and attention[0].ndim == 3 else "head"
    for number, values in enumerate(attention):
        if values.ndim != 3 or values.shape[1:] != (tokens, tokens) or values.shape[0] != heads:
            raise KvmnnError(
                f"attention of layer {number} has shape {list(values.shape)}: expected [{heads}, {tokens}, {tokens}]"
            )
        if values.size and not (values.min() >= 0 and values.max() < np.inf):
            raise KvmnnError(f"attention of layer {number} is below 0 or not finite: expected probabilities")
    if len(attention) != layers:
        raise KvmnnError(f"attention of {len(attention)} layers: expected {layers}")
