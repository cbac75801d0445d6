"""Runs that are done, kept in a file, so that an interrupted suite goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import IO, Any

from ...errors import OutputError
from ...files.journal import lock_exclusive
from ...files.schema import loads_strict, read_bounded

RUN_STORE_VERSION = 3
"""Raised whenever a run measures anything differently, so that runs of before are not reused."""

MAX_RUN_STORE_BYTES = 256 << 20


class RunStore:
    """Results of runs by the digest of everything that they depend on.

    Parameters
    ----------
    path
        A file of JSON lines, made when the first run is stored; a line that a crash tore, or that somebody changed, is
        not used. None: in memory only.

    Raises
    ------
    OutputError
        From `put`, where the file cannot be written or another process is writing it.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = None if path is None else Path(path)
        self._value_by_key: dict[str, Any] = {}
        self._file: IO[bytes] | None = None
        self._is_last_line_torn = False
        self.num_reused = 0
        if self._path is not None:
            self._read(self._path)

    def __contains__(self, key: str) -> bool:
        return key in self._value_by_key

    def get(self, key: str) -> Any | None:
        """What is stored under a key; None where nothing is."""
        value = self._value_by_key.get(key)
        self.num_reused += value is not None
        return value

    def put(self, key: str, value: Any) -> None:
        """Store a result, on the disk as well before this returns."""
        self._value_by_key[key] = value
        if self._path is None:
            return
        line = json.dumps({"key": key, "sha256": _hash_entry(key, value), "value": value})
        try:
            if self._file is None:
                self._file = _open_locked(self._path)
            self._file.write(("\n" * self._is_last_line_torn + line + "\n").encode())
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise OutputError(f"{self._path}: cannot be written: {error.strerror or error}") from error
        self._is_last_line_torn = False

    def close(self) -> None:
        """Let go of the file, so that another may write it."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _read(self, path: Path) -> None:
        try:
            text = read_bounded(path, MAX_RUN_STORE_BYTES).decode("utf-8", "ignore")
        except (FileNotFoundError, NotADirectoryError):
            return
        self._is_last_line_torn = not text.endswith("\n")
        for line in text.split("\n"):
            try:
                entry = loads_strict(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(entry, dict) or not isinstance(entry.get("key"), str):
                continue
            if entry.get("sha256") == _hash_entry(entry["key"], entry.get("value")):
                self._value_by_key[entry["key"]] = entry["value"]


def _open_locked(path: Path) -> IO[bytes]:
    """A file to append to, locked until it is closed."""
    file = open(path, "ab")  # noqa: SIM115 - the store closes it
    try:
        lock_exclusive(file, path, "gate run")
    except OutputError:
        file.close()
        raise
    return file


def compute_key(**about: Any) -> str:
    """The digest of what a run depends on."""
    return hashlib.sha256(json.dumps({"version": RUN_STORE_VERSION, **about}, sort_keys=True).encode()).hexdigest()


def _hash_entry(key: str, value: Any) -> str:
    return hashlib.sha256(json.dumps([key, value], sort_keys=True).encode()).hexdigest()
