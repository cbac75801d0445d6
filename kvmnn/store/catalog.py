"""What a store directory holds besides K and V: pins, sessions; and what there is of everything."""

from __future__ import annotations

import zlib

from ..checks import shown
from ..errors import KvmnnError, SourceError
from . import updates
from .directory import Directory
from .lookup import Text
from .mending import session_ids
from .prefix_state import is_state, parse_state
from .results import LAST_IDS, Entry, Listing, Stats
from .rows import Number, NumberedWord, SessionText, TextRow, Totals, Word, WrongRowError, parse_space_document
from .space import Space
from .token_ids import Ids, block_keys, text_key
from .unit import DamagedError, parse_header

_MAX_NAME = 256


def note_session(units: Directory, name: str, space: Space, ids: Ids) -> None:
    """Keep the text of a session under its name."""
    check_name(name)
    with units.index.writing() as cursor:
        updates.note_session(cursor, name, space, ids)
        units.beside.note_space(space)
        units.beside.keep_session(name, space, ids)


def session(units: Directory, name: str) -> tuple[Space, Ids]:
    """Space and text of a session; `KvmnnError` where there is none of this name."""
    check_name(name)
    with units.index.reading() as cursor:
        row = cursor.row(
            SessionText,
            "SELECT space.document, session.ids FROM session JOIN space ON space.id = session.space WHERE name = ?",
            (name,),
        )
        space = None if row is None else parse_space_document(row.document, units.label)
    if row is None or space is None:
        raise KvmnnError(f"{units.label}: there is no session {shown(name)}")
    try:
        return space, session_ids(row.ids)
    except (zlib.error, TypeError, ValueError) as error:
        raise SourceError(f"{units.label}: session {shown(name)} is damaged: {error}") from None


def sessions(units: Directory) -> list[str]:
    """All names."""
    with units.index.reading() as cursor:
        return [row.value for row in cursor.rows(Word, "SELECT name FROM session ORDER BY name")]


def forget_session(units: Directory, name: str) -> None:
    """Forget a session; errors as `session`."""
    check_name(name)
    with units.index.writing() as cursor:
        if cursor.execute("DELETE FROM session WHERE name = ?", (name,)) == 0:
            raise KvmnnError(f"{units.label}: there is no session {shown(name)}")
        units.beside.drop_session(name)


def pin(units: Directory, space: Space, ids: Ids) -> bool:
    """Pin the unit with the end of a text: what leads to it stays with it. Whether it was not pinned before.

    Raises
    ------
    KvmnnError
        Where the end is not stored any more.
    """
    text = Text(space.key, ids, block_keys(space.key, ids, units.block_tokens), units.block_tokens, space.needs_state)
    key = text_key(space.key, ids)
    with units.index.writing() as cursor:
        unit = units.lookup(cursor).last_unit(text)
        if unit is None:
            held = units.lookup(cursor).find(text).tokens
            raise KvmnnError(f"{units.label}: holds only {held:,} tokens of this text of {ids.size:,}")
        is_new = updates.pin(cursor, key, unit, ids.size)
        if is_new:
            units.beside.keep_pin(space, ids)
    return is_new


def unpin(units: Directory, space: Space, ids: Ids) -> bool:
    """Let go of a text; whether it was pinned."""
    key = text_key(space.key, ids)
    with units.index.writing() as cursor:
        row = cursor.row(Number, "SELECT unit FROM pin WHERE key = ?", (key,))
        if row is not None:
            cursor.execute("DELETE FROM pin WHERE key = ?", (key,))
            cursor.execute("UPDATE unit SET pins = pins - 1 WHERE id = ?", row)
            units.beside.drop_pin(key)
    return row is not None


_IS_END = """(NOT EXISTS (SELECT 1 FROM block JOIN branch ON branch.parent = block.key
    WHERE block.unit = unit.id AND (block.number + 1) * (SELECT block_tokens FROM state) = unit.tokens)
    AND (tokens = 0 OR NOT EXISTS (SELECT 1 FROM unit AS other
    WHERE other.parent = unit.id AND other.tokens = 0 AND other.start = unit.start + unit.tokens)))"""
