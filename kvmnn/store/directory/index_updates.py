"""Changes of the index inside a writing transaction, and rebuilding a lost or damaged index from the unit files."""

from __future__ import annotations

import os
import sqlite3
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from ...errors import ManifestError
from ...files.atomic import wrap_os_errors
from ..backend import ConcurrentUpdateError, NewUnit, explain_settings
from ..namespace import Ids, Namespace, TokenSequence, compute_block_keys, compute_sequence_key, to_sort_key
from ..unit import DamagedUnitError, UnitHeader, parse_header, parse_unit
from ..unit_codec import is_prefix_state, parse_state
from .files import SETTINGS_FILE, RecoveryFiles, UnitFiles
from .index import (
    BranchKeyRow,
    NumberRow,
    PinRow,
    TailUnitRow,
    UnitBytesRow,
    UnitParentRow,
    ValidatingCursor,
    create_tables,
    find_newest_index,
    make_index_name,
)
from .lookup import Lookup, find_stored_blocks

_UNITS_PER_QUERY = 64
_SELECT_LEAVES_SQL = "SELECT id, bytes FROM unit WHERE children = 0 AND pins = 0 ORDER BY used, id DESC"
_LOST_UNIT = 0
"""The unit of a pin whose sequence is not completely stored; a put of the sequence renews the pin."""


def ensure_namespace_id(cursor: ValidatingCursor, namespace: Namespace) -> int:
    """Return the row id of a namespace, which is inserted if it is new."""
    cursor.execute("INSERT OR IGNORE INTO space (key, document) VALUES (?, ?)", (namespace.key, namespace.to_json()))
    return cursor.require_row(NumberRow, "SELECT id FROM space WHERE key = ?", (namespace.key,)).value


def advance_clock(cursor: ValidatingCursor) -> int:
    """Count a use of the store; return its tick."""
    cursor.execute("UPDATE state SET tick = tick + 1")
    return _read_state_value(cursor, "tick")


def _read_state_value(cursor: ValidatingCursor, name: str) -> int:
    return cursor.require_row(NumberRow, f"SELECT {name} FROM state").value


def touch(cursor: ValidatingCursor, units: Iterable[int]) -> None:
    """Set the last use of units to a new tick."""
    lru_clock = advance_clock(cursor)
    cursor.execute_many("UPDATE unit SET used = ? WHERE id = ?", [(lru_clock, unit) for unit in units])


def insert_unit(
    cursor: ValidatingCursor,
    namespace_id: int,
    new_unit: NewUnit,
    sequence: TokenSequence,
    has_all: Callable[[], bool],
    *,
    number: int | None = None,
) -> tuple[int, list[int]]:
    """Insert a unit; blocks that another process has stored meanwhile stay with their units."""
    stored_block_rows = find_stored_blocks(cursor, new_unit.keys)
    num_known_blocks = next(
        (number for number, key in enumerate(new_unit.keys) if key not in stored_block_rows), len(new_unit.keys)
    )
    if num_known_blocks == len(new_unit.keys) and (
        new_unit.ids.size == num_known_blocks * sequence.block_tokens or has_all()
    ):
        return 0, []
    parent_key = new_unit.keys[num_known_blocks - 1] if num_known_blocks else new_unit.parent
    first_sort_key = to_sort_key(
        new_unit.ids[num_known_blocks * sequence.block_tokens : (num_known_blocks + 1) * sequence.block_tokens]
    )
    parent = None
    if parent_key != sequence.namespace_key:
        row = cursor.fetch_row(NumberRow, "SELECT unit FROM block WHERE key = ?", (parent_key,))
        if row is None:
            raise ConcurrentUpdateError("the blocks before a unit are gone")
        parent = row.value
        cursor.execute("UPDATE unit SET children = children + 1 WHERE id = ?", (parent,))
    lru_clock = _read_state_value(cursor, "tick")
    cursor.execute(
        "INSERT INTO unit VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, 0)",
        (number, namespace_id, parent, num_known_blocks, new_unit.start, new_unit.ids.size, new_unit.nbytes, lru_clock),
    )
    unit = cursor.last_row_id
    cursor.execute_many(
        "INSERT OR REPLACE INTO block VALUES (?, ?, ?)",
        [
            (key, unit, num_known_blocks + block_index)
            for block_index, key in enumerate(new_unit.keys[num_known_blocks:])
        ],
    )
    cursor.execute("INSERT INTO branch VALUES (?, ?, ?)", (unit, parent_key, first_sort_key))
    cursor.execute("UPDATE state SET bytes = bytes + ?", (new_unit.nbytes,))
    return unit, _find_superseded_tail(cursor, parent_key, first_sort_key, sequence.block_tokens)


