"""The files of units in a store directory: written aside, put in their places at once, read mapped."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

from ..dtypes import Bytes
from ..errors import SourceError
from ..files.mapped import MappedFile
from ..files.output import failures
from ..files.temporary import Temporary, sweep

SUFFIX = ".unit"
_STAGING = "staging"
_UNITS = "units"
_FOLDER_BITS = 12
_MAX_UNIT = 1 << 62
_PIECES = 1024
"""In one call, as POSIX systems take them."""


class UnitFiles:
    """Where the units of a store lie.

    Parameters
    ----------
    folder
        Of the store.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def path(self, unit: int) -> Path:
        """The file of a unit."""
        return Path(self._folder, _UNITS, *_names(unit))

    def read(self, unit: int) -> Bytes | None:
        """The bytes of a unit's file, mapped; None where there is none."""
        if not 0 < unit < _MAX_UNIT:
            return None
        path = os.path.join(self._folder, _UNITS, *_names(unit))
        try:
            if not os.path.isfile(path):
                return None
            file = MappedFile(path)
            return file.view(0, file.size)
        except (SourceError, OSError):
            return None

    def stage(self) -> Staging:
        """A folder for units on their way in."""
        return Staging(self._folder / _STAGING)

    def place(self, staged: Path, unit: int) -> None:
        """Give a staged file its name."""
        path = self.path(unit)
        with failures(path):
            try:
                os.replace(staged, path)
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(staged, path)

    def remove(self, units: Iterable[int]) -> None:
        """Remove files; those that cannot be are left to `others`."""
        for unit in units:
            with suppress(OSError):
                self.path(unit).unlink()

    def others(self, known: set[int]) -> Iterator[Path]:
        """Files of units that are not known."""
        for path in sorted((self._folder / _UNITS).glob(f"*/*{SUFFIX}")):
            try:
                number = int(path.stem, 16)
            except ValueError:
                continue
            if number not in known and path == self.path(number):
                yield path

    def sweep(self) -> None:
        """Remove what processes that are gone have left on its way in."""
        sweep(self._folder / _STAGING)


def _write(handle: int, pieces: Sequence[Bytes | bytes]) -> None:
    """All pieces, in as few calls as can be: the system gives a file larger pages then."""
    rest = [memoryview(piece) if isinstance(piece, bytes) else piece.data for piece in pieces]
    while rest:
        done = _write_some(handle, rest[:_PIECES])
        while rest and done >= len(rest[0]):
            done -= len(rest.pop(0))
        if done:
            rest[0] = rest[0][done:]


def _write_some(handle: int, pieces: list[memoryview]) -> int:
    """Bytes that were written."""
    return os.writev(handle, pieces) if hasattr(os, "writev") else os.write(handle, pieces[0])


def _names(unit: int) -> tuple[str, str]:
    """Of the folder of a unit, and of its file."""
    return f"{unit >> _FOLDER_BITS:03x}", f"{unit:08x}{SUFFIX}"


class Staging:
    """A folder of files that are not in their places yet: removed on leaving the ``with`` block.

    It is locked as long as this process has it, so that others know what may be removed. Files are not brought to the
    disk before they get their names: what a power cut leaves of them does not match its checksums.
    """

    def __init__(self, parent: Path) -> None:
        with failures(parent):
            parent.mkdir(exist_ok=True)
            self._folder = Temporary(parent / "put", parent=parent, is_folder=True)

    def write(self, name: str, pieces: Sequence[Bytes | bytes]) -> Path:
        """Write a file; its path."""
        path = self._folder.path / name
        with failures(path.parent), open(path, "xb", buffering=0) as file:
            _write(file.fileno(), pieces)
        return path

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):
            for entry in list(os.scandir(self._folder.path)):
                os.unlink(entry.path)
            self._folder.path.rmdir()
        self._folder.release()
