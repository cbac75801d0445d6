"""What keeps a store directory in order: deleting, cleaning, verifying."""

from __future__ import annotations

from contextlib import suppress

from ..errors import OutputError
from . import updates
from .directory import Directory
from .lookup import Place, Text
from .mending import mend_beside
from .prefix_state import decode_state, parse_state
from .results import Cleaned, Verified, kept_part, pinned_bytes
from .rows import (
    BlockRow,
    BranchEnd,
    Cursor,
    KeyRow,
    Number,
    StateRow,
    UnitRow,
    UnitSizes,
    UnitUse,
    WrongRowError,
    parse_space_document,
)
from .space import Space
from .strangers import strangers
from .token_ids import as_text, block_keys
from .unit import DamagedError, Unit
from .verifying import Verifier

_AT_ONCE = 64


def delete(units: Directory, text: Text) -> Cleaned:
    """Remove the units of a text from its end on, up to one that others continue, or that is pinned."""

    is_pinned = False

    def choose(cursor: Cursor) -> list[int]:
        nonlocal is_pinned
        lookup = units.lookup(cursor)
        found, last = lookup.find(text), lookup.last_unit(text)
        gone: list[int] = []
        if last is None:
            return gone
        places = [Place(last, 0, 0), *reversed(found.places)] if text.needs_state else reversed(found.places)
        for place in places:
            others = f"other.parent = unit.id AND other.id NOT IN ({','.join(map(str, gone))})"
            tokens, pins, followers = cursor.need_row(
                UnitUse,
                f"SELECT tokens, pins, (SELECT count(*) FROM unit AS other WHERE {others}) FROM unit WHERE id = ?",
                (place.unit,),
            )
            is_pinned = bool(pins)
            if pins or followers or tokens > place.skip + place.take:
                break
            gone.append(place.unit)
        return gone

    removed = units.remove(choose)
    left = units.find(text).tokens
    kept = kept_part(removed.units, left, pinned=is_pinned)
    return Cleaned(units=removed.units, bytes=removed.nbytes, kept=kept)


def clean(units: Directory, max_bytes: int | None) -> Cleaned:
    """Remove what nothing refers to, what refers to no file, and what has to go for `max_bytes`.

    Where the disk is too full to write to the index files go first.
    """
    units.files.sweep()
    units.beside.sweep()
    try:
        return units.in_little_room(lambda: _clean(units, max_bytes))
    except OutputError:
        if units.read_only or max_bytes is None or not units.make_room(max_bytes):
            raise
    return units.in_little_room(lambda: _clean(units, max_bytes))


def _clean(units: Directory, max_bytes: int | None) -> Cleaned:
    with units.index.writing() as cursor:  # nobody gives a file its name meanwhile
        known = {row.value for row in cursor.rows(Number, "SELECT id FROM unit")}
        units.beside.drop_other_pins([row.key for row in cursor.rows(KeyRow, "SELECT key FROM pin")])
        used = cursor.rows(KeyRow, "SELECT key FROM space WHERE id IN (SELECT DISTINCT space FROM unit)")
        spaces = {row.key.hex() for row in used}
        idle = [name for name in units.beside.table_names() if name.partition("-")[0] not in spaces]
        others, other_bytes = len(idle), units.beside.drop_tables(idle)
        for path in units.files.others(known):
            with suppress(OSError):
                other_bytes += path.stat().st_size
                path.unlink()
                others += 1

    def choose(cursor: Cursor) -> list[int]:
        gone: list[int] = []
        for (number,) in cursor.all_rows(Number, "SELECT id FROM unit"):
            if not units.files.path(number).is_file():
                gone += [each for each in updates.with_followers(cursor, number) if each not in gone]
        return gone

    lost = units.remove(choose)
    evicted = units.evict(max_bytes) if max_bytes is not None else None
    with units.index.reading() as cursor:
        left = updates.held_bytes(cursor)
    units.index.clean()
    return Cleaned(
        units=lost.units + (evicted.units if evicted else 0),
        bytes=lost.nbytes + (evicted.nbytes if evicted else 0),
        other_files=others,
        other_bytes=other_bytes,
        kept=pinned_bytes(left, max_bytes),
        foreign=tuple(sorted(strangers(units.folder))),
    )


