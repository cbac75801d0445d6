"""Identity and birth time of a file; `os.stat` does not return the latter on Linux."""

from __future__ import annotations

import ctypes
import os
import sys
from functools import cache
from typing import Any, Final


def file_id(path: str | os.PathLike[str]) -> tuple[int, int] | None:
    """Return device and inode, which all names of a file share; None if there is no file."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_dev, status.st_ino


_AT_FDCWD: Final = -100
_STATX_BTIME: Final = 0x800
_STATX_BYTES: Final = 256
_MASK_OFFSET: Final = 0
_BTIME_OFFSET: Final = 80


def read_birth_time(path: str) -> int | None:
    """Return the creation time of a file (nanoseconds since 1970); None if the system does not provide it."""
    status = os.stat(path)
    birth_time = getattr(status, "st_birthtime_ns", None) or getattr(status, "st_birthtime", None)
    if birth_time is not None:
        return int(birth_time) if isinstance(birth_time, int) else int(birth_time * 1e9)
    statx = _find_statx()
    if statx is None:
        return None
    buffer = ctypes.create_string_buffer(_STATX_BYTES)
    if statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, buffer) != 0:
        return None
    if not ctypes.c_uint32.from_buffer(buffer, _MASK_OFFSET).value & _STATX_BTIME:
        return None  # of a file system that keeps none
    seconds = ctypes.c_int64.from_buffer(buffer, _BTIME_OFFSET).value
    return seconds * 10**9 + ctypes.c_uint32.from_buffer(buffer, _BTIME_OFFSET + 8).value


@cache
def _find_statx() -> Any:
    """Return the C library's `statx`; None if it has none."""
    if not sys.platform.startswith("linux"):
        return None
    try:
        statx = ctypes.CDLL(None, use_errno=True).statx
    except (OSError, AttributeError):
        return None
    statx.argtypes = [ctypes.c_int, ctypes.c_char_p, ctypes.c_int, ctypes.c_uint, ctypes.c_void_p]
    statx.restype = ctypes.c_int
    return statx
