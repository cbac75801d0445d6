"""Journals: files that a run appends to while it works, so that it can be resumed."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from ..errors import OutputError, SourceError
from .atomic import is_device, wrap_os_errors
from .schema import loads_strict


def lock_exclusive(file: IO[bytes], path: Path, process_name: str) -> None:
    """Lock a file for this process until it is closed, so that no other process appends to it.

    On systems without such locks, nothing is checked.
    """
    with suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"{path}: another {process_name} is writing it") from None
        except OSError:  # a file system without locks
            return


@dataclass(frozen=True, kw_only=True)
class JournalFormat:
    """Contents of a journal's lines, and their names in messages."""

    #: First key of every line and its value. Lines of an earlier version stay in the file and are ignored.
    tag: str
    version: int
    #: Name of the process that writes it, for messages.
    process_name: str
    #: Description of a line: "a cell of an evaluation".
    entry_description: str
    #: Consequence of deleting a damaged line: "its cell is measured again".
    remedy: str
    #: Whether damaged lines are ignored; otherwise they are an error.
    skips_damage: bool = False
    #: Seconds between two syncs to the disk; 0: with every line.
    sync_interval_seconds: float = 0.0

    @property
    def prefix(self) -> bytes:
        """Return the bytes of a line before its hash."""
        return f'{{"{self.tag}": {self.version}, "sha256": "'.encode()


class JournalEntry(NamedTuple):
    """A line of a journal: its number from 1, its range in the file, and its record."""

    number: int
    offset: int
    length: int
    record: Any


_SEPARATOR = b'", "record": '
_SUFFIX = b"}\n"
_HASH_DIGITS = 64
_MAX_LINE_BYTES = 256 << 20


