"""SQLite index of a store directory: which unit contains which block.

The index is written in short transactions only, and its answers are checked against the units when these are read: a
wrong index may cost a miss, but never a wrong result. It may be damaged or forged, and SQLite stores any type in any
column. So every row is fetched with the types of its columns, and all its values are validated.
"""

from __future__ import annotations

import os
import shutil
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NewType, TypeVar, get_args

from ..._util.patterns import declare_pattern
from ..._util.validation import repr_short
from ...errors import KvmnnError, MissingFileError, OutputError, SourceError
from ..backend import StoreSettings
from ..encryption import NO_CIPHER, StoreCipher
from ..namespace import KEY_BYTES, MAX_TOKENS, Namespace, parse_namespace
from .files import SETTINGS_FILE, RecoveryFiles

Key = NewType("Key", bytes)
"""Key of a namespace, a block or a sequence: 16 bytes."""

_MAX_SQLITE_INTEGER = 2**63 - 1
R = TypeVar("R")


class InvalidRowError(Exception):
    """A row that kvmnn cannot have written; the transaction turns it into `DamagedIndexError`."""


class ValidatingCursor:
    """Cursor inside a transaction that returns validated rows only.

    `row_type` is the tuple of the types of the columns, such as ``tuple[int, Key]``; an int must be at least 0.
    """

    def __init__(self, cursor: sqlite3.Cursor, cipher: StoreCipher = NO_CIPHER) -> None:
        self._cursor = cursor
        self.cipher = cipher
        """What texts and ids in rows are sealed with."""

    def execute(self, statement: str, parameters: Sequence[object] = ()) -> int:
        """Run a statement without a result; return the number of changed rows."""
        return self._cursor.execute(statement, parameters).rowcount

    def execute_many(self, statement: str, rows: Iterable[Sequence[object]]) -> None:
        """Run a statement for each row of parameters."""
        self._cursor.executemany(statement, rows)

    @property
    def last_row_id(self) -> int:
        """Number of the row that was inserted last."""
        number = self._cursor.lastrowid
        assert number
        return number

    def iter_rows(self, row_type: type[R], query: str, parameters: Sequence[object] = ()) -> Iterator[R]:
        """Yield the rows of a query, each validated when it is fetched.

        The cursor runs one query at a time: use `fetch_rows` to run another one meanwhile.
        """
        column_checks = [_CHECK_BY_TYPE[column_type] for column_type in get_args(row_type)]
        for row in self._cursor.execute(query, parameters):
            for value, (is_valid, expected) in zip(row, column_checks, strict=True):
                if not is_valid(value):
                    value_text = f"{len(value):,} bytes" if isinstance(value, bytes) else repr_short(value)
                    raise InvalidRowError(f"a row has {value_text}, expected {expected}")
            yield row

    def fetch_rows(self, row_type: type[R], query: str, parameters: Sequence[object] = ()) -> list[R]:
        """Return all rows of a query."""
        return list(self.iter_rows(row_type, query, parameters))

    def fetch_row(self, row_type: type[R], query: str, parameters: Sequence[object] = ()) -> R | None:
        """Return the first row of a query, None if it has none."""
        return next(self.iter_rows(row_type, query, parameters), None)

    def require_row(self, row_type: type[R], query: str, parameters: Sequence[object] = ()) -> R:
        """Return the first row of a query; raise `InvalidRowError` if it has none."""
        row = self.fetch_row(row_type, query, parameters)
        if row is None:
            raise InvalidRowError("a row of it is gone")
        return row

    def list_numbers(self, query: str, parameters: Sequence[object] = ()) -> list[int]:
        """Return all rows of a query for one number."""
        return [number for (number,) in self.iter_rows(tuple[int], query, parameters)]

    def fetch_number(self, query: str, parameters: Sequence[object] = ()) -> int | None:
        """Return the first row of a query for one number, None if it has none."""
        row = self.fetch_row(tuple[int], query, parameters)
        return None if row is None else row[0]

    def require_number(self, query: str, parameters: Sequence[object] = ()) -> int:
        """Return the first row of a query for one number; raise `InvalidRowError` if it has none."""
        return self.require_row(tuple[int], query, parameters)[0]

    def has_row(self, query: str, parameters: Sequence[object] = ()) -> bool:
        """Return whether a query has any row; its values are not used."""
        return self._cursor.execute(query, parameters).fetchone() is not None


