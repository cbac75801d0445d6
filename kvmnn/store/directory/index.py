"""Rows of an index as typed objects: every value is validated once, when its row is fetched.

An index may be damaged, or forged. SQLite stores any type in any column, so that a flipped bit turns a number into a
text. Whatever is fetched comes as a `NamedTuple` of a kind below, and nothing else of a row is used.

The index of a store directory: an SQLite file that knows which unit holds which block.

It is written in short transactions only. What it says is checked against the units when they are read, so that it may
be wrong, but never believed.
"""

from __future__ import annotations

import os
import re
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, NewType, TypeVar, get_type_hints

from ..._util.validation import repr_short
from ...errors import KvmnnError, OutputError, SourceError
from ..backend import explain_settings
from ..namespace import KEY_BYTES, MAX_TOKENS, Namespace, parse_namespace
from .files import SETTINGS_FILE, RecoveryFiles

Key = NewType("Key", bytes)
"""A key of a space, a block or a text: 16 bytes."""

_MAX_SQLITE_INTEGER = 2**63 - 1
R = TypeVar("R")


class InvalidRowError(Exception):
    """A row that no kvmnn has written; the transaction makes a `DamagedIndexError` of it."""


class NumberRow(NamedTuple):
    """One number from 0 on: an id, a count, a sum."""

    value: int


class OptionalNumberRow(NamedTuple):
    """One number, or None where there is no row to take it from."""

    value: int | None


class WordRow(NamedTuple):
    """One text: a name or a document."""

    value: str


class KeyRow(NamedTuple):
    """One key."""

    key: Key


class NumberedDocumentRow(NamedTuple):
    """A document with its number."""

    number: int
    document: str


class BlockRow(NamedTuple):
    """A block: the unit that has it, and its number there."""

    key: Key
    unit: int
    number: int


class BranchUnitRow(NamedTuple):
    """What follows a block: a unit, its blocks that another unit has already, and the ids of its first own block."""

    unit: int
    skip: int
    sort_key: bytes


class BranchKeyRow(NamedTuple):
    """The key before a unit, and the ids of its first own block."""

    parent: Key
    sort_key: bytes


class BranchParentRow(NamedTuple):
    """A unit, and the key before it: of state its own key."""

    unit: int
    parent: Key


class UnitBytesRow(NamedTuple):
    """A unit and the bytes of its file."""

    unit: int
    nbytes: int


class UnitSpanRow(NamedTuple):
    """Where the tokens of a unit stand in their text."""

    start: int
    tokens: int


class UnitSizesRow(NamedTuple):
    """Tokens of a unit, and bytes of its file."""

    tokens: int
    nbytes: int


class UnitParentRow(NamedTuple):
    """The unit that another follows, none for the first of a text, and the bytes of its file."""

    parent: int | None
    nbytes: int


class UnitUseRow(NamedTuple):
    """What decides whether a unit may go: its tokens, its pins, and how many units follow it."""

    tokens: int
    pins: int
    followers: int


class StateRow(NamedTuple):
    """State of a prefix: tokens of the prefix, bytes of its file, and bytes of what it holds."""

    tokens: int
    nbytes: int
    raw_bytes: int


class UnitRow(NamedTuple):
    """A unit with the document of its space."""

    unit: int
    skip: int
    start: int
    tokens: int
    document: str


class TailUnitRow(NamedTuple):
    """A unit that may be superfluous: its ids, what holds it, and whether it ends within a block."""

    unit: int
    sort_key: bytes
    children: int
    pins: int
    is_tail: int


class SequenceRow(NamedTuple):
    """A stored text by its last unit; `unused_for` counts uses of the store since."""

    namespace_id: int
    tokens: int
    nbytes: int
    pins: int
    unused_for: int
    unit: int
    is_state: int


class PinRow(NamedTuple):
    """A pinned text: its key, the unit with its end, and its tokens."""

    key: Key
    unit: int
    tokens: int