class Journal:
    """A file of appended records, from which an interrupted run is resumed.

    The file has one JSON object per line, ``{TAG: VERSION, "sha256", "record"}``; the hash is that of the record's
    bytes, so that edited lines are detected. Lines are written at once. A last line that a crash truncated is dropped.

    Parameters
    ----------
    path
        The file; created if it does not exist, else continued.
    journal_format
        Format of its lines.

    Attributes
    ----------
    has_torn_line : bool
        Whether `read_entries` dropped a torn line.
    """

    def __init__(self, path: str | os.PathLike[str], journal_format: JournalFormat) -> None:
        self.path = Path(path)
        self.format = journal_format
        self.has_torn_line = False
        self._prefix = journal_format.prefix
        self._record_offset = len(self._prefix) + _HASH_DIGITS + len(_SEPARATOR)
        self._synced_at = time.monotonic()
        if is_device(self.path):
            raise OutputError(f"{self.path}: is no regular file, and cannot be continued")
        with wrap_os_errors(self.path):
            self._file: IO[bytes] = open(self.path, "a+b")  # noqa: SIM115  # all lines are appended to it
        try:
            lock_exclusive(self._file, self.path, journal_format.process_name)
        except BaseException:
            self._file.close()
            raise

    def read_entries(self) -> Iterator[JournalEntry]:
        """Read the lines in the file."""
        self._file.seek(0)
        offset = number = 0
        while line := self._file.readline(_MAX_LINE_BYTES):
            if not line.endswith(b"\n") and self._is_torn(line, number):
                self.has_torn_line = True
                with wrap_os_errors(self.path):
                    self._file.truncate(offset)
                return
            number += 1
            try:
                if not self._is_earlier_version(line, number):
                    yield JournalEntry(number, offset, len(line), self._parse_line(line, number))
            except SourceError:
                if not self.format.skips_damage:
                    raise
            offset += len(line)

    def read_record(self, offset: int, length: int) -> Any:
        """Return the record of the line at a position in the file."""
        self._file.seek(offset)
        return self._parse_line(self._file.read(length), 0)

    def append(self, record: Mapping[str, Any]) -> tuple[int, int]:
        """Append a record; return its offset and length in the file."""
        text = json.dumps(record).encode()
        line = self._prefix + hashlib.sha256(text).hexdigest().encode() + _SEPARATOR + text + _SUFFIX
        with wrap_os_errors(self.path):
            offset = self._file.seek(0, os.SEEK_END)
            self._file.write(line)
            self._file.flush()
            if time.monotonic() - self._synced_at >= self.format.sync_interval_seconds:
                self._sync()
        return offset, len(line)

    def close(self) -> None:
        """Sync and close the file."""
        if not self._file.closed:
            with wrap_os_errors(self.path), self._file:
                self._sync()

    def make_foreign_error(self, line_number: int) -> SourceError:
        """Return the error about a line that does not belong to a journal of this kind."""
        return SourceError(
            f"{self.path}: line {line_number} is not {self.format.entry_description}: it would be overwritten"
        )

    def _sync(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._synced_at = time.monotonic()

    def _is_torn(self, line: bytes, line_number: int) -> bool:
        """Return whether the rest of the file is a line that a crash truncated; `SourceError` for anything else."""
        if line.startswith(self._prefix[: len(line)]) or (line_number and not line.strip(b"\0")):
            return not self._file.readline(1)
        raise self.make_foreign_error(line_number + 1)

    def _is_earlier_version(self, line: bytes, line_number: int) -> bool:
        match = re.match(rb'\{"%s": (\d{1,9}), ' % self.format.tag.encode(), line)
        version = int(match[1]) if match else self.format.version
        if version > self.format.version:
            raise SourceError(f"{self.path}: line {line_number} is of format {version}: expected {self.format.version}")
        return 0 < version < self.format.version

    def _parse_line(self, line: bytes, line_number: int) -> Any:
        where = f"line {line_number}" if line_number else "a line"
        text = line[self._record_offset : -len(_SUFFIX)]
        separator = line[self._record_offset - len(_SEPARATOR) : self._record_offset]
        if not (line.startswith(self._prefix) and separator == _SEPARATOR and line.endswith(_SUFFIX)):
            raise SourceError(
                f"{self.path}: {where} is not {self.format.entry_description}, or was edited"
                + ("" if line_number == 1 else f"; delete the line and {self.format.remedy}")
            )
        if hashlib.sha256(text).hexdigest().encode() != line[len(self._prefix) : len(self._prefix) + _HASH_DIGITS]:
            raise SourceError(
                f"{self.path}: {where} does not have the hash that it names: it was edited or is damaged; delete the "
                f"line and {self.format.remedy}"
            )
        try:
            return loads_strict(text)
        except (ValueError, RecursionError):
            raise self.make_foreign_error(line_number) from None


class KeyedJournal:
    """JSON values by key, in memory and, with a path, in a `Journal` of records ``{"key", "value"}``."""

    def __init__(self, path: str | os.PathLike[str] | None, journal_format: JournalFormat) -> None:
        self._value_by_key: dict[str, Any] = {}
        self._journal = None if path is None else Journal(path, journal_format)
        if self._journal is not None:
            try:
                for entry in self._journal.read_entries():
                    match entry.record:
                        case {"key": str(key), "value": value}:
                            self._value_by_key[key] = value
                        case _ if not journal_format.skips_damage:
                            raise self._journal.make_foreign_error(entry.number)
            except BaseException:
                self._journal.close()
                raise

    @property
    def path(self) -> Path | None:
        """Return the path of the file, or None."""
        return None if self._journal is None else self._journal.path

    def __len__(self) -> int:
        return len(self._value_by_key)

    def __contains__(self, key: str) -> bool:
        return key in self._value_by_key

    def get(self, key: str) -> Any | None:
        """Return the value of a key, or None."""
        return self._value_by_key.get(key)

    def put(self, key: str, value: Any) -> None:
        """Store a value; it is on the disk when this returns."""
        self._value_by_key[key] = value
        if self._journal is not None:
            self._journal.append({"key": key, "value": value})

    def close(self) -> None:
        """Close the file, so that another process may write it."""
        if self._journal is not None:
            self._journal.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()
