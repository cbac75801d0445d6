"""K and V out of a prompt cache: the valid tokens of every layer, quantised groups as numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ... import dtypes
from ...arrays.engine_cache import BatchText, EngineCache
from ...arrays.layers import array_name
from ...arrays.named_array import NamedArray, Piece, UnsupportedArrayError, rechunked
from ...arrays.source import Source
from ...dtypes import PARTS, Part
from ...text import count
from ..file_bytes import FileBytes
from ..options import ReadOptions
from ..reading import dequantised_note
from ..safetensors_header import Tensor
from .classes import Layer, describe_states, read_layers
from .groups import numbers
from .states import States, numpy_type

ENGINE = "MLX"
_NAMES = {"F16": "float16", "BF16": "bfloat16", "F32": "float32"}
_DTYPES = {"F16": "fp16", "BF16": "bf16", "F32": "fp32"}


def read(file: FileBytes, options: ReadOptions) -> Source:
    """``layer_<n>.key`` and ``.value``, ``[kv_head, token, head_dim]``, with a batch of several texts in front of it.

    The padding behind the valid tokens is left out.

    Raises
    ------
    SourceError
        For a file that is damaged, or has K and V in no class of cache that is read.
    """
    states = States(file)
    layers = read_layers(states)
    arrays = [_array(states, layer, part, options) for layer in layers for part in PARTS]
    described = _described(states, layers, options)
    notes = [*_notes(layers, arrays, described), *_padding_notes(states, layers)]
    return Source(arrays, notes=notes, engine_cache=described, completeness=describe_states(states, layers))


def _padding_notes(states: States, layers: Sequence[Layer]) -> list[str]:
    """Say which rows of a batch are padding in all of its texts, and left out."""
    left_out = max(layer.spans[0][0] for layer in layers)
    if not layers[0].lengths or not left_out:
        return []
    return [f"{count(left_out, 'row')} of padding left out, which all texts of the batch have (left_padding)"]


def _notes(layers: Sequence[Layer], arrays: Sequence[NamedArray], described: EngineCache) -> list[str]:
    """What numbers that stand for groups were made from."""
    if not described.dequantised:
        return []
    quantised = [layer for layer in layers if layer.bits]
    names = {array_name(layer.number, part) for layer in quantised for part in PARTS}
    made = [array for array in arrays if array.name in names]
    blocks = sum(
        (tensor.end - tensor.begin) // tensor.shape[2] * layer.tokens
        for layer in quantised
        for tensor in (*layer.keys, *layer.values)
    )
    dtype = " and ".join(sorted({array.dtype for array in made}))
    return [dequantised_note(described.dequantised, dtype, blocks, sum(array.nbytes for array in made))]


def _tensors(layer: Layer, part: Part) -> tuple[Tensor, ...]:
    return layer.keys if part == "key" else layer.values


def _array(states: States, layer: Layer, part: Part, options: ReadOptions) -> NamedArray:
    tensors, name = _tensors(layer, part), array_name(layer.number, part)
    first = tensors[0]
    batch, heads = first.shape[:2]
    if layer.bits and options.engine.blocks:
        return _code_array(states, layer, first, name)
    words = tensors[1] if layer.bits else first
    dims = first.shape[3] * 32 // layer.bits if layer.bits else first.shape[3]
    dtype = _DTYPES[words.kind]
    if options.dtype not in (None, dtype):
        raise UnsupportedArrayError(f"{states.file.label}: {name} holds {dtype} words, not {options.dtype}")
    runs = partial(_group_runs, states, layer, tensors) if layer.bits else partial(_valid_runs, states, layer, first)
    shape = (heads, layer.tokens, dims)
    return NamedArray(
        name=name,
        dtype=dtype,
        shape=shape if batch == 1 else (batch, *shape),
        array_dtype=dtypes.by_name(dtype).numpy.str,
        reader=runs,
    )


def _code_array(states: States, layer: Layer, codes: Tensor, name: str) -> NamedArray:
    """The packed codes as bytes, ``[kv_head, token, byte]``."""
    batch, heads, _, words = codes.shape
    shape = (heads, layer.tokens, 4 * words)
    return NamedArray(
        name=name,
        dtype="fp16",
        shape=shape if batch == 1 else (batch, *shape),
        array_dtype="|u1",
        reader=partial(_valid_runs, states, layer, codes),
    )


def _valid_runs(states: States, layer: Layer, tensor: Tensor, step: int) -> Iterator[Piece]:
    """The words of the valid tokens, head after head."""
    heads, capacity = tensor.shape[0] * tensor.shape[1], tensor.shape[2]
    begin, size = states.header.start + tensor.begin, (tensor.end - tensor.begin) // heads
    valid = size // capacity * layer.tokens
    if layer.spans != ((0, layer.tokens),):
        row = size // capacity
        parts = (
            states.file.view(begin + head * size + first * row, (last - first) * row)
            for head in range(heads)
            for first, last in layer.spans
        )
        yield from rechunked(parts, step, heads * valid)
        states.file.drop(begin, tensor.end - tensor.begin)
        return
    if valid == size:
        yield from states.file.runs(begin, tensor.end - tensor.begin, step)
        return
    for start in range(0, heads * valid, step):
        head, place = divmod(start, valid)
        if place + min(step, heads * valid - start) <= valid:
            yield states.file.view(begin + head * size + place, min(step, heads * valid - start))
            continue
        run = np.empty(min(step, heads * valid - start), np.uint8)
        done = 0
        while done < run.size:
            head, place = divmod(start + done, valid)
            nbytes = min(valid - place, run.size - done)
            run[done : done + nbytes] = states.file.view(begin + head * size + place, nbytes)
            done += nbytes
        yield run
        del run
    states.file.drop(begin, tensor.end - tensor.begin)


def _group_runs(states: States, layer: Layer, tensors: tuple[Tensor, ...], step: int) -> Iterator[Piece]:
    """The numbers of the valid tokens."""
    codes, scales, _ = tensors
    dtype = np.dtype(numpy_type(scales))
    sizes = 4 * codes.shape[3], scales.shape[3] * dtype.itemsize
    row = codes.shape[3] * 32 // layer.bits * dtype.itemsize
    if step % row:
        rows = codes.shape[0] * codes.shape[1] * layer.tokens
        yield from rechunked(_group_runs(states, layer, tensors, max(step // row, 1) * row), step, rows * row)
        return
    readers = [
        _valid_runs(states, layer, tensor, step // row * size)
        for tensor, size in zip(tensors, (sizes[0], sizes[1], sizes[1]), strict=True)
    ]
    for packed, scale, bias in zip(*readers, strict=True):
        groups = [words.view(dtype).reshape(-1, scales.shape[3]) for words in (scale, bias)]
        made = numbers(packed.reshape(-1, sizes[0]), groups[0], groups[1], layer.bits)
        yield made.reshape(-1).view(np.uint8)
        del made  # or it would live on while the next run is made


def _described(states: States, layers: list[Layer], options: ReadOptions) -> EngineCache:
    same = all(np.array_equal(layer.positions, layers[0].positions) for layer in layers)
    types = [_type(layer, part) for part in PARTS for layer in layers]
    heads, dims = tuple(_shape(layer)[1] for layer in layers), {_shape(layer)[2] for layer in layers}
    groups = sorted({_type(layer, part) for layer in layers if layer.bits for part in PARTS})
    return EngineCache(
        engine=ENGINE,
        kind="prompt cache",
        layers=len(layers),
        kv_heads=heads[0] if len({*heads}) == 1 else None,
        layer_kv_heads=heads if len({*heads}) > 1 else (),
        head_dim=dims.pop() if len(dims) == 1 else None,
        tokens=max(layer.tokens for layer in layers),
        types=tuple(types),
        batch=_shape(layers[0])[0],
        positions=layers[0].positions if same else None,
        layer_positions=None if same else tuple(layer.positions for layer in layers),
        texts=_texts(layers[0]),
        dequantised=() if options.engine.blocks else tuple(groups),
        room_bytes=_room_bytes(layers),
        details=_details(states, layers),
    )


def _room_bytes(layers: Sequence[Layer]) -> int:
    """Return the bytes of K and V in the file that are no valid tokens."""
    return sum(
        (tensor.end - tensor.begin) // tensor.shape[2] * (tensor.shape[2] - layer.tokens)
        for layer in layers
        for tensor in (*layer.keys, *layer.values)
    )


def _texts(layer: Layer) -> tuple[BatchText, ...]:
    """The texts of a batch that has padding before them."""
    if not layer.lengths or set(layer.lengths) == {layer.end}:
        return ()
    return tuple(BatchText(np.arange(layer.end - length, layer.end)) for length in layer.lengths)


def _shape(layer: Layer) -> tuple[int, int, int]:
    """Batch, kv heads and head_dim of K."""
    batch, heads, _, last = layer.keys[0].shape
    return batch, heads, last * 32 // layer.bits if layer.bits else last


def _type(layer: Layer, part: Part) -> str:
    if layer.bits:
        return f"{layer.bits} bits in groups of {layer.group_size}"
    return _NAMES[_tensors(layer, part)[0].kind]


def _details(states: States, layers: list[Layer]) -> dict[str, Any]:
    first = layers[0]
    more = {"bits": first.bits, "group_size": first.group_size} if first.bits else {}
    return {"classes": list(dict.fromkeys(states.classes)), "capacity": first.keys[0].shape[2], **more}
