"""Stored units back into K and V; what is damaged is discarded."""

from __future__ import annotations

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..arrays.opaque_state import OpaqueState
from .decoding import DamagedSliceError, LoadedSlice, check_unit_matches, decode_slices
from .encoding import count_blocks_per_unit
from .lookup import PrefixMatch, TokenSequence, UnitSlice, list_units
from .prefix_state import decode_state, parse_state
from .space import Namespace
from .token_ids import Ids, compute_block_keys
from .unit import DamagedUnitError, Unit, parse_unit
from .units import StoreBackend


def read_layers(
    backend: StoreBackend,
    namespace: Namespace,
    prefix_match: PrefixMatch,
    ids: Ids,
    notes: list[str],
    threads: int | None,
) -> list[LayerCache] | None:
    """K and V of the beginning of a text that was found.

    Returns
    -------
    None where a unit is not what it should be: it is discarded, which `notes` says, and is not found again.
    """
    max_tokens = (count_blocks_per_unit(namespace, backend.block_tokens) + 1) * backend.block_tokens
    unit_ids = list_units(prefix_match.slices)
    data_by_unit = dict(zip(unit_ids, backend.read_units(unit_ids), strict=True))
    slices: list[LoadedSlice] = []
    begin_token, key = 0, namespace.key
    for unit_slice in prefix_match.slices:
        try:
            data = data_by_unit[unit_slice.unit]
            if data is None:
                raise DamagedUnitError("its file is gone or cannot be read")
            unit = parse_unit(data)
            check_unit_matches(
                unit, namespace, ids[begin_token : begin_token + unit_slice.take], unit_slice.skip, max_tokens
            )
            key = _compute_end_key(unit, unit_slice, key, backend.block_tokens)
        except DamagedUnitError as error:
            backend.quarantine(unit_slice.unit, str(error), notes)
            return None
        slices.append(LoadedSlice(unit, unit_slice.skip, unit_slice.take))
        begin_token += unit_slice.take
    try:
        return decode_slices(namespace, slices, threads, tables=backend.tables)
    except DamagedSliceError as error:
        backend.quarantine(prefix_match.slices[error.slice_index].unit, str(error), notes)
        return None


def read_state(
    backend: StoreBackend, namespace: Namespace, unit_id: int, sequence: TokenSequence, notes: list[str]
) -> tuple[list[LayerCache], list[OpaqueState]] | None:
    """Rows of windows, and opaque state, of all of a text.

    Returns
    -------
    None where it is not what it should be: it is discarded, which `notes` says, and is not found again.
    """
    try:
        (data,) = backend.read_units([unit_id])
        if data is None:
            raise DamagedUnitError("its file is gone or cannot be read")
        state = parse_state(data)
        parent, last_ids = sequence.get_end(sequence.ids.size)
        if state.tokens != sequence.ids.size or state.parent != parent or not np.array_equal(state.ids, last_ids):
            raise DamagedUnitError("is of another prefix than the index says")
        return decode_state(state, namespace)
    except DamagedUnitError as error:
        backend.quarantine(unit_id, str(error), notes)
        return None


def _compute_end_key(unit: Unit, unit_slice: UnitSlice, expected_key: bytes, block_tokens: int) -> bytes:
    """The key of the last whole block that is taken of a unit; its first must follow the one with the key
    `expected_key`, as the same tokens may stand behind other ones, too.
    """
    keys = [unit.parent, *compute_block_keys(unit.parent, unit.ids[: unit_slice.skip + unit_slice.take], block_tokens)]
    if keys[unit_slice.skip // block_tokens] != expected_key:
        raise DamagedUnitError("follows other tokens than the index says")
    return keys[-1]
