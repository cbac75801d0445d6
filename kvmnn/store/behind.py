"""The rows before a unit that its dense streams refer to: those of units that are stored, or about to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dtypes import Words
from ..frames.hashing import block_checksums, checksum
from .encoding import token_bytes
from .lookup import Found, Place, Text
from .space import parts_of
from .unit import MOST_CHAIN, MOST_HISTORY, DamagedError, Header, parse_header
from .units import Units


class Behind(NamedTuple):
    """What a unit refers to: rows right before it, how many blocks they lie in, and the units needed."""

    history: int = 0
    blocks: int = 0
    chain: int = 0


class Before(NamedTuple):
    """What may be referred to of a unit: its last blocks up to the next unit, and the units it needs."""

    blocks: int
    chain: int


def part_sums(words: Words, block_tokens: int) -> list[int]:
    """Checksums of the words of each whole block in K or V of a layer."""
    blocks = words.shape[1] // block_tokens
    return block_checksums(token_bytes(words[:, : blocks * block_tokens]), block_tokens)


def unit_sums(sums: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """64 bits over the words of each block in all layers: the checksum of those of K and V of each layer, in order."""
    return tuple(checksum(each) for each in np.array(sums, "<u8").T.copy())


def behind_units(before: Sequence[Before], block_tokens: int) -> Behind:
    """What a unit may refer to of those before it, in order: the nearest rows of units that need no chain too long."""
    blocks = units_needed = 0
    for distance, unit in enumerate(reversed(before), 1):
        left = most_blocks(block_tokens) - blocks
        if not left or distance + unit.chain > MOST_CHAIN:
            break
        blocks += min(left, unit.blocks)
        units_needed = max(units_needed, distance + unit.chain)
    return Behind(min(MOST_HISTORY, blocks * block_tokens), blocks, units_needed)


def most_blocks(block_tokens: int) -> int:
    """Blocks that hold as many rows as a unit refers to."""
    return -(-MOST_HISTORY // block_tokens)


def stored_before(
    units: Units, text: Text, layers: Sequence[LayerCache], known: Found
) -> tuple[list[Before], list[int]]:
    """Of the stored units of a text, in order, what may be referred to: rows that are those that are put; and the
    checksums of their blocks.

    Where a unit is not at hand, is of frames, or holds other rows, what lies before it cannot be referred to.
    """
    size = text.block_tokens
    parts = parts_of(layers)
    found: list[Before] = []
    sums: list[int] = []
    left = most_blocks(size)
    for begin, end, place in reversed(_whole_blocks(known, size)):
        header = _header_at_hand(units, place.unit)
        if not left or header is None or header.dense is None:
            break
        first, count = place.skip // size, (end - begin) // size
        held = header.dense.sums[first : first + count][-left:]
        put = unit_sums([part_sums(words[:, end - len(held) * size : end], size) for words in parts])
        same = 0
        while same < len(held) and held[-1 - same] == put[-1 - same]:
            same += 1
        if same:
            found.insert(0, Before(same, header.dense.chain))
            sums[:0] = put[len(put) - same :]
            left -= same
        if same < count or (first and header.dense.history):  # rows before its first may be of more units than it knew
            break
    return found, sums


def _whole_blocks(known: Found, block_tokens: int) -> list[tuple[int, int, Place]]:
    """The places that have whole blocks of the text: where these begin and end, and the place."""
    found = []
    begin = 0
    for place in known.places:
        end = min(begin + place.take, known.blocks * block_tokens)
        if end > begin:
            found.append((begin, end, place))
        begin += place.take
    return found


def unit_before(units: Units, text: Text, known: Found) -> Header | None:
    """The header of the unit with the last whole block that is stored, where it is at hand."""
    blocks = _whole_blocks(known, text.block_tokens)
    return _header_at_hand(units, blocks[-1][2].unit) if blocks else None


def _header_at_hand(units: Units, unit: int) -> Header | None:
    data = units.at_hand(unit)
    try:
        return None if data is None else parse_header(data)
    except DamagedError:
        return None
