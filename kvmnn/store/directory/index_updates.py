"""Changes of the index of a store directory, and its reconstruction from the unit files (docs/format-store.md).

The functions take the cursor of an open writing transaction; they change rows, not unit files. `rebuild_index` makes a
new index if the old one is lost or damaged.
"""

from __future__ import annotations

import heapq
import os
import sqlite3
import zlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from ..._util.named_tuple import NamedTuple
from ...errors import ManifestError
from ...files.atomic import wrap_os_errors
from ..backend import (
    BENEFIT_SCALE,
    MAX_UNIT_PRIORITY,
    MAX_UNIT_USES,
    ConcurrentUpdateError,
    NewUnit,
)
from ..encryption import NO_CIPHER, StoreCipher
from ..namespace import (
    Ids,
    Namespace,
    TokenSequence,
    compute_block_keys,
    compute_sequence_key,
    mask_ids,
    to_sort_key,
)
from ..unit import DamagedUnitError, parse_header
from ..unit_codec import PrefixState, is_prefix_state, parse_state
from .files import PIN_SUFFIX, SESSION_SUFFIX, SETTINGS_FILE, RecoveryFiles, UnitFiles
from .index import (
    SESSION_NAME,
    SPACE_NAME,
    Key,
    ValidatingCursor,
    create_tables,
    find_newest_index,
    make_index_name,
)
from .lookup import Lookup, find_stored_blocks

_SELECT_LEAVES_SQL = (
    "SELECT priority, used, id, bytes FROM unit WHERE children = 0 AND pins = 0{} ORDER BY priority, used, id DESC"
)
_SELECT_PARENT_SQL = """SELECT id, bytes, priority, used, children, pins,
    (SELECT tokens = 0 FROM unit WHERE id = ?) FROM unit WHERE id = (SELECT parent FROM unit WHERE id = ?)"""
_SET_PRIORITY_SQL = f"""UPDATE unit SET priority = CASE (SELECT policy FROM state) WHEN 'benefit' THEN
    min((SELECT clock FROM state) + uses * (CASE tokens WHEN 0 THEN start ELSE tokens END * {BENEFIT_SCALE}
    / max(bytes, 1)), {MAX_UNIT_PRIORITY}) ELSE used END"""
"""Priority of `backend.compute_benefit`; a unit of windows and state saves the whole prefix before it."""
_LOST_UNIT = 0
"""The unit of a pin of whose sequence nothing is stored; a put of the sequence renews the pin."""


def ensure_namespace_id(cursor: ValidatingCursor, namespace: Namespace) -> int:
    """Return the row id of a namespace, which is inserted if it is new."""
    document = cursor.cipher.seal_text(namespace.to_json(), SPACE_NAME)
    cursor.execute("INSERT OR IGNORE INTO space (key, document) VALUES (?, ?)", (namespace.key, document))
    return cursor.require_number("SELECT id FROM space WHERE key = ?", (namespace.key,))


def advance_clock(cursor: ValidatingCursor) -> int:
    """Count a use of the store; return its tick."""
    cursor.execute("UPDATE state SET tick = tick + 1")
    return _read_clock(cursor)


def _read_clock(cursor: ValidatingCursor) -> int:
    return cursor.require_number("SELECT tick FROM state")


def touch(cursor: ValidatingCursor, num_uses_by_unit: Mapping[int, int]) -> None:
    """Set the last use of units to a new tick, and add their uses."""
    tick = advance_clock(cursor)
    cursor.execute_many(
        f"UPDATE unit SET used = ?, uses = min(uses + ?, {MAX_UNIT_USES}) WHERE id = ?",
        [(tick, num_uses, unit) for unit, num_uses in sorted(num_uses_by_unit.items())],
    )
    _update_priorities(cursor, num_uses_by_unit)


def _update_priorities(cursor: ValidatingCursor, units: Iterable[int]) -> None:
    """Recompute the eviction priorities of units from their uses."""
    cursor.execute_many(f"{_SET_PRIORITY_SQL} WHERE id = ?", [(unit,) for unit in units])


