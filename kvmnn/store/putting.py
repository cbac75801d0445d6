"""A text on its way in: encoded, written aside, noted down."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from ..arrays.layer_cache import LayerCache
from ..dense import Rotary, find_rotary
from ..errors import OptionError
from ..frames import CodecOptions
from ..threads.pool import map_pulled, resolve_threads
from . import table_sets
from .behind import Before, behind_units, most_blocks, stored_before, unit_before
from .dense_encoding import NEAR, SHARED, WORTH, Compared, DenseUnit, Kind, Streams, Tried, dense_of, fits, middle_of
from .encoding import Cut, blocks_in_unit, cuts, encode_units
from .lookup import Found, Text
from .space import Space
from .table_sets import LEAST_TOKENS
from .unit import Frame, Unit
from .units import Added, Units
from .updates import NewUnit

_BATCH_BYTES = 256 << 20
"""Raw bytes that are encoded before they are noted down: what a killed process loses of a put."""
LEAST_OWN = 64
"""Units of fewer tokens always share tables."""
TRIED_EVERY = 16
"""Units that are put from one trial of how texts are best encoded to the next."""


class Rotation:
    """How the models of a store rotated K.

    Parameters
    ----------
    said
        By the caller; ``"none"`` for not at all, None where each is to be found by trial.

    Raises
    ------
    OptionError
        For anything else.
    """

    def __init__(self, said: Rotary | Literal["none"] | None) -> None:
        if not (said is None or said == "none" or isinstance(said, Rotary)):
            raise OptionError(f'rotary is {said!r}: expected a kvmnn.Rotary, "none" or None')
        self._said = said
        self._found: dict[bytes, Rotary | None] = {}

    def of(self, space: Space, layers: Sequence[LayerCache]) -> Rotary | None:
        """That of a space, found on the first text that is long enough; `OptionError` for one beyond its heads."""
        if self._said == "none":
            return None
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


class Verdict(NamedTuple):
    """What a trial has shown: whether units have tables of their own, as those that are shared were made of a text that
    is unlike theirs; whether frames of K, and of V, come near the streams (None where a short text was tried); and
    what streams have been smaller than frames since (`Streams.frames_lost`).
    """

    own_tables: bool
    frames_near: tuple[bool, bool] | None
    frames_lost: Mapping[Kind, float] = MappingProxyType({})


class Trials:
    """What the last trials have shown; on each put a trial would take short texts a seventh of their time."""

    def __init__(self) -> None:
        self._since: dict[bytes, int] = {}
        self._shown: dict[bytes, Verdict] = {}

    def is_due(self, key: bytes, units: int) -> bool:
        """Whether a put of so many units is to be tried: the first one, and one unit in so many."""
        if key in self._since:
            self._since[key] += units
        return self._since.get(key, TRIED_EVERY) >= TRIED_EVERY

    def shown(self, key: bytes) -> Verdict:
        """By the last trial."""
        return self._shown.get(key, Verdict(False, None))

    def note(self, key: bytes, verdict: Verdict) -> None:
        """What a trial has shown."""
        self._since[key], self._shown[key] = 0, verdict

    def note_frames(self, key: bytes, compared: Sequence[Compared]) -> None:
        """What frames have come to in a text that goes by the last trial."""
        shown = self._shown.get(key)
        if shown is None:
            return
        lost = dict(shown.frames_lost)
        for kind, share, _ in compared:
            lost[kind] = min(share, lost.get(kind, share))
        for each in compared:
            if each.is_frame:
                lost.pop(each.kind, None)
        self._shown[key] = shown._replace(frames_lost=lost)


class Writing(NamedTuple):
    """How units are made: effort of frames, how K was rotated (dense streams), what trials have shown, threads."""

    options: CodecOptions
    rotation: Rotation
    trials: Trials
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
        self.tables = units.tables.of_space(space.key)
        self._tables_are_new = self.tables is None and text.ids.size >= LEAST_TOKENS
        if self._tables_are_new:
            self.tables = table_sets.made_of(layers, space, self._rotary, how.threads)
            units.tables.keep(space.key, self.tables)
        self._key = space.key + (self.tables.key if self.tables else b"")
        self._own_tables = self._is_short = False

    def are_worth_it(self, batch: Sequence[Cut], text: Text) -> bool:
        """Whether a layer of the first batch is so much smaller than as frames; units are made of frames if not.

        Short units are what the unit before them is: they gain by rows to refer to, which frames cannot give. What is
        not tried goes by the last trial, but for a text that was better off as frames, which says nothing of others.
        """
        plans = self._plan(batch, text)
        middle = plans[middle_of(plans)].cut
        self._is_short = _is_short(middle)
        if self._is_short:
            self._planned = self._short(plans) if self.tables is not None and _tokens(middle) >= LEAST_OWN else plans
            return not self._is_behind_frames
        shown = self._how.trials.shown(self._key)
        if self._how.trials.is_due(self._key, len(plans)) or shown.frames_near is None:
            return self._try(plans)
        self._planned, self._streams.frames_near = self._with_tables(plans, own=shown.own_tables), shown.frames_near
        self._streams.frames_lost = shown.frames_lost
        return True

    def _try(self, plans: list[DenseUnit]) -> bool:
        found, own, frames = self._trials(plans)
        own_tables = own is not None and _is_better(own, found)
        if own_tables:
            plans = self._with_tables(plans, own=True)
            found = self._streams.try_layer(plans)
        near = [frame <= NEAR * size for frame, size in zip(frames, found.sizes(), strict=True)]
        frames_near = near[0], near[-1]  # there may be no V
        self._planned, self._tried, self._streams.frames_near = plans, found, frames_near
        are_worth_it = sum(found.sizes()) <= WORTH * sum(frames)
        if are_worth_it and not self._tables_are_new:  # new tables fit the text that they were made of, and no other
            self._how.trials.note(self._key, Verdict(own_tables, frames_near))
        return are_worth_it

    def _short(self, plans: list[DenseUnit]) -> list[DenseUnit]:
        """With tables of their own, if these were smaller when it was tried."""
        trials, own_plans = self._how.trials, _with_own_tables(plans)
        self._streams.frames_lost = trials.shown(self._key).frames_lost
        if trials.is_due(self._key, len(plans)):
            found, own = map_pulled(
                lambda each: self._streams.try_layer(each, only_keys=True),
                [plans, own_plans],
                resolve_threads(self._how.threads),
            )
            trials.note(self._key, trials.shown(self._key)._replace(own_tables=_is_better(own, found)))
            self._tried = own if _is_better(own, found) else found
        return self._with_tables(plans, own=trials.shown(self._key).own_tables)

    def _with_tables(self, plans: list[DenseUnit], *, own: bool) -> list[DenseUnit]:
        self._own_tables = own
        return _with_own_tables(plans) if own else plans

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
        if not self._is_short:  # a frame gains more by many tokens
            self._how.trials.note_frames(self._key, self._streams.compared)
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
            path = staging.write(unit.pieces())
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
