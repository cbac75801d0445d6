"""Units back into K and V, every byte of them checked on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dtypes import Words
from ..errors import KvmnnError
from ..frames.decoding import Decoder
from ..threads.pool import map_pulled, resolve_threads
from .space import Space
from .token_ids import Ids
from .unit import DamagedError, Frame, Unit


class Stretch(NamedTuple):
    """Tokens of a unit: `take` of them behind the first `skip`."""

    unit: Unit
    skip: int
    take: int


class DamagedStretchError(DamagedError):
    """What is wrong with the stretch of this `number`."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


def check_unit(unit: Unit, space: Space, ids: Ids, skip: int, most_tokens: int) -> None:
    """Refuse a unit that does not hold `ids` behind its first `skip` tokens in `space`, or more than `most_tokens`.

    Raises
    ------
    DamagedError
        With what was found.
    """
    if unit.space != space.key or len(unit.frames) != 2 * len(space.layers):
        raise DamagedError("holds layers of another model")
    if unit.ids.size > most_tokens:
        raise DamagedError(f"holds {unit.ids.size:,} tokens: expected at most {most_tokens:,}")
    if not np.array_equal(unit.ids[skip : skip + ids.size], ids):
        raise DamagedError("holds other tokens than the index says")


def decode_stretches(space: Space, stretches: Sequence[Stretch], threads: int | None = None) -> list[LayerCache]:
    """K and V of all layers, of the tokens of all stretches one after another.

    Raises
    ------
    DamagedStretchError
        For frames that do not match their checksum, do not decode, or decode to other words than were put.
    """
    total = sum(stretch.take for stretch in stretches)
    begins = np.cumsum([0, *(stretch.take for stretch in stretches)]).tolist()
    decoder = Decoder(space.dtype)
    rows = _arrays(space, total)

    def one(job: tuple[int, int, int]) -> None:
        number, layer, part = job
        stretch, shape = stretches[number], space.layers[layer]
        out = rows[layer][part][:, begins[number] : begins[number + 1]]
        try:
            _decode(decoder, stretch.unit.frames[2 * layer + part], stretch, out)
        except KvmnnError as error:
            raise DamagedStretchError(f"{'KV'[part]} of layer {shape.layer}: {error}", number) from None

    numbers = range(len(stretches))
    jobs = [(number, layer, part) for number in numbers for layer in range(len(space.layers)) for part in range(2)]
    map_pulled(one, jobs, resolve_threads(threads))
    return [
        LayerCache(layer=shape.layer, keys=keys, values=values)
        for shape, (keys, values) in zip(space.layers, rows, strict=True)
    ]


def _arrays(space: Space, tokens: int) -> list[tuple[Words, Words]]:
    """K and V of every layer, not filled yet: parts of one array, whose memory is mapped in large pages or used again,
    where that of many smaller ones costs nearly as much as decoding into it.
    """
    words = np.empty(tokens * space.token_bytes // space.words.itemsize, space.words.numpy)
    found = []
    begin = 0
    for shape in space.layers:
        size = shape.kv_heads * tokens * shape.head_dim
        both = words[begin : begin + 2 * size].reshape(2, shape.kv_heads, tokens, shape.head_dim)
        found.append((both[0], both[1]))
        begin += 2 * size
    return found


def _decode(decoder: Decoder, frame: Frame, stretch: Stretch, out: Words) -> None:
    tokens = stretch.unit.ids.size
    entire = stretch.take == tokens
    words = out if entire else np.empty((out.shape[0], tokens, out.shape[2]), out.dtype)
    decoder.checked(frame.data, frame.checksum, frame.raw_checksum, words)
    if not entire:
        out[:] = words[:, stretch.skip : stretch.skip + stretch.take]
