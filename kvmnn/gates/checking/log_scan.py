"""Lines of logs in which the engine says that K and V went wrong."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..logs.log_files import log_files, read_log

_DAMAGE = re.compile(
    "|".join(
        (
            "Invalid KV realloc",
            "Invalid KV reserve range",
            "KV length/meta previous mismatch",
            "Drop stale per-layer pending plan",
            "corrupted size",
            "double free",
            "Segmentation fault",
            "munmap_chunk",
        )
    ),
    re.IGNORECASE,
)
_ENCODING = "[H2O-LOSSLESS]"
_EXAMPLES, _EXAMPLE_LETTERS, _LINE_LETTERS = 5, 220, 400


@dataclass(frozen=True, kw_only=True)
class LogScan:
    """What the lines of logs say.

    Attributes
    ----------
    files
        How many were read.
    invalid
        Lines of damage.
    examples
        The first of them, with their files.
    encodings
        Lines in which the engine tells of an encoding (``[H2O-LOSSLESS]``).
    """

    files: int = 0
    invalid: int = 0
    examples: tuple[str, ...] = ()
    encodings: tuple[str, ...] = ()


def scan(paths: Iterable[str | os.PathLike[str]]) -> LogScan:
    """Read logs: files, and the ``*.log`` of folders; those that are not there are passed over, as the fork does."""
    files = log_files(path for path in paths if Path(path).exists())
    invalid = 0
    examples: list[str] = []
    encodings: list[str] = []
    for file in files:
        for line in io.StringIO(read_log(file), newline=None):
            text = line.strip()
            if _ENCODING in text:
                encodings.append(text[:_LINE_LETTERS])
            if _DAMAGE.search(text):
                invalid += 1
                if len(examples) < _EXAMPLES:
                    examples.append(f"{file}: {text[:_EXAMPLE_LETTERS]}")
    return LogScan(files=len(files), invalid=invalid, examples=tuple(examples), encodings=tuple(encodings))
