"""Files of arrays read again after they were written, before anything is said of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import NamedTuple

from ..arrays.named_array import ArrayInfo, NamedArray, Piece
from ..errors import KvmnnError, OutputError
from ..files.mapped import MappedFile
from ..threads.digest import Digester
from ..threads.pool import map_pulled, resolve_threads
from .array_formats import ArrayFormat
from .options import ReadOptions
from .sinks import Runs

_STEP = 8 << 20
_ANY_WORDS = ReadOptions(fallbacks=("fp16", "fp32"), frames=False, codes=True)


class ReadBackError(OutputError):
    """A file does not hold what was written to it, or what was written is not what it should be.

    Parameters
    ----------
    message
        What and where.
    index
        Which of the arrays.
    """

    def __init__(self, message: str, index: int) -> None:
        super().__init__(message)
        self.index = index


class Hashed:
    """Runs that are hashed while they pass by: `hashes` has the SHA-256 of each array once all have passed."""

    def __init__(self, runs: Runs, count: int) -> None:
        self._runs = runs
        self._digests = [hashlib.sha256() for _ in range(count)]

    def __iter__(self) -> Iterator[tuple[int, Piece]]:
        with Digester() as digester:
            for index, data in self._runs:
                digester.update(self._digests[index], data)
                yield index, data
                digester.wait()  # the memory of the run is used again for the next
                del data

    @property
    def hashes(self) -> list[str]:
        """In hexadecimal digits."""
        return [digest.hexdigest() for digest in self._digests]


class Written(NamedTuple):
    """A file that was written, and is not yet where it belongs.

    Parameters
    ----------
    path, target
        Where it is, and what it will be.
    format
        None for raw words.
    arrays
        What it must hold; of a format that holds one array, that one.
    """

    path: Path
    target: Path
    format: ArrayFormat | None
    arrays: Sequence[ArrayInfo]


def read_back(written: Sequence[Written], hashes: Sequence[str], threads: int | None = None) -> None:
    """Compare what files hold with what was to be written: names, shapes, and every byte by its hash.

    Parameters
    ----------
    written
        The files; together they have all arrays, in order.
    hashes
        SHA-256 of each array: little-endian words in memory order.
    threads
        None for all processors.

    Raises
    ------
    ReadBackError
        For the first difference.
    """
    pairs = [(file, *pair) for file in written for pair in _pairs(file)]

    def compare(index: int) -> None:
        file, info, found = pairs[index]
        try:
            same = _hash(found) == hashes[index]
        except KvmnnError as error:
            raise _unreadable(file, error, index) from None
        if not same:
            raise ReadBackError(f"{file.target}: array {info.name!r}: its bytes do not read back as written", index)

    map_pulled(compare, range(len(pairs)), resolve_threads(threads))


def _pairs(file: Written) -> Iterator[tuple[ArrayInfo, NamedArray]]:
    """The arrays that a file should hold, and those that it holds."""
    try:
        arrays = [_raw(file)] if file.format is None else file.format.read(str(file.path), _ANY_WORDS).arrays
    except KvmnnError as error:
        raise _unreadable(file, error, 0) from None
    many = file.format is not None and file.format.holds_many
    by_name = {array.name if many else file.arrays[0].name: array for array in arrays}
    if len(arrays) != len(file.arrays):
        raise ReadBackError(f"{file.target}: {len(arrays)} arrays read back of {len(file.arrays)}", 0)
    for info in file.arrays:
        found = by_name.get(info.name)
        if found is None or (found.shape, found.order, found.nbytes) != (info.shape, info.order, info.nbytes):
            raise ReadBackError(f"{file.target}: array {info.name!r}: does not read back as written", 0)
        yield info, found


def _unreadable(file: Written, error: KvmnnError, index: int) -> ReadBackError:
    reason = str(error).replace(str(file.path), file.target.name)
    return ReadBackError(f"{file.target}: does not read back: {reason}", index)


def _raw(file: Written) -> NamedArray:
    (info,) = file.arrays
    about = {field.name: getattr(info, field.name) for field in fields(ArrayInfo)}
    return NamedArray(**about, reader=partial(_whole, file.path))


def _whole(path: Path, step: int) -> Iterator[Piece]:
    """The file's bytes, mapped only while they are read: there may be more files than a process may map."""
    mapped = MappedFile(path)
    yield from mapped.runs(0, mapped.size, step)


def _hash(array: NamedArray) -> str:
    digest = hashlib.sha256()
    for piece in array.pieces(_STEP):
        digest.update(piece.data)
        del piece
    return digest.hexdigest()