def insert_unit(
    cursor: ValidatingCursor,
    namespace_id: int,
    new_unit: NewUnit,
    sequence: TokenSequence,
    has_all: Callable[[], bool],
    *,
    number: int | None = None,
) -> tuple[int, list[int]]:
    """Insert a unit, as `number` or the next one; blocks that another process has stored meanwhile stay where they are.

    Returns the unit, 0 if it is not needed, and the units that it supersedes. `has_all` returns whether the partial
    block at its end is stored already.
    """
    keys, size = new_unit.keys, sequence.block_tokens
    stored_blocks = find_stored_blocks(cursor, keys)
    num_known = next((index for index, key in enumerate(keys) if key not in stored_blocks), len(keys))
    if num_known == len(keys) and (new_unit.ids.size == num_known * size or has_all()):
        return 0, []
    parent_key = keys[num_known - 1] if num_known else new_unit.parent
    own_ids = new_unit.ids[num_known * size : (num_known + 1) * size]
    first_sort_key = to_sort_key(mask_ids(parent_key, own_ids, sequence.secret))
    parent = None
    if parent_key != sequence.namespace_key:
        parent = cursor.fetch_number("SELECT unit FROM block WHERE key = ?", (parent_key,))
        if parent is None:
            raise ConcurrentUpdateError("the blocks before a unit are gone")
        cursor.execute("UPDATE unit SET children = children + 1 WHERE id = ?", (parent,))
    tick = _read_clock(cursor)
    cursor.execute(
        "INSERT INTO unit VALUES (?, ?, ?, ?, ?, ?, ?, ?, 0, 0, 1, 0)",
        (number, namespace_id, parent, num_known, new_unit.start, new_unit.ids.size, new_unit.nbytes, tick),
    )
    unit = cursor.last_row_id
    _update_priorities(cursor, [unit])
    cursor.execute_many(
        "INSERT OR REPLACE INTO block VALUES (?, ?, ?)",
        [(key, unit, block_index) for block_index, key in enumerate(keys) if block_index >= num_known],
    )
    cursor.execute("INSERT INTO branch VALUES (?, ?, ?)", (unit, parent_key, first_sort_key))
    cursor.execute("UPDATE state SET bytes = bytes + ?", (new_unit.nbytes,))
    return unit, _find_superseded_tail(cursor, parent_key, first_sort_key, size)


def insert_state(
    cursor: ValidatingCursor,
    namespace_id: int,
    state: PrefixState,
    nbytes: int,
    parent: int | None,
    *,
    number: int | None = None,
) -> int:
    """Insert state as a unit without tokens that follows `parent`, the unit with the end of its prefix.

    It is evicted before that unit, and removed with it. In its row, `start` is the length of the prefix, and `skip` the
    bytes of its contents.
    """
    state_key = state.compute_key(cursor.cipher.secret)
    if cursor.has_row("SELECT 1 FROM branch WHERE parent = ? AND text = x''", (state_key,)):
        return 0
    if parent is not None:
        cursor.execute("UPDATE unit SET children = children + 1 WHERE id = ?", (parent,))
    cursor.execute(
        "INSERT INTO unit VALUES (?, ?, ?, ?, ?, 0, ?, ?, 0, 0, 1, 0)",
        (number, namespace_id, parent, state.raw_bytes, state.tokens, nbytes, _read_clock(cursor)),
    )
    unit = cursor.last_row_id
    _update_priorities(cursor, [unit])
    cursor.execute("INSERT INTO branch VALUES (?, ?, x'')", (unit, state_key))
    cursor.execute("UPDATE state SET bytes = bytes + ?", (nbytes,))
    return unit


def _find_superseded_tail(cursor: ValidatingCursor, parent: bytes, sort_key: bytes, block_tokens: int) -> list[int]:
    """Return the partial block that a longer sequence repeats: a growing chat would leave one at every turn."""
    row = cursor.fetch_row(
        tuple[int, bytes, int, int, int],
        "SELECT unit.id, branch.text, children, pins, tokens < (skip + 1) * ? FROM branch JOIN unit "
        "ON unit.id = branch.unit WHERE branch.parent = ? AND branch.text < ? ORDER BY branch.text DESC LIMIT 1",
        (block_tokens, parent, sort_key),
    )
    if row is None:
        return []
    unit, tail_sort_key, children, pins, is_tail = row
    return [unit] if is_tail and not children and not pins and sort_key.startswith(tail_sort_key) else []


