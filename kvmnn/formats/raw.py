"""Raw little-endian words: a file of any name, or standard input; the caller says the dtype."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from .. import dtypes
from ..arrays.named_array import ArrayInfo, NamedArray, Piece, swap_words
from ..arrays.source import Source
from ..arrays.valid_names import name_of_file
from ..dtypes import FLOAT8_NAMES
from ..errors import MissingOptionError, SourceError
from ..files.mapped import STDIN, MappedFile
from .options import ReadOptions
from .raw_pages import Page, page_in
from .reading import FLOAT8_WORDS, check_own_type, checked
from .sinks import Runs, Sink
from .unknown import HEAD_BYTES, file_not_known, looks_known


def read(path: str, options: ReadOptions) -> Source:
    """One 1-D array: all words of the file."""
    return read_mapped(MappedFile(path, max_bytes=options.max_bytes), options)


def read_mapped(file: MappedFile, options: ReadOptions) -> Source:
    """One 1-D array: all words of an open file."""
    page = page_in(file.path)
    if page is not None and not page.can_be(options.dtype):
        check_own_type(page.dtype, options, file.label)
    names = [options.dtype] if options.dtype else [page.dtype] if page and page.dtype else options.fallbacks
    if not names:
        head = file.head(HEAD_BYTES)
        error = SourceError if looks_known(file.path, head) else MissingOptionError
        raise error(
            f"{file.label}: {file_not_known(file.path, head)}; raw bytes need a dtype (--dtype fp16, bf16 or "
            "fp32); float8_e4m3fn and the like are for codes of one byte"
        )
    element = names[0] if names[0] in FLOAT8_NAMES else ""
    dtype = dtypes.by_name(FLOAT8_WORDS if element else names[0])
    if file.size == 0:
        raise SourceError(f"{file.label}: is empty, there is nothing to encode")
    if file.size % dtype.itemsize and not element:
        raise SourceError(
            f"{file.label}: {file.size} bytes are not a whole number of {dtype.itemsize}-byte {dtype.name} words"
        )
    array = NamedArray(
        name="stdin" if file.path == STDIN else _name(file.path, page),
        dtype=dtype.name,
        shape=(file.size if element else file.size // dtype.itemsize,),
        array_dtype="|u1" if element else dtype.numpy.str,
        element=element,
        reader=partial(file.runs, 0, file.size),
    )
    return Source([checked(array, file.label, options)])


def _name(path: str, page: Page | None) -> str:
    return name_of_file(path) if page is None or page.layer is None else f"layer_{page.layer}"


def write_raw(sink: Sink, arrays: Sequence[ArrayInfo], runs: Runs, metadata: dict[str, str]) -> None:
    """The words alone, in memory order, in the array's own byte order."""
    for index, data in runs:
        sink.write(own_bytes(arrays[index], data).data)
        del data  # or it would live on while the next run is decoded


def own_bytes(array: ArrayInfo, data: Piece) -> Piece:
    """Little-endian words of an array in the array's own byte order."""
    return swap_words(data, array.itemsize) if array.swapped else data
