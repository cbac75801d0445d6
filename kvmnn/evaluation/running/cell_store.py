"""Finished cells of an evaluation, kept in a file, so that an interrupted one goes on where it was.

A cell is one configuration on one document. The file has one JSON object a line, ``{"kvmnn_cell", "key", "sha256",
"cell"}``, each brought to the disk before the next begins. The key is a digest of everything that the cell's numbers
depend on, so a cell of another model, text or setting is never taken for this one; it is left in the file. The hash is
that of the cell under its key: numbers that somebody edited are found. A last line that was torn by a crash is dropped.
Lines of the format before, which had no hash, are left in the file and not used.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import IO, Self

from ...errors import SourceError
from ...files.appending import lock_for_one
from ...files.json_document import loads
from ...files.output import failures
from ...lm.documents import Document
from ..measuring.cells import Kind
from ..setup.configurations import Configuration
from ..setup.settings import Settings

NUMBERS_VERSION = 2
"""Raised whenever kvmnn computes any number of a cell differently, so that cells of before are not reused."""

_FORMAT = 2
_WITHOUT_HASH = 1


def cell_key(
    kind: Kind,
    model_sha256: str,
    configuration: Configuration,
    document: Document,
    settings: Settings,
    extra: Mapping[str, object],
) -> str:
    """The digest under which a cell is stored.

    Parameters
    ----------
    kind
        Of the cell.
    extra
        What else this kind depends on.
    """
    about = {
        "numbers": NUMBERS_VERSION,
        "kind": kind,
        "model": model_sha256,
        "configuration": configuration.identity,
        "document": document.sha256,
        "ids": hashlib.sha256(document.ids.astype("<i8").tobytes()).hexdigest(),
        "settings": settings.that_change(kind),
        "extra": dict(extra),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()


class CellStore:
    """Cells as JSON objects by their keys, in memory and, where there is a path, in a file.

    Parameters
    ----------
    path
        File of cells; made when the first is stored, continued where it is there. None: memory only.

    Raises
    ------
    SourceError
        For a file that holds something else, or cannot be read.
    OutputError
        Where another run is writing it, and from `put` when it cannot be written.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None) -> None:
        self.path = None if path is None else Path(path)
        self._cells: dict[str, Mapping[str, object]] = {}
        self._file: IO[bytes] | None = None
        if self.path is not None:
            self._open(self.path)

    def __len__(self) -> int:
        return len(self._cells)

    def get(self, key: str) -> Mapping[str, object] | None:
        """The cell, or None."""
        return self._cells.get(key)

    def put(self, key: str, cell: Mapping[str, object]) -> None:
        """Store a cell; when this returns it is on the disk."""
        self._cells[key] = cell
        if self._file is not None and self.path is not None:
            line = json.dumps({"kvmnn_cell": _FORMAT, "key": key, "sha256": _hash(key, cell), "cell": cell}) + "\n"
            with failures(self.path):
                self._file.write(line.encode())
                self._file.flush()
                os.fsync(self._file.fileno())

    def close(self) -> None:
        """Let go of the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def _open(self, path: Path) -> None:
        with failures(path):
            file = open(path, "a+b")  # noqa: SIM115  # kept open: every cell is appended to it
        try:
            lock_for_one(file, path, "evaluation")
            file.seek(0)
            data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._parse(path, complete, torn=data[len(complete) :])
            if len(complete) != len(data):
                with failures(path):
                    file.truncate(len(complete))
        except BaseException:
            file.close()
            raise
        self._file = file

    def _parse(self, path: Path, complete: bytes, torn: bytes) -> None:
        lines = complete.split(b"\n")[:-1]
        if not lines and torn and not _FIRST.startswith(torn[: len(_FIRST)]):
            raise SourceError(f"{path}: is not a file of cells: it would be overwritten")
        for number, line in enumerate(lines, 1):
            try:
                entry = loads(line)
                form = entry["kvmnn_cell"]
                if form not in (_FORMAT, _WITHOUT_HASH):
                    raise SourceError(f"{path}: line {number} is of format {form!r}: expected {_FORMAT}")
                key, cell = str(entry["key"]), entry["cell"]
                said = _hash(key, cell) if form == _WITHOUT_HASH else entry["sha256"]
                if not isinstance(cell, dict):
                    raise TypeError
                found = _hash(key, cell)
            except SourceError:
                raise
            except (KeyError, TypeError, ValueError, RecursionError):  # deep, or an integer of thousands of digits
                raise SourceError(f"{path}: line {number} is not a cell of an evaluation") from None
            if said != found:
                raise SourceError(
                    f"{path}: line {number} does not have the hash that it names: it was edited or is damaged; delete "
                    "the line and its cell is measured anew"
                )
            if form == _FORMAT:
                self._cells[key] = cell


def _hash(key: str, cell: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps([key, cell], sort_keys=True).encode()).hexdigest()


_FIRST = b'{"kvmnn_cell": '