def insert_pin(cursor: ValidatingCursor, key: bytes, unit: int, tokens: int) -> bool:
    """Pin a sequence by `unit`, `_LOST_UNIT` if none is stored; return whether it had no pin before."""
    pinned_unit = cursor.fetch_number("SELECT unit FROM pin WHERE key = ?", (key,))
    if pinned_unit != unit:
        cursor.execute("INSERT OR REPLACE INTO pin VALUES (?, ?, ?)", (key, unit, tokens))
        cursor.execute("UPDATE unit SET pins = pins + 1 WHERE id = ?", (unit,))
        cursor.execute("UPDATE unit SET pins = pins - 1 WHERE id = ?", (pinned_unit,))
    return pinned_unit is None


def pin_sequence(cursor: ValidatingCursor, lookup: Lookup, sequence: TokenSequence) -> None:
    """Pin a sequence; if its end is not stored, the pin keeps its stored blocks until it is put."""
    key = compute_sequence_key(sequence.namespace_key, sequence.ids, sequence.secret)
    unit = lookup.find_last_unit(sequence)
    if unit is None:
        prefix_match = lookup.find_prefix(sequence)
        end_keys = sequence.keys[: prefix_match.num_blocks][-1:]
        units = [block.unit for block in find_stored_blocks(cursor, end_keys).values()]
        if prefix_match.tokens == sequence.ids.size:  # only its state is missing
            units = [*prefix_match.list_units()]
        unit = units[-1] if units else _LOST_UNIT
    insert_pin(cursor, key, unit, sequence.ids.size)


def restore_pins(cursor: ValidatingCursor, lookup: Lookup, sequence: TokenSequence) -> None:
    """Renew the pins of this sequence and of its prefixes that have lost units: `delete_units` has moved them."""
    if not cursor.has_row("SELECT 1 FROM pin LIMIT 1"):
        return
    last_unit = lookup.find_last_unit(sequence) or _LOST_UNIT
    before_state = cursor.list_numbers("SELECT parent FROM unit WHERE id = ? AND parent IS NOT NULL", (last_unit,))
    units = {_LOST_UNIT, *lookup.find_prefix(sequence).list_units(), *before_state}
    query = f"SELECT key, tokens FROM pin WHERE unit IN {_format_numbers([*units])}"
    for key, tokens in cursor.fetch_rows(tuple[Key, int], query):
        ids = sequence.ids[:tokens]
        if ids.size == tokens and compute_sequence_key(sequence.namespace_key, ids, sequence.secret) == key:
            pin_sequence(cursor, lookup, sequence.take_prefix(tokens))


def save_session(cursor: ValidatingCursor, name: str, namespace: Namespace, ids: Ids) -> None:
    """Insert or replace a session."""
    sealed_ids = cursor.cipher.seal(zlib.compress(ids.tobytes(), 1), SESSION_NAME + name)
    row = cursor.cipher.seal_name(name), ensure_namespace_id(cursor, namespace), sealed_ids
    cursor.execute("INSERT OR REPLACE INTO session VALUES (?, ?, ?)", row)


def delete_units(cursor: ValidatingCursor, units: Iterable[int]) -> None:
    """Delete the rows of units, which must be ordered descendants first.

    A pin goes to the unit before: it keeps what is left of its sequence.
    """
    nbytes = 0
    for unit in units:
        row = cursor.fetch_row(tuple[int | None, int], "SELECT parent, bytes FROM unit WHERE id = ?", (unit,))
        if row is not None:
            parent, unit_bytes = row
            for table, column in (("unit", "id"), ("block", "unit"), ("branch", "unit")):
                cursor.execute(f"DELETE FROM {table} WHERE {column} = ?", (unit,))
            num_pins = cursor.execute("UPDATE pin SET unit = ? WHERE unit = ?", (parent or _LOST_UNIT, unit))
            cursor.execute("UPDATE unit SET children = children - 1, pins = pins + ? WHERE id = ?", (num_pins, parent))
            nbytes += unit_bytes
    cursor.execute("UPDATE state SET bytes = bytes - ?", (nbytes,))


def read_total_bytes(cursor: ValidatingCursor, spaces: Sequence[int] | None = None) -> int:
    """Return the number of bytes of all units, or of those of some namespaces."""
    if spaces is None:
        return cursor.require_number("SELECT bytes FROM state")
    return cursor.require_number(f"SELECT coalesce(sum(bytes), 0) FROM unit WHERE space IN {_format_numbers(spaces)}")


