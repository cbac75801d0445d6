"""Runs that are done, kept in a file, so that an interrupted suite goes on where it was."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

from ...errors import OutputError
from ...files.json_document import loads, read_bounded

VERSION = 1
"""Raised whenever a run measures anything differently, so that runs of before are not reused."""

MAX_BYTES = 256 << 20


class RunStore:
    """Results of runs by the digest of everything that they depend on.

    Parameters
    ----------
    path
        A file of JSON lines, made when the first run is stored; a line that a crash tore, or that somebody changed, is
        not used. None: in memory only.
    """

    def __init__(self, path: str | os.PathLike[str] | None) -> None:
        self._path = None if path is None else Path(path)
        self._found: dict[str, Any] = {}
        self.reused = 0
        if self._path is not None:
            self._read(self._path)

    def get(self, key: str) -> Any | None:
        """What is stored under a key; None where nothing is."""
        found = self._found.get(key)
        self.reused += found is not None
        return found

    def put(self, key: str, value: Any) -> None:
        """Store a result, on the disk as well before this returns."""
        self._found[key] = value
        if self._path is None:
            return
        line = json.dumps({"key": key, "sha256": _digest(key, value), "value": value})
        try:
            with open(self._path, "a", encoding="utf-8") as stream:
                stream.write(line + "\n")
                stream.flush()
                os.fsync(stream.fileno())
        except OSError as error:
            raise OutputError(f"{self._path}: cannot be written: {error.strerror or error}") from error

    def _read(self, path: Path) -> None:
        try:
            text = read_bounded(path, MAX_BYTES).decode("utf-8", "ignore")
        except (FileNotFoundError, NotADirectoryError):
            return
        for line in text.split("\n"):
            try:
                entry = loads(line)
            except (ValueError, RecursionError):
                continue
            if not isinstance(entry, dict) or not isinstance(entry.get("key"), str):
                continue
            if entry.get("sha256") == _digest(entry["key"], entry.get("value")):
                self._found[entry["key"]] = entry["value"]


def key_of(**about: Any) -> str:
    """The digest of what a run depends on."""
    return hashlib.sha256(json.dumps({"version": VERSION, **about}, sort_keys=True).encode()).hexdigest()


def _digest(key: str, value: Any) -> str:
    return hashlib.sha256(json.dumps([key, value], sort_keys=True).encode()).hexdigest()
