"""The rows before a unit that its dense streams refer to: those of units that are stored, or about to be."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dtypes import Elements
from ..frames.hashing import checksum_blocks, integrity_checksum
from .encoding import view_token_bytes
from .lookup import PrefixMatch, TokenSequence, UnitSlice
from .space import list_parts
from .unit import MAX_CHAIN_UNITS, MAX_HISTORY_ROWS, DamagedUnitError, UnitHeader, parse_header
from .units import StoreBackend


class HistoryRef(NamedTuple):
    """What a unit refers to: rows right before it, how many blocks they lie in, and the units needed."""

    num_rows: int = 0
    num_blocks: int = 0
    chain_length: int = 0


class HistorySource(NamedTuple):
    """What may be referred to of a unit: its last blocks up to the next unit, and the units it needs."""

    num_blocks: int
    chain_length: int


def checksum_part_blocks(elements: Elements, block_tokens: int) -> list[int]:
    """Checksums of the words of each whole block in K or V of a layer."""
    num_blocks = elements.shape[1] // block_tokens
    return checksum_blocks(view_token_bytes(elements[:, : num_blocks * block_tokens]), block_tokens)


def combine_block_sums(sums: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """64 bits over the words of each block in all layers: the checksum of those of K and V of each layer, in order."""
    return tuple(integrity_checksum(block_sums) for block_sums in np.array(sums, "<u8").T.copy())


def plan_history(sources: Sequence[HistorySource], block_tokens: int) -> HistoryRef:
    """What a unit may refer to of those before it, in order: the nearest rows of units that need no chain too long."""
    num_blocks = chain_length = 0
    for distance, source in enumerate(reversed(sources), 1):
        remaining_blocks = count_history_blocks(block_tokens) - num_blocks
        if not remaining_blocks or distance + source.chain_length > MAX_CHAIN_UNITS:
            break
        num_blocks += min(remaining_blocks, source.num_blocks)
        chain_length = max(chain_length, distance + source.chain_length)
    return HistoryRef(min(MAX_HISTORY_ROWS, num_blocks * block_tokens), num_blocks, chain_length)


def count_history_blocks(block_tokens: int) -> int:
    """Blocks that hold as many rows as a unit refers to."""
    return -(-MAX_HISTORY_ROWS // block_tokens)


def load_history(
    backend: StoreBackend, sequence: TokenSequence, layers: Sequence[LayerCache], stored_prefix: PrefixMatch
) -> tuple[list[HistorySource], list[int]]:
    """Of the stored units of a text, in order, what may be referred to: rows that are those that are put; and the
    checksums of their blocks.

    Where a unit is not at hand, is of frames, or holds other rows, what lies before it cannot be referred to.
    """
    size = sequence.block_tokens
    parts = list_parts(layers)
    sources: list[HistorySource] = []
    sums: list[int] = []
    remaining_blocks = count_history_blocks(size)
    for begin_token, end_token, unit_slice in reversed(_list_whole_blocks(stored_prefix, size)):
        header = _read_cached_header(backend, unit_slice.unit)
        if not remaining_blocks or header is None or header.dense is None:
            break
        first_block, num_blocks = unit_slice.skip // size, (end_token - begin_token) // size
        stored_sums = header.dense.block_sums[first_block : first_block + num_blocks][-remaining_blocks:]
        new_sums = combine_block_sums(
            [
                checksum_part_blocks(elements[:, end_token - len(stored_sums) * size : end_token], size)
                for elements in parts
            ]
        )
        num_equal = 0
        while num_equal < len(stored_sums) and stored_sums[-1 - num_equal] == new_sums[-1 - num_equal]:
            num_equal += 1
        if num_equal:
            sources.insert(0, HistorySource(num_equal, header.dense.chain_length))
            sums[:0] = new_sums[len(new_sums) - num_equal :]
            remaining_blocks -= num_equal
        if num_equal < num_blocks or (
            first_block and header.dense.history_rows
        ):  # rows before its first may be of more units than it knew
            break
    return sources, sums


def _list_whole_blocks(stored_prefix: PrefixMatch, block_tokens: int) -> list[tuple[int, int, UnitSlice]]:
    """The places that have whole blocks of the text: where these begin and end, and the place."""
    spans = []
    begin_token = 0
    for unit_slice in stored_prefix.slices:
        end_token = min(begin_token + unit_slice.take, stored_prefix.num_blocks * block_tokens)
        if end_token > begin_token:
            spans.append((begin_token, end_token, unit_slice))
        begin_token += unit_slice.take
    return spans


def read_previous_header(
    backend: StoreBackend, sequence: TokenSequence, stored_prefix: PrefixMatch
) -> UnitHeader | None:
    """The header of the unit with the last whole block that is stored, where it is at hand."""
    blocks = _list_whole_blocks(stored_prefix, sequence.block_tokens)
    return _read_cached_header(backend, blocks[-1][2].unit) if blocks else None


def _read_cached_header(backend: StoreBackend, unit: int) -> UnitHeader | None:
    data = backend.get_cached(unit)
    try:
        return None if data is None else parse_header(data)
    except DamagedUnitError:
        return None
