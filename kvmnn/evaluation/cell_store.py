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

from ..errors import SourceError
from ..files.atomic import wrap_os_errors
from ..files.journal import lock_exclusive
from ..files.schema import loads_strict
from ..lm.documents import Document
from .records import CellKind
from .settings import Configuration, EvaluationSettings

NUMBERS_VERSION = 2
"""Raised whenever kvmnn computes any number of a cell differently, so that cells of before are not reused."""

_FORMAT_VERSION = 2
_UNHASHED_FORMAT_VERSION = 1


def compute_cell_key(
    kind: CellKind,
    model_sha256: str,
    configuration: Configuration,
    document: Document,
    settings: EvaluationSettings,
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
    description = {
        "numbers": NUMBERS_VERSION,
        "kind": kind,
        "model": model_sha256,
        "configuration": configuration.to_identity,
        "document": document.sha256,
        "ids": hashlib.sha256(document.ids.astype("<i8").tobytes()).hexdigest(),
        "settings": settings.select_relevant(kind),
        "extra": dict(extra),
    }
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).hexdigest()


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
            self._open_file(self.path)

    def __len__(self) -> int:
        return len(self._cells)

    def get(self, key: str) -> Mapping[str, object] | None:
        """The cell, or None."""
        return self._cells.get(key)

    def put(self, key: str, cell: Mapping[str, object]) -> None:
        """Store a cell; when this returns it is on the disk."""
        self._cells[key] = cell
        if self._file is not None and self.path is not None:
            line = (
                json.dumps({"kvmnn_cell": _FORMAT_VERSION, "key": key, "sha256": _hash_cell(key, cell), "cell": cell})
                + "\n"
            )
            with wrap_os_errors(self.path):
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

    def _open_file(self, path: Path) -> None:
        with wrap_os_errors(path):
            file = open(path, "a+b")  # noqa: SIM115  # kept open: every cell is appended to it
        try:
            lock_exclusive(file, path, "evaluation")
            file.seek(0)
            data = file.read()
            complete_lines = data[: data.rfind(b"\n") + 1]
            self._parse_lines(path, complete_lines, incomplete_tail=data[len(complete_lines) :])
            if len(complete_lines) != len(data):
                with wrap_os_errors(path):
                    file.truncate(len(complete_lines))
        except BaseException:
            file.close()
            raise
        self._file = file

    def _parse_lines(self, path: Path, complete_lines: bytes, incomplete_tail: bytes) -> None:
        lines = complete_lines.split(b"\n")[:-1]
        if not lines and incomplete_tail and not _LINE_PREFIX.startswith(incomplete_tail[: len(_LINE_PREFIX)]):
            raise SourceError(f"{path}: is not a file of cells: it would be overwritten")
        for number, line in enumerate(lines, 1):
            try:
                entry = loads_strict(line)
                version = entry["kvmnn_cell"]
                if version not in (_FORMAT_VERSION, _UNHASHED_FORMAT_VERSION):
                    raise SourceError(f"{path}: line {number} is of format {version!r}: expected {_FORMAT_VERSION}")
                key, cell = str(entry["key"]), entry["cell"]
                stored_hash = _hash_cell(key, cell) if version == _UNHASHED_FORMAT_VERSION else entry["sha256"]
                if not isinstance(cell, dict):
                    raise TypeError
                computed_hash = _hash_cell(key, cell)
            except SourceError:
                raise
            except (KeyError, TypeError, ValueError, RecursionError):  # deep, or an integer of thousands of digits
                raise SourceError(f"{path}: line {number} is not a cell of an evaluation") from None
            if stored_hash != computed_hash:
                raise SourceError(
                    f"{path}: line {number} does not have the hash that it names: it was edited or is damaged; delete "
                    "the line and its cell is measured anew"
                )
            if version == _FORMAT_VERSION:
                self._cells[key] = cell


def _hash_cell(key: str, cell: Mapping[str, object]) -> str:
    return hashlib.sha256(json.dumps([key, cell], sort_keys=True).encode()).hexdigest()


_LINE_PREFIX = b'{"kvmnn_cell": '
