"""Which names arrays may have: checked where they enter, so that no writer has to."""

from __future__ import annotations

import os
import re
from pathlib import PurePath

from ..errors import SourceError

MAX_NAME_BYTES = 255
"""Of a name in UTF-8: what file systems take for a file's."""

_CONTROL_REGEX = re.compile(r"[\x00-\x1f\x7f-\x9f]")
_SURROGATE_REGEX = re.compile(r"[\ud800-\udfff]")


def find_name_error(name: str) -> str | None:
    """Why an array may not have this name, wherever it comes from; None if it may.

    Such names are cut or altered by some formats (a zip archive ends names at a NUL) and by terminals.
    """
    if name.isascii() and name.isprintable() and len(name) <= MAX_NAME_BYTES:
        return None  # nearly all are, and there may be a million
    if match := _CONTROL_REGEX.search(name):
        return f"has the control character {match[0]!r} in it"
    if match := _SURROGATE_REGEX.search(name):
        return f"is not Unicode: it has the lone surrogate {match[0]!r} in it"
    nbytes = len(name.encode())
    return f"has {nbytes:,} bytes, above the limit of {MAX_NAME_BYTES}" if nbytes > MAX_NAME_BYTES else None


def check_name(name: str, where: str) -> None:
    """`SourceError` for a name that an array may not have; `where` begins the message."""
    if name_error := find_name_error(name):
        raise SourceError(f"{where}: the array name {shorten_name(name)} {name_error}")


def shorten_name(name: str, max_chars: int = 60) -> str:
    """A name for a message: quoted, what does not print escaped, the middle of a long one left out."""
    short_name = name if len(name) <= max_chars else f"{name[: max_chars // 2]}...{name[-max_chars // 2 :]}"
    return ascii(short_name) if find_name_error(short_name) else repr(short_name)


def array_name_from_path(path: str) -> str:
    """The name of the one array in a file: the file's without its suffix, what no array's may have in it escaped."""
    return sanitize_name(PurePath(path).stem)


def sanitize_name(name: str) -> str:
    """A file's name as a manifest has it: control characters and bytes that are not UTF-8 escaped."""
    text = os.fsencode(name).decode("utf-8", "backslashreplace")
    return _CONTROL_REGEX.sub(lambda match: f"\\x{ord(match[0]):02x}", text)
