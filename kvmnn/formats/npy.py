"""``.npy`` files: mapped, never unpickled; and the writer that restores them byte for byte."""

from __future__ import annotations

import io
import math
import warnings
from collections.abc import Sequence
from functools import partial

import numpy as np
from numpy.lib import format as npy_format

from ..arrays.named_array import ArrayInfo, NamedArray, Order
from ..arrays.source import Source
from ..arrays.valid_names import name_of_file
from ..errors import SourceError
from ..files.mapped import STDIN, MappedFile
from .options import ReadOptions
from .raw import write_raw
from .reading import checked, dtype_name
from .sinks import Runs, Sink

MAGIC = npy_format.MAGIC_PREFIX
MAX_HEADER = 1 << 16
"""Bytes of a file in which its header must lie; numpy itself refuses headers above 10,000 characters."""


class Header:
    """The parsed header of a ``.npy`` file: `shape`, `order`, numpy `dtype`, and `size`, its own length in bytes."""

    def __init__(self, head: bytes, where: str) -> None:
        stream = io.BytesIO(head)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                version = npy_format.read_magic(stream)
                if version == (1, 0):
                    shape, fortran, dtype = npy_format.read_array_header_1_0(stream)
                elif version in ((2, 0), (3, 0)):
                    # 3.0 differs from 2.0 in the encoding of field names, and types with fields are refused below.
                    shape, fortran, dtype = npy_format.read_array_header_2_0(stream)
                else:
                    raise SourceError(f"{where}: .npy format version {version[0]}.{version[1]} is unknown")
        except SourceError:
            raise
        except Exception as exc:
            reason = (str(exc).splitlines() or [type(exc).__name__])[0]
            raise SourceError(f"{where}: not a valid .npy header: {reason[:200]}") from None
        if any(not isinstance(n, int) or n < 0 for n in shape) or len(shape) > 64:
            raise SourceError(f"{where}: .npy header has an impossible shape {str(shape)[:200]}")
        self.shape: tuple[int, ...] = shape
        self.order: Order = "F" if fortran else "C"
        self.dtype: np.dtype[np.generic] = dtype
        self.size = stream.tell()

    @property
    def nbytes(self) -> int:
        """Bytes of data that must follow the header."""
        return math.prod(self.shape) * self.dtype.itemsize


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
    return Source([checked(array, where)])


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