@dataclass(frozen=True)
class NewStateUnit:
    """State to be added: its key, tokens of the prefix, bytes of its contents and of its file."""

    key: bytes
    tokens: int
    raw_bytes: int
    nbytes: int


def insert_state(
    cursor: ValidatingCursor,
    namespace_id: int,
    new_state: NewStateUnit,
    parent: int | None,
    *,
    number: int | None = None,
) -> int:
    """Insert state as a unit without tokens that follows `parent`, the unit with the end of its prefix.

    It is evicted before that unit, and removed with it. In its row, `start` is the length of the prefix, and `skip` the
    bytes of its contents.
    """
    if cursor.has_row("SELECT 1 FROM branch WHERE parent = ? AND text = x''", (new_state.key,)):
        return 0
    if parent is not None:
        cursor.execute("UPDATE unit SET children = children + 1 WHERE id = ?", (parent,))
    cursor.execute(
        "INSERT INTO unit VALUES (?, ?, ?, ?, ?, 0, ?, ?, 0, 0)",
        (
            number,
            namespace_id,
            parent,
            new_state.raw_bytes,
            new_state.tokens,
            new_state.nbytes,
            _read_state_value(cursor, "tick"),
        ),
    )
    unit = cursor.last_row_id
    cursor.execute("INSERT INTO branch VALUES (?, ?, x'')", (unit, new_state.key))
    cursor.execute("UPDATE state SET bytes = bytes + ?", (new_state.nbytes,))
    return unit


def _find_superseded_tail(cursor: ValidatingCursor, parent: bytes, sort_key: bytes, block_tokens: int) -> list[int]:
    """Return the partial block that a longer sequence repeats: a growing chat would leave one at every turn."""
    row = cursor.fetch_row(
        TailUnitRow,
        "SELECT unit.id, branch.text, children, pins, tokens < (skip + 1) * ? FROM branch JOIN unit "
        "ON unit.id = branch.unit WHERE branch.parent = ? AND branch.text < ? ORDER BY branch.text DESC LIMIT 1",
        (block_tokens, parent, sort_key),
    )
    if row is None:
        return []
    return [row.unit] if row.is_tail and not row.children and not row.pins and sort_key.startswith(row.sort_key) else []


def insert_pin(cursor: ValidatingCursor, key: bytes, unit: int, tokens: int) -> bool:
    """Pin a unit for a sequence, or `_LOST_UNIT` if its end is missing; return whether it was not pinned before."""
    row = cursor.fetch_row(NumberRow, "SELECT unit FROM pin WHERE key = ?", (key,))
    if row is None or row.value == _LOST_UNIT:
        cursor.execute("INSERT OR REPLACE INTO pin VALUES (?, ?, ?)", (key, unit, tokens))
        cursor.execute("UPDATE unit SET pins = pins + 1 WHERE id = ?", (unit,))
    return row is None


def pin_sequence(cursor: ValidatingCursor, lookup: Lookup, sequence: TokenSequence) -> None:
    """Pin a sequence; if its end is not stored, the pin takes effect when it is put."""
    insert_pin(
        cursor,
        compute_sequence_key(sequence.namespace_key, sequence.ids),
        lookup.last_unit(sequence) or _LOST_UNIT,
        sequence.ids.size,
    )


def restore_pins(cursor: ValidatingCursor, lookup: Lookup, sequence: TokenSequence) -> None:
    """Renew the pins of this sequence and of its prefixes whose units were lost."""
    for key, _, tokens in cursor.fetch_rows(PinRow, "SELECT key, unit, tokens FROM pin WHERE unit = ?", (_LOST_UNIT,)):
        ids = sequence.ids[:tokens]
        if ids.size == tokens and compute_sequence_key(sequence.namespace_key, ids) == key:
            pin_sequence(cursor, lookup, sequence.take_prefix(tokens))


