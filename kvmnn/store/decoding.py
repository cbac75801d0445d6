"""Units back into K and V, every byte of them checked on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dense import Tables
from ..dense.decoding import Places, decode_into
from ..dense.header import read_header
from ..dtypes import Words
from ..errors import KvmnnError
from ..frames.decoding import Decoder
from ..threads.pool import map_pulled, resolve_threads
from .space import Space
from .table_sets import KeptTables, TableSets
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
    if unit.space != space.key or len(unit.frames) != len(space.parts):
        raise DamagedError("holds layers of another model")
    if unit.ids.size > most_tokens:
        raise DamagedError(f"holds {unit.ids.size:,} tokens: expected at most {most_tokens:,}")
    if not np.array_equal(unit.ids[skip : skip + ids.size], ids):
        raise DamagedError("holds other tokens than the index says")


def decode_stretches(
    space: Space,
    stretches: Sequence[Stretch],
    threads: int | None = None,
    *,
    tables: KeptTables | None = None,
    before: Sequence[LayerCache] | None = None,
) -> list[LayerCache]:
    """K and V of all layers, of the tokens of all stretches one after another; from dense units with the rows of a
    token together in memory, as their streams have them, else with those of a head.

    Parameters
    ----------
    tables
        Of the store, for dense units that have none of their own.
    before
        K and V of the rows right before, for a first dense unit that refers to some.

    Raises
    ------
    DamagedStretchError
        For frames and streams that do not match their checksum, do not decode, or decode to other words than were put.
    """
    first = before[0].tokens if before else 0
    begins = np.cumsum([first, *(stretch.take for stretch in stretches)]).tolist()
    sets = [_tables(space, stretch.unit, tables, number) for number, stretch in enumerate(stretches)]
    decoder = Decoder(space.dtype)
    by_token = any(stretch.unit.dense for stretch in stretches)
    rows = _arrays(space, begins[-1], by_token=by_token)
    for (keys, values), cache in zip(rows, before or (), strict=False):
        keys[:, :first], values[:, :first] = cache.keys, cache.values

    def one(job: tuple[range, int]) -> None:
        numbers, at = job
        layer, part = space.parts[at]
        whole, shape = rows[layer][part], space.layers[layer]
        places = Places(whole, space.dtype) if by_token else None
        for number in numbers:
            stretch, begin = stretches[number], begins[number]
            out = whole[:, begin : begins[number + 1]]
            try:
                if stretch.unit.dense is None:
                    _decode(decoder, stretch.unit.frames[at], stretch, out)
                else:
                    one_of = sets[number]
                    held = one_of.sets[at] if one_of is not None else None
                    if places is None or not _decode_placed(stretch, at, places, held, begin):
                        _decode_dense(stretch, at, whole[:, : max(begin - stretch.skip, 0)], held, out)
            except KvmnnError as error:
                raise DamagedStretchError(f"{'KV'[part]} of layer {shape.layer}: {error}", number) from None

    jobs = [(run, at) for run in _runs(stretches, begins) for at in range(len(space.parts))]
    map_pulled(one, jobs, resolve_threads(threads))
    return [
        LayerCache(layer=shape.layer, keys=keys[:, first:], values=values[:, first:])
        for shape, (keys, values) in zip(space.layers, rows, strict=True)
    ]


def _runs(stretches: Sequence[Stretch], begins: Sequence[int]) -> list[range]:
    """Stretches that need rows of those before them, in runs: what one thread decodes in order."""
    found: list[range] = []
    end, needed = len(stretches), begins[-1]
    for number in reversed(range(len(stretches))):
        unit, begin = stretches[number].unit, begins[number]
        history = unit.dense.history if unit.dense else 0
        needed = min(needed, begin - stretches[number].skip - history if history else begin)
        if needed == begin or not number:
            found.append(range(number, end))
            end = number
    return found[::-1]


def _tables(space: Space, unit: Unit, tables: KeptTables | None, number: int) -> TableSets | None:
    if unit.dense is None or not unit.dense.tables:
        return None
    try:
        if tables is None:
            raise DamagedError("its tables are gone")
        found = tables.get(space.key, unit.dense.tables)
        if len(found.sets) != len(unit.frames):
            raise DamagedError("its tables are for other layers")
    except DamagedError as error:
        raise DamagedStretchError(str(error), number) from None
    return found


def _arrays(space: Space, tokens: int, *, by_token: bool) -> list[tuple[Words, Words]]:
    """K and V of every layer, not filled yet: parts of one array, whose memory is mapped in large pages or used again,
    where that of many smaller ones costs nearly as much as decoding into it.
    """
    words = np.empty(tokens * space.token_bytes // space.words.itemsize, space.words.numpy)
    found = []
    begin = 0
    for shape in space.layers:
        both = []
        for dims in shape.dims:
            part = words[begin : begin + shape.kv_heads * tokens * dims]
            begin += part.size
            if by_token:
                both.append(part.reshape(tokens, shape.kv_heads, dims).transpose(1, 0, 2))
            else:
                both.append(part.reshape(shape.kv_heads, tokens, dims))
        found.append((both[0], both[1]))
    return found


def _decode(decoder: Decoder, frame: Frame, stretch: Stretch, out: Words) -> None:
    tokens = stretch.unit.ids.size
    in_place = stretch.take == tokens and out[0].flags.c_contiguous
    words = out if in_place else np.empty((out.shape[0], tokens, out.shape[2]), out.dtype)
    decoder.checked(frame.data, frame.checksum, frame.raw_checksum, words)
    if not in_place:
        out[:] = words[:, stretch.skip : stretch.skip + stretch.take]


def _decode_placed(stretch: Stretch, at: int, places: Places, tables: Tables | None, begin: int) -> bool:
    """Decode K or V of a whole unit to where it belongs, if it is as usual; if not, `_decode_dense` tells why."""
    unit, frame = stretch.unit, stretch.unit.frames[at]
    if unit.dense is None or stretch.take != unit.ids.size or begin < unit.dense.history:
        return False
    history = unit.dense.history
    return places.decode(frame.data, frame.checksum, begin, stretch.take, history=history, tables=tables)


def _decode_dense(stretch: Stretch, at: int, before: Words, tables: Tables | None, out: Words) -> None:
    unit, frame = stretch.unit, stretch.unit.frames[at]
    assert unit.dense is not None
    history = unit.dense.history
    if before.shape[1] < history:
        raise DamagedError(f"refers to {history} rows before it: {before.shape[1]} are there")
    header = read_header(frame.data)
    if header.checksum != frame.checksum:
        raise DamagedError("is another stream than was put")
    entire = stretch.take == unit.ids.size
    words = out if entire else np.empty((out.shape[0], unit.ids.size, out.shape[2]), out.dtype)
    held = before[:, before.shape[1] - history :] if history else None
    decode_into(header, words, history=held, tables=tables)
    if not entire:
        out[:] = words[:, stretch.skip : stretch.skip + stretch.take]