class SessionNameRow(NamedTuple):
    """A session: its name, the key of its space, and its ids as `zlib` packs them."""

    name: str
    namespace_key: Key
    ids: bytes


class SessionDocumentRow(NamedTuple):
    """The document of a session's space, and its ids as `zlib` packs them."""

    document: str
    ids: bytes


class TotalsRow(NamedTuple):
    """Sums over all units; `states` counts those that are state of a prefix."""

    units: int
    states: int
    tokens: int
    nbytes: int
    texts: int


class ValidatingCursor:
    """A cursor inside a transaction that yields validated rows only.

    Parameters
    ----------
    cursor
        Of the sqlite3 module.
    """

    def __init__(self, cursor: sqlite3.Cursor) -> None:
        self._cursor = cursor

    def execute(self, statement: str, parameters: Sequence[object] = ()) -> int:
        """Run a statement without a result; returns how many rows it changed."""
        return self._cursor.execute(statement, parameters).rowcount

    def execute_many(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Run a statement for each row of parameters."""
        self._cursor.executemany(statement, rows)

    @property
    def last_row_id(self) -> int:
        """The number of the row that was inserted last."""
        number = self._cursor.lastrowid
        assert number
        return number

    def iter_rows(self, row_type: Callable[..., R], query: str, parameters: Sequence[object] = ()) -> Iterator[R]:
        """Yield the rows of a query as a kind; each is validated when it is fetched.

        The cursor runs one query at a time: the rows of one are fetched before the next begins (`fetch_rows`).

        Raises
        ------
        WrongRowError
            For a row whose values are of other types, or whose numbers are below 0.
        """
        field_checks = _get_field_checks(row_type)
        for row in self._cursor.execute(query, parameters):
            for value, (is_valid, expected) in zip(row, field_checks, strict=True):
                if not is_valid(value):
                    value_text = f"{len(value):,} bytes" if isinstance(value, bytes) else repr_short(value)
                    raise InvalidRowError(f"a row has {value_text}, expected {expected}")
            yield row_type(*row)

    def fetch_rows(self, row_type: Callable[..., R], query: str, parameters: Sequence[object] = ()) -> list[R]:
        """As `iter_rows`, all of them."""
        return list(self.iter_rows(row_type, query, parameters))

    def fetch_row(self, row_type: Callable[..., R], query: str, parameters: Sequence[object] = ()) -> R | None:
        """As `iter_rows`, the first; None for no row."""
        return next(self.iter_rows(row_type, query, parameters), None)

    def require_row(self, row_type: Callable[..., R], query: str, parameters: Sequence[object] = ()) -> R:
        """As `fetch_row`; `InvalidRowError` where there is none."""
        row = self.fetch_row(row_type, query, parameters)
        if row is None:
            raise InvalidRowError("a row of it is gone")
        return row

    def has_row(self, query: str, parameters: Sequence[object] = ()) -> bool:
        """Return whether a query has any row; its values are not used."""
        return self._cursor.execute(query, parameters).fetchone() is not None


def parse_space_document(document: str, where: str) -> Namespace:
    """Return the space that a row has as a document; `InvalidRowError` for what is none."""
    try:
        return parse_namespace(document, f"{where}: space")
    except KvmnnError as error:
        raise InvalidRowError(str(error)) from None


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SQLITE_INTEGER


_FieldCheck = tuple[Callable[[Any], bool], str]
_CHECK_BY_TYPE: dict[object, _FieldCheck] = {
    int: (_is_number, "a whole number from 0 on"),
    int | None: (lambda value: value is None or _is_number(value), "a whole number from 0 on, or none"),
    str: (lambda value: type(value) is str, "a text"),
    bytes: (lambda value: type(value) is bytes, "bytes"),
    Key: (lambda value: type(value) is bytes and len(value) == KEY_BYTES, f"a key of {KEY_BYTES} bytes"),
}
"""By the type of a field, the check of its value and what the check expects."""


@cache
def _get_field_checks(row_type: Callable[..., object]) -> tuple[_FieldCheck, ...]:
    """The checks of a kind's fields, in order."""
    return tuple(_CHECK_BY_TYPE[hint] for hint in get_type_hints(row_type).values())


INDEX_FILE = "index.sqlite"
BUSY_TIMEOUT_SECONDS = 30.0
"""How long another process's transaction is waited for."""

_APPLICATION_ID = 0x4B564D53
_INDEX_VERSION = 1
_TABLE_STATEMENTS = {
    "state": """CREATE TABLE state (
        one INTEGER PRIMARY KEY, block_tokens INTEGER NOT NULL, tick INTEGER NOT NULL, bytes INTEGER NOT NULL)""",
    "space": "CREATE TABLE space (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, document TEXT NOT NULL)",
    "unit": """CREATE TABLE unit (
        id INTEGER PRIMARY KEY AUTOINCREMENT, space INTEGER NOT NULL, parent INTEGER, skip INTEGER NOT NULL,
        start INTEGER NOT NULL, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL, used INTEGER NOT NULL,
        children INTEGER NOT NULL, pins INTEGER NOT NULL)""",
    "unit_leaf": "CREATE INDEX unit_leaf ON unit (used) WHERE children = 0 AND pins = 0",
    "unit_parent": "CREATE INDEX unit_parent ON unit (parent)",
    "block": "CREATE TABLE block (key BLOB PRIMARY KEY, unit INTEGER NOT NULL, number INTEGER NOT NULL) WITHOUT ROWID",
    "block_unit": "CREATE INDEX block_unit ON block (unit)",
    "branch": "CREATE TABLE branch (unit INTEGER PRIMARY KEY, parent BLOB NOT NULL, text BLOB NOT NULL)",
    "branch_text": "CREATE INDEX branch_text ON branch (parent, text)",
    "pin": "CREATE TABLE pin (key BLOB PRIMARY KEY, unit INTEGER NOT NULL, tokens INTEGER NOT NULL) WITHOUT ROWID",
    "session": "CREATE TABLE session (name TEXT PRIMARY KEY, space INTEGER NOT NULL, ids BLOB NOT NULL) WITHOUT ROWID",
}
"""unit: `parent` is the unit that it follows, `skip` its blocks that another unit has already, `start` the tokens of
the text before it, `used` the tick of its last use: uses are counted, and no clock is asked. block: `number` in its
unit. branch: the key of the block before a unit and the ids of the unit's first own block, which sort as text."""

_BUSY_CODES = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_DISK_CODES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)
"""What SQLite says that is not damage: another process writes, or the disk."""
_INDEX_NAME_REGEX = re.compile(r"index(?:-(\d{1,9}))?\.sqlite")
"""Of an index; each that was made anew has a higher number, and the highest holds. A name is never used twice: SQLite
writes and removes files beside a database by its name."""