def save_session(cursor: ValidatingCursor, name: str, namespace: Namespace, ids: Ids) -> None:
    """Insert or replace a session."""
    row = name, ensure_namespace_id(cursor, namespace), zlib.compress(ids.tobytes(), 1)
    cursor.execute("INSERT OR REPLACE INTO session VALUES (?, ?, ?)", row)


def delete_units(cursor: ValidatingCursor, units: Iterable[int]) -> int:
    """Delete the rows of units, which must be ordered followers first; return the bytes of their files."""
    nbytes = 0
    for unit in units:
        row = cursor.fetch_row(UnitParentRow, "SELECT parent, bytes FROM unit WHERE id = ?", (unit,))
        if row is not None:
            for table, column in (("unit", "id"), ("block", "unit"), ("branch", "unit")):
                cursor.execute(f"DELETE FROM {table} WHERE {column} = ?", (unit,))
            cursor.execute("UPDATE pin SET unit = ? WHERE unit = ?", (_LOST_UNIT, unit))
            cursor.execute("UPDATE unit SET children = children - 1 WHERE id = ?", (row.parent,))
            nbytes += row.nbytes
    cursor.execute("UPDATE state SET bytes = bytes - ?", (nbytes,))
    return nbytes


def read_total_bytes(cursor: ValidatingCursor) -> int:
    """Return the bytes of all units."""
    return _read_state_value(cursor, "bytes")


def list_with_followers(cursor: ValidatingCursor, unit: int) -> list[int]:
    """Return a unit and all that follow it, the last ones first: without it they are unreachable."""
    seen_units = {unit: None}
    queue = [unit]
    for queued_unit in queue:
        follower_ids = [
            row.value for row in cursor.iter_rows(NumberRow, "SELECT id FROM unit WHERE parent = ?", (queued_unit,))
        ]
        queue += [number for number in follower_ids if number not in seen_units]
        seen_units.update(dict.fromkeys(follower_ids))
    return queue[::-1]


def list_with_all_followers(cursor: ValidatingCursor, units: Iterable[int]) -> list[int]:
    """Return several units with all that follow them, as `list_with_followers`, each once."""
    return list(dict.fromkeys(follower for unit in units for follower in list_with_followers(cursor, unit)))


def evict_units(cursor: ValidatingCursor, max_bytes: int) -> list[int]:
    """Delete the rows of the least recently used units, ends of sequences first, down to `max_bytes`;
    return the units.
    """
    evicted: list[int] = []
    remaining_bytes = read_total_bytes(cursor)
    while remaining_bytes > max_bytes:
        rows = cursor.fetch_rows(UnitBytesRow, f"{_SELECT_LEAVES_SQL} LIMIT ?", (_UNITS_PER_QUERY,))
        if not rows:
            break
        batch: dict[int, None] = {}
        for unit, nbytes in rows:
            if remaining_bytes > max_bytes:
                remaining_bytes -= nbytes
                batch[unit] = None
                parent_of_state = _find_parent_of_state(cursor, unit) if remaining_bytes > max_bytes else None
                if parent_of_state is not None and parent_of_state.unit not in batch:
                    remaining_bytes -= parent_of_state.nbytes
                    batch[parent_of_state.unit] = None
        delete_units(cursor, batch)
        evicted += batch
    return evicted


def _find_parent_of_state(cursor: ValidatingCursor, unit: int) -> UnitBytesRow | None:
    """Return the unit that was only needed by the state unit `unit`, if there is one."""
    return cursor.fetch_row(
        UnitBytesRow,
        "SELECT id, bytes FROM unit WHERE id = (SELECT parent FROM unit WHERE id = ? AND tokens = 0) "
        "AND children = 1 AND pins = 0",
        (unit,),
    )


