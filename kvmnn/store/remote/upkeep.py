"""What keeps a store in another engine in order; each of these calls reads all records."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from ...dtypes import Bytes
from ..lookup import Text
from ..prefix_state import decode_state, parse_state
from ..results import LAST_IDS, Cleaned, Entry, Listing, Stats, Verified, kept_part, pinned_bytes
from ..space import Space
from ..unit import DamagedError
from ..verifying import GoneError, Verifier
from . import bounding, sessions
from .records import AFTER, STATES, Record, StateRecord, placed, unit_name
from .shelf import TABLES, Shelf

T = TypeVar("T")

_UNIT = re.compile("[0-9a-f]{32}")
_AT_ONCE, _AT_ONCE_BYTES = 256, 32 << 20
"""Values, and bytes of units unless one has more, in one round trip."""


def records(units: Shelf) -> Iterator[tuple[str, Record | None]]:
    """All records by their names; None for one that is damaged, or lies where another belongs."""
    for some in _runs(sorted((*units.values.tree(AFTER), *units.values.tree(STATES)))):
        for name, data in zip(some, units.values.get_many(some), strict=True):
            yield name, placed(data, name, units.block_tokens)


def _known(units: Shelf) -> list[Record]:
    return [record for _, record in records(units) if record is not None]


def delete(units: Shelf, text: Text) -> Cleaned:
    """Remove the units of a text from its end on, up to one that others continue, or that is pinned."""
    while True:
        found = units.find(text)
        size = units.block_tokens
        known = {record.unit: record for record in _known(units)}
        pins = bounding.pins(units)
        pinned = {unit for ends in pins.values() for unit in ends}
        gone: list[Record] = []
        state = units.find_state(text, text.ids.size) if text.needs_state else None
        if state is not None and state.tokens == text.ids.size and state.unit not in pinned and state.unit in known:
            gone.append(known[state.unit])
        is_stored = bool(gone) if text.needs_state else found.tokens == text.ids.size
        for place in reversed(found.places if is_stored else ()):
            record = known.get(place.unit)
            if record is None or record.unit in pinned:
                break
            keys = set(record.keys(size))
            others = [each for each in known.values() if each.parent in keys and each not in gone]
            rest = [each for each in known.values() if each not in gone and each is not record]
            others += [each for each in _states(rest) if each.ends_in(record, size) and not _has_end(rest, each, size)]
            if others or record.ids.size > place.skip + place.take:
                break
            gone.append(record)
        if not gone or bounding.forget_unless_pinned(units, gone, pins):
            is_pinned = bool(found.places) and found.places[-1].unit in pinned
            is_pinned |= state is not None and state.unit in pinned
            kept = kept_part(len(gone), units.find(text).tokens, pinned=is_pinned)
            return Cleaned(units=len(gone), bytes=sum(record.nbytes for record in gone), kept=kept)


def clean(units: Shelf, max_bytes: int | None) -> Cleaned:
    """Remove records without units, damaged records, units without records, and what goes on from nothing; and texts
    down to `max_bytes`.

    A put stores tables and units before records, or all at once. So what is listed first is compared with what was
    listed after it, and nothing that came meanwhile seems to be of no use; what a put may have stored just now stays.
    """
    units.touch((), now=True)
    uses, tables = units.values.names_in("uses"), units.values.names_in(TABLES)
    seen = list(records(units))
    there = set(units.values.names_in("units"))
    lost = [name for name, record in seen if record is None or f"{record.unit:032x}" not in there]
    held = [record for record in _known(units) if f"{record.unit:032x}" in there]
    known = {f"{record.unit:032x}" for record in held}
    spaces = {record.space.hex() for record in held}
    foreign = sorted(name for name in there if not _UNIT.fullmatch(name))
    others = [f"units/{name}" for name in sorted(there - known - set(foreign))]
    reached = {record.unit for record in _in_order(held, units.block_tokens, orphans=False)}
    layers = {space.key for space in units.spaces() if space.layers}
    reached |= {state.unit for state in _states(held) if state.space not in layers}
    reached -= {
        state.unit for state in _states(held) if state.space in layers and not _has_end(held, state, units.block_tokens)
    }
    loose = {record.unit for _, record in seen if record is not None} - reached - bounding.pinned_units(units)
    orphans = [each for each in held if each.unit in loose]
    units.forget(orphans)
    unused = [f"uses/{name}" for name in uses if name not in known]
    others += [f"{TABLES}/{name}" for name in tables if name.partition("-")[0] not in spaces]
    settled = units.values.settled(others)
    for some in _runs([*lost, *settled, *unused]):
        units.values.delete(some)
    evicted, nbytes = (0, 0) if max_bytes is None else bounding.evict(units, max_bytes)
    return Cleaned(
        units=len(lost) + len(orphans) + evicted,
        bytes=nbytes + sum(record.nbytes for record in orphans),
        other_files=len(settled) + units.values.sweep(),
        young_files=len(others) - len(settled),
        kept=pinned_bytes(units.held_bytes or 0, max_bytes),
        foreign=tuple(sorted({*(f"units/{name}" for name in foreign), *units.values.foreign()})),
    )


def verify(units: Shelf, threads: int | None) -> Verified:
    """Read, decode and compare every unit."""
    spaces = {space.key: space for space in units.spaces()}
    known = _known(units)
    size = units.block_tokens
    holders = {key: (record.unit, n) for record in known for n, key in enumerate(record.keys(size), 1)}
    at_hand: dict[int, Bytes | None] = {}
    verifier = Verifier(lambda unit: _read(units, unit, at_hand), holders.get, units.tables, size, threads)
    count = states = tokens = nbytes = 0
    notes: list[str] = []
    damaged: list[Record] = []
    lost: list[Record] = []
    gone: set[bytes] = set()
    for some in _by_bytes(_in_order(known, size)):
        at_hand.clear()
        read = units.values.get_many([unit_name(record.unit) for record in some])
        for record, data in zip(some, read, strict=True):
            at_hand[record.unit] = None if data is None else np.frombuffer(data, np.uint8)
        for record in some:
            if record.parent in gone:
                lost.append(record)
                gone.update(record.keys(size))
                continue
            try:
                space = spaces.get(record.space)
                if space is None:
                    raise DamagedError("is of no known model")
                if isinstance(record, StateRecord):
                    _verify_state(_read(units, record.unit, at_hand), record, space)
                    states += 1
                    nbytes += record.nbytes
                    continue
                unit = verifier.verified(record.unit, space, record.ids)
                if (unit.parent, unit.start) != (record.parent, record.start):
                    raise DamagedError("holds other blocks than its record says")
            except GoneError:  # the engine has evicted it, or what it follows: no damage
                continue
            except DamagedError as error:
                units.discard(record.unit, str(error), notes)
                damaged.append(record)
                gone.update(record.keys(size))
                continue
            count += 1
            tokens += unit.ids.size
            nbytes += unit.nbytes
    if not units.read_only:
        units.forget([*damaged, *lost])
    return Verified(
        units=count,
        tokens=tokens,
        bytes=nbytes,
        damaged=tuple(notes),
        states=states,
        lost=len(lost),
        beside=(*sessions.damaged(units.values), *map(_another_type, units.values.foreign())),
        anew=tuple(units.notes),
    )


def _another_type(name: str) -> str:
    """Report a value that nobody can read: texts may be behind it, so a store without a word about it seems whole."""
    return f"kvmnn:{name} is of another type than a store writes, and nothing of it is read: delete the key, put again"


def _verify_state(data: Bytes | None, record: StateRecord, space: Space) -> None:
    """Decode and compare windows and state; `GoneError` where they were evicted, `DamagedError` for what is wrong."""
    if data is None:
        raise GoneError("its file is gone or cannot be read")
    state = parse_state(data)
    decode_state(state, space)
    if (state.key, state.tokens, data.size) != (record.key, record.tokens, record.nbytes):
        raise DamagedError("is of another prefix than its record says")


def _has_end(records_: Iterable[Record], state: StateRecord, block_tokens: int) -> bool:
    """Whether any unit has the end of the prefix."""
    return any(not isinstance(each, StateRecord) and state.ends_in(each, block_tokens) for each in records_)


def _states(records_: Iterable[Record]) -> list[StateRecord]:
    return [record for record in records_ if isinstance(record, StateRecord)]


def _read(units: Shelf, unit: int, at_hand: Mapping[int, Bytes | None]) -> Bytes | None:
    """A unit as the engine has it."""
    if unit in at_hand:
        return at_hand[unit]
    (data,) = units.values.get_many([unit_name(unit)])
    return None if data is None else np.frombuffer(data, np.uint8)


def _by_bytes(found: Iterable[Record]) -> Iterator[list[Record]]:
    """Records whose units are read in one round trip."""
    some: list[Record] = []
    nbytes = 0
    for record in found:
        if some and (nbytes + record.nbytes > _AT_ONCE_BYTES or len(some) == _AT_ONCE):
            yield some
            some, nbytes = [], 0
        some.append(record)
        nbytes += record.nbytes
    if some:
        yield some


def _in_order(known: Sequence[Record], block_tokens: int, *, orphans: bool = True) -> Iterator[Record]:
    """Each behind the one that it follows, if it can be; `orphans` are those for which it cannot."""
    behind: dict[bytes, list[Record]] = {}
    for record in known:
        behind.setdefault(record.parent, []).append(record)
    held = {key for record in known for key in record.keys(block_tokens)}
    todo = [each for each in known if each.parent == each.space or (orphans and each.parent not in held)]
    while todo:
        record = todo.pop()
        yield record
        for key in record.keys(block_tokens):
            todo += behind.pop(key, [])


def stats(units: Shelf, asked: int, found: int) -> Stats:
    """Counts of everything, as the records say."""
    spaces = {space.key: space for space in units.spaces()}
    every = [record for record in _known(units) if record.space in spaces]
    states = _states(every)
    known = [record for record in every if not isinstance(record, StateRecord)]
    size = units.block_tokens
    return Stats(
        texts=len(_ends(every, size)),
        states=len(states),
        units=len(known),
        blocks=sum(record.ids.size // size for record in known),
        tokens=sum(record.ids.size for record in known),
        bytes=sum(record.nbytes for record in every),
        raw_bytes=sum(state.raw_bytes for state in states)
        + sum(record.ids.size * spaces[record.space].token_bytes for record in known),
        index_bytes=0,
        models=tuple(sorted({spaces[record.space].model for record in known})),
        pinned=len(bounding.pins(units)),
        sessions=len(sessions.names(units.values)),
        codec=units.codec,
        asked_tokens=asked,
        found_tokens=found,
    )


def entries(units: Shelf) -> Listing:
    """The stored texts, the last used first, those of equal use by length."""
    spaces: dict[bytes, Space] = {space.key: space for space in units.spaces()}
    known = [record for record in _known(units) if record.space in spaces]
    pinned = bounding.pinned_units(units)
    ticks = bounding.ticks(units, known)
    now = max(ticks.values(), default=0)
    size, held = units.block_tokens, [each for each in known if not isinstance(each, StateRecord)]
    holders = {key: each for each in reversed(held) for key in each.keys(size)}
    found = []
    for record in sorted(_ends(known, units.block_tokens), key=lambda each: (-ticks[each.unit], -each.start)):
        space, tick = spaces[record.space], ticks[record.unit]
        found.append(
            Entry(
                model=space.model,
                dtype=space.dtype,
                tokens=record.start + record.ids.size,
                bytes=sum(each.nbytes for each in _path(record, held, holders, size)),
                pinned=record.unit in pinned,
                unused_for=now - tick if tick else None,
                is_complete=isinstance(record, StateRecord) or not space.needs_state,
                last_ids=tuple(record.ids[-LAST_IDS:].tolist()),
            )
        )
    return Listing(texts=tuple(found), bytes=sum(record.nbytes for record in known))


def _path(
    record: Record, held: Sequence[Record], holders: Mapping[bytes, Record], block_tokens: int
) -> Iterator[Record]:
    """A record and those before it in its text; before windows and state stands the unit that they end in, if any."""
    yield record
    if isinstance(record, StateRecord):
        ends = (each for each in held if record.ends_in(each, block_tokens))
        record = next(ends, None) or holders.get(record.parent, record)
        if not isinstance(record, StateRecord):
            yield record
    while (before := holders.get(record.parent)) is not None:
        record = before
        yield record


def _ends(known: Sequence[Record], block_tokens: int) -> list[Record]:
    """The records at whose end no other goes on; behind a tail none can."""
    states = _states(known)
    units = [record for record in known if not isinstance(record, StateRecord)]
    parents = {record.parent for record in units}
    ends: list[Record] = [
        record for record in units if record.ids.size % block_tokens or record.keys(block_tokens)[-1] not in parents
    ]
    return [*states, *(each for each in ends if not any(_is_end_of(each, state, block_tokens) for state in states))]


def _is_end_of(record: Record, state: StateRecord, block_tokens: int) -> bool:
    """Whether windows and state stand for the text up to the end of a unit."""
    return state.tokens == record.start + record.ids.size and state.ends_in(record, block_tokens)


def _runs(entries_: Sequence[T]) -> Iterator[Sequence[T]]:
    for begin in range(0, len(entries_), _AT_ONCE):
        yield entries_[begin : begin + _AT_ONCE]
