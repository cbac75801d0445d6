"""``.npy`` files and folders of them: mapped, never unpickled, and written byte for byte as ``numpy.save`` does."""

from __future__ import annotations

import ast
import io
import math
import os
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import PurePath
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from .._util.validation import repr_short
from ..arrays.array import ArrayInfo, Chunk, LazyArray, Order, UnsupportedArrayError
from ..arrays.naming import array_name_from_path, parse_conventional_name
from ..arrays.source import Source
from ..dtypes import parse_numpy_type
from ..errors import ArrayTypeError, SourceError, build_read_error
from ..files.mapped_file import STDIN, MappedFile
from .base import ArrayChunks, FileFormat, PathFormat, Sink
from .options import ReadOptions
from .raw import write_raw
from .sidecars import add_sidecars
from .tensor_selection import resolve_dtype_name, select_tensors, validate_array

MAGIC = npy_format.MAGIC_PREFIX
MAX_NPY_HEADER_BYTES = 1 << 16
"""Maximum size of a header, including its magic."""
_MAX_HEADER_TEXT_BYTES = 10_000  # as numpy's own reader has it
_MAX_AXIS_LENGTH = 1 << 128  # far above any file; Python refuses to print ints of thousands of digits
_PYTHON2_LONG_REGEX = re.compile(r"\b([0-9]+)L\b")


class NpyHeader:
    """The parsed header of a ``.npy`` file: `shape`, `order`, numpy `dtype`, and its length `header_bytes`."""

    def __init__(self, head: bytes, label: str) -> None:
        try:
            fields, self.header_bytes = _parse_header_fields(head)
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError) as exc:  # all that literal_eval raises
            reason = (str(exc).splitlines() or [type(exc).__name__])[0]
            raise SourceError(f"{label}: not a valid .npy header: {reason[:200]}") from None
        shape = fields["shape"]
        if any(type(n) is not int or not 0 <= n < _MAX_AXIS_LENGTH for n in shape) or len(shape) > 64:
            lengths = ", ".join(repr_short(n) if type(n) is int else f"a {type(n).__name__}" for n in shape)
            raise SourceError(f"{label}: .npy header has an impossible shape ({lengths:.200})")
        self.shape: tuple[int, ...] = shape
        self.order: Order = "F" if fields["fortran_order"] else "C"
        try:
            self.dtype: np.dtype[Any] = parse_numpy_type(fields["descr"])
        except ArrayTypeError as exc:
            raise UnsupportedArrayError(f"{label}: {exc}") from None

    @property
    def nbytes(self) -> int:
        """Return the number of data bytes that must follow the header."""
        return math.prod(self.shape) * self.dtype.itemsize


def _parse_header_fields(head: bytes) -> tuple[dict[str, Any], int]:
    """Return the three checked fields of a header and its length in bytes; raise `ValueError` for a bad one.

    numpy's own reader hands the text of the type to ``numpy.dtype``, which some texts crash.
    """
    version = tuple(head[6:8])
    if not head.startswith(MAGIC) or len(version) < 2:
        raise ValueError("the magic string is not correct")
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"format version {version[0]}.{version[1]} is unknown")
    start = 10 if version == (1, 0) else 12
    nbytes = int.from_bytes(head[8:start], "little")
    if nbytes > _MAX_HEADER_TEXT_BYTES or len(head) < start + nbytes:
        raise ValueError(
            f"it has {nbytes:,} bytes, expected at most {min(_MAX_HEADER_TEXT_BYTES, len(head) - start):,}"
        )
    text = head[start : start + nbytes].decode("utf-8" if version == (3, 0) else "latin-1")
    fields = _parse_literal(text.strip())
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("expected the fields descr, fortran_order and shape")
    if not isinstance(fields["shape"], tuple) or not isinstance(fields["fortran_order"], bool):
        raise ValueError("expected a tuple as shape, and True or False as fortran_order")
    return fields, start + nbytes


@lru_cache(maxsize=16)  # the arrays of a cache have equal headers
def _parse_literal(text: str) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd literals
        try:
            return ast.literal_eval(text)
        except SyntaxError:
            return ast.literal_eval(_PYTHON2_LONG_REGEX.sub(r"\1", text))  # Python 2 wrote shapes as (3L, 4L)