def read_unevictable_bytes(cursor: ValidatingCursor, parent: int, spaces: Sequence[int] | None) -> int:
    """Return the bytes that no eviction can free for a unit after `parent`: of what is before it, and of pins.

    `parent` is 0 for a unit that follows none; with `spaces`, only units of these namespaces count.
    """
    condition = "" if spaces is None else f" AND space IN {_format_numbers(spaces)}"
    return cursor.require_number(
        "WITH RECURSIVE kept(id, up) AS (SELECT id, parent FROM unit WHERE id = ? OR id IN (SELECT unit FROM pin) "
        "UNION SELECT unit.id, unit.parent FROM unit JOIN kept ON unit.id = kept.up) "
        f"SELECT coalesce(sum(bytes), 0) FROM unit WHERE id IN (SELECT id FROM kept){condition}",
        (parent,),
    )


def _format_numbers(numbers: Sequence[int]) -> str:
    return f"({','.join(map(str, numbers))})"


def list_with_descendants(cursor: ValidatingCursor, unit: int) -> list[int]:
    """Return a unit and its descendants, the last ones first: without it they are unreachable."""
    seen_units = {unit: None}
    queue = [unit]
    for queued_unit in queue:
        child_ids = cursor.list_numbers("SELECT id FROM unit WHERE parent = ?", (queued_unit,))
        queue += [number for number in child_ids if number not in seen_units]
        seen_units.update(dict.fromkeys(child_ids))
    return queue[::-1]


def list_all_with_descendants(cursor: ValidatingCursor, units: Iterable[int]) -> list[int]:
    """Return units and all their descendants, each once, in the order of `list_with_descendants`."""
    return list(dict.fromkeys(descendant for unit in units for descendant in list_with_descendants(cursor, unit)))


def evict_units(
    cursor: ValidatingCursor, max_bytes: int, spaces: Sequence[int] | None = None, exempt_units: Collection[int] = ()
) -> list[int]:
    """Delete the rows of the units with the lowest priorities, ends of sequences first; return the units.

    With `spaces`, only units of these namespaces are evicted, until at most `max_bytes` of them are left. The exempt
    units stay: those of a put, which a store would else never admit while the others save more.
    """
    evicted = _list_evictable(cursor, max_bytes, spaces, exempt_units)
    delete_units(cursor, [unit for unit, _ in evicted])
    clock = max((priority for _, priority in evicted), default=0)
    cursor.execute("UPDATE state SET clock = max(clock, ?)", (clock,))
    return [unit for unit, _ in evicted]


def list_evictable_units(cursor: ValidatingCursor, max_bytes: int) -> list[int]:
    """Return the units that `evict_units` would delete, in its order."""
    return [unit for unit, _ in _list_evictable(cursor, max_bytes)]


class _Candidate(NamedTuple):
    """A unit that no other follows, in the order of eviction."""

    priority: int
    used: int
    negative_unit: int
    nbytes: int


def _iter_leaves(cursor: ValidatingCursor, condition: str) -> Iterator[_Candidate]:
    """Yield the units that no other follows, in the order of eviction, while the cursor runs other queries."""
    offset, limit = 0, 64
    query = f"{_SELECT_LEAVES_SQL.format(condition)} LIMIT ? OFFSET ?"
    while rows := cursor.fetch_rows(tuple[int, int, int, int], query, (limit, offset)):
        yield from (_Candidate(priority, used, -unit, nbytes) for priority, used, unit, nbytes in rows)
        offset, limit = offset + len(rows), 2 * limit


