"""The index of a store made anew from its units, for one that was lost or damaged."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import ManifestError
from ..files.output import wrap_os_errors
from . import updates
from .beside import SETTINGS_FILE, RecoveryFiles, explain_settings
from .index import create_tables, find_newest_index, make_index_name
from .lookup import Lookup, TokenSequence
from .prefix_state import is_prefix_state, parse_state
from .rows import BranchKeyRow, ValidatingCursor
from .space import Namespace
from .token_ids import Ids, compute_block_keys, to_sort_key
from .unit import DamagedUnitError, UnitHeader, parse_header, parse_unit
from .unit_files import UnitFiles
from .updates import ConcurrentUpdateError, NewUnit

fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: two processes that do this at once do it twice
    fcntl = None

REBUILD_LOCK_FILE = "rebuild.lock"
_UNIT_NUMBER_GAP = 1 << 16
"""Numbers of units that are left out: a process that has not noticed yet may still use those that come next."""


class RebuildResult(NamedTuple):
    """What an index that was made anew has: units, pinned texts, sessions; `num_unusable` units are of no use any
    more.
    """

    num_units: int
    num_unusable: int
    num_pins: int
    num_sessions: int


def rebuild_index(folder: Path, known_path: Path | None) -> RebuildResult | None:
    """Make the index of a store anew, unless another process has done so since `known_path` was the newest.

    Raises
    ------
    OutputError
        Where it cannot be written.
    KvmnnError
        Where the store's settings are lost or damaged as well.
    """
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
        updates.ensure_namespace_id(cursor, namespace)
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
    for _, unit_id in sorted(starts):  # what others follow comes before them
        if _insert_unit(cursor, unit_id, files, namespaces, block_tokens):
            num_units += 1
        else:
            num_unusable += 1
    lookup = Lookup(cursor, lambda unit: _read_unit_ids(files, unit), lambda unit: False)
    for unit_id in states:
        if _insert_state(cursor, unit_id, files, lookup, namespaces, block_tokens):
            num_units += 1
        else:
            num_unusable += 1
    last_unit = max((*(unit_id for _, unit_id in starts), *states), default=0)
    cursor.execute("UPDATE unit SET used = id")  # units that were put later were used later
    cursor.execute("UPDATE state SET tick = ?", (last_unit,))
    cursor.execute("DELETE FROM sqlite_sequence WHERE name = 'unit'")
    cursor.execute("INSERT INTO sqlite_sequence VALUES ('unit', ?)", (last_unit + _UNIT_NUMBER_GAP,))
    num_pins = num_sessions = 0
    for saved_sequence in recovery_files.iter_pins():
        if saved_sequence.namespace_key in namespaces:
            keys = compute_block_keys(saved_sequence.namespace_key, saved_sequence.ids, block_tokens)
            sequence = TokenSequence(
                saved_sequence.namespace_key,
                saved_sequence.ids,
                keys,
                block_tokens,
                namespaces[saved_sequence.namespace_key].needs_state,
            )
            updates.pin_sequence(cursor, lookup, sequence)
            num_pins += 1
    for saved_sequence in recovery_files.iter_sessions():
        if saved_sequence.namespace_key in namespaces:
            updates.save_session(
                cursor, saved_sequence.name, namespaces[saved_sequence.namespace_key], saved_sequence.ids
            )
            num_sessions += 1
    return RebuildResult(num_units, num_unusable, num_pins, num_sessions)


def _fits_block_tokens(header: UnitHeader, block_tokens: int) -> bool:
    """Whether a unit can be one of blocks of so many tokens."""
    num_blocks = header.ids.size // block_tokens
    return not header.start % block_tokens and (header.dense is None or len(header.dense.block_sums) == num_blocks)


def _insert_unit(
    cursor: ValidatingCursor, unit_id: int, files: UnitFiles, namespaces: dict[bytes, Namespace], block_tokens: int
) -> bool:
    """Note a unit down by its file; whether it is of use."""
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
    namespace = updates.ensure_namespace_id(cursor, namespaces[unit.namespace_key])
    try:
        inserted_id, _ = updates.insert_unit(
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
    """Note the state of a prefix down by its file; whether it is of use."""
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
    new_state = updates.NewStateUnit(state.key, state.tokens, state.raw_bytes, data.size)
    return (
        updates.insert_state(cursor, updates.ensure_namespace_id(cursor, namespace), new_state, parent, number=unit_id)
        > 0
    )


def _has_equal_tail(cursor: ValidatingCursor, new_unit: NewUnit, block_tokens: int) -> bool:
    """Whether another unit that follows the last whole block begins with what is left of this one."""
    tail_key = to_sort_key(new_unit.ids[len(new_unit.keys) * block_tokens :])
    parent = new_unit.keys[-1] if new_unit.keys else new_unit.parent
    row = cursor.fetch_row(
        BranchKeyRow,
        "SELECT parent, text FROM branch WHERE parent = ? AND text >= ? ORDER BY text LIMIT 1",
        (parent, tail_key),
    )
    return row is not None and row.sort_key.startswith(tail_key)


def _read_unit_ids(files: UnitFiles, unit: int) -> Ids | None:
    data = files.read_unit(unit)
    try:
        return None if data is None else parse_header(data).ids
    except DamagedUnitError:
        return None