def read(file: MappedFile, options: ReadOptions) -> Source:
    """Return one array, named after the file."""
    label = file.label
    header = NpyHeader(file.read_head(MAX_NPY_HEADER_BYTES), label)
    name = "stdin" if file.path == STDIN else array_name_from_path(file.path)
    dtype = resolve_dtype_name(header.dtype, options, label)
    data_bytes = file.size - header.header_bytes
    if data_bytes != header.nbytes:
        problem = "is truncated" if data_bytes < header.nbytes else "has trailing bytes"
        raise SourceError(
            f"{label}: {problem}: the header promises {header.nbytes} bytes of data (shape {list(header.shape)}, "
            f"{header.dtype}), the file holds {data_bytes}"
        )
    array = LazyArray(
        name=name,
        dtype=dtype,
        shape=header.shape,
        array_dtype=header.dtype.str,
        order=header.order,
        reader=partial(file.iter_chunks, header.header_bytes, header.nbytes),
    )
    return Source([validate_array(array, label, options)])


def write_header(sink: Sink, array: ArrayInfo) -> None:
    """Write the header that ``numpy.save`` writes for this array."""
    buffer = io.BytesIO()
    npy_format.write_array_header_1_0(
        buffer,
        {
            "descr": npy_format.dtype_to_descr(np.dtype(array.array_dtype)),
            "fortran_order": array.order == "F",
            "shape": array.shape,
        },
    )
    sink.write(buffer.getvalue())


def write_npy(sink: Sink, arrays: Sequence[ArrayInfo], chunks: ArrayChunks, metadata: dict[str, str]) -> None:
    """Write one array as ``numpy.save`` does."""
    write_header(sink, arrays[0])
    write_raw(sink, arrays, chunks, metadata)


NPY_SUFFIX = ".npy"
NPY = FileFormat(
    name="npy",
    extensions=(NPY_SUFFIX,),
    check=lambda head: head.file is None or head.data.startswith(MAGIC),
    read_file=read,
    has_sidecars=True,
    write=write_npy,
)


def list_npy_files(path: str) -> list[str]:
    """List the ``.npy`` files directly in a directory: K and V in layer order, then others in natural order."""
    try:
        with os.scandir(path) as entries:
            paths = [entry.path for entry in entries if entry.name.lower().endswith(NPY_SUFFIX) and entry.is_file()]
    except OSError as exc:
        raise build_read_error(path, exc) from exc
    return sorted(paths, key=lambda file: make_name_sort_key(PurePath(file).stem))


def read_folder(path: str, options: ReadOptions) -> Source:
    """Return the arrays of all ``.npy`` files in a directory, named after their files; mapped only while read."""
    files = list_npy_files(path)
    arrays, skipped = select_tensors(
        path, [(array_name_from_path(file), partial(_read_file_array, file, options)) for file in files], options
    )
    source = Source(arrays, skipped_arrays=skipped, opened_files=tuple(files))
    add_sidecars(source, path, is_whole=not options.tensors)
    return source


NPY_FOLDER = PathFormat(name="npy", check=lambda head: bool(list_npy_files(head.path)), read_path=read_folder)


def make_name_sort_key(name: str) -> tuple[bool, list[int | str]]:
    """Make a key that sorts names of layers first, by layer, first token and part; others in natural order."""
    parsed_name = parse_conventional_name(name)
    if parsed_name is not None:
        return False, [parsed_name.layer, parsed_name.start, parsed_name.part]
    return True, [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


def _read_file_array(path: str, options: ReadOptions) -> LazyArray:
    (array,) = read(MappedFile(path), options).arrays
    return replace(array, reader=partial(_iter_file_chunks, path, array.nbytes))


def _iter_file_chunks(path: str, nbytes: int, chunk_bytes: int) -> Iterator[Chunk]:
    """Yield the data at the end of the file: a directory may contain more files than a process may map."""
    mapped_file = MappedFile(path)
    if mapped_file.size < nbytes:
        raise SourceError(
            f"{path}: has {mapped_file.size} bytes, too few for the {nbytes} of its array when it was opened"
        )
    yield from mapped_file.iter_chunks(mapped_file.size - nbytes, nbytes, chunk_bytes)
