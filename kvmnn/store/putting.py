"""A text on its way in: encoded, written aside, noted down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from ..arrays.layer_cache import LayerCache
from ..dense import Rotary
from ..frames import CodecOptions
from . import table_sets
from .dense_encoding import (
    NOTHING,
    Behind,
    DenseUnit,
    behind_unit,
    block_sum,
    dense_of,
    encode_dense_units,
    fits,
    unit_sums,
)
from .encoding import Cut, blocks_in_unit, cuts, encode_units
from .lookup import Found, Text
from .space import Space
from .table_sets import LEAST_TOKENS, TableSets
from .unit import DamagedError, Frame, Unit, parse_header
from .units import Added, Units
from .updates import NewUnit

_BATCH_BYTES = 256 << 20
"""Raw bytes that are encoded before they are noted down: what a killed process loses of a put."""


class Writing(NamedTuple):
    """How units are made: effort of frames, how K was rotated (dense streams), threads."""

    options: CodecOptions
    rotary: Callable[[Space, Sequence[LayerCache]], Rotary | None]
    threads: int | None


def add_text(units: Units, text: Text, layers: Sequence[LayerCache], space: Space, known: Found, how: Writing) -> Added:
    """Store what follows the whole blocks of a text that are known.

    Raises
    ------
    ParentGoneError
        Where these blocks are not there any more.
    OutputError
        Where files cannot be written; whole batches may have been stored then.
    """
    size, step = text.block_tokens, blocks_in_unit(space, text.block_tokens)
    all_cuts = cuts(known.blocks * size, text.ids.size, size, step)
    make: _Frames | _Streams
    if units.codec == "dense" and fits(space, (step + 1) * size):
        make = _Streams(units, text, layers, space, known, how)
    else:
        make = _Frames(layers, how)
    stored = removed = 0
    for batch in _batches(all_cuts, space.token_bytes):
        added = _add_batch(units, text, space, batch, make)
        stored += added.stored_bytes
        removed += added.removed_bytes
    return Added(stored, removed)


class _Frames:
    """Units of frames."""

    tables = None

    def __init__(self, layers: Sequence[LayerCache], how: Writing) -> None:
        self._layers, self._how = layers, how

    def units(self, batch: Sequence[Cut], text: Text, done: Callable[[int, Unit, Behind], object]) -> None:
        """Encode; `done` is called with the number of a unit, the unit, and what it refers to."""

        def keep(number: int, frames: tuple[Frame, ...]) -> None:
            begin, end = batch[number]
            parent = text.key_before(begin // text.block_tokens)
            done(number, Unit(text.space, parent, begin, text.ids[begin:end], frames), NOTHING)

        encode_units(self._layers, batch, self._how.options, keep, self._how.threads)


class _Streams:
    """Units of dense streams; each refers to the rows of the one before it, and short ones to tables."""

    def __init__(
        self, units: Units, text: Text, layers: Sequence[LayerCache], space: Space, known: Found, how: Writing
    ) -> None:
        self._layers, self._space, self._how = layers, space, how
        self._rotary = how.rotary(space, layers)
        self._behind = _behind_stored(units, text, layers, known)
        self._units = units
        self.tables: TableSets | None = None

    def units(self, batch: Sequence[Cut], text: Text, done: Callable[[int, Unit, Behind], object]) -> None:
        """As `_Frames.units`."""
        plans, sums = [], []
        for cut in batch:
            plans.append(DenseUnit(cut, self._behind, self._tables(text) if cut[1] - cut[0] < LEAST_TOKENS else None))
            sums.append(unit_sums(self._layers, cut, text.block_tokens))
            self._behind = behind_unit(sums[-1], self._behind.chain, text.block_tokens)

        def keep(number: int, streams: tuple[Frame, ...]) -> None:
            (begin, end), behind, _ = plans[number]
            parent = text.key_before(begin // text.block_tokens)
            dense = dense_of(plans[number], sums[number])
            done(number, Unit(text.space, parent, begin, text.ids[begin:end], streams, dense), behind)

        encode_dense_units(self._layers, plans, self._space, text.ids, self._rotary, keep, self._how.threads)

    def _tables(self, text: Text) -> TableSets | None:
        """Those that the store has of these layers; else new ones, where the text is long enough for that."""
        if self.tables is None:
            self.tables = self._units.tables.of_space(self._space.key)
        if self.tables is None and text.ids.size >= LEAST_TOKENS:
            self.tables = table_sets.made_of(self._layers, self._space, self._rotary, self._how.threads)
            self._units.tables.keep(self._space.key, self.tables)
        return self.tables


def _behind_stored(units: Units, text: Text, layers: Sequence[LayerCache], known: Found) -> Behind:
    """What a first unit may refer to: rows of the stored unit before it that are those that are put."""
    size, end = text.block_tokens, known.blocks * text.block_tokens
    begin = 0
    for place in known.places:
        if begin < end <= begin + place.take:
            data = units.at_hand(place.unit)
            try:
                dense = parse_header(data).dense if data is not None else None
            except DamagedError:
                return NOTHING
            if dense is None:
                return NOTHING
            behind = behind_unit(dense.sums[: (place.skip + end - begin) // size], dense.chain, size)
            same = 0
            for said in reversed(behind.sums):
                at = end - same * size
                if block_sum(layers, at - size, at) != said:
                    break
                same += 1
            return behind_unit(behind.sums[len(behind.sums) - same :], dense.chain, size)
        begin += place.take
    return NOTHING


def _add_batch(units: Units, text: Text, space: Space, batch: Sequence[Cut], make: _Frames | _Streams) -> Added:
    new: dict[int, NewUnit] = {}
    with units.stage() as staging:

        def keep(number: int, unit: Unit, behind: Behind) -> None:
            begin, end = batch[number]
            keys = text.keys[begin // text.block_tokens : end // text.block_tokens]
            path = staging.write(str(number), unit.pieces())
            new[number] = NewUnit(unit.parent, begin, unit.ids, keys, unit.nbytes, path, behind.sums)

        make.units(batch, text, keep)
        return units.add(space, text, [new[number] for number in range(len(batch))], make.tables)


def _batches(found: Sequence[Cut], token_bytes: int) -> list[list[Cut]]:
    batches: list[list[Cut]] = [[]]
    held = 0
    for begin, end in found:
        nbytes = (end - begin) * token_bytes
        if batches[-1] and held + nbytes > _BATCH_BYTES:
            batches.append([])
            held = 0
        batches[-1].append((begin, end))
        held += nbytes
    return batches