def list_evictable_leaves(cursor: ValidatingCursor, max_bytes: int) -> list[int]:
    """Return those units that `evict_units` would delete and that no unit follows."""
    remaining_bytes = read_total_bytes(cursor)
    leaf_ids = []
    for unit, nbytes in cursor.iter_rows(UnitBytesRow, _SELECT_LEAVES_SQL):
        if remaining_bytes <= max_bytes:
            break
        remaining_bytes -= nbytes
        leaf_ids.append(unit)
    return leaf_ids


fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: two processes may rebuild concurrently
    fcntl = None

REBUILD_LOCK_FILE = "rebuild.lock"
_UNIT_NUMBER_GAP = 1 << 16
"""Unit numbers to skip: a process with the old index may still use the next ones."""


class RebuildResult(NamedTuple):
    """Contents of a rebuilt index."""

    #: Units, pins and sessions that were inserted.
    num_units: int
    #: Units that could not be inserted.
    num_unusable: int
    num_pins: int
    num_sessions: int


def rebuild_index(folder: Path, known_path: Path | None) -> RebuildResult | None:
    """Rebuild the index of a store, unless another process has done so since `known_path` was the newest."""
    recovery_files, files = RecoveryFiles(folder), UnitFiles(folder)
    try:
        block_tokens = recovery_files.read_settings().block_tokens
    except ManifestError as error:
        advice = explain_settings("this file")
        raise ManifestError(f"{error}; the index is lost or damaged as well: {advice}") from None
    with _lock_folder(folder):
        number, newest_path = find_newest_index(folder)
        if newest_path != known_path:
            return None
        path = folder / make_index_name(number + 1)
        new_path = path.with_name(path.name + ".new")
        with wrap_os_errors(new_path):
            new_path.unlink(missing_ok=True)
            try:
                with closing(sqlite3.connect(new_path, isolation_level=None)) as connection:
                    create_tables(connection, block_tokens)
                    connection.execute("BEGIN IMMEDIATE")
                    rebuild_result = _fill_index(
                        ValidatingCursor(connection.cursor()), folder, recovery_files, files, block_tokens
                    )
                    connection.execute("COMMIT")
                os.replace(new_path, path)
            except sqlite3.Error as error:
                raise OSError(0, str(error)) from error
            finally:
                new_path.unlink(missing_ok=True)
        for name in os.listdir(folder):
            if name.startswith("index") and ".sqlite" in name and not name.startswith(path.name):
                with suppress(OSError):
                    (folder / name).unlink()
        return rebuild_result


@contextmanager
def _lock_folder(folder: Path) -> Iterator[None]:
    with wrap_os_errors(folder / REBUILD_LOCK_FILE):
        handle = os.open(folder / REBUILD_LOCK_FILE, os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0), 0o666)
    try:
        if fcntl is not None:
            with suppress(OSError):  # a file system without locks
                fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _fill_index(
    cursor: ValidatingCursor, folder: Path, recovery_files: RecoveryFiles, files: UnitFiles, block_tokens: int
) -> RebuildResult:
    namespaces = {namespace.key: namespace for namespace in recovery_files.iter_namespaces()}
    for namespace in namespaces.values():
        ensure_namespace_id(cursor, namespace)
    starts, states = [], []
    num_wrong = 0
    for path in files.iter_unknown_files(set()):
        with suppress(DamagedUnitError):
            data = files.read_unit(int(path.stem, 16))
            if data is not None and is_prefix_state(data):
                states.append(int(path.stem, 16))
            elif data is not None:
                header = parse_header(data)
                starts.append((header.start, int(path.stem, 16)))
                num_wrong += not _fits_block_tokens(header, block_tokens)
    if 2 * num_wrong > len(starts):
        raise ManifestError(
            f"{folder / SETTINGS_FILE}: says that a block has {block_tokens} tokens, and {num_wrong} of {len(starts)} "
            f"units "
            f"have other blocks: {explain_settings('it')}"
        )
    num_units = num_unusable = 0
    for _, unit_id in sorted(starts):  # parents before followers
        if _insert_unit(cursor, unit_id, files, namespaces, block_tokens):
            num_units += 1
        else:
            num_unusable += 1
    lookup = Lookup(cursor, files.read_header, lambda unit: False)
    for unit_id in states:
        if _insert_state(cursor, unit_id, files, lookup, namespaces, block_tokens):
            num_units += 1
        else:
            num_unusable += 1
    last_unit = max((*(unit_id for _, unit_id in starts), *states), default=0)
    cursor.execute("UPDATE unit SET used = id")  # the order of puts stands in for the order of uses
    cursor.execute("UPDATE state SET tick = ?", (last_unit,))
    cursor.execute("DELETE FROM sqlite_sequence WHERE name = 'unit'")
    cursor.execute("INSERT INTO sqlite_sequence VALUES ('unit', ?)", (last_unit + _UNIT_NUMBER_GAP,))
    num_pins = num_sessions = 0
    for saved_sequence in recovery_files.iter_pins():
        if saved_sequence.namespace_key in namespaces:
            namespace = namespaces[saved_sequence.namespace_key]
            pin_sequence(cursor, lookup, namespace.make_sequence(saved_sequence.ids, block_tokens))
            num_pins += 1
    for saved_sequence in recovery_files.iter_sessions():
        if saved_sequence.namespace_key in namespaces:
            save_session(cursor, saved_sequence.name, namespaces[saved_sequence.namespace_key], saved_sequence.ids)
            num_sessions += 1
    return RebuildResult(num_units, num_unusable, num_pins, num_sessions)


