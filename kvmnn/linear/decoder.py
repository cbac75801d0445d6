"""Decode linear streams to K and V of layers (docs/format-linear.md)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dense import decode as decode_dense
from ..dense.header import DTYPES, to_row_bytes
from ..dtypes import PARTS, Bytes, Elements, Part
from ..errors import FrameError, KvmnnError
from ..profiles.profile import Profile
from .header import METHOD_DENSE, METHOD_LINEAR, LinearHeader, check_words, read_header, read_varint
from .lower_rows import LayerRows, build_rows, select_blocks
from .model import LinearModel, check_below, get_model

_MAX_WORDS_PER_BYTE = 4096
"""A word takes 2^-9 of a byte or more unless it is of a constant element; there is room for these."""


def decode_layer(
    data: Any, profile: Profile | None, lower: Sequence[LayerCache] = (), *, max_bytes: int | None = None
) -> LayerCache:
    """Decode a linear stream.

    Parameters
    ----------
    data
        Bytes-like; exactly one stream.
    profile
        The profile with which it was encoded; None will do for streams that need none.
    lower
        The layers below that `encode_layer` was given, or decoded ones: the words are the same.
    max_bytes
        Reject a stream that claims more bytes of K and V, before any memory is allocated.

    Returns
    -------
    LayerCache
        K and V ``[kv_head, token, head_dim]``, in memory ``[token, kv_head, head_dim]``, and the positions.

    Raises
    ------
    FrameError
        If the stream violates the format, its checksum differs, or lower layers are others.
    KvmnnError
        For a profile or lower layers that are missing or of other sizes; the message has the key of the profile.
    LimitError
        Above `max_bytes`.
    """
    header = read_header(data, max_bytes)
    model = _open_model(header, profile)
    rows = {} if model is None else {cache.layer: build_rows(model, cache) for cache in lower}
    return _decode_header(header, model, rows)[0]


def decode_layers(
    streams: Iterable[Any], profile: Profile | None, *, max_bytes: int | None = None
) -> Iterator[LayerCache]:
    """Yield the layers of a cache, whose streams come from layer 0 up; faster than `decode_layer` for each.

    Raises
    ------
    FrameError, KvmnnError, LimitError
        As `decode_layer`; `max_bytes` is of each layer.
    """
    rows: dict[int, LayerRows] = {}
    for data in streams:
        header = read_header(data, max_bytes)
        model = _open_model(header, profile)
        cache, layer_rows = _decode_header(header, model, rows)
        if layer_rows is None and profile is not None:
            model = get_model(profile, header.below)
            layer_rows = build_rows(model, cache)
        if layer_rows is not None:
            rows[header.layer] = layer_rows
        rows.pop(header.layer - 2, None)
        yield cache


def _open_model(header: LinearHeader, profile: Profile | None) -> LinearModel | None:
    if header.key is None:
        return None
    if profile is None or profile.key != header.key:
        profile_text = "none is given" if profile is None else f"{profile.key.hex()} is given"
        raise KvmnnError(f"layer {header.layer}: encoded with the profile {header.key.hex()}: {profile_text}")
    return get_model(profile, check_below(profile, header.below))


def _decode_header(
    header: LinearHeader, model: LinearModel | None, lower: Mapping[int, LayerRows]
) -> tuple[LayerCache, LayerRows | None]:
    elements: list[Elements] = []
    words: list[Bytes] = []
    rows: LayerRows | None = None
    for index, part in enumerate(PARTS):
        shape = (header.tokens, header.kv_heads, header.dims[index])
        part_words = _decode_side(header, model, rows, lower, part)
        words.append(part_words)
        elements.append(part_words.view(header.dtype.numpy_dtype).reshape(shape).transpose(1, 0, 2))
        if part == "key" and model is not None:
            rows = _build_own_rows(header, model, elements[0], part_words)
    check_words(header, (words[0], words[1]))
    cache = LayerCache(layer=header.layer, keys=elements[0], values=elements[1], positions=header.positions)
    if rows is not None:
        rows.cache, rows.words = cache, (words[0], words[1])
    return cache, rows


def _build_own_rows(header: LinearHeader, model: LinearModel, keys: Elements, words: Bytes) -> LayerRows:
    """Return rows whose V is not there yet."""
    values = np.broadcast_to(np.zeros(1, keys.dtype), (header.kv_heads, header.tokens, header.value_dim))
    cache = LayerCache(layer=header.layer, keys=keys, values=values, positions=header.positions)
    return LayerRows(cache, (words, words[:0]), np.ascontiguousarray(header.positions))


def _decode_side(
    header: LinearHeader, model: LinearModel | None, rows: LayerRows | None, lower: Mapping[int, LayerRows], part: Part
) -> Bytes:
    index = PARTS.index(part)
    method, payload, dim = header.methods[index], header.payloads[index], header.dims[index]
    num_elements = header.kv_heads * dim
    num_bytes = header.tokens * num_elements * header.dtype.itemsize
    where = f"layer {header.layer}: {part}"
    if method == METHOD_LINEAR and model is not None:
        return _decode_linear(header, model, rows, lower, part)
    if method == METHOD_DENSE:
        array = decode_dense(payload, max_bytes=num_bytes)
        if array.shape != (header.kv_heads, header.tokens, dim) or array.dtype != header.dtype.numpy_dtype:
            raise FrameError(f"{where}: a dense stream of shape {list(array.shape)} and type {array.dtype}")
        return to_row_bytes(array, header.dtype)
    if payload.size != num_bytes:
        raise FrameError(f"{where}: {payload.size} bytes of words: expected {num_bytes}")
    return payload.copy()


def _decode_linear(
    header: LinearHeader, model: LinearModel, rows: LayerRows | None, lower: Mapping[int, LayerRows], part: Part
) -> Bytes:
    where = f"layer {header.layer}: {part}"
    index = PARTS.index(part)
    num_elements = header.kv_heads * header.dims[index]
    if header.layer >= len(model.layers):
        raise KvmnnError(f"layer {header.layer}: the profile is of {len(model.layers)} layers")
    geometry = model.layers[header.layer]
    if (geometry.kv_heads, geometry.get_dim(part)) != (header.kv_heads, header.dims[index]):
        raise FrameError(
            f"{where}: {header.kv_heads} heads of {header.dims[index]} elements: the profile has "
            f"{geometry.kv_heads} of {geometry.get_dim(part)}"
        )
    side = model.get_side(header.layer, part)
    if side is None or header.positions.ndim != 1 or not header.tokens:
        raise FrameError(f"{where}: linear, without tables in the profile, positions of its tokens, or tokens")
    payload = header.payloads[index]
    constants, offset = _read_constants(payload, num_elements, header.dtype.itemsize)
    num_words = header.tokens * (num_elements - len(constants))
    if num_words > _MAX_WORDS_PER_BYTE * payload.size:
        raise FrameError(f"{where}: {num_words} words in {payload.size} bytes")
    if rows is None:
        empty = np.zeros((header.kv_heads, header.tokens, 0), header.dtype.numpy_dtype)
        keys = np.zeros((header.kv_heads, header.tokens, header.head_dim), header.dtype.numpy_dtype)
        cache = LayerCache(layer=header.layer, keys=keys, values=empty, positions=header.positions)
        rows = LayerRows(cache, (np.zeros(0, np.uint8), np.zeros(0, np.uint8)), header.positions)
    blocks = select_blocks(model, rows, lower, part)
    words = np.zeros(header.tokens * num_elements * header.dtype.itemsize, np.uint8)
    mask: Bytes | None = None
    if constants:
        mask = np.zeros(num_elements, np.uint8)
        table = words.view(f"<u{header.dtype.itemsize}").reshape(header.tokens, num_elements)
        for element, word in constants:
            mask[element] = 1
            table[:, element] = word
    data = np.ascontiguousarray(payload[offset:])
    if not side.decode(DTYPES.index(header.dtype), data, rows.positions, blocks, mask, words):
        raise FrameError(
            f"{where}: an entropy coder that ends too early, too late or in another state than it began in"
        )
    return words


def _read_constants(payload: Bytes, num_elements: int, itemsize: int) -> tuple[list[tuple[int, int]], int]:
    count, offset = read_varint(payload, 0)
    if count > num_elements:
        raise FrameError(f"linear stream has {count} constant elements: its rows have {num_elements}")
    constants, element = [], -1
    for _ in range(count):
        distance, offset = read_varint(payload, offset)
        element += distance + 1
        if element >= num_elements or offset + itemsize > payload.size:
            raise FrameError("linear stream: a constant element beyond its row, or that is cut")
        constants.append((element, int.from_bytes(payload[offset : offset + itemsize].tobytes(), "little")))
        offset += itemsize
    return constants, offset
