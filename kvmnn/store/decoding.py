"""Units back into K and V, every byte of them checked on the way."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dense import SharedTables
from ..dense.decoding import RowDecoder, decode_into
from ..dense.header import read_header
from ..dtypes import Elements
from ..errors import KvmnnError
from ..frames.decoding import FrameDecoder
from ..threads.pool import parallel_map, resolve_threads
from .space import Namespace
from .table_sets import TableSetCache, TableSets
from .token_ids import Ids
from .unit import DamagedUnitError, Unit, UnitFrame


class LoadedSlice(NamedTuple):
    """Tokens of a unit: `take` of them behind the first `skip`."""

    unit: Unit
    skip: int
    take: int


class DamagedSliceError(DamagedUnitError):
    """What is wrong with the stretch of this `slice_index`."""

    def __init__(self, message: str, slice_index: int) -> None:
        super().__init__(message)
        self.slice_index = slice_index


def check_unit_matches(unit: Unit, namespace: Namespace, ids: Ids, skip: int, max_tokens: int) -> None:
    """Refuse a unit that does not hold `ids` behind its first `skip` tokens in `namespace`, or more than `max_tokens`.

    Raises
    ------
    DamagedError
        With what was found.
    """
    if unit.namespace_key != namespace.key or len(unit.frames) != len(namespace.parts):
        raise DamagedUnitError("holds layers of another model")
    if unit.ids.size > max_tokens:
        raise DamagedUnitError(f"holds {unit.ids.size:,} tokens: expected at most {max_tokens:,}")
    if not np.array_equal(unit.ids[skip : skip + ids.size], ids):
        raise DamagedUnitError("holds other tokens than the index says")


def decode_slices(
    namespace: Namespace,
    slices: Sequence[LoadedSlice],
    threads: int | None = None,
    *,
    tables: TableSetCache | None = None,
    preceding_rows: Sequence[LayerCache] | None = None,
) -> list[LayerCache]:
    """K and V of all layers, of the tokens of all stretches one after another; from dense units with the rows of a
    token together in memory, as their streams have them, else with those of a head.

    Parameters
    ----------
    tables
        Of the store, for dense units that have none of their own.
    preceding_rows
        K and V of the rows right before, for a first dense unit that refers to some.

    Raises
    ------
    DamagedStretchError
        For frames and streams that do not match their checksum, do not decode, or decode to other words than were put.
    """
    num_preceding = preceding_rows[0].tokens if preceding_rows else 0
    begin_tokens = np.cumsum([num_preceding, *(loaded_slice.take for loaded_slice in slices)]).tolist()
    table_sets = [
        _load_tables(namespace, loaded_slice.unit, tables, number) for number, loaded_slice in enumerate(slices)
    ]
    decoder = FrameDecoder(namespace.dtype)
    by_token = any(loaded_slice.unit.dense for loaded_slice in slices)
    pairs = _allocate_arrays(namespace, begin_tokens[-1], by_token=by_token)
    for (keys, values), cache in zip(pairs, preceding_rows or (), strict=False):
        keys[:, :num_preceding], values[:, :num_preceding] = cache.keys, cache.values

    def decode_part(job: tuple[range, int]) -> None:
        slice_indices, part_index = job
        layer, part = namespace.parts[part_index]
        rows, shape = pairs[layer][part], namespace.layers[layer]
        row_decoder = RowDecoder(rows, namespace.dtype) if by_token else None
        for slice_index in slice_indices:
            stretch, begin_token = slices[slice_index], begin_tokens[slice_index]
            out = rows[:, begin_token : begin_tokens[slice_index + 1]]
            try:
                if stretch.unit.dense is None:
                    _decode_frame(decoder, stretch.unit.frames[part_index], stretch, out)
                else:
                    shared_sets = table_sets[slice_index]
                    tables_of_part = shared_sets.sets[part_index] if shared_sets is not None else None
                    if row_decoder is None or not _decode_in_place(
                        stretch, part_index, row_decoder, tables_of_part, begin_token
                    ):
                        _decode_dense_slice(
                            stretch, part_index, rows[:, : max(begin_token - stretch.skip, 0)], tables_of_part, out
                        )
            except KvmnnError as error:
                raise DamagedSliceError(f"{'KV'[part]} of layer {shape.layer}: {error}", slice_index) from None

    jobs = [
        (run, part_index)
        for run in _group_dependent_slices(slices, begin_tokens)
        for part_index in range(len(namespace.parts))
    ]
    parallel_map(decode_part, jobs, resolve_threads(threads))
    return [
        LayerCache(layer=shape.layer, keys=keys[:, num_preceding:], values=values[:, num_preceding:])
        for shape, (keys, values) in zip(namespace.layers, pairs, strict=True)
    ]


def _group_dependent_slices(slices: Sequence[LoadedSlice], begin_tokens: Sequence[int]) -> list[range]:
    """Stretches that need rows of those before them, in runs: what one thread decodes in order."""
    groups: list[range] = []
    end_index, first_needed = len(slices), begin_tokens[-1]
    for slice_index in reversed(range(len(slices))):
        unit, begin_token = slices[slice_index].unit, begin_tokens[slice_index]
        history = unit.dense.history_rows if unit.dense else 0
        first_needed = min(first_needed, begin_token - slices[slice_index].skip - history if history else begin_token)
        if first_needed == begin_token or not slice_index:
            groups.append(range(slice_index, end_index))
            end_index = slice_index
    return groups[::-1]


def _load_tables(namespace: Namespace, unit: Unit, tables: TableSetCache | None, slice_index: int) -> TableSets | None:
    if unit.dense is None or not unit.dense.tables_key:
        return None
    try:
        if tables is None:
            raise DamagedUnitError("its tables are gone")
        table_sets = tables.get(namespace.key, unit.dense.tables_key)
        if len(table_sets.sets) != len(unit.frames):
            raise DamagedUnitError("its tables are for other layers")
    except DamagedUnitError as error:
        raise DamagedSliceError(str(error), slice_index) from None
    return table_sets


def _allocate_arrays(namespace: Namespace, tokens: int, *, by_token: bool) -> list[tuple[Elements, Elements]]:
    """K and V of every layer, not filled yet: parts of one array, whose memory is mapped in large pages or used again,
    where that of many smaller ones costs nearly as much as decoding into it.
    """
    elements = np.empty(
        tokens * namespace.token_bytes // namespace.element_dtype.itemsize, namespace.element_dtype.numpy_dtype
    )
    pairs = []
    begin_element = 0
    for shape in namespace.layers:
        pair = []
        for dims in shape.dims:
            part = elements[begin_element : begin_element + shape.kv_heads * tokens * dims]
            begin_element += part.size
            if by_token:
                pair.append(part.reshape(tokens, shape.kv_heads, dims).transpose(1, 0, 2))
            else:
                pair.append(part.reshape(shape.kv_heads, tokens, dims))
        pairs.append((pair[0], pair[1]))
    return pairs


def _decode_frame(decoder: FrameDecoder, frame: UnitFrame, loaded_slice: LoadedSlice, out: Elements) -> None:
    tokens = loaded_slice.unit.ids.size
    in_place = loaded_slice.take == tokens and out[0].flags.c_contiguous
    elements = out if in_place else np.empty((out.shape[0], tokens, out.shape[2]), out.dtype)
    decoder.decode_verified(frame.data, frame.checksum, frame.raw_checksum, elements)
    if not in_place:
        out[:] = elements[:, loaded_slice.skip : loaded_slice.skip + loaded_slice.take]


def _decode_in_place(
    loaded_slice: LoadedSlice, part_index: int, row_decoder: RowDecoder, tables: SharedTables | None, begin_token: int
) -> bool:
    """Decode K or V of a whole unit to where it belongs, if it is as usual; if not, `_decode_dense_slice` tells why."""
    unit, frame = loaded_slice.unit, loaded_slice.unit.frames[part_index]
    if unit.dense is None or loaded_slice.take != unit.ids.size or begin_token < unit.dense.history_rows:
        return False
    history = unit.dense.history_rows
    return row_decoder.decode(
        frame.data, frame.checksum, begin_token, loaded_slice.take, history=history, tables=tables
    )


def _decode_dense_slice(
    loaded_slice: LoadedSlice, part_index: int, preceding_rows: Elements, tables: SharedTables | None, out: Elements
) -> None:
    unit, frame = loaded_slice.unit, loaded_slice.unit.frames[part_index]
    assert unit.dense is not None
    history = unit.dense.history_rows
    if preceding_rows.shape[1] < history:
        raise DamagedUnitError(f"refers to {history} rows before it: {preceding_rows.shape[1]} are there")
    header = read_header(frame.data)
    if header.checksum != frame.checksum:
        raise DamagedUnitError("is another stream than was put")
    is_entire = loaded_slice.take == unit.ids.size
    elements = out if is_entire else np.empty((out.shape[0], unit.ids.size, out.shape[2]), out.dtype)
    history_rows = preceding_rows[:, preceding_rows.shape[1] - history :] if history else None
    decode_into(header, elements, history=history_rows, tables=tables)
    if not is_entire:
        out[:] = elements[:, loaded_slice.skip : loaded_slice.skip + loaded_slice.take]