def _list_evictable(
    cursor: ValidatingCursor, max_bytes: int, spaces: Sequence[int] | None = None, exempt_units: Collection[int] = ()
) -> list[tuple[int, int]]:
    """Return the units to evict, each with its priority, one by one: what a unit follows is a candidate after it."""
    condition = "" if spaces is None else f" AND space IN {_format_numbers(spaces)}"
    condition += f" AND id NOT IN {_format_numbers([*exempt_units])}" if exempt_units else ""
    leaves = _iter_leaves(cursor, condition)
    exposed: list[_Candidate] = []
    num_children: dict[int, int] = {}
    evicted: list[tuple[int, int]] = []
    remaining_bytes = read_total_bytes(cursor, spaces)
    next_leaf = next(leaves, None)
    while remaining_bytes > max_bytes and (exposed or next_leaf):
        if next_leaf is None or (exposed and exposed[0] < next_leaf):
            candidate = heapq.heappop(exposed)
        else:
            candidate, next_leaf = next_leaf, next(leaves, None)
        unit = -candidate.negative_unit
        evicted.append((unit, candidate.priority))
        remaining_bytes -= candidate.nbytes
        for parent, nbytes, priority, used, children, pins, is_state in cursor.fetch_rows(
            tuple[int, int, int, int, int, int, int], _SELECT_PARENT_SQL, (unit, unit)
        ):
            num_children[parent] = num_children.get(parent, children) - 1
            if not num_children[parent] and not pins and parent not in exempt_units:
                # without its state a unit is of no use
                heapq.heappush(exposed, _Candidate(-1 if is_state else priority, used, -parent, nbytes))
    return evicted


fcntl: Any
try:
    import fcntl
except ImportError:  # Windows: two processes may rebuild concurrently
    fcntl = None

REBUILD_LOCK_FILE = "rebuild.lock"
_UNIT_NUMBER_GAP = 1 << 16
"""Unit numbers to skip: a process with the old index may still use the next ones."""


class RebuildResult(NamedTuple):
    """Number of units, pins and sessions in a rebuilt index, and of units that could not be inserted."""

    num_units: int
    num_unusable: int
    num_pins: int
    num_sessions: int


def rebuild_index(folder: Path, expected_path: Path | None, cipher: StoreCipher = NO_CIPHER) -> RebuildResult | None:
    """Rebuild the index of a store, unless another process has done so since `expected_path` was the newest."""
    try:
        settings = RecoveryFiles(folder, cipher).read_settings()
    except ManifestError as error:
        advice = RecoveryFiles(folder, cipher).explain_settings("this file")
        raise ManifestError(f"{error}; the index is lost or damaged as well: {advice}") from None
    with _lock_folder(folder):
        number, newest_path = find_newest_index(folder)
        if newest_path != expected_path:
            return None
        path = folder / make_index_name(number + 1)
        new_path = path.with_name(path.name + ".new")
        with wrap_os_errors(new_path):
            new_path.unlink(missing_ok=True)
            try:
                with closing(sqlite3.connect(new_path, isolation_level=None)) as connection:
                    create_tables(connection, settings)
                    connection.execute("BEGIN IMMEDIATE")
                    rebuild = _Rebuild(ValidatingCursor(connection.cursor(), cipher), folder, settings.block_tokens)
                    rebuild_result = rebuild.fill_index()
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