def _fits_block_tokens(header: UnitHeader, block_tokens: int) -> bool:
    """Return whether a unit is consistent with this block size."""
    num_blocks = header.ids.size // block_tokens
    return not header.start % block_tokens and (header.dense is None or len(header.dense.block_sums) == num_blocks)


def _insert_unit(
    cursor: ValidatingCursor, unit_id: int, files: UnitFiles, namespaces: dict[bytes, Namespace], block_tokens: int
) -> bool:
    """Insert a unit by its file; return whether it is usable."""
    data = files.read_unit(unit_id)
    try:
        unit = parse_unit(data) if data is not None else None
    except DamagedUnitError:
        return False
    if unit is None or unit.namespace_key not in namespaces:
        return False
    keys = compute_block_keys(unit.parent, unit.ids, block_tokens)
    new_unit = NewUnit(unit.parent, unit.start, unit.ids, keys, unit.nbytes, files.make_path(unit_id))
    sequence = TokenSequence(unit.namespace_key, unit.ids, keys, block_tokens)
    namespace = ensure_namespace_id(cursor, namespaces[unit.namespace_key])
    try:
        inserted_id, _ = insert_unit(
            cursor,
            namespace,
            new_unit,
            sequence,
            lambda: _has_equal_tail(cursor, new_unit, block_tokens),
            number=unit_id,
        )
    except ConcurrentUpdateError:
        return False
    return inserted_id > 0


def _insert_state(
    cursor: ValidatingCursor,
    unit_id: int,
    files: UnitFiles,
    lookup: Lookup,
    namespaces: dict[bytes, Namespace],
    block_tokens: int,
) -> bool:
    """Insert a state unit by its file; return whether it is usable."""
    data = files.read_unit(unit_id)
    try:
        state = parse_state(data) if data is not None else None
    except DamagedUnitError:
        return False
    if data is None or state is None or state.namespace_key not in namespaces:
        return False
    namespace, parent = namespaces[state.namespace_key], None
    if namespace.layers:
        parent = lookup.find_end(state.namespace_key, state.parent, state.ids, block_tokens)
        if parent is None:
            return False
    new_state = NewStateUnit(state.key, state.tokens, state.raw_bytes, data.size)
    return insert_state(cursor, ensure_namespace_id(cursor, namespace), new_state, parent, number=unit_id) > 0


def _has_equal_tail(cursor: ValidatingCursor, new_unit: NewUnit, block_tokens: int) -> bool:
    """Return whether another unit that follows the last whole block starts with the partial block of this one."""
    tail_key = to_sort_key(new_unit.ids[len(new_unit.keys) * block_tokens :])
    parent = new_unit.keys[-1] if new_unit.keys else new_unit.parent
    row = cursor.fetch_row(
        BranchKeyRow,
        "SELECT parent, text FROM branch WHERE parent = ? AND text >= ? ORDER BY text LIMIT 1",
        (parent, tail_key),
    )
    return row is not None and row.sort_key.startswith(tail_key)