SPACE_NAME, SESSION_NAME = "index: space", "index: session "
"""Names under which documents of namespaces, and ids of the session whose name follows, are sealed in rows."""


def parse_space_document(document: str, where: str, cipher: StoreCipher) -> Namespace:
    """Parse the namespace document of a row; raise `InvalidRowError` if it is malformed."""
    try:
        return parse_namespace(cipher.unseal_text(document, SPACE_NAME), f"{where}: space", cipher.secret)
    except KvmnnError as error:
        raise InvalidRowError(str(error)) from None


def _is_number(value: object) -> bool:
    return type(value) is int and 0 <= value <= _MAX_SQLITE_INTEGER


_CHECK_BY_TYPE: dict[object, tuple[Callable[[Any], bool], str]] = {
    int: (_is_number, "a whole number from 0 on"),
    int | None: (lambda value: value is None or _is_number(value), "a whole number from 0 on, or none"),
    str: (lambda value: type(value) is str, "a text"),
    bytes: (lambda value: type(value) is bytes, "bytes"),
    Key: (lambda value: type(value) is bytes and len(value) == KEY_BYTES, f"a key of {KEY_BYTES} bytes"),
}
"""Check of a value and description of what it expects, by the type of the column."""


INDEX_FILE = "index.sqlite"
BUSY_TIMEOUT_SECONDS = 30.0
"""Maximum time to wait for the transaction of another process."""

_APPLICATION_ID = 0x4B564D53
_INDEX_VERSION = 1
_TABLE_STATEMENTS = {
    "state": """CREATE TABLE state (
        one INTEGER PRIMARY KEY, block_tokens INTEGER NOT NULL, tick INTEGER NOT NULL, bytes INTEGER NOT NULL,
        policy TEXT NOT NULL, clock INTEGER NOT NULL)""",
    "space": "CREATE TABLE space (id INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE, document TEXT NOT NULL)",
    "unit": """CREATE TABLE unit (
        id INTEGER PRIMARY KEY AUTOINCREMENT, space INTEGER NOT NULL, parent INTEGER, skip INTEGER NOT NULL,
        start INTEGER NOT NULL, tokens INTEGER NOT NULL, bytes INTEGER NOT NULL, used INTEGER NOT NULL,
        children INTEGER NOT NULL, pins INTEGER NOT NULL, uses INTEGER NOT NULL, priority INTEGER NOT NULL)""",
    "unit_leaf": "CREATE INDEX unit_leaf ON unit (priority) WHERE children = 0 AND pins = 0",
    "unit_parent": "CREATE INDEX unit_parent ON unit (parent)",
    "block": "CREATE TABLE block (key BLOB PRIMARY KEY, unit INTEGER NOT NULL, number INTEGER NOT NULL) WITHOUT ROWID",
    "block_unit": "CREATE INDEX block_unit ON block (unit)",
    "branch": "CREATE TABLE branch (unit INTEGER PRIMARY KEY, parent BLOB NOT NULL, text BLOB NOT NULL)",
    "branch_text": "CREATE INDEX branch_text ON branch (parent, text)",
    "pin": "CREATE TABLE pin (key BLOB PRIMARY KEY, unit INTEGER NOT NULL, tokens INTEGER NOT NULL) WITHOUT ROWID",
    "session": "CREATE TABLE session (name TEXT PRIMARY KEY, space INTEGER NOT NULL, ids BLOB NOT NULL) WITHOUT ROWID",
}
"""state: `clock` is the highest priority that was evicted. unit: `parent` is the unit before it, `skip` the number of
its blocks that belong to another unit, `start` the tokens of the sequence before it, `used` the tick of its last use (a
counter, not a time), `uses` how often it was read and once for its put; the lowest `priority` is evicted first. block:
`number` is its index in the unit. branch: key of the block before a unit, and sort key of its first own block."""

