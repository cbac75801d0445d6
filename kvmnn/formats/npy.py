"""``.npy`` files: mapped, never unpickled; and the writer that restores them byte for byte."""

from __future__ import annotations

import ast
import io
import math
import re
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.lib import format as npy_format

from ..arrays.named_array import ArrayInfo, NamedArray, Order, UnsupportedArrayError
from ..arrays.source import Source
from ..arrays.valid_names import name_of_file
from ..checks import shown
from ..dtypes import parse_numpy_type
from ..errors import ArrayTypeError, SourceError
from ..files.mapped import STDIN, MappedFile
from .options import ReadOptions
from .raw import write_raw
from .reading import checked, dtype_name
from .sinks import Runs, Sink

MAGIC = npy_format.MAGIC_PREFIX
MAX_HEADER = 1 << 16
"""Bytes of a file in which its header must lie."""
_MAX_TEXT = 10_000  # as numpy's own reader has it
_MAX_LENGTH = 1 << 128  # far above what a file holds, and Python writes it down: thousands of digits it refuses
_LONG = re.compile(r"\b([0-9]+)L\b")


class Header:
    """The parsed header of a ``.npy`` file: `shape`, `order`, numpy `dtype`, and `size`, its own length in bytes."""

    def __init__(self, head: bytes, where: str) -> None:
        try:
            fields, self.size = _header_fields(head)
        except (ValueError, SyntaxError, MemoryError, RecursionError) as exc:  # the last three are ast.literal_eval's
            reason = (str(exc).splitlines() or [type(exc).__name__])[0]
            raise SourceError(f"{where}: not a valid .npy header: {reason[:200]}") from None
        shape = fields["shape"]
        if any(type(n) is not int or not 0 <= n < _MAX_LENGTH for n in shape) or len(shape) > 64:
            lengths = ", ".join(shown(n) if type(n) is int else f"a {type(n).__name__}" for n in shape)
            raise SourceError(f"{where}: .npy header has an impossible shape ({lengths:.200})")
        self.shape: tuple[int, ...] = shape
        self.order: Order = "F" if fields["fortran_order"] else "C"
        try:
            self.dtype: np.dtype[Any] = parse_numpy_type(fields["descr"])
        except ArrayTypeError as exc:
            raise UnsupportedArrayError(f"{where}: {exc}") from None

    @property
    def nbytes(self) -> int:
        """Bytes of data that must follow the header."""
        return math.prod(self.shape) * self.dtype.itemsize


def _header_fields(head: bytes) -> tuple[dict[str, Any], int]:
    """The three fields of a header, types of Python checked, and its length in bytes; `ValueError` for a bad one.

    numpy's own reader hands the text of the type to ``numpy.dtype``, which some texts crash.
    """
    version = tuple(head[6:8])
    if not head.startswith(MAGIC) or len(version) < 2:
        raise ValueError("the magic string is not correct")
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise ValueError(f"format version {version[0]}.{version[1]} is unknown")
    start = 10 if version == (1, 0) else 12
    nbytes = int.from_bytes(head[8:start], "little")
    if nbytes > _MAX_TEXT or len(head) < start + nbytes:
        raise ValueError(f"it has {nbytes:,} bytes, expected at most {min(_MAX_TEXT, len(head) - start):,}")
    text = head[start : start + nbytes].decode("utf-8" if version == (3, 0) else "latin-1")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of odd literals
        try:
            fields = ast.literal_eval(text.strip())
        except SyntaxError:
            fields = ast.literal_eval(_LONG.sub(r"\1", text.strip()))  # Python 2 wrote shapes as (3L, 4L)
    if not isinstance(fields, dict) or fields.keys() != {"descr", "fortran_order", "shape"}:
        raise ValueError("expected the fields descr, fortran_order and shape")
    if not isinstance(fields["shape"], tuple) or not isinstance(fields["fortran_order"], bool):
        raise ValueError("expected a tuple as shape, and True or False as fortran_order")
    return fields, start + nbytes


def read(path: str, options: ReadOptions) -> Source:
    """One array named after the file."""
    return read_mapped(MappedFile(path, max_bytes=options.max_bytes), options)


def read_mapped(file: MappedFile, options: ReadOptions) -> Source:
    """One array from an open file.

    Raises
    ------
    SourceError
        For a bad header, an object or structured type, and data shorter or longer than the header says.
    """
    where = file.label
    header = Header(file.head(MAX_HEADER), where)
    name = "stdin" if file.path == STDIN else name_of_file(file.path)
    dtype = dtype_name(header.dtype, options, where)
    found = file.size - header.size
    if found != header.nbytes:
        what = "is truncated" if found < header.nbytes else "has trailing bytes"
        raise SourceError(
            f"{where}: {what}: the header promises {header.nbytes} bytes of data (shape {list(header.shape)}, "
            f"{header.dtype}), the file holds {found}"
        )
    array = NamedArray(
        name=name,
        dtype=dtype,
        shape=header.shape,
        array_dtype=header.dtype.str,
        order=header.order,
        reader=partial(file.runs, header.size, header.nbytes),
    )
    return Source([checked(array, where, options)])


def write_header(sink: Sink, array: ArrayInfo) -> None:
    """Write the header that ``numpy.save`` writes for such an array."""
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


def write_npy(sink: Sink, arrays: Sequence[ArrayInfo], runs: Runs, metadata: dict[str, str]) -> None:
    """One array as ``numpy.save`` writes it."""
    write_header(sink, arrays[0])
    write_raw(sink, arrays, runs, metadata)
