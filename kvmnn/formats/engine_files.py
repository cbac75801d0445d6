"""Files of other engines, known by what they hold rather than by their names. A new one is a line in the table."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NamedTuple

from ..arrays.source import Source
from ..files.mapped import STDIN, MappedFile
from . import llama
from .options import ReadOptions


class EngineFile(NamedTuple):
    """A kind of file.

    Parameters
    ----------
    name
        In documents.
    is_one
        Whether the file at a path is one, by its first bytes.
    read
        Its arrays.
    """

    name: str
    is_one: Callable[[str], bool]
    read: Callable[[MappedFile, ReadOptions], Source]


ENGINE_FILES = (EngineFile("llama-state", llama.is_state, llama.read),)


def engine_file(path: str) -> EngineFile | None:
    """What a file is; None for all others, for directories and for standard input."""
    if path == STDIN or not os.path.isfile(path):
        return None
    return next((kind for kind in ENGINE_FILES if kind.is_one(path)), None)


def engine_kind(path: str) -> str | None:
    """The name of the kind of a file."""
    kind = engine_file(path)
    return None if kind is None else kind.name


def read(path: str, kind: EngineFile, options: ReadOptions) -> Source:
    """The arrays of such a file."""
    return kind.read(MappedFile(path, max_bytes=options.max_bytes), options)