_BUSY_CODES = (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
_DISK_CODES = (sqlite3.SQLITE_FULL, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN, sqlite3.SQLITE_IOERR)
"""Errors of SQLite that are not damage: another process writes, or the disk fails."""
_MIN_FREE_BYTES = 64 << 10
"""With less the disk is full for an index: SQLite needs two pages and 32 KiB of shared memory to write anything."""
_INDEX_NAME_REGEX = declare_pattern(r"index(?:-(\d{1,9}))?\.sqlite")
"""Each rebuilt index has a higher number, and the highest is valid. A name is never used twice: SQLite writes and
removes other files by the name of the database."""

_BEGIN_READ = "BEGIN"
_SET_WAL_MODE = "PRAGMA journal_mode = WAL"
_IN_PLACE_TIMEOUT_MILLISECONDS = 2000  # a process that has the index open keeps it: a longer wait is useless
_MAX_VALUE_BYTES = 4 * MAX_TOKENS + (1 << 20)  # the ids of a session, which compression may not shrink

_parent_connections: list[sqlite3.Connection] = []
"""Connections of a parent process: closing them in a child would release the locks of the parent."""


class DamagedIndexError(SourceError):
    """The index is damaged; its next use rebuilds it where that is possible."""


class _NotOursError(SourceError):
    """A database that is not an index of kvmnn."""


def find_newest_index(folder: Path) -> tuple[int, Path | None]:
    """Return the highest number that an index of this folder ever had, and the newest index, if there is one."""
    max_number, newest_number = 0, -1
    with suppress(OSError):
        for match in filter(None, map(_INDEX_NAME_REGEX.match, os.listdir(folder))):
            number = int(match[1] or 0)
            max_number = max(max_number, number)
            if match.end() == len(match.string):
                newest_number = max(newest_number, number)
    return max_number, None if newest_number < 0 else folder / make_index_name(newest_number)


def make_index_name(number: int) -> str:
    """Return the file name of the index with this number."""
    return f"index-{number}.sqlite" if number else INDEX_FILE


class StoreIndex:
    """Connection to the index, shared by the threads of a process.

    `settings` are those of a new store, None if the store must exist. `rebuild` is called with the reason
    and the path of the newest index (None if there is none), and returns whether it could rebuild the index.
    """

    def __init__(
        self,
        folder: Path,
        *,
        settings: StoreSettings | None,
        read_only: bool,
        rebuild: Callable[[str, Path | None], bool],
        explain_lost_settings: Callable[[], str],
        cipher: StoreCipher = NO_CIPHER,
    ) -> None:
        self.path = folder / INDEX_FILE
        self._cipher = cipher
        self.folder = folder
        self.read_only = read_only
        self._rebuild, self._explain_lost_settings = rebuild, explain_lost_settings
        self.write_error = ""
        """Reason why the index is only open for reading, such as a full disk; the next transaction tries again."""
        self._damage_reason = ""
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._is_closed = False
        with self._translate_errors():
            self._connection = self._open_newest(settings)

    @contextmanager
    def begin_reading(self) -> Iterator[ValidatingCursor]:
        """Open a transaction that sees one state of the index, whatever other processes write meanwhile."""
        with self._transaction(_BEGIN_READ) as cursor:
            yield cursor

    @contextmanager
    def begin_writing(self) -> Iterator[ValidatingCursor]:
        """Open an exclusive writing transaction, which is rolled back if the block fails."""
        if self.read_only:
            raise OutputError(f"{self.folder}: is open for reading only")
        with self._transaction("BEGIN IMMEDIATE") as cursor:
            yield cursor

    @contextmanager
    def write_in_place(self) -> Iterator[None]:
        """Let the block write without a journal file, which a full disk has no space for.

        The journal in memory does not survive a crash; the index is rebuilt then.
        """
        with self._lock, self._translate_errors():
            self._get_connection().close()
            try:
                self._connection = self._connect("?mode=rw")
                self._connection.execute(f"PRAGMA busy_timeout = {_IN_PLACE_TIMEOUT_MILLISECONDS}")
                self._connection.execute("PRAGMA trusted_schema = OFF")
                self._connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # other modes need a file for locks
                self._connection.execute("PRAGMA journal_mode = MEMORY").fetchone()
                self._check_schema(self._connection)
                self.write_error = ""
                yield
            finally:
                with suppress(sqlite3.Error):
                    self._connection.execute(_SET_WAL_MODE)
                self._connection.close()
                self._connection = self._open_newest(None)

    def vacuum(self) -> None:
        """Release the space of removed rows to the file system."""
        with self._lock, self._translate_errors():
            self._get_connection().execute("PRAGMA incremental_vacuum").fetchall()
            self._get_connection().execute("PRAGMA wal_checkpoint(TRUNCATE)").fetchall()

    def check_integrity(self) -> None:
        """Raise `DamagedIndexError` if SQLite finds the file damaged; all of it is read."""
        with self.begin_reading() as cursor:
            (result,) = cursor.require_row(tuple[str], "PRAGMA integrity_check(1)")
        if result != "ok":
            raise self.mark_damaged(" ".join(result.split()))

    def mark_damaged(self, reason: str) -> DamagedIndexError:
        """Return the error to raise for a damaged index, which the next use rebuilds."""
        self._damage_reason = reason
        # without settings nothing is made again, whoever opens the store: all say the same then
        advice = self._explain_lost_settings() or (
            "open the store for writing (kvmnn store verify), and it is made again"
            if self.read_only
            else "remove the store: it is a cache"
        )
        return DamagedIndexError(f"{self.path}: is damaged ({reason}); {advice}")

    @property
    def nbytes(self) -> int:
        """Size of the index and of its write-ahead log in bytes."""
        return sum(path.stat().st_size for path in (self.path, Path(f"{self.path}-wal")) if path.exists())

    def close(self) -> None:
        """Close the connection; any later use raises `KvmnnError`."""
        with self._lock:
            if not self._is_closed and self._process == os.getpid():
                self._connection.close()
            self._is_closed = True

    @contextmanager
    def _transaction(self, begin: str) -> Iterator[ValidatingCursor]:
        """Open a transaction on the newest index, which another process may have rebuilt."""
        if self._process != os.getpid():  # forked
            _parent_connections.append(self._connection)
            self._lock, self._process = threading.RLock(), os.getpid()
            with self._translate_errors():
                self._connection = self._open_newest(None)
        with self._lock, self._translate_errors():
            try:
                is_replaced = not os.path.samestat(os.stat(self.path), self._stat)
            except OSError:
                is_replaced = True
            has_damage = bool(self._damage_reason) and not self.read_only
            if not self._is_closed and (is_replaced or self.write_error or has_damage):
                self._connection.close()
                self._connection = self._open_newest(None)
            if self.write_error and begin != _BEGIN_READ:
                raise OutputError(f"{self.path}: cannot be written: {self.write_error}")
            connection = self._get_connection()
            cursor = connection.cursor()
            cursor.execute(begin)
            try:
                yield ValidatingCursor(cursor, self._cipher)
                cursor.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:
                    connection.rollback()
                raise

    def check_open(self) -> None:
        """Raise `KvmnnError` if the index was closed."""
        if self._is_closed:
            raise KvmnnError(f"{self.folder}: the store is closed")

    def _get_connection(self) -> sqlite3.Connection:
        self.check_open()
        return self._connection

    def _open_newest(self, settings: StoreSettings | None) -> sqlite3.Connection:
        """Connect to the newest index; rebuild one that is missing or damaged where that is possible."""
        _, path = find_newest_index(self.folder)
        damage = self._damage_reason if path == self.path else ""
        self.path = path or self.folder / INDEX_FILE
        if path is None:
            damage = f"{self.path.name} is gone"
        self.write_error = ""
        if not damage:
            try:
                return self._open_connection(settings)
            except (sqlite3.Error, UnicodeDecodeError, _NotOursError) as error:
                code = _get_error_code(error) if isinstance(error, sqlite3.Error) else None
                is_damage = code not in (*_BUSY_CODES, *_DISK_CODES)
                if not self.read_only and code in _DISK_CODES:
                    self.write_error = _describe_disk_error(error, self.folder)
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
            if settings is None or self.read_only:
                problem = f"it has no {INDEX_FILE}" if self.folder.is_dir() else "there is no such directory"
                if RecoveryFiles(self.folder).has_only_units:
                    problem += (
                        f", but units: {RecoveryFiles(self.folder, self._cipher).explain_settings(SETTINGS_FILE)}"
                    )
                error_class = SourceError if self.folder.exists() else MissingFileError
                raise error_class(f"{self.folder}: is not a prefix store: {problem}")
            try:
                return self._open_connection(settings)
            except sqlite3.Error:
                with suppress(OSError):  # after a full disk, nothing may look like a store
                    if not self.path.stat().st_size:
                        self.path.unlink()
                raise
        self.path = find_newest_index(self.folder)[1] or self.path
        return self._open_connection(None)

    def _open_connection(self, settings: StoreSettings | None) -> sqlite3.Connection:
        if self.path.exists() and not self.path.is_file():  # SQLite would block on a pipe
            raise SourceError(f"{self.path}: is not a regular file")
        is_read_only = self.read_only or bool(self.write_error)
        connection = self._connect("?mode=ro" if is_read_only else "")
        if is_read_only:
            try:
                connection.execute("PRAGMA schema_version").fetchone()
            except sqlite3.OperationalError:  # a read-only folder, without a writer
                connection.close()
                connection = self._connect("?mode=ro&immutable=1")
        try:
            connection.execute("PRAGMA trusted_schema = OFF")
            connection.execute("PRAGMA synchronous = NORMAL")  # a cache may lose its last second in a power failure
            if not is_read_only and connection.execute("PRAGMA application_id").fetchone() != (_APPLICATION_ID,):
                # if the folder is a store, its index was lost: an empty one would lose all units
                create_tables(connection, None if RecoveryFiles(self.folder).exists else settings)
            self._check_schema(connection)
            if not is_read_only and connection.execute("PRAGMA journal_mode").fetchone() != ("wal",):
                with suppress(sqlite3.Error):  # `write_in_place` on a full disk may have left another mode
                    connection.execute(_SET_WAL_MODE)
            self._stat = os.stat(self.path)
            self._damage_reason = ""
        except BaseException:
            connection.close()
            raise
        return connection

    def _connect(self, uri_query: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            self.path.absolute().as_uri() + uri_query,
            timeout=BUSY_TIMEOUT_SECONDS,
            isolation_level=None,
            check_same_thread=False,
            factory=_Connection,
            uri=True,
        )
        connection.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _MAX_VALUE_BYTES)  # refuses a damaged length before reading
        return connection

    def _check_schema(self, connection: sqlite3.Connection) -> None:
        """Refuse a database that has other tables than this version of the index."""
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
        """Turn errors of SQLite into those of kvmnn."""
        try:
            yield
        except sqlite3.Error as error:
            code = _get_error_code(error)
            if code in _BUSY_CODES:
                raise KvmnnError(
                    f"{self.folder}: another process has kept the index for {BUSY_TIMEOUT_SECONDS:.0f} seconds"
                ) from error
            if code in _DISK_CODES:
                raise OutputError(
                    f"{self.path}: cannot be written: {_describe_disk_error(error, self.folder)}"
                ) from error
            raise self.mark_damaged(str(error)) from error
        except (InvalidRowError, UnicodeDecodeError) as error:  # names in a damaged schema need not be UTF-8
            raise self.mark_damaged(str(error)) from error


