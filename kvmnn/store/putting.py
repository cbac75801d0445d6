"""A text on its way in: encoded, written aside, noted down."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from ..arrays.layer_cache import LayerCache
from ..dense import Rotary, find_rotary
from ..errors import OptionError
from ..frames import CodecOptions
from ..threads.pool import map_pulled, resolve_threads
from . import table_sets
from .behind import Before, behind_units, most_blocks, stored_before, unit_before
from .dense_encoding import NEAR, SHARED, WORTH, DenseUnit, Streams, Tried, dense_of, fits, middle_of
from .encoding import Cut, blocks_in_unit, cuts, encode_units
from .lookup import Found, Text
from .space import Space
from .table_sets import LEAST_TOKENS, KeptTables, TableSets
from .unit import Frame, Unit
from .units import Added, Units
from .updates import NewUnit

_BATCH_BYTES = 256 << 20
"""Raw bytes that are encoded before they are noted down: what a killed process loses of a put."""
LEAST_OWN = 64
"""Units of fewer tokens always share tables."""
TRIED_EVERY = 16
"""Puts of short units between two trials of whether shared tables fit."""


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


class Fit:
    """Whether short units have tables of their own, as those that are shared were made of a text unlike theirs.

    It is tried on a put in so many: on each it would take short texts a seventh of their time.
    """

    def __init__(self) -> None:
        self._puts: dict[bytes, int] = {}
        self._own: dict[bytes, bool] = {}

    def is_due(self, tables: TableSets) -> bool:
        """Whether to try it on this put."""
        count = self._puts[tables.key] = self._puts.get(tables.key, -1) + 1
        return count % TRIED_EVERY == 0

    def note(self, tables: TableSets, *, own: bool) -> None:
        """What a trial has shown."""
        self._puts[tables.key], self._own[tables.key] = 0, own

    def wants_own(self, tables: TableSets) -> bool:
        """What the last trial has shown."""
        return self._own.get(tables.key, False)


class Writing(NamedTuple):
    """How units are made: effort of frames, how K was rotated (dense streams), whether shared tables fit, threads."""

    options: CodecOptions
    rotation: Rotation
    fit: Fit
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
    make: _Frames | _DenseUnits = _Frames(layers, how)
    if units.codec == "dense" and fits(space, (step + 1) * size):
        streams = _DenseUnits(units, text, layers, space, known, how)
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

    def units(self, batch: Sequence[Cut], text: Text, done: Callable[[int, Unit], object]) -> list[tuple[int, ...]]:
        """Encode; `done` is called with the number of a unit and the unit.

        Returns
        -------
        For each unit the checksums of the blocks whose rows it refers to.
        """

        def keep(number: int, frames: tuple[Frame, ...]) -> None:
            begin, end = batch[number]
            parent = text.key_before(begin // text.block_tokens)
            done(number, Unit(text.space, parent, begin, text.ids[begin:end], frames))

        encode_units(self._layers, batch, self._how.options, keep, self._how.threads)
        return [()] * len(batch)


class _DenseUnits:
    """Units of dense streams; each refers to the rows of the one before it, and to tables that all of a space share."""

    def __init__(
        self, units: Units, text: Text, layers: Sequence[LayerCache], space: Space, known: Found, how: Writing
    ) -> None:
        self._layers, self._space, self._how = layers, space, how
        self._rotary = how.rotation.of(space, layers)
        self._streams = Streams(layers, space, self._rotary)
        before = unit_before(units, text, known)
        self._is_behind_frames = before is not None and before.dense is None
        self._before, self._sums = stored_before(units, text, layers, known)
        self._planned: list[DenseUnit] | None = None
        self._tried: Tried | None = None
        self.tables = self._shared(units.tables, text)
        self._own_tables = False

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
        tables are shared is found by trial as well: on each text with long ones, on some of the others.
        """
        plans = self._plan(batch, text)
        middle = plans[middle_of(plans)].cut
        if _is_short(middle):
            self._planned = self._short(plans) if self.tables is not None and _tokens(middle) >= LEAST_OWN else plans
            return not self._is_behind_frames
        found, own, frames = self._trials(plans)
        if self.tables is not None and own is not None:
            self._how.fit.note(self.tables, own=_is_better(own, found))
            if _is_better(own, found):
                self._own_tables, plans = True, _with_own_tables(plans)
                found = self._streams.try_layer(plans)
        self._planned, self._tried = plans, found
        keys, values = (frame <= NEAR * size for frame, size in zip(frames, found.sizes(), strict=True))
        self._streams.frames_near = keys, values
        return sum(found.sizes()) <= WORTH * sum(frames)

    def _short(self, plans: list[DenseUnit]) -> list[DenseUnit]:
        """With tables of their own, if these were smaller when it was tried."""
        assert self.tables is not None
        fit, own_plans = self._how.fit, _with_own_tables(plans)
        if fit.is_due(self.tables):
            found, own = map_pulled(
                lambda each: self._streams.try_layer(each, only_keys=True),
                [plans, own_plans],
                resolve_threads(self._how.threads),
            )
            fit.note(self.tables, own=_is_better(own, found))
            self._tried = own if _is_better(own, found) else found
        self._own_tables = fit.wants_own(self.tables)
        return own_plans if self._own_tables else plans

    def _trials(self, plans: Sequence[DenseUnit]) -> tuple[Tried, Tried | None, list[int]]:
        """A layer as it is planned, its K with tables of its own where they are shared, and the bytes of frames."""

        def streams() -> Tried:
            return self._streams.try_layer(plans)

        def others() -> tuple[Tried | None, list[int]]:
            own = None
            if self.tables is not None:
                own = self._streams.try_layer(_with_own_tables(plans), only_keys=True)
            return own, self._streams.frames_of_layer(plans, self._how.options)

        calls: list[Callable[[], Any]] = [streams, others]
        found, (own, frames) = map_pulled(lambda call: call(), calls, resolve_threads(self._how.threads))
        return found, own, frames

    def _plan(self, batch: Sequence[Cut], text: Text) -> list[DenseUnit]:
        plans = []
        for cut in batch:
            behind = behind_units(self._before, text.block_tokens)
            plans.append(DenseUnit(cut, behind, self.tables))
            blocks = (cut[1] - cut[0]) // text.block_tokens
            self._before = [*self._before, Before(blocks, behind.chain)][-most_blocks(text.block_tokens) :]
        return _with_own_tables(plans) if self._own_tables else plans

    def units(self, batch: Sequence[Cut], text: Text, done: Callable[[int, Unit], object]) -> list[tuple[int, ...]]:
        """As `_Frames.units`."""
        plans = self._planned or self._plan(batch, text)
        tried, self._planned, self._tried = self._tried, None, None
        sums: dict[int, tuple[int, ...]] = {}

        def keep(number: int, streams: tuple[Frame, ...], its_sums: tuple[int, ...]) -> None:
            begin, end = plans[number].cut
            parent = text.key_before(begin // text.block_tokens)
            dense = dense_of(plans[number], its_sums)
            done(number, Unit(text.space, parent, begin, text.ids[begin:end], streams, dense))
            sums[number] = its_sums

        self._streams.encode(plans, text.block_tokens, keep, self._how.threads, tried)
        referred = []
        for number, plan in enumerate(plans):
            referred.append(tuple(self._sums[len(self._sums) - plan.behind.blocks :]))
            self._sums = [*self._sums, *sums[number]][-most_blocks(text.block_tokens) :]
        return referred


def _with_own_tables(plans: Sequence[DenseUnit]) -> list[DenseUnit]:
    return [plan if _tokens(plan.cut) < LEAST_OWN else plan._replace(tables=None) for plan in plans]


def _is_better(own: Tried, shared: Tried) -> bool:
    """Whether K has so much fewer bytes with tables of its own."""
    return shared.sizes()[0] > SHARED * own.sizes()[0]


def _tokens(cut: Cut) -> int:
    return cut[1] - cut[0]


def _is_short(cut: Cut) -> bool:
    return _tokens(cut) < LEAST_TOKENS


def _add_batch(units: Units, text: Text, space: Space, batch: Sequence[Cut], make: _Frames | _DenseUnits) -> Added:
    new: dict[int, NewUnit] = {}
    with units.stage() as staging:

        def keep(number: int, unit: Unit) -> None:
            begin, end = batch[number]
            keys = text.keys[begin // text.block_tokens : end // text.block_tokens]
            path = staging.write(str(number), unit.pieces())
            new[number] = NewUnit(unit.parent, begin, unit.ids, keys, unit.nbytes, path)

        behind = make.units(batch, text, keep)
        added = [replace(new[number], behind=sums) for number, sums in enumerate(behind)]
        return units.add(space, text, added, make.tables)


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