def verify(units: Directory, threads: int | None) -> Verified:
    """Read, decode and compare every unit, the index first; then what lies beside the index."""
    units.index.check()
    _check_counts(units)
    verifier = Verifier(units.files.read, lambda key: _holder(units, key), units.tables, units.block_tokens, threads)
    count = states = tokens = nbytes = after = 0
    notes: list[str] = []
    lost: set[int] = set()
    while True:
        with units.index.reading() as cursor:
            rows = cursor.all_rows(
                UnitRow,
                "SELECT unit.id, skip, start, tokens, space.document FROM unit LEFT JOIN space "
                "ON space.id = unit.space WHERE unit.id > ? ORDER BY unit.id LIMIT ?",
                (after, _AT_ONCE),
            )
            spaces = {row.document: parse_space_document(row.document, units.label) for row in rows}
        for number, skip, start, unit_tokens, document in rows:
            after = number
            if number in lost:
                continue
            try:
                if not unit_tokens:
                    nbytes += _verify_state(units, number, spaces[document])
                    states += 1
                    continue
                unit = verifier.verified(number, spaces[document])
                _check_rows(units, number, skip, start, unit)
            except DamagedError as error:
                lost.update(units.discard(number, str(error), notes))
                continue
            count += 1
            tokens += unit.ids.size
            nbytes += unit.nbytes
        if not rows:
            break
    beside = tuple(mend_beside(units))
    return Verified(
        units=count,
        tokens=tokens,
        bytes=nbytes,
        states=states,
        damaged=tuple(notes),
        lost=len(lost),
        beside=beside,
        anew=tuple(units.made_anew),
    )


def _verify_state(units: Directory, number: int, space: Space) -> int:
    """Decode and compare the state of a prefix; bytes of its file. Errors as `_check_rows`."""
    data = units.files.read(number)
    if data is None:
        raise DamagedError("its file is gone or cannot be read")
    state = parse_state(data)
    decode_state(state, space)
    with units.index.reading() as cursor:
        row = cursor.row(StateRow, "SELECT start, bytes, skip FROM unit WHERE id = ?", (number,))
        branch = cursor.row(BranchEnd, "SELECT parent, text FROM branch WHERE unit = ?", (number,))
    if row is not None:  # else another process has removed it
        if branch is None or branch.parent != state.key or row.tokens != state.tokens:
            raise DamagedError("is of another prefix than the index says")
        if row != (state.tokens, data.size, state.raw_bytes):
            raise units.index.damaged("it says other things of a state than its file")
    return int(data.size)


_WRONG = (
    "unit LEFT JOIN branch ON branch.unit = unit.id WHERE branch.unit IS NULL",
    "branch WHERE unit NOT IN (SELECT id FROM unit)",
    "block WHERE unit NOT IN (SELECT id FROM unit)",
    "unit WHERE children <> (SELECT count(*) FROM unit AS other WHERE other.parent = unit.id)",
    "unit WHERE pins <> 0 AND id NOT IN (SELECT unit FROM pin)",
    "(SELECT unit, count(*) AS n FROM pin WHERE unit <> 0 GROUP BY unit) AS kept LEFT JOIN unit ON unit.id = kept.unit "
    "WHERE unit.pins IS NOT kept.n",
    "unit WHERE space NOT IN (SELECT id FROM space)",
    "space WHERE typeof(key) <> 'blob' OR typeof(document) <> 'text'",
    "pin WHERE typeof(key) <> 'blob'",
    "state WHERE bytes <> (SELECT total(bytes) FROM unit)",
)
"""Rows that contradict others, or hold what they cannot hold."""


def _check_counts(units: Directory) -> None:
    """`DamagedIndexError` where the index contradicts itself; it is made anew then."""
    with units.index.reading() as cursor:
        for wrong in _WRONG:
            if cursor.has_row(f"SELECT 1 FROM {wrong} LIMIT 1"):
                raise WrongRowError("its rows do not fit together")


def _holder(units: Directory, key: bytes) -> tuple[int, int] | None:
    """The unit that has a block, and how many of its blocks there are up to it."""
    with units.index.reading() as cursor:
        row = cursor.row(BlockRow, "SELECT key, unit, number FROM block WHERE key = ?", (key,))
    return None if row is None else (row.unit, row.number + 1)


def _check_rows(units: Directory, number: int, skip: int, start: int, unit: Unit) -> None:
    """`DamagedError` where the index says other blocks of a unit than its file; `DamagedIndexError` for the rest."""
    size = units.block_tokens
    keys = block_keys(unit.parent, unit.ids, size)
    with units.index.reading() as cursor:
        rows = cursor.all_rows(BlockRow, "SELECT key, unit, number FROM block WHERE unit = ?", (number,))
        counts = cursor.row(UnitSizes, "SELECT tokens, bytes FROM unit WHERE id = ?", (number,))
        branch = cursor.row(BranchEnd, "SELECT parent, text FROM branch WHERE unit = ?", (number,))
    if counts is None:  # another process has removed it
        return
    if start != unit.start or {row.key: row.number for row in rows} != {
        key: at for at, key in enumerate(keys) if at >= skip
    }:
        raise DamagedError("holds other blocks than the index says")
    parent = [unit.parent, *keys][skip : skip + 1]
    first = as_text(unit.ids[skip * size : (skip + 1) * size])
    if counts != (unit.ids.size, unit.nbytes) or [branch] != [(key, first) for key in parent]:
        raise units.index.damaged("it says other things of a unit than its file")