_BEGIN_READ = "BEGIN"
_SET_WAL_MODE = "PRAGMA journal_mode = WAL"
_IN_PLACE_TIMEOUT_MILLISECONDS = 2000  # others that have the index open keep it: waiting longer is of no use
_MAX_VALUE_BYTES = 4 * MAX_TOKENS + (1 << 20)  # the ids of a session, which need not become smaller

_parent_connections: list[sqlite3.Connection] = []
"""Of a parent process: to close them in its child would let go of the parent's locks."""


class DamagedIndexError(SourceError):
    """An index that is not what kvmnn has written; it is made anew when it is next asked, where that is possible."""


class _NotOursError(SourceError):
    """A database that is not an index."""


def find_newest_index(folder: Path) -> tuple[int, Path | None]:
    """The highest number that an index of this folder ever had, and the index, if there is one."""
    max_number, newest_number = 0, -1
    with suppress(OSError):
        for match in filter(None, map(_INDEX_NAME_REGEX.match, os.listdir(folder))):
            number = int(match[1] or 0)
            max_number = max(max_number, number)
            if match.end() == len(match.string):
                newest_number = max(newest_number, number)
    return max_number, None if newest_number < 0 else folder / make_index_name(newest_number)


def make_index_name(number: int) -> str:
    """The file name of an index."""
    return f"index-{number}.sqlite" if number else INDEX_FILE


