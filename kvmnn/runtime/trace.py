"""K and V of all layers as computed once, for replay through a runtime."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from .._util.dataclass import dataclass
from ..arrays.completeness import Completeness
from ..arrays.layers import collect_layers, format_input_prefix, require_common_geometry
from ..arrays.source import LOSSY_KEY, Source
from ..dtypes import Elements, Floats, KVPair, parse_dtype
from ..errors import KvmnnError, SourceError


@dataclass(frozen=True, eq=False)
class KVTrace:
    """K and V of every layer, token by token.

    Attributes
    ----------
    layers
        K and V, each ``[kv_head, token, head_dim]``, of one geometry and dtype.
    dtype
        ``"fp16"``, ``"bf16"`` or ``"fp32"``.
    completeness
        How much of the model's state the layers are; None if unknown.
    loss
        What K and V had lost before, in a sentence; empty if nothing is recorded.
    """

    layers: tuple[KVPair, ...]
    dtype: str
    completeness: Completeness | None = None
    loss: str = ""

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
        """Number of heads of each layer."""
        return int(self.layers[0][0].shape[0])

    @property
    def tokens(self) -> int:
        """Number of tokens of each layer."""
        return int(self.layers[0][0].shape[1])

    @property
    def head_dim(self) -> int:
        """Number of elements of a token in one head."""
        return int(self.layers[0][0].shape[2])


def read_trace(source: Source) -> KVTrace:
    """Read the K and V of a source.

    Raises
    ------
    SourceError
        For arrays that are no K and V, or of layers that differ in geometry or length.
    """
    arrays = collect_layers(source)
    _, _, dtype = require_common_geometry(arrays, format_input_prefix(source))
    element_type = parse_dtype(dtype).numpy_dtype

    def read_rows(index: int) -> Elements:
        entry = arrays[index]
        array = entry.array.to_numpy()
        array = array.astype(array.dtype.newbyteorder("<")).view(element_type)
        return np.ascontiguousarray(array.transpose(1, 0, 2) if entry.token_major else array)

    layers = tuple((read_rows(index), read_rows(index + 1)) for index in range(0, len(arrays), 2))
    with _prefix_errors(source):
        return KVTrace(layers, dtype, source.completeness, source.metadata.get(LOSSY_KEY, ""))


@contextmanager
def _prefix_errors(source: Source) -> Iterator[None]:
    """Prefix error messages about the content of `source` with its name."""
    try:
        yield
    except KvmnnError as error:
        raise SourceError(f"{format_input_prefix(source)}{error}") from None


def read_attention(source: Source, num_layers: int, tokens: int) -> tuple[Floats, ...]:
    """Read the attention probabilities of every layer, ``[head, query, key]``, in the order of the arrays.

    Raises
    ------
    SourceError
        The errors of `check_attention`.
    """
    probabilities: list[Floats] = []
    for array in source.arrays:
        values = array.to_numpy().astype(np.float32)
        probabilities += [*values] if values.ndim == 4 else [values]
    with _prefix_errors(source):
        check_attention(probabilities, num_layers, tokens)
    return tuple(probabilities)


def check_attention(attention: Sequence[Floats], num_layers: int, tokens: int) -> None:
    """Raise an error for attention of another number of layers, heads or tokens, or that contains no probabilities."""
    heads = attention[0].shape[0] if attention and attention[0].ndim == 3 else "head"
    for number, values in enumerate(attention):
        if values.ndim != 3 or values.shape[1:] != (tokens, tokens) or values.shape[0] != heads:
            raise KvmnnError(
                f"attention of layer {number} has shape {list(values.shape)}: expected [{heads}, {tokens}, {tokens}]"
            )
        if values.size and not (values.min() >= 0 and values.max() < np.inf):
            raise KvmnnError(f"attention of layer {number} is below 0 or not finite: expected probabilities")
    if len(attention) != num_layers:
        raise KvmnnError(f"attention of {len(attention)} layers: expected {num_layers}")