"""Whether no unit goes on at the end of one; behind a tail none can. State of the text up to that end stands for it."""


_TEXT_BYTES = """(WITH RECURSIVE path(id, up, bytes) AS (SELECT unit.id, unit.parent, unit.bytes
    UNION SELECT before.id, before.parent, before.bytes FROM unit AS before JOIN path ON before.id = path.up)
    SELECT sum(bytes) FROM path)"""
"""Bytes of a unit and of all before it: UNION visits each once, also where a forged index has a circle."""


def entries(units: Directory) -> Listing:
    """The stored texts, the last used first."""
    with units.index.reading() as cursor:
        documents = cursor.rows(NumberedWord, "SELECT id, document FROM space")
        spaces = {row.number: parse_space_document(row.word, units.label) for row in documents}
        rows = cursor.all_rows(
            TextRow,
            f"SELECT space, start + tokens, {_TEXT_BYTES}, pins, (SELECT tick FROM state) - used, id, tokens = 0 "
            f"FROM unit WHERE {_IS_END} ORDER BY used DESC, id DESC",
        )
        if not {row.space for row in rows} <= spaces.keys():
            raise WrongRowError("a unit has a space that is not there")
        total = cursor.need_row(Number, "SELECT coalesce(sum(bytes), 0) FROM unit").value
    found = []
    for number, tokens, nbytes, pins, ago, unit, has_state in rows:
        space = spaces[number]
        found.append(
            Entry(
                model=space.model,
                dtype=space.dtype,
                tokens=tokens,
                bytes=nbytes,
                pinned=pins > 0,
                unused_for=ago,
                is_complete=bool(has_state) or not space.needs_state,
                last_ids=tuple(_last_ids(units, unit)),
            )
        )
    return Listing(texts=tuple(found), bytes=total)


def _last_ids(units: Directory, unit: int) -> list[int]:
    """The last ids in the file of a unit; none where it cannot be read."""
    data = units.files.read(unit)
    try:
        if data is None:
            return []
        ids = parse_state(data).ids if is_state(data) else parse_header(data).ids
    except DamagedError:
        return []
    return [int(each) for each in ids[-LAST_IDS:]]


def stats(units: Directory, asked: int, found: int) -> Stats:
    """Counts of everything."""
    with units.index.reading() as cursor:
        sums = ", ".join(f"coalesce(sum({what}), 0)" for what in ("tokens = 0", "tokens", "bytes", _IS_END))
        count, states, tokens, nbytes, texts = cursor.need_row(Totals, f"SELECT count(*), {sums} FROM unit")
        state_bytes = cursor.need_row(Number, "SELECT coalesce(sum(skip), 0) FROM unit WHERE tokens = 0").value
        blocks, pinned, kept = (
            cursor.need_row(Number, f"SELECT count(*) FROM {table}").value for table in ("block", "pin", "session")
        )
        rows = cursor.rows(
            NumberedWord,
            "SELECT sum(tokens), space.document FROM unit JOIN space ON space.id = unit.space GROUP BY space.id",
        )
        by_space = [(parse_space_document(row.word, units.label), row.number) for row in rows]
    return Stats(
        texts=texts,
        units=count - states,
        states=states,
        blocks=blocks,
        tokens=tokens,
        bytes=nbytes,
        raw_bytes=state_bytes + sum(space.token_bytes * number for space, number in by_space),
        index_bytes=units.index.nbytes,
        models=tuple(sorted({space.model for space, _ in by_space})),
        pinned=pinned,
        sessions=kept,
        codec=units.codec,
        asked_tokens=asked,
        found_tokens=found,
    )


def check_name(name: object) -> None:
    """Refuse what is no name of a session."""
    if not isinstance(name, str):
        raise TypeError(f"the name of a session must be a string, not {type(name).__name__}")
    if not name or len(name) > _MAX_NAME or not name.isprintable():
        raise KvmnnError(f"the name of a session is {shown(name)}: expected 1 to {_MAX_NAME} printable characters")
