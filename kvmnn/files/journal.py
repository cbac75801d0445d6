"""Files that a run appends to while it goes on, one run at a time."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import IO

from ..errors import OutputError


def lock_exclusive(file: IO[bytes], path: Path, process_name: str) -> None:
    """Keep a file for this process until it is closed: two would both append.

    Where the system has no such locks, nothing is checked.

    Raises
    ------
    OutputError
        Where another process has it, which is what `process_name` calls it.
    """
    with suppress(ImportError):
        import fcntl

        try:
            fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise OutputError(f"{path}: another {process_name} is writing it") from None
        except OSError:  # a file system without locks
            return
