"""Lines of logs in which the engine says that K and V went wrong."""

from __future__ import annotations

import io
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..logs.log_files import find_log_files, read_log

_DAMAGE_REGEX = re.compile(
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
_ENCODING_MARK = "[H2O-LOSSLESS]"
_MAX_EXAMPLES, _MAX_EXAMPLE_LETTERS, _MAX_LINE_LETTERS = 5, 220, 400


@dataclass(frozen=True, kw_only=True)
class LogScan:
    """What the lines of logs say.

    Attributes
    ----------
    num_files
        How many were read.
    num_invalid
        Lines of damage.
    examples
        The first of them, with their files.
    encoding_lines
        Lines in which the engine tells of an encoding (``[H2O-LOSSLESS]``).
    """

    num_files: int = 0
    num_invalid: int = 0
    examples: tuple[str, ...] = ()
    encoding_lines: tuple[str, ...] = ()


def scan_logs(paths: Iterable[str | os.PathLike[str]]) -> LogScan:
    """Read logs: files, and the ``*.log`` of folders; those that are not there are passed over, as the fork does."""
    files = find_log_files(path for path in paths if Path(path).exists())
    num_invalid = 0
    examples: list[str] = []
    encoding_lines: list[str] = []
    for file in files:
        for line in io.StringIO(read_log(file), newline=None):
            text = line.strip()
            if _ENCODING_MARK in text:
                encoding_lines.append(text[:_MAX_LINE_LETTERS])
            if _DAMAGE_REGEX.search(text):
                num_invalid += 1
                if len(examples) < _MAX_EXAMPLES:
                    examples.append(f"{file}: {text[:_MAX_EXAMPLE_LETTERS]}")
    return LogScan(
        num_files=len(files), num_invalid=num_invalid, examples=tuple(examples), encoding_lines=tuple(encoding_lines)
    )
