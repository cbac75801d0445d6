"""Settings files that people have: one JSON object, of a reasonable size."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .errors import SourceError

MOST_BYTES = 16 << 20


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file of at most `MOST_BYTES`.

    Raises
    ------
    FileNotFoundError, NotADirectoryError
        Where there is no such file.
    SourceError
        Where it cannot be read, is larger, or is no JSON object.
    """
    try:
        with path.open("rb") as stream:
            text = stream.read(MOST_BYTES + 1)
        if len(text) > MOST_BYTES:
            raise SourceError(f"{path}: holds more than {MOST_BYTES:,} bytes")
        value = json.loads(text)
    except (FileNotFoundError, NotADirectoryError, SourceError):
        raise
    except OSError as error:
        raise SourceError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path}: is not JSON: {' '.join(str(error).split())[:200]}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{path}: holds no JSON object: a {type(value).__name__} is not a JSON object")
    return value


def read_object_if_there(path: Path) -> dict[str, Any]:
    """`read_object`, or an empty one where there is no such file."""
    try:
        return read_object(path)
    except (FileNotFoundError, NotADirectoryError):
        return {}
