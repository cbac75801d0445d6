"""The index of a store made anew from its units, for one that was lost or damaged."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ManifestError
from ..files.output import failures
from . import updates
from .beside import FILE_NAME, Beside, settings_wanted
from .index import index_name, make, newest
from .lookup import Lookup, Text
from .prefix_state import is_state, parse_state
from .rows import BranchEnd, Cursor
from .space import Space
from .token_ids import Ids, as_text, block_keys
from .unit import DamagedError, Header, parse, parse_header
from .unit_files import UnitFiles
from .updates import NewUnit, ParentGoneError

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: two processes that do this at once do it twice
    fcntl = None

LOCK = "rebuild.lock"
_GAP = 1 << 16
"""Numbers of units that are left out: a process that has not noticed yet may still use those that come next."""


class Rebuilt(NamedTuple):
    """What an index that was made anew has: units, pinned texts, sessions; `left` units are of no use any more."""

    units: int
    left: int
    pins: int
    sessions: int


def rebuild(folder: Path, seen: Path | None) -> Rebuilt | None:
    """Make the index of a store anew, unless another process has done so since `seen` was the newest.

    Raises
    ------
    OutputError
        Where it cannot be written.
    KvmnnError
        Where the store's settings are lost or damaged as well.
    """
    beside, files = Beside(folder), UnitFiles(folder)
    try:
        block_tokens = beside.settings().block_tokens
    except ManifestError as error:
        wanted = settings_wanted("this file")
        raise ManifestError(f"{error}; the index is lost or damaged as well: {wanted}") from None
    with _locked(folder):
        number, found = newest(folder)
        if found != seen:
            return None
        path = folder / index_name(number + 1)
        new = path.with_name(path.name + ".new")
        with failures(new):
            new.unlink(missing_ok=True)
            try:
                with closing(sqlite3.connect(new, isolation_level=None)) as connection:
                    make(connection, block_tokens)
                    connection.execute("BEGIN IMMEDIATE")
                    made = _fill(Cursor(connection.cursor()), folder, beside, files, block_tokens)
                    connection.execute("COMMIT")
                os.replace(new, path)
            except sqlite3.Error as error:
                raise OSError(0, str(error)) from error
            finally:
                new.unlink(missing_ok=True)
        for name in os.listdir(folder):
            if name.startswith("index") and ".sqlite" in name and not name.startswith(path.name):
                with suppress(OSError):
                    (folder / name).unlink()
        return made


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    with failures(folder / LOCK):
        handle = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _fill(cursor: Cursor, folder: Path, beside: Beside, files: UnitFiles, block_tokens: int) -> Rebuilt:
    spaces = {space.key: space for space in beside.spaces()}
    for space in spaces.values():
        updates.space_id(cursor, space)
    starts, states = [], []
    wrong = 0
    for path in files.others(set()):
        with suppress(DamagedError):
            data = files.read(int(path.stem, 16))
            if data is not None and is_state(data):
                states.append(int(path.stem, 16))
            elif data is not None:
                header = parse_header(data)
                starts.append((header.start, int(path.stem, 16)))
                wrong += not _fits(header, block_tokens)
    if 2 * wrong > len(starts):
        raise ManifestError(
            f"{folder / FILE_NAME}: says that a block has {block_tokens} tokens, and {wrong} of {len(starts)} units "
            f"have other blocks: {settings_wanted('it')}"
        )
    units = left = 0
    for _, number in sorted(starts):  # what others follow comes before them
        if _insert(cursor, number, files, spaces, block_tokens):
            units += 1
        else:
            left += 1
    lookup = Lookup(cursor, lambda unit: _ids_of(files, unit), lambda unit: False)
    for number in states:
        if _insert_state(cursor, number, files, lookup, spaces, block_tokens):
            units += 1
        else:
            left += 1
    last = max((*(number for _, number in starts), *states), default=0)
    cursor.execute("UPDATE unit SET used = id")  # units that were put later were used later
    cursor.execute("UPDATE state SET tick = ?", (last,))
    cursor.execute("DELETE FROM sqlite_sequence WHERE name = 'unit'")
    cursor.execute("INSERT INTO sqlite_sequence VALUES ('unit', ?)", (last + _GAP,))
    pins = sessions = 0
    for kept in beside.pins():
        if kept.space in spaces:
            keys = block_keys(kept.space, kept.ids, block_tokens)
            text = Text(kept.space, kept.ids, keys, block_tokens, spaces[kept.space].needs_state)
            updates.pin_text(cursor, lookup, text)
            pins += 1
    for kept in beside.sessions():
        if kept.space in spaces:
            updates.note_session(cursor, kept.name, spaces[kept.space], kept.ids)
            sessions += 1
    return Rebuilt(units, left, pins, sessions)


def _fits(header: Header, block_tokens: int) -> bool:
    """Whether a unit can be one of blocks of so many tokens."""
    blocks = header.ids.size // block_tokens
    return not header.start % block_tokens and (header.dense is None or len(header.dense.sums) == blocks)


def _insert(cursor: Cursor, number: int, files: UnitFiles, spaces: dict[bytes, Space], block_tokens: int) -> bool:
    """Note a unit down by its file; whether it is of use."""
    data = files.read(number)
    try:
        unit = parse(data) if data is not None else None
    except DamagedError:
        return False
    if unit is None or unit.space not in spaces:
        return False
    keys = block_keys(unit.parent, unit.ids, block_tokens)
    new = NewUnit(unit.parent, unit.start, unit.ids, keys, unit.nbytes, files.path(number))
    text = Text(unit.space, unit.ids, keys, block_tokens)
    space = updates.space_id(cursor, spaces[unit.space])
    try:
        found, _ = updates.insert(cursor, space, new, text, lambda: _has_tail(cursor, new, block_tokens), number=number)
    except ParentGoneError:
        return False
    return found > 0


def _insert_state(
    cursor: Cursor, number: int, files: UnitFiles, lookup: Lookup, spaces: dict[bytes, Space], block_tokens: int
) -> bool:
    """Note the state of a prefix down by its file; whether it is of use."""
    data = files.read(number)
    try:
        state = parse_state(data) if data is not None else None
    except DamagedError:
        return False
    if data is None or state is None or state.space not in spaces:
        return False
    space, parent = spaces[state.space], None
    if space.layers:
        parent = lookup.find_end(state.space, state.parent, state.ids, block_tokens)
        if parent is None:
            return False
    new = updates.NewState(state.key, state.tokens, state.raw_bytes, data.size)
    return updates.insert_state(cursor, updates.space_id(cursor, space), new, parent, number=number) > 0


def _has_tail(cursor: Cursor, new: NewUnit, block_tokens: int) -> bool:
    """Whether another unit that follows the last whole block begins with what is left of this one."""
    tail = as_text(new.ids[len(new.keys) * block_tokens :])
    parent = new.keys[-1] if new.keys else new.parent
    row = cursor.row(
        BranchEnd,
        "SELECT parent, text FROM branch WHERE parent = ? AND text >= ? ORDER BY text LIMIT 1",
        (parent, tail),
    )
    return row is not None and row.text.startswith(tail)


def _ids_of(files: UnitFiles, unit: int) -> Ids | None:
    data = files.read(unit)
    try:
        return None if data is None else parse_header(data).ids
    except DamagedError:
        return None
