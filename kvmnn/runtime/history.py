"""K and V of all layers as they were computed once, to be run through a runtime again."""

from __future__ import annotations

from collections.abc import Sequence
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

    try:
        return History(tuple((rows(index), rows(index + 1)) for index in range(0, len(arrays), 2)), dtype)
    except SourceError:
        raise
    except KvmnnError as error:
        raise SourceError(str(error)) from None


def attention_of(source: Source, layers: int, tokens: int) -> tuple[Floats, ...]:
    """Attention probabilities of every layer, ``[head, query, key]``, in the order of the arrays.

    Raises
    ------
    SourceError
        For another number of layers or tokens.
    """
    found: list[Floats] = []
    for array in source.arrays:
        values = array.to_numpy().astype(np.float32)
        found += [*values] if values.ndim == 4 else [values]
    for number, values in enumerate(found):
        if values.ndim != 3 or values.shape[1:] != (tokens, tokens):
            raise SourceError(
                f"attention of layer {number} has shape {list(values.shape)}: expected [head, {tokens}, {tokens}]"
            )
    if len(found) != layers:
        raise SourceError(f"attention of {len(found)} layers: expected {layers}")
    return tuple(found)


def check_attention(attention: Sequence[Floats] | None, evicts: bool) -> None:
    """Refuse an eviction without scores."""
    if evicts and attention is None:
        raise KvmnnError("kv_h2o_enable without attention: an eviction plan needs scores (kvmnn replay --scores)")
