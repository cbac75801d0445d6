"""The rows before a unit that its dense streams refer to: those of units that are stored, or about to be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dtypes import Bytes, Words
from ..frames.hashing import block_checksums, checksum
from ..threads.pool import map_pulled, resolve_threads
from .lookup import Found, Place, Text
from .unit import MOST_CHAIN, MOST_HISTORY, DamagedError, Header, parse_header
from .units import Units


class Behind(NamedTuple):
    """What a unit refers to: rows right before it, checksums of the blocks that they lie in, and the units needed."""

    history: int = 0
    sums: tuple[int, ...] = ()
    chain: int = 0


class Before(NamedTuple):
    """What may be referred to of a unit: checksums of its last blocks up to the next unit, and the units it needs."""

    sums: tuple[int, ...]
    chain: int


def block_sums(
    layers: Sequence[LayerCache], cuts: Sequence[tuple[int, int]], block_tokens: int, threads: int | None = None
) -> list[tuple[int, ...]]:
    """For each cut, from a token to another, 64 bits over the words of each of its whole blocks in all layers: the
    checksum of the checksums of K and V of each layer.
    """

    def one(job: tuple[int, Words]) -> list[int]:
        begin, words = job
        return block_checksums(_rows(words[:, begin : begin + block_tokens * blocks[begin]]), block_bytes(words))

    def block_bytes(words: Words) -> int:
        return int(block_tokens * words.shape[2] * words.dtype.itemsize)

    blocks = {begin: (end - begin) // block_tokens for begin, end in cuts}
    parts = list(chain.from_iterable((cache.keys, cache.values) for cache in layers))
    sums = map_pulled(one, [(begin, words) for begin in blocks for words in parts], resolve_threads(threads))
    runs = [sums[at : at + len(parts)] for at in range(0, len(sums), len(parts))]
    return [tuple(checksum(each) for each in np.array(run, "<u8").T.copy()) for run in runs]


def behind_units(before: Sequence[Before], block_tokens: int) -> Behind:
    """What a unit may refer to of those before it, in order: the nearest rows of units that need no chain too long."""
    sums: list[int] = []
    units_needed = 0
    for distance, unit in enumerate(reversed(before), 1):
        left = most_blocks(block_tokens) - len(sums)
        if not left or distance + unit.chain > MOST_CHAIN:
            break
        sums[:0] = unit.sums[-left:]
        units_needed = max(units_needed, distance + unit.chain)
    return Behind(min(MOST_HISTORY, len(sums) * block_tokens), tuple(sums), units_needed)


def most_blocks(block_tokens: int) -> int:
    """Blocks that hold as many rows as a unit refers to."""
    return -(-MOST_HISTORY // block_tokens)


def stored_before(units: Units, text: Text, layers: Sequence[LayerCache], known: Found) -> list[Before]:
    """Of the stored units of a text, in order, what may be referred to: rows that are those that are put.

    Where a unit is not at hand, is of frames, or holds other rows, what lies before it cannot be referred to.
    """
    size = text.block_tokens
    found: list[Before] = []
    left = most_blocks(size)
    for begin, end, place in reversed(_whole_blocks(known, size)):
        header = _header_at_hand(units, place.unit)
        if not left or header is None or header.dense is None:
            break
        first, count = place.skip // size, (end - begin) // size
        held = header.dense.sums[first : first + count][-left:]
        (put,) = block_sums(layers, [(end - len(held) * size, end)], size)
        same = 0
        while same < len(held) and held[-1 - same] == put[-1 - same]:
            same += 1
        if same:
            found.insert(0, Before(put[len(put) - same :], header.dense.chain))
            left -= same
        if same < count or (first and header.dense.history):  # rows before its first may be of more units than it knew
            break
    return found


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


def _rows(words: Words) -> Bytes:
    """``[kv_head, byte]``, little-endian, each head's rows together."""
    little = words if words.dtype.isnative else words.astype(words.dtype.newbyteorder("<"))
    return little.reshape(len(little), -1).view(np.uint8)
