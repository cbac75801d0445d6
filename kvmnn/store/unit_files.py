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
from ..files.output import wrap_os_errors
from ..files.temporary import TemporaryPath, remove_stale

UNIT_SUFFIX = ".unit"
_STAGING_FOLDER = "staging"
_UNITS_FOLDER = "units"
_FOLDER_BITS = 12
_MAX_UNIT_NUMBER = 1 << 62
_MAX_PIECES_PER_WRITE = 1024
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
        self._staging_folder = _StagingFolder(folder / _STAGING_FOLDER)

    def make_path(self, unit: int) -> Path:
        """The file of a unit."""
        return Path(self._folder, _UNITS_FOLDER, *_make_unit_names(unit))

    def read_unit(self, unit: int) -> Bytes | None:
        """The bytes of a unit's file, mapped; None where there is none."""
        if not 0 < unit < _MAX_UNIT_NUMBER:
            return None
        path = os.path.join(self._folder, _UNITS_FOLDER, *_make_unit_names(unit))
        try:
            if not os.path.isfile(path):
                return None
            file = MappedFile(path)
            return file.view(0, file.size)
        except (SourceError, OSError):
            return None

    def stage(self) -> StagedFiles:
        """A place for units on their way in."""
        return StagedFiles(self._staging_folder)

    def move_into_place(self, staged_path: Path, unit: int) -> None:
        """Give a staged file its name."""
        path = self.make_path(unit)
        with wrap_os_errors(path):
            try:
                os.replace(staged_path, path)
            except FileNotFoundError:
                path.parent.mkdir(parents=True, exist_ok=True)
                os.replace(staged_path, path)

    def delete_units(self, units: Iterable[int]) -> None:
        """Remove files; those that cannot be are left to `iter_unknown_files`."""
        for unit in units:
            with suppress(OSError):
                self.make_path(unit).unlink()

    def iter_unknown_files(self, known_units: set[int]) -> Iterator[Path]:
        """Files of units that are not known."""
        for path in sorted((self._folder / _UNITS_FOLDER).glob(f"*/*{UNIT_SUFFIX}")):
            try:
                number = int(path.stem, 16)
            except ValueError:
                continue
            if number not in known_units and path == self.make_path(number) and path.is_file():
                yield path

    def remove_stale(self) -> None:
        """Remove what processes that are gone have left on its way in."""
        remove_stale(self._folder / _STAGING_FOLDER)

    def close(self) -> None:
        """Remove what this process has of its own."""
        self._staging_folder.close()


def _write_pieces(handle: int, pieces: Sequence[Bytes | bytes]) -> None:
    """All pieces, in as few calls as can be: the system gives a file larger pages then."""
    remaining = [memoryview(piece) if isinstance(piece, bytes) else piece.data for piece in pieces]
    while remaining:
        num_written = _write_some(handle, remaining[:_MAX_PIECES_PER_WRITE])
        while remaining and num_written >= len(remaining[0]):
            num_written -= len(remaining.pop(0))
        if num_written:
            remaining[0] = remaining[0][num_written:]


def _write_some(handle: int, pieces: list[memoryview]) -> int:
    """Bytes that were written."""
    return os.writev(handle, pieces) if hasattr(os, "writev") else os.write(handle, pieces[0])


def _make_unit_names(unit: int) -> tuple[str, str]:
    """Of the folder of a unit, and of its file."""
    return f"{unit >> _FOLDER_BITS:03x}", f"{unit:08x}{UNIT_SUFFIX}"


def is_unit_name(path: Path) -> bool:
    """Whether a path below a store's folder is that of a unit's file."""
    try:
        return path == Path(_UNITS_FOLDER, *_make_unit_names(int(path.stem, 16)))
    except ValueError:
        return False


class _StagingFolder:
    """A folder of this process for files that are not in their places yet, made when it is needed.

    It is locked as long as this process has it, so that others know what may be removed.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._file_numbers = itertools.count()
        self._lock = threading.Lock()
        self._finalizer: weakref.finalize[[TemporaryPath, int], _StagingFolder] | None = None
        self._folder: Path | None = None
        self._process = os.getpid()

    def new_file(self) -> Path:
        """The name of a file that is not there yet; its folder is."""
        if self._process != os.getpid():  # forked: that folder and that lock are the parent's
            self._lock, self._folder, self._process = threading.Lock(), None, os.getpid()
        with self._lock:
            if self._folder is None or not self._folder.is_dir():
                self.close()
                with wrap_os_errors(self._parent):
                    self._parent.mkdir(exist_ok=True)
                    staged_folder = TemporaryPath(self._parent / "put", parent=self._parent, is_folder=True)
                self._folder = staged_folder.path
                self._finalizer = weakref.finalize(self, _remove_folder, staged_folder, self._process)
            return self._folder / str(next(self._file_numbers))

    def close(self) -> None:
        """Remove the folder."""
        if self._finalizer is not None:
            self._finalizer()
        self._finalizer = self._folder = None


def _remove_folder(folder: TemporaryPath, process: int) -> None:
    """Remove a folder; a forked child leaves its parent's alone."""
    if process == os.getpid():
        with suppress(OSError):
            folder.path.rmdir()
        folder.release()


class StagedFiles:
    """Files that are not in their places yet: those that still are not on leaving the ``with`` block are removed.

    They are not brought to the disk before they get their names: what a power cut leaves of them does not match its
    checksums.
    """

    def __init__(self, staging_folder: _StagingFolder) -> None:
        self._staging_folder = staging_folder
        self._staged_paths: list[Path] = []

    def write(self, pieces: Sequence[Bytes | bytes]) -> Path:
        """Write a file; its path."""
        path = self._staging_folder.new_file()
        self._staged_paths.append(path)
        with wrap_os_errors(path.parent), open(path, "xb", buffering=0) as file:
            _write_pieces(file.fileno(), pieces)
        return path

    def __enter__(self) -> StagedFiles:
        return self

    def __exit__(self, *_: object) -> None:
        for path in self._staged_paths:
            with suppress(OSError):
                os.unlink(path)