class StoreIndex:
    """A connection to the index, shared by the threads of a process.

    Parameters
    ----------
    folder
        Of the store.
    block_tokens
        Of a store that is made; None where one must be there.
    read_only
        No row is written; SQLite may leave files of its own beside the index where it can.
    rebuild
        Makes an index anew, told what is wrong, and which it is, None where there is none; whether it could.

    Raises
    ------
    SourceError
        Where there is no store, or one of another version.
    OutputError
        Where one cannot be made.
    """

    def __init__(
        self, folder: Path, *, block_tokens: int | None, read_only: bool, rebuild: Callable[[str, Path | None], bool]
    ) -> None:
        self.path = folder / INDEX_FILE
        self.folder = folder
        self.read_only = read_only
        self._rebuild = rebuild
        self.write_error = ""
        """Why it is open for reading alone where it should not be, such as a full disk; it is tried again each time."""
        self._damage_reason = ""
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._is_closed = False
        with self._translate_errors():
            self._connection = self._open_newest(block_tokens)

    @contextmanager
    def begin_reading(self) -> Iterator[ValidatingCursor]:
        """A transaction that sees the index as it is now, whatever others write meanwhile."""
        with self._transaction(_BEGIN_READ) as cursor:
            yield cursor

    @contextmanager
    def begin_writing(self) -> Iterator[ValidatingCursor]:
        """A transaction that alone writes; undone where the block fails."""
        if self.read_only:
            raise OutputError(f"{self.folder}: is open for reading only")
        with self._transaction("BEGIN IMMEDIATE") as cursor:
            yield cursor

    @contextmanager
    def write_in_place(self) -> Iterator[None]:
        """Write without a journal file meanwhile, which needs no room on a full disk.

        The journal in memory does not survive a crash; the index is made anew then.

        Raises
        ------
        OutputError, KvmnnError
            Where another process uses the index, or it cannot be written either.
        """
        with self._lock, self._translate_errors():
            self._get_connection().close()
            try:
                self._connection = self._open_in_place()
                yield
            finally:
                with suppress(sqlite3.Error):
                    self._connection.execute(_SET_WAL_MODE)
                self._connection.close()
                self._connection = self._open_newest(None)

    def vacuum(self) -> None:
        """Give back the room of what was removed."""
        with self._lock, self._translate_errors():
            self._get_connection().execute("PRAGMA incremental_vacuum").fetchall()
            self._get_connection().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def check_integrity(self) -> None:
        """`DamagedIndexError` where SQLite finds the file damaged; all of it is read."""
        with self.begin_reading() as cursor:
            result = cursor.require_row(WordRow, "PRAGMA integrity_check(1)").value
        if result != "ok":
            raise self.mark_damaged(" ".join(result.split()))

    def mark_damaged(self, reason: str) -> DamagedIndexError:
        """What to raise for an index that is wrong; it is made anew when it is next asked."""
        self._damage_reason = reason
        advice = (
            "open the store for writing (kvmnn store verify), and it is made anew"
            if self.read_only
            else "remove the store: it is a cache"
        )
        return DamagedIndexError(f"{self.path}: is damaged ({reason}); {advice}")

    @property
    def nbytes(self) -> int:
        """Bytes of the file and of those beside it."""
        paths = (self.path, Path(f"{self.path}-wal"))
        return sum(path.stat().st_size for path in paths if path.exists())

    def close(self) -> None:
        """Nothing more is asked."""
        with self._lock:
            if not self._is_closed and self._process == os.getpid():
                self._connection.close()
            self._is_closed = True

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[ValidatingCursor]:
        self._reopen_after_fork()
        with self._lock, self._translate_errors():
            self._reopen_if_replaced()
            if self.write_error and begin != _BEGIN_READ:
                raise OutputError(f"{self.path}: cannot be written: {self.write_error}")
            connection = self._get_connection()
            cursor = connection.cursor()
            cursor.execute(begin)
            try:
                yield ValidatingCursor(cursor)
                cursor.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.rollback()
                raise

    def check_open(self) -> None:
        """`KvmnnError` for an index that was closed."""
        if self._is_closed:
            raise KvmnnError(f"{self.folder}: the store is closed")

    def _get_connection(self) -> sqlite3.Connection:
        self.check_open()
        return self._connection

    def _reopen_after_fork(self) -> None:
        if self._process != os.getpid():
            _parent_connections.append(self._connection)
            self._lock, self._process = threading.RLock(), os.getpid()
            with self._translate_errors():
                self._connection = self._open_newest(None)

    def _reopen_if_replaced(self) -> None:
        """Take the index that others have made anew, or make it anew where it is gone or damaged."""
        try:
            is_replaced = not os.path.samestat(os.stat(self.path), self._stat)
        except OSError:
            is_replaced = True
        if not self._is_closed and (is_replaced or self.write_error or (self._damage_reason and not self.read_only)):
            self._connection.close()
            self._connection = self._open_newest(None)

    def _open_newest(self, block_tokens: int | None) -> sqlite3.Connection:
        """A connection to the newest index; one that is lost or damaged is made anew if it can be."""
        _, path = find_newest_index(self.folder)
        damage = self._damage_reason if path == self.path else ""
        self.path = path or self.folder / INDEX_FILE
        if path is None:
            damage = f"{self.path.name} is gone"
        self.write_error = ""
        if not damage:
            try:
                return self._open_connection(block_tokens)
            except (sqlite3.Error, UnicodeDecodeError, _NotOursError) as error:
                is_damage = not isinstance(error, sqlite3.Error) or _get_error_code(error) not in (
                    *_BUSY_CODES,
                    *_DISK_CODES,
                )
                if not self.read_only and isinstance(error, sqlite3.Error) and _get_error_code(error) in _DISK_CODES:
                    self.write_error = str(error)
                    with suppress(sqlite3.Error, SourceError):
                        return self._open_connection(None)
                if not is_damage or self.read_only or not self._rebuild(str(error), path):
                    if not isinstance(error, _NotOursError):
                        raise
                    if self.read_only and RecoveryFiles(self.folder).exists:
                        raise self.mark_damaged(str(error)) from None
                    raise SourceError(f"{self.folder}: is not a prefix store: {error}") from None
        elif self.read_only or not self._rebuild(damage, path):
            if path is not None or (self.read_only and RecoveryFiles(self.folder).exists):
                raise self.mark_damaged(damage)
            if block_tokens is None or self.read_only:
                problem = f"it has no {INDEX_FILE}" if self.folder.is_dir() else "there is no such directory"
                if RecoveryFiles(self.folder).has_only_units:
                    problem += f", but units: {explain_settings(SETTINGS_FILE)}"
                raise SourceError(f"{self.folder}: is not a prefix store: {problem}")
            try:
                return self._open_connection(block_tokens)
            except sqlite3.Error:
                with suppress(OSError):  # of a full disk nothing is left that looks like a store
                    if not self.path.stat().st_size:
                        self.path.unlink()
                raise
        self.path = find_newest_index(self.folder)[1] or self.path
        return self._open_connection(None)

    def _open_connection(self, block_tokens: int | None) -> sqlite3.Connection:
        connection = self._connect_for_mode()
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA synchronous = NORMAL")  # a cache need not outlive a power cut to the second
            if not self._is_read_only and connection.execute("PRAGMA application_id").fetchone() != (_APPLICATION_ID,):
                # where the folder is a store the index was lost, and an empty one would lose all that is stored
                create_tables(connection, None if RecoveryFiles(self.folder).exists else block_tokens)
            self._check_schema(connection)
            if not self._is_read_only and connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
                with suppress(sqlite3.Error):  # what `in_place` has left on a full disk
                    connection.execute(_SET_WAL_MODE)
            self._stat = os.stat(self.path)
            self._damage_reason = ""
        except BaseException:
            connection.close()
            raise
        return connection

    def _open_in_place(self) -> sqlite3.Connection:
        connection = self._connect_uri(f"{self.path.absolute().as_uri()}?mode=rw")
        try:
            connection.execute(f"PRAGMA busy_timeout = {_IN_PLACE_TIMEOUT_MILLISECONDS}")
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # of others the index needs a file with their locks
            connection.execute("PRAGMA journal_mode = MEMORY").fetchone()
            self._check_schema(connection)
        except BaseException:
            connection.close()
            raise
        self.write_error = ""
        return connection

    @property
    def _is_read_only(self) -> bool:
        return self.read_only or bool(self.write_error)

    def _connect_for_mode(self) -> sqlite3.Connection:
        if self.path.exists() and not self.path.is_file():  # SQLite would wait for somebody to write into a pipe
            raise SourceError(f"{self.path}: is not a regular file")
        uri = self.path.absolute().as_uri()
        if not self._is_read_only:
            return self._connect_uri(uri)
        connection = self._connect_uri(f"{uri}?mode=ro")
        try:
            connection.execute("PRAGMA schema_version").fetchone()
        except sqlite3.OperationalError:  # nobody writes, and nothing can be written beside it
            connection.close()
            connection = self._connect_uri(f"{uri}?mode=ro&immutable=1")
        return connection

    def _connect_uri(self, uri: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            uri, timeout=BUSY_TIMEOUT_SECONDS, isolation_level=None, check_same_thread=False, uri=True
        )
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)  # a damaged length is refused unread
        return connection

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        """Only this version's tables are asked anything."""
        application_id, version = (
            connection.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")
        )
        if application_id != _APPLICATION_ID:
            is_empty = connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,)
            raise _NotOursError(self.path.name + (" is empty" if is_empty else " is another's"))
        if version != _INDEX_VERSION:
            raise SourceError(f"{self.folder}: is a prefix store of version {version}: expected {_INDEX_VERSION}")
        table_statements = dict(
            connection.execute("SELECT name, sql FROM sqlite_master WHERE name NOT LIKE 'sqlite_%'")
        )
        if table_statements != _TABLE_STATEMENTS:
            raise _NotOursError(f"{self.path.name} has other tables")

    @contextmanager
    def _translate_errors(self) -> Iterator[None]:
        """Errors of SQLite in kvmnn's words."""
        try:
            yield
        except sqlite3.Error as error:
            raise self._make_error(error) from error
        except (InvalidRowError, UnicodeDecodeError) as error:  # names in a damaged schema need not be UTF-8
            raise self.mark_damaged(str(error)) from error

    def _make_error(self, error: sqlite3.Error) -> KvmnnError:
        code = _get_error_code(error)
        if code in _BUSY_CODES:
            return KvmnnError(
                f"{self.folder}: another process has kept the index for {BUSY_TIMEOUT_SECONDS:.0f} seconds"
            )
        if code in _DISK_CODES:
            return OutputError(f"{self.path}: cannot be written: {error}")
        return self.mark_damaged(str(error))


def _get_error_code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def create_tables(connection: sqlite3.Connection, block_tokens: int | None) -> None:
    """Make the tables where nobody else has; what is another's file is left as it is."""
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,) and block_tokens is not None:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute(_SET_WAL_MODE).fetchone()
    connection.execute("BEGIN IMMEDIATE")
    try:
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,) and block_tokens is not None:
            for statement in _TABLE_STATEMENTS.values():
                connection.execute(statement)
            connection.execute("INSERT INTO state VALUES (1, ?, 0, 0)", (block_tokens,))
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {_INDEX_VERSION}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.rollback()
