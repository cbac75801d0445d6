"""The files of units in a store directory: written aside, put in their places at once, read mapped."""

from __future__ import annotations

import itertools
import os
import threading
import weakref
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
        self._aside = _Aside(folder / _STAGING)

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
        """A place for units on their way in."""
        return Staging(self._aside)

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
            if number not in known and path == self.path(number) and path.is_file():
                yield path

    def sweep(self) -> None:
        """Remove what processes that are gone have left on its way in."""
        sweep(self._folder / _STAGING)

    def close(self) -> None:
        """Remove what this process has of its own."""
        self._aside.close()


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


def is_unit_name(path: Path) -> bool:
    """Whether a path below a store's folder is that of a unit's file."""
    try:
        return path == Path(_UNITS, *_names(int(path.stem, 16)))
    except ValueError:
        return False


class _Aside:
    """A folder of this process for files that are not in their places yet, made when it is needed.

    It is locked as long as this process has it, so that others know what may be removed.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._numbers = itertools.count()
        self._lock = threading.Lock()
        self._made: weakref.finalize[[Temporary, int], _Aside] | None = None
        self._folder: Path | None = None
        self._process = os.getpid()

    def new_file(self) -> Path:
        """The name of a file that is not there yet; its folder is."""
        if self._process != os.getpid():  # forked: that folder and that lock are the parent's
            self._lock, self._folder, self._process = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._folder is None or not self._folder.is_dir():
                self.close()
                with failures(self._parent):
                    self._parent.mkdir(exist_ok=True)
                    made = Temporary(self._parent / "put", parent=self._parent, is_folder=True)
                self._folder = made.path
                self._made = weakref.finalize(self, _let_go, made, self._process)
            return self._folder / str(next(self._numbers))

    def close(self) -> None:
        """Remove the folder."""
        if self._made is not None:
            self._made()
        self._made = self._folder = None


def _let_go(folder: Temporary, process: int) -> None:
    """Remove a folder; a forked child leaves its parent's alone."""
    if process == os.getpid():
        with suppress(OSError):
            folder.path.rmdir()
        folder.release()


class Staging:
    """Files that are not in their places yet: those that still are not on leaving the ``with`` block are removed.

    They are not brought to the disk before they get their names: what a power cut leaves of them does not match its
    checksums.
    """

    def __init__(self, aside: _Aside) -> None:
        self._aside = aside
        self._written: list[Path] = []

    def write(self, pieces: Sequence[Bytes | bytes]) -> Path:
        """Write a file; its path."""
        path = self._aside.new_file()
        self._written.append(path)
        with failures(path.parent), open(path, "xb", buffering=0) as file:
            _write(file.fileno(), pieces)
        return path

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._written:
            with suppress(OSError):
                os.unlink(path)
