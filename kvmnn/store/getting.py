"""Stored units back into K and V; what is damaged is discarded."""

from __future__ import annotations

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..arrays.opaque_state import OpaqueState
from .decoding import DamagedStretchError, Stretch, check_unit, decode_stretches
from .encoding import blocks_in_unit
from .lookup import Found, Place, Text, units_of
from .prefix_state import decode_state, parse_state
from .space import Space
from .token_ids import Ids, block_keys
from .unit import DamagedError, Unit, parse
from .units import Units


def read_layers(
    units: Units, space: Space, found: Found, ids: Ids, notes: list[str], threads: int | None
) -> list[LayerCache] | None:
    """K and V of the beginning of a text that was found.

    Returns
    -------
    None where a unit is not what it should be: it is discarded, which `notes` says, and is not found again.
    """
    most = (blocks_in_unit(space, units.block_tokens) + 1) * units.block_tokens
    numbers = units_of(found.places)
    held = dict(zip(numbers, units.read(numbers), strict=True))
    stretches: list[Stretch] = []
    begin, key = 0, space.key
    for place in found.places:
        try:
            data = held[place.unit]
            if data is None:
                raise DamagedError("its file is gone or cannot be read")
            unit = parse(data)
            check_unit(unit, space, ids[begin : begin + place.take], place.skip, most)
            key = _key_behind(unit, place, key, units.block_tokens)
        except DamagedError as error:
            units.discard(place.unit, str(error), notes)
            return None
        stretches.append(Stretch(unit, place.skip, place.take))
        begin += place.take
    try:
        return decode_stretches(space, stretches, threads, tables=units.tables)
    except DamagedStretchError as error:
        units.discard(found.places[error.number].unit, str(error), notes)
        return None


def read_state(
    units: Units, space: Space, number: int, text: Text, notes: list[str]
) -> tuple[list[LayerCache], list[OpaqueState]] | None:
    """Rows of windows, and opaque state, of all of a text.

    Returns
    -------
    None where it is not what it should be: it is discarded, which `notes` says, and is not found again.
    """
    try:
        (data,) = units.read([number])
        if data is None:
            raise DamagedError("its file is gone or cannot be read")
        state = parse_state(data)
        parent, rest = text.end(text.ids.size)
        if state.tokens != text.ids.size or state.parent != parent or not np.array_equal(state.ids, rest):
            raise DamagedError("is of another prefix than the index says")
        return decode_state(state, space)
    except DamagedError as error:
        units.discard(number, str(error), notes)
        return None


def _key_behind(unit: Unit, place: Place, before: bytes, block_tokens: int) -> bytes:
    """The key of the last whole block that is taken of a unit; its first must follow the one with the key `before`, as
    the same tokens may stand behind other ones, too.
    """
    keys = [unit.parent, *block_keys(unit.parent, unit.ids[: place.skip + place.take], block_tokens)]
    if keys[place.skip // block_tokens] != before:
        raise DamagedError("follows other tokens than the index says")
    return keys[-1]