class _Rebuild:
    """Fills a new index from the files of a store."""

    def __init__(self, cursor: ValidatingCursor, folder: Path, block_tokens: int) -> None:
        self._cursor, self._folder, self._block_tokens = cursor, folder, block_tokens
        self._secret = cursor.cipher.secret
        self._recovery_files, self._files = RecoveryFiles(folder, cursor.cipher), UnitFiles(folder, cursor.cipher)
        self._namespaces = {namespace.key: namespace for namespace in self._recovery_files.iter_namespaces()}
        self._lookup = Lookup(cursor, self._files.read_header, lambda unit: False)

    def fill_index(self) -> RebuildResult:
        cursor, block_tokens = self._cursor, self._block_tokens
        for namespace in self._namespaces.values():
            ensure_namespace_id(cursor, namespace)
        starts, states = self._list_units()
        # parents before descendants, and the ends of prefixes before their states
        are_usable = [self._insert_unit(unit) for _, unit in sorted(starts)] + list(map(self._insert_state, states))
        last_unit = max((*(unit for _, unit in starts), *states), default=0)
        cursor.execute("UPDATE unit SET used = id")  # the order of puts stands in for the order of uses
        cursor.execute(_SET_PRIORITY_SQL)
        cursor.execute("UPDATE state SET tick = ?", (last_unit,))
        cursor.execute("DELETE FROM sqlite_sequence WHERE name = 'unit'")
        cursor.execute("INSERT INTO sqlite_sequence VALUES ('unit', ?)", (last_unit + _UNIT_NUMBER_GAP,))
        num_pins = num_sessions = 0
        for saved_sequence in self._recovery_files.iter_sequences(PIN_SUFFIX):
            if (pin_namespace := self._namespaces.get(saved_sequence.namespace_key)) is not None:
                pin_sequence(cursor, self._lookup, pin_namespace.make_sequence(saved_sequence.ids, block_tokens))
                num_pins += 1
        for saved_sequence in self._recovery_files.iter_sequences(SESSION_SUFFIX):
            if (session_namespace := self._namespaces.get(saved_sequence.namespace_key)) is not None:
                save_session(cursor, saved_sequence.name, session_namespace, saved_sequence.ids)
                num_sessions += 1
        return RebuildResult(sum(are_usable), are_usable.count(False), num_pins, num_sessions)

    def _list_units(self) -> tuple[list[tuple[int, int]], list[int]]:
        """Return start and number of each unit, and the numbers of the state units."""
        starts, states = [], []
        num_wrong = 0
        for path in self._files.iter_unknown_files(set()):
            unit = int(path.stem, 16)
            with suppress(DamagedUnitError):
                data = self._files.read_head(unit)
                if data is not None and is_prefix_state(data):
                    states.append(unit)
                elif data is not None:
                    header = parse_header(data)
                    starts.append((header.start, unit))
                    num_blocks = header.ids.size // self._block_tokens
                    has_other_blocks = header.dense is not None and len(header.dense.block_sums) != num_blocks
                    num_wrong += bool(header.start % self._block_tokens) or has_other_blocks
        if 2 * num_wrong > len(starts):
            raise ManifestError(
                f"{self._folder / SETTINGS_FILE}: says that a block has {self._block_tokens} tokens, and {num_wrong} "
                f"of {len(starts)} units have other blocks: {self._recovery_files.explain_settings('it')}"
            )
        return starts, states

    def _insert_unit(self, unit_id: int) -> bool:
        """Insert a unit by its file; return whether it is usable."""
        unit, nbytes = self._files.read_header(unit_id), self._files.count_unit_bytes(unit_id)
        if unit is None or unit.unit_bytes != nbytes or unit.namespace_key not in self._namespaces:
            return False
        keys = compute_block_keys(unit.parent, unit.ids, self._block_tokens, self._secret)
        file_bytes = nbytes + self._cursor.cipher.unit_overhead_bytes
        new_unit = NewUnit(unit.parent, unit.start, unit.ids, keys, file_bytes, self._files.make_path(unit_id))
        sequence = TokenSequence(unit.namespace_key, unit.ids, keys, self._block_tokens, secret=self._secret)
        namespace_id = ensure_namespace_id(self._cursor, self._namespaces[unit.namespace_key])

        def has_equal_tail() -> bool:
            """Return whether another unit after the last whole block starts with the partial block of this one."""
            parent_key = keys[-1] if keys else unit.parent
            tail_key = to_sort_key(mask_ids(parent_key, unit.ids[len(keys) * self._block_tokens :], self._secret))
            row = self._cursor.fetch_row(
                tuple[bytes],
                "SELECT text FROM branch WHERE parent = ? AND text >= ? ORDER BY text LIMIT 1",
                (parent_key, tail_key),
            )
            return row is not None and row[0].startswith(tail_key)

        try:
            unit_number, _ = insert_unit(self._cursor, namespace_id, new_unit, sequence, has_equal_tail, number=unit_id)
        except ConcurrentUpdateError:
            return False
        return unit_number > 0

    def _insert_state(self, unit_id: int) -> bool:
        """Insert a state unit by its file; return whether it is usable."""
        data = self._files.read_unit(unit_id)
        try:
            state = parse_state(data) if data is not None else None
        except DamagedUnitError:
            return False
        if data is None or state is None or state.namespace_key not in self._namespaces:
            return False
        namespace, parent = self._namespaces[state.namespace_key], None
        if namespace.layers:
            parent = self._lookup.find_end(state.namespace_key, state.parent, state.ids, self._block_tokens)
            if parent is None:
                return False
        namespace_id = ensure_namespace_id(self._cursor, namespace)
        file_bytes = data.size + self._cursor.cipher.unit_overhead_bytes
        return insert_state(self._cursor, namespace_id, state, file_bytes, parent, number=unit_id) > 0
