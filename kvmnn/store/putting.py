"""A text on its way in: encoded, written aside, noted down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from ..arrays.layer_cache import LayerCache
from ..dense import Rotary, find_rotary
from ..errors import OptionError
from ..frames import CodecOptions
from ..threads.pool import map_pulled, resolve_threads
from . import table_sets
from .behind import Before, Behind, behind_units, block_sums, most_blocks, stored_before, unit_before
from .dense_encoding import (
    SHARED,
    WORTH,
    DenseUnit,
    Tried,
    dense_of,
    encode_dense_units,
    fits,
    frames_of_layer,
    middle_of,
    try_layer,
)
from .encoding import Cut, blocks_in_unit, cuts, encode_units
from .lookup import Found, Text
from .space import Space
from .table_sets import LEAST_TOKENS, KeptTables, TableSets
from .unit import Frame, Unit
from .units import Added, Units
from .updates import NewUnit

_BATCH_BYTES = 256 << 20
"""Raw bytes that are encoded before they are noted down: what a killed process loses of a put."""


class Rotation:
    """How the models of a store rotated K.

    Parameters
    ----------
    said
        By the caller; None where each is to be found by trial.
    """

    def __init__(self, said: Rotary | None) -> None:
        self._said = said
        self._found: dict[bytes, Rotary | None] = {}

    def of(self, space: Space, layers: Sequence[LayerCache]) -> Rotary | None:
        """That of a space, found on the first text that is long enough; `OptionError` for one beyond its heads."""
        if self._said is not None:
            most = max(shape.head_dim for shape in space.layers)
            if self._said.dims > most:
                raise OptionError(f"rotary has {self._said.dims} dims: expected at most the head_dim, {most}")
            return self._said
        if space.key not in self._found:
            found = find_rotary(layers[0].keys, dtype=space.dtype)
            if found is None and layers[0].tokens < LEAST_TOKENS:
                return None
            self._found[space.key] = found
        return self._found[space.key]


class Writing(NamedTuple):
    """How units are made: effort of frames, how K was rotated (dense streams), threads."""

    options: CodecOptions
    rotation: Rotation
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
    batches = _batches(all_cuts, space.token_bytes)
    make: _Frames | _Streams = _Frames(layers, how)
    if units.codec == "dense" and fits(space, (step + 1) * size):
        streams = _Streams(units, text, layers, space, known, how)
        if streams.are_worth_it(batches[0], text):
            make = streams
    stored = removed = 0
    for batch in batches:
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
            done(number, Unit(text.space, parent, begin, text.ids[begin:end], frames), Behind())

        encode_units(self._layers, batch, self._how.options, keep, self._how.threads)


class _Streams:
    """Units of dense streams; each refers to the rows of the one before it, and to tables that all of a space share."""

    def __init__(
        self, units: Units, text: Text, layers: Sequence[LayerCache], space: Space, known: Found, how: Writing
    ) -> None:
        self._layers, self._space, self._how = layers, space, how
        self._rotary = how.rotation.of(space, layers)
        before = unit_before(units, text, known)
        self._is_behind_frames = before is not None and before.dense is None
        self._before = stored_before(units, text, layers, known)
        self._planned: tuple[list[DenseUnit], list[tuple[int, ...]]] | None = None
        self._tried: Tried | None = None
        self.tables = self._shared(units.tables, text)
        self._for_long = self.tables

    def _shared(self, kept: KeptTables, text: Text) -> TableSets | None:
        """Those that the store has of these layers; else new ones, where the text is long enough for that."""
        found = kept.of_space(self._space.key)
        if found is None and text.ids.size >= LEAST_TOKENS:
            found = table_sets.made_of(self._layers, self._space, self._rotary, self._how.threads)
            kept.keep(self._space.key, found)
        return found

    def are_worth_it(self, batch: Sequence[Cut], text: Text) -> bool:
        """Whether a layer of the first batch is so much smaller than as frames; units are made of frames if not.

        Short units are what the unit before them is: they gain by rows to refer to, which frames cannot give. Whether
        long ones share tables is found by trial as well.
        """
        plans, sums = self._plan(batch, text)
        middle = plans[middle_of(plans)].cut
        if _is_short(middle):
            self._planned = plans, sums
            return not self._is_behind_frames
        found, own, frames = self._trials(plans)
        if own is not None and found.nbytes(only_keys=True) > SHARED * own.nbytes():
            self._for_long, plans = None, _with_own_tables(plans)
            found = try_layer(self._layers, plans, self._space, self._rotary)
        self._planned, self._tried = (plans, sums), found
        return found.nbytes() <= WORTH * frames

    def _trials(self, plans: Sequence[DenseUnit]) -> tuple[Tried, Tried | None, int]:
        """A layer as it is planned, its K with tables of its own where they are shared, and the bytes of frames."""

        def streams() -> Tried:
            return try_layer(self._layers, plans, self._space, self._rotary)

        def others() -> tuple[Tried | None, int]:
            own = None
            if self._for_long is not None:
                own = try_layer(self._layers, _with_own_tables(plans), self._space, self._rotary, only_keys=True)
            return own, frames_of_layer(self._layers, plans, self._space, self._how.options)

        calls: list[Callable[[], Any]] = [streams, others]
        found, (own, frames) = map_pulled(lambda call: call(), calls, resolve_threads(self._how.threads))
        return found, own, frames

    def _plan(self, batch: Sequence[Cut], text: Text) -> tuple[list[DenseUnit], list[tuple[int, ...]]]:
        plans = []
        sums = block_sums(self._layers, batch, text.block_tokens, self._how.threads)
        for cut, its_sums in zip(batch, sums, strict=True):
            behind = behind_units(self._before, text.block_tokens)
            plans.append(DenseUnit(cut, behind, self.tables if _is_short(cut) else self._for_long))
            self._before = [*self._before, Before(its_sums, behind.chain)][-most_blocks(text.block_tokens) :]
        return plans, sums

    def units(self, batch: Sequence[Cut], text: Text, done: Callable[[int, Unit, Behind], object]) -> None:
        """As `_Frames.units`."""
        plans, sums = self._planned or self._plan(batch, text)
        tried, self._planned, self._tried = self._tried, None, None

        def keep(number: int, streams: tuple[Frame, ...]) -> None:
            (begin, end), behind, _ = plans[number]
            parent = text.key_before(begin // text.block_tokens)
            dense = dense_of(plans[number], sums[number])
            done(number, Unit(text.space, parent, begin, text.ids[begin:end], streams, dense), behind)

        threads = self._how.threads
        encode_dense_units(self._layers, plans, self._space, self._rotary, keep, threads, tried)


def _with_own_tables(plans: Sequence[DenseUnit]) -> list[DenseUnit]:
    return [plan if _is_short(plan.cut) else plan._replace(tables=None) for plan in plans]


def _is_short(cut: Cut) -> bool:
    return cut[1] - cut[0] < LEAST_TOKENS


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
