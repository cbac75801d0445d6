"""Files of arrays read again after they were written, before anything is said of them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import NamedTuple

from .._util.parallel import BackgroundHasher, parallel_map, resolve_threads
from ..arrays.array import ArrayInfo, Chunk, LazyArray
from ..errors import KvmnnError, OutputError
from ..files.mapped_file import MappedFile
from .base import ArrayChunks, FileFormat
from .options import ReadOptions

_HASH_CHUNK_BYTES = 8 << 20
_ANY_DTYPE_OPTIONS = ReadOptions(fallback_dtypes=("fp16", "fp32"), decode_frames=False, codes=True)


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


class HashingIterator:
    """Runs that are hashed while they pass by: `hashes` has the SHA-256 of each array once all have passed."""

    def __init__(self, chunks: ArrayChunks, num_arrays: int) -> None:
        self._chunks = chunks
        self._digests = [hashlib.sha256() for _ in range(num_arrays)]

    def __iter__(self) -> Iterator[tuple[int, Chunk]]:
        with BackgroundHasher() as hasher:
            for index, data in self._chunks:
                hasher.update(self._digests[index], data)
                yield index, data
                hasher.wait()  # the memory of the run is used again for the next
                del data

    @property
    def hashes(self) -> list[str]:
        """In hexadecimal digits."""
        return [digest.hexdigest() for digest in self._digests]


class WrittenFile(NamedTuple):
    """A file that was written, and is not yet where it belongs."""

    #: Where it is, and what it will be.
    path: Path
    target: Path
    #: None for raw words.
    format: FileFormat | None
    #: What it must hold; of a format that holds one array, that one.
    arrays: Sequence[ArrayInfo]


def verify_written(written_files: Sequence[WrittenFile], hashes: Sequence[str], threads: int | None = None) -> None:
    """Compare what files hold with what was to be written: names, shapes, and every byte by its hash."""
    comparisons = [(file, *array_pair) for file in written_files for array_pair in _iter_array_pairs(file)]

    def compare(index: int) -> None:
        file, info, read_array = comparisons[index]
        try:
            is_equal = _hash_array(read_array) == hashes[index]
        except KvmnnError as error:
            raise _make_unreadable_error(file, error, index) from None
        if not is_equal:
            raise ReadBackError(f"{file.target}: array {info.name!r}: its bytes do not read back as written", index)

    parallel_map(compare, range(len(comparisons)), resolve_threads(threads))


def _iter_array_pairs(file: WrittenFile) -> Iterator[tuple[ArrayInfo, LazyArray]]:
    """The arrays that a file should hold, and those that it holds."""
    try:
        arrays = (
            [_make_raw_array(file)]
            if file.format is None
            else file.format.read_file(MappedFile(file.path), _ANY_DTYPE_OPTIONS).arrays
        )
    except KvmnnError as error:
        raise _make_unreadable_error(file, error, 0) from None
    is_multi_array = file.format is not None and file.format.is_multi_array
    by_name = {array.name if is_multi_array else file.arrays[0].name: array for array in arrays}
    if len(arrays) != len(file.arrays):
        raise ReadBackError(f"{file.target}: {len(arrays)} arrays read back of {len(file.arrays)}", 0)
    for info in file.arrays:
        read_array = by_name.get(info.name)
        if read_array is None or (read_array.shape, read_array.order, read_array.nbytes) != (
            info.shape,
            info.order,
            info.nbytes,
        ):
            raise ReadBackError(f"{file.target}: array {info.name!r}: does not read back as written", 0)
        yield info, read_array


def _make_unreadable_error(file: WrittenFile, error: KvmnnError, index: int) -> ReadBackError:
    reason = str(error).replace(str(file.path), file.target.name)
    return ReadBackError(f"{file.target}: does not read back: {reason}", index)


def _make_raw_array(file: WrittenFile) -> LazyArray:
    (info,) = file.arrays
    info_fields = {field.name: getattr(info, field.name) for field in fields(ArrayInfo)}
    return LazyArray(**info_fields, reader=partial(_iter_file_chunks, file.path))


def _iter_file_chunks(path: Path, chunk_bytes: int) -> Iterator[Chunk]:
    """The file's bytes, mapped only while they are read: there may be more files than a process may map."""
    mapped_file = MappedFile(path)
    yield from mapped_file.iter_chunks(0, mapped_file.size, chunk_bytes)


def _hash_array(array: LazyArray) -> str:
    digest = hashlib.sha256()
    for chunk in array.iter_chunks(_HASH_CHUNK_BYTES):
        digest.update(chunk.data)
        del chunk
    return digest.hexdigest()
