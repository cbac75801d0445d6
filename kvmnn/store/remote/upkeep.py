"""What keeps a store in another engine in order; each of these calls reads all records."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from ..decoding import Stretch, check_unit, decode_stretches
from ..encoding import blocks_in_unit
from ..lookup import Text
from ..results import Cleaned, Entry, Stats, Verified
from ..space import Space
from ..unit import DamagedError, parse
from . import sessions
from .records import AFTER, Record, from_bytes
from .shelf import Shelf

T = TypeVar("T")

_AT_ONCE = 256


def records(units: Shelf) -> Iterator[tuple[str, Record | None]]:
    """All records by their names; None for one that is damaged."""
    for folder in units.values.folders():
        if folder.startswith(AFTER):
            names = [f"{folder}/{name}" for name in units.values.names_in(folder)]
            for some in _runs(names):
                yield from zip(some, map(from_bytes, units.values.get_many(some)), strict=True)


def delete(units: Shelf, text: Text) -> Cleaned:
    """Remove the units of a text from its end on, up to one that others continue."""
    found = units.find(text)
    size = units.block_tokens
    known = {record.unit: record for _, record in records(units) if record is not None}
    gone: list[Record] = []
    for place in reversed(found.places if found.tokens == text.ids.size else ()):
        record = known.get(place.unit)
        if record is None:
            break
        keys = {record.parent, *record.keys(size)} - {record.parent}
        others = [each for each in known.values() if each.parent in keys and each not in gone]
        if others or record.ids.size > place.skip + place.take:
            break
        gone.append(record)
    units.forget(gone)
    kept = "" if gone else "other texts go on from it"
    return Cleaned(units=len(gone), bytes=sum(record.nbytes for record in gone), kept=kept)


def clean(units: Shelf) -> Cleaned:
    """Remove records without units, damaged records, and units without records."""
    there = set(units.values.names_in("units"))
    lost, known = [], set()
    for name, record in records(units):
        if record is None or f"{record.unit:032x}" not in there:
            lost.append(name)
        else:
            known.add(f"{record.unit:032x}")
    others = sorted(there - known)
    for some in _runs([*lost, *(f"units/{name}" for name in others)]):
        units.values.delete(some)
    return Cleaned(units=len(lost), other_files=len(others))


def verify(units: Shelf, threads: int | None) -> Verified:
    """Read, decode and compare every unit."""
    spaces = {space.key: space for space in units.spaces()}
    count = tokens = nbytes = 0
    notes: list[str] = []
    for _, record in records(units):
        if record is None:
            continue
        (data,) = units.read([record.unit])
        if data is None:
            continue  # evicted: no damage
        count += 1
        try:
            space = spaces.get(record.space)
            if space is None:
                raise DamagedError("is of no known model")
            unit = parse(data)
            check_unit(unit, space, record.ids, 0, (blocks_in_unit(space, units.block_tokens) + 1) * units.block_tokens)
            if (unit.parent, unit.start) != (record.parent, record.start):
                raise DamagedError("holds other blocks than its record says")
            decode_stretches(space, [Stretch(unit, 0, unit.ids.size)], threads)
        except DamagedError as error:
            units.discard(record.unit, str(error), notes)
        else:
            tokens += unit.ids.size
            nbytes += unit.nbytes
    return Verified(units=count, tokens=tokens, bytes=nbytes, damaged=tuple(notes))


def stats(units: Shelf, asked: int, found: int) -> Stats:
    """Counts of everything, as the records say."""
    spaces = {space.key: space for space in units.spaces()}
    known = [record for _, record in records(units) if record is not None and record.space in spaces]
    size = units.block_tokens
    return Stats(
        texts=len(_ends(known, size)),
        units=len(known),
        blocks=sum(record.ids.size // size for record in known),
        tokens=sum(record.ids.size for record in known),
        bytes=sum(record.nbytes for record in known),
        raw_bytes=sum(record.ids.size * spaces[record.space].token_bytes for record in known),
        index_bytes=0,
        models=tuple(sorted({space.model for space in spaces.values()})),
        pinned=0,
        sessions=len(sessions.names(units.values)),
        asked_tokens=asked,
        found_tokens=found,
    )


def entries(units: Shelf) -> list[Entry]:
    """The stored texts, the longest first."""
    spaces: dict[bytes, Space] = {space.key: space for space in units.spaces()}
    known = [record for _, record in records(units) if record is not None and record.space in spaces]
    found = []
    for record in _ends(known, units.block_tokens):
        space = spaces[record.space]
        found.append(
            Entry(
                model=space.model,
                dtype=space.dtype,
                tokens=record.start + record.ids.size,
                bytes=record.nbytes,
                pinned=False,
                unused_for=None,
            )
        )
    return sorted(found, key=lambda entry: -entry.tokens)


def _ends(known: Sequence[Record], block_tokens: int) -> list[Record]:
    """The records at whose end no other goes on; behind a tail none can."""
    parents = {record.parent for record in known}
    return [
        record for record in known if record.ids.size % block_tokens or record.keys(block_tokens)[-1] not in parents
    ]


def _runs(entries_: Sequence[T]) -> Iterator[Sequence[T]]:
    for begin in range(0, len(entries_), _AT_ONCE):
        yield entries_[begin : begin + _AT_ONCE]