class _Connection(sqlite3.Connection):
    """A connection that is closed when it is freed: Python 3.13 and later warn of others that were left open."""

    def __del__(self) -> None:
        self.close()


def _describe_disk_error(error: Exception, folder: str | os.PathLike[str]) -> str:
    """Return the text of an error, with a note if the disk is full: SQLite reports an I/O error then."""
    try:
        is_full = shutil.disk_usage(folder).free < _MIN_FREE_BYTES
    except OSError:
        is_full = False
    return f"{error}: no space is left on the disk" if is_full else str(error)


def _get_error_code(error: sqlite3.Error) -> int:
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


def create_tables(connection: sqlite3.Connection, settings: StoreSettings | None) -> None:
    """Create the tables in an empty database; other databases are left unchanged."""
    if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,) and settings is not None:
        connection.execute("PRAGMA auto_vacuum = INCREMENTAL")
        connection.execute(_SET_WAL_MODE).fetchone()
    connection.execute("BEGIN IMMEDIATE")
    try:
        if connection.execute("SELECT count(*) FROM sqlite_master").fetchone() == (0,) and settings is not None:
            for statement in _TABLE_STATEMENTS.values():
                connection.execute(statement)
            connection.execute("INSERT INTO state VALUES (1, ?, 0, 0, ?, 0)", (settings.block_tokens, settings.policy))
            connection.execute(f"PRAGMA application_id = {_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version = {_INDEX_VERSION}")
        connection.execute("COMMIT")
    finally:
        if connection.in_transaction:
            connection.rollback()
