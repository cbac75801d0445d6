"""Which log files are meant, and their text."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ...errors import SourceError
from ...files.json_document import read_bounded

MAX_LOG_BYTES = 64 << 20
"""Of one log."""


def find_log_files(paths: Iterable[str | os.PathLike[str]], suffixes: tuple[str, ...] = (".log",)) -> list[Path]:
    """Files, and the logs of folders in the order of their names; each once, whatever it is called.

    Raises
    ------
    SourceError
        For a path where nothing is.
    """
    path_by_real_path: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise SourceError(f"{path}: does not exist")
        for file in _list_folder_logs(path, suffixes) if path.is_dir() else [path]:
            path_by_real_path.setdefault(file.resolve(), file)
    return list(path_by_real_path.values())


def _list_folder_logs(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    try:
        yield from sorted(path for path in folder.iterdir() if path.suffix in suffixes and path.is_file())
    except OSError as error:
        raise SourceError(f"{folder}: cannot be read: {error.strerror or error}") from error


def read_log(path: Path) -> str:
    """The text of a log; bytes that are not UTF-8 are left out, as logs hold what a model says.

    Raises
    ------
    SourceError
        Where it is not there, cannot be read, or is larger than `MAX_LOG_BYTES`.
    """
    try:
        return read_bounded(path, MAX_LOG_BYTES).decode("utf-8", "ignore")
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(f"{path}: does not exist") from None
