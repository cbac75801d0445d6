"""Encode K and V of layers as linear streams (docs/format-linear.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dense import encode as encode_dense
from ..dense.header import DTYPES
from ..dtypes import PARTS, Bytes, DType, Part, infer_dtype
from ..errors import KvmnnError, LimitError
from ..profiles.profile import Profile
from .header import (
    MAX_POSITION,
    MAX_SIDE_BYTES,
    MAX_TOKENS,
    METHOD_DENSE,
    METHOD_LINEAR,
    METHOD_WORDS,
    append_varint,
    write_stream,
)
from .lower_rows import LayerRows, build_rows, select_blocks
from .model import LinearModel, check_below, get_model

_NUM_DENSE_LAYERS = 2
"""In the first layers rows repeat: dense streams are tried there."""
_MAX_LINEAR_FRACTION = 0.85
"""Of raw bytes: dense streams are tried where linear ones are longer."""


def encode_layer(layer: LayerCache, profile: Profile, lower: Sequence[LayerCache] = (), *, below: int = 2) -> bytes:
    """Encode K and V of a layer, losslessly.

    Parameters
    ----------
    layer
        The layer. Where heads have positions of their own, its stream is not linear.
    profile
        A profile with linear tables of this `below`; `decode_layer` requires the same.
    lower
        The layers below it, up to `below` of them, in any order; `decode_layer` requires them. Tokens are matched by
        their positions.
    below
        How many layers below predict a layer: 0, 1 or 2.

    Returns
    -------
    bytes
        At most 64 bytes more than K, V and, where they are not 0, 1, 2 ..., positions take.

    Raises
    ------
    KvmnnError
        For a layer that the profile does not have, lower layers that are missing, or a profile without such tables.
    LimitError
        Above the limits of the format.
    """
    model = get_model(profile, check_below(profile, below))
    rows = {cache.layer: build_rows(model, cache) for cache in lower}
    return _encode_rows(model, profile, build_rows(model, layer), rows)


def encode_layers(layers: Iterable[LayerCache], profile: Profile, *, below: int = 2) -> Iterator[bytes]:
    """Yield the stream of each layer of a cache, from layer 0 up; faster than `encode_layer` for each.

    Raises
    ------
    KvmnnError, LimitError
        As `encode_layer`, and for layers that are not 0, 1, 2 ...
    """
    model = get_model(profile, check_below(profile, below))
    rows: dict[int, LayerRows] = {}
    for number, layer in enumerate(layers):
        if layer.layer != number:
            raise KvmnnError(f"layer {layer.layer} at place {number}: expected the layers of a cache in their order")
        rows[number] = build_rows(model, layer)
        yield _encode_rows(model, profile, rows[number], rows)
        rows.pop(number - below, None)


def _encode_rows(model: LinearModel, profile: Profile, rows: LayerRows, lower: dict[int, LayerRows]) -> bytes:
    layer = rows.cache
    profile.check_layer(layer)
    dtype = infer_dtype(layer.keys)
    _check_limits(layer, dtype)
    sides = [_encode_side(model, rows, lower, part, dtype) for part in PARTS]
    return write_stream(
        dtype,
        model.below,
        (sides[0][0], sides[1][0]),
        layer.layer,
        (layer.kv_heads, layer.head_dim, layer.value_dim, layer.tokens),
        profile.key,
        layer.positions,
        (sides[0][1], sides[1][1]),
        rows.words,
    )


def _encode_side(
    model: LinearModel, rows: LayerRows, lower: dict[int, LayerRows], part: Part, dtype: DType
) -> tuple[int, bytes]:
    """Return method and payload of K or V: the shortest of those that are tried."""
    layer, words = rows.cache, rows.get_words(part)
    best_method, best = METHOD_WORDS, words.tobytes()
    side = model.get_side(layer.layer, part)
    blocks = select_blocks(model, rows, lower, part)
    if side is not None and layer.positions.ndim == 1 and layer.tokens:
        head, is_constant = _find_constants(words, layer.tokens, dtype)
        data = side.encode(DTYPES.index(dtype), words, rows.positions, blocks, is_constant)
        # the profile's key is in the stream for it
        if len(head) + len(data) + 32 < len(best):
            best_method, best = METHOD_LINEAR, head + data
    is_short = best_method == METHOD_LINEAR and len(best) <= _MAX_LINEAR_FRACTION * words.size
    if layer.tokens and words.size and not (is_short and layer.layer >= _NUM_DENSE_LAYERS):
        elements = layer.keys if part == "key" else layer.values
        frequencies = model.layers[layer.layer].rope if part == "key" and layer.positions.ndim == 1 else None
        rotation = None if frequencies is None else frequencies.rotation
        positions = None if rotation is None else layer.positions
        dense = encode_dense(elements, rotary=rotation, positions=positions)  # type: ignore[arg-type]
        if len(dense) < len(best):
            best_method, best = METHOD_DENSE, dense
    return best_method, best


def _find_constants(words: Bytes, tokens: int, dtype: DType) -> tuple[bytes, Bytes | None]:
    """Return the list of elements that are the same word in all rows, as in the stream, and a mask of them."""
    table = words.view(f"<u{dtype.itemsize}").reshape(tokens, -1)
    candidates = np.flatnonzero(table[0] == table[-1]) if tokens > 1 else np.zeros(0, np.int64)
    constants = candidates[(table[:, candidates] == table[0, candidates]).all(axis=0)]
    head = bytearray()
    append_varint(head, len(constants))
    previous = -1
    for element in constants.tolist():
        append_varint(head, element - previous - 1)
        head += table[0, element].tobytes()
        previous = element
    if not len(constants):
        return bytes(head), None
    mask = np.zeros(table.shape[1], np.uint8)
    mask[constants] = 1
    return bytes(head), mask


def _check_limits(layer: LayerCache, dtype: DType) -> None:
    row = layer.kv_heads * max(layer.head_dim, layer.value_dim)
    if layer.tokens > MAX_TOKENS or layer.tokens * row * dtype.itemsize > MAX_SIDE_BYTES or layer.layer > 65535:
        raise LimitError(
            f"layer {layer.layer}: {layer.tokens:,} tokens of {row:,} elements: a linear stream holds at most "
            f"{MAX_TOKENS:,} and less than 4 GiB of K and of V"
        )
    if layer.positions.max(initial=0) > MAX_POSITION:
        raise LimitError(f"layer {layer.layer}: a position above 2^31 - 1")
