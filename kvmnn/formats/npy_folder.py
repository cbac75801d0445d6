"""Directories of ``.npy`` files, one for each array: what `dump-kv`, `unpack` and `decode` write with ``-o DIR/``."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import PurePath

from ..arrays.named_array import NamedArray, Piece
from ..arrays.names import conventional
from ..arrays.source import Source
from ..arrays.valid_names import name_of_file
from ..errors import SourceError
from ..files.mapped import MappedFile
from . import npy
from .options import ReadOptions
from .reading import select

SUFFIX = ".npy"


def files_in(path: str) -> list[str]:
    """The ``.npy`` files directly in a directory, K and V of the layers in order, and numbers as such."""
    try:
        with os.scandir(path) as entries:
            found = [entry.path for entry in entries if entry.name.lower().endswith(SUFFIX) and entry.is_file()]
    except OSError as exc:
        raise SourceError(f"{path}: cannot be read: {exc.strerror or exc}") from exc
    return sorted(found, key=lambda file: order_of(PurePath(file).stem))


def read(path: str, options: ReadOptions) -> Source:
    """The arrays of all ``.npy`` files in a directory, each named after its file; mapped only while they are read.

    Raises
    ------
    SourceError
        When there is none, or as for a single file.
    """
    files = files_in(path)
    arrays, skipped = select(path, [(name_of_file(file), partial(_array, file, options)) for file in files], options)
    return Source(arrays, skipped=skipped, opened=tuple(files))


def order_of(name: str) -> tuple[bool, list[int | str]]:
    """Names of layers by layer, first token and part, before all others, which are in the order that people expect."""
    said = conventional(name)
    if said is not None:
        return False, [said.layer, said.start, said.part]
    return True, [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _array(path: str, options: ReadOptions) -> NamedArray:
    (array,) = npy.read(path, options).arrays
    return replace(array, reader=partial(_runs, path, array.nbytes))


def _runs(path: str, nbytes: int, step: int) -> Iterator[Piece]:
    """The data at the end of the file: a directory may have more files than a process may map."""
    mapped = MappedFile(path)
    if mapped.size < nbytes:
        raise SourceError(f"{path}: has {mapped.size} bytes, too few for the {nbytes} of its array when it was opened")
    yield from mapped.runs(mapped.size - nbytes, nbytes, step)
