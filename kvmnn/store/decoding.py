"""Units back into K and V, every byte of them checked on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dtypes import Words
from ..errors import KvmnnError
from ..frames import decode
from ..frames.hashing import checksum
from ..threads.pool import map_pulled, resolve_threads
from .space import LayerShape, Space
from .token_ids import Ids
from .unit import DamagedError, Frame, Unit, rows_checksum


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
    numpy_type = space.words.numpy
    rows = [[np.empty((shape.kv_heads, total, shape.head_dim), numpy_type) for _ in range(2)] for shape in space.layers]

    def one(job: tuple[int, int, int]) -> None:
        number, layer, part = job
        stretch, shape = stretches[number], space.layers[layer]
        out = rows[layer][part][:, begins[number] : begins[number + 1]]
        try:
            _decode(space.dtype, stretch.unit.frames[2 * layer + part], shape, stretch, out)
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
    """K and V of every layer, not filled yet: parts of one array, as one is mapped in large pages and many are not."""
    words = np.empty(tokens * space.token_bytes // space.words.itemsize, space.words.numpy)
    found = []
    begin = 0
    for shape in space.layers:
        size = shape.kv_heads * tokens * shape.head_dim
        both = words[begin : begin + 2 * size].reshape(2, shape.kv_heads, tokens, shape.head_dim)
        found.append((both[0], both[1]))
        begin += 2 * size
    return found


def _decode(dtype: str, frame: Frame, shape: LayerShape, stretch: Stretch, out: Words) -> None:
    if checksum(frame.data) != frame.checksum:
        raise DamagedError("the frame does not match its checksum")
    tokens = stretch.unit.ids.size
    entire = stretch.take == tokens
    words = out if entire else np.empty((shape.kv_heads, tokens, shape.head_dim), out.dtype)
    rows = words.reshape(shape.kv_heads, -1).view(np.uint8)  # a view, as tokens and dims lie together
    decode(frame.data, dtype=dtype, out=words, threads=1)
    if rows_checksum(rows) != frame.raw_checksum:
        raise DamagedError("the frame decodes to other words than were put")
    if not entire:
        out[:] = words[:, stretch.skip : stretch.skip + stretch.take]
