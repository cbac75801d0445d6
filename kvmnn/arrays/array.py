"""Named arrays whose bytes are read in chunks; strided views in C order; lazy lists of a million arrays.

A chunk is a read-only run of little-endian words in memory order. Chunks are cut along the leading axes, so that a
frame made from one never splits an element, and they are views of the mapped file wherever the file allows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import field, fields
from functools import partial
from typing import Any, Generic, Literal, TypeVar, overload

import numpy as np
import numpy.typing as npt

from .. import dtypes
from .._util.dataclass import dataclass
from ..dtypes import Bytes, Elements
from ..errors import MissingOptionError, SourceError
from ..files.change_detection import InputGuard

Order = Literal["C", "F"]  # the axis that runs fastest in memory: the last or the first
Chunk = Bytes  # a run of little-endian words in memory order; do not write to it

_READ_CHUNK_BYTES = 8 << 20


class UnsupportedArrayError(SourceError):
    """A well-formed array of a type or size that no frame can store."""


class UntypedArrayError(UnsupportedArrayError, MissingOptionError):
    """An array whose own type does not define its elements, and for which no option does."""


@dataclass(frozen=True, kw_only=True)
class ArrayInfo:
    """Name, type and shape of an array: all that is needed to restore it from its bytes."""

    #: Unique within its source or manifest.
    name: str
    #: ``"fp16"``, ``"bf16"`` or ``"fp32"``: the element type as which the words are encoded.
    dtype: str
    #: Axis lengths in the order of numpy, also for Fortran-ordered files.
    shape: tuple[int, ...]
    #: The numpy type string of the array itself, e.g. ``"<f2"``, ``">f2"``, ``"<i2"`` or ``"|u1"`` (raw bytes).
    array_dtype: str
    #: ``"C"`` or ``"F"``: which axis runs fastest in memory.
    order: Order = "C"
    #: One of `dtypes.FLOAT8_NAMES` for an array of these codes, one byte each (`array_dtype` is ``"|u1"``), or of
    #: float32 numbers decoded from them; empty for all others.
    element: str = ""

    @property
    def itemsize(self) -> int:
        """Return bytes per array element (1 for raw bytes, else the word size)."""
        return np.dtype(self.array_dtype).itemsize

    @property
    def coded_itemsize(self) -> int:
        """Return bytes per coded word: 2 or 4."""
        return dtypes.parse_dtype(self.dtype).itemsize

    @property
    def type_name(self) -> str:
        """Return the shown element type: `dtype`; of bytes, which are only coded as words, `element` or "bytes"."""
        return (self.element or "bytes") if self.itemsize == 1 else self.dtype

    @property
    def has_axes(self) -> bool:
        """Return whether its axes count words or codes, as those of raw bytes do not."""
        return self.itemsize == self.coded_itemsize or bool(self.element)

    @property
    def nbytes(self) -> int:
        """Return the number of bytes of all elements."""
        return math.prod(self.shape) * self.itemsize

    @property
    def is_big_endian(self) -> bool:
        """Return whether the array's words are big-endian and so differ from the bytes of its chunks."""
        return self.array_dtype.startswith(">")

    def compute_chunk_bytes(self, max_bytes: int) -> int:
        """Return the size in bytes of each chunk but the last: whole rows of the leading axes; 0 never splits it."""
        if max_bytes == 0 or self.nbytes <= max_bytes:
            return self.nbytes
        if self.itemsize != self.coded_itemsize:
            return max(max_bytes // self.coded_itemsize, 1) * self.coded_itemsize
        row_bytes = self.nbytes
        for length in self.shape if self.order == "C" else self.shape[::-1]:
            row_bytes //= length
            if row_bytes <= max_bytes:
                return max_bytes // row_bytes * row_bytes
        return self.itemsize

    def count_chunks(self, max_bytes: int) -> int:
        """Return the number of chunks of at most `max_bytes` bytes."""
        return -(-self.nbytes // self.compute_chunk_bytes(max_bytes))

    def index_at_offset(self, offset: int) -> tuple[int, ...]:
        """Return the index of the element at a byte offset in memory order."""
        return tuple(int(i) for i in np.unravel_index(offset // self.itemsize, self.shape or (1,), order=self.order))


@dataclass(frozen=True, kw_only=True)
class LazyArray(ArrayInfo):
    """A named array whose bytes are read on demand in bounded memory."""

    #: ``reader(step)`` iterates over the file's own bytes of the array in runs of `chunk_bytes` bytes, the last one
    #: shorter.
    reader: Callable[[int], Iterator[Chunk]] = field(repr=False, compare=False)

    def iter_chunks(self, max_bytes: int = 0) -> Iterator[Chunk]:
        """Iterate over the array's bytes as little-endian words in memory order: uint8, 1-D, contiguous, read-only.

        Parameters
        ----------
        max_bytes
            Limit of the bytes per chunk; 0 yields the array in one chunk.

        Raises
        ------
        SourceError
            If the file is damaged or shorter than its header says.
        """
        num_bytes = 0
        for chunk in self.reader(self.compute_chunk_bytes(max_bytes)):
            num_bytes += chunk.size
            yield byteswap(chunk, self.itemsize) if self.is_big_endian else chunk
            del chunk
        if num_bytes != self.nbytes:
            raise SourceError(f"array {self.name!r}: {num_bytes} bytes came where {self.nbytes} were announced")

    def to_numpy(self) -> npt.NDArray[Any]:
        """Return the array in memory, freshly allocated and writable.

        Returns
        -------
        numpy.ndarray
            Of `shape`, `order` and `array_dtype`, the latter in little-endian byte order; bf16 as uint16 words.

        Raises
        ------
        SourceError
            If the file is damaged or shorter than its header says.
        """
        elements = np.empty(self.nbytes, np.uint8)
        position = 0
        with InputGuard():
            for chunk in self.iter_chunks(_READ_CHUNK_BYTES):
                target = elements[position : position + chunk.size]
                target[:] = chunk[: target.size]
                position += chunk.size
                del chunk
        return elements.view(np.dtype(self.array_dtype).newbyteorder("<")).reshape(self.shape, order=self.order)


def from_numpy(name: str, elements: Elements) -> LazyArray:
    """Wrap an array in memory (float16, float32, or uint16 for bf16) under a name.

    Nothing is copied: words that do not lie in C order are put into it run by run as they are read, as pages that a
    copy of all of them touches for the first time take longer than the copy.
    """
    element_type = dtypes.infer_dtype(elements)
    info = ArrayInfo(name=name, dtype=element_type.name, shape=elements.shape, array_dtype=element_type.numpy_dtype.str)
    return from_strided_view(info, lambda: elements)


def bytes_array(name: str, data: bytes) -> LazyArray:
    """Wrap non-numeric bytes in memory as an array."""
    words = np.frombuffer(data, np.uint8)
    return LazyArray(
        name=name, dtype="fp16", shape=words.shape, array_dtype="|u1", reader=partial(_iter_buffer_chunks, words)
    )


def _iter_buffer_chunks(data: Chunk, chunk_bytes: int) -> Iterator[Chunk]:
    for begin in range(0, data.size, max(chunk_bytes, 1)):
        yield data[begin : begin + chunk_bytes]


def byteswap(chunk: Chunk, itemsize: int) -> Chunk:
    """Return a copy of `chunk` with the bytes of every `itemsize`-byte word reversed."""
    return chunk.view(np.dtype(f"u{itemsize}")).byteswap().view(np.uint8)


def rechunk(blocks: Iterator[Chunk], chunk_bytes: int, total_bytes: int) -> Iterator[Chunk]:
    """Copy `total_bytes` bytes of `blocks` into fresh chunks of `chunk_bytes` bytes, the last one shorter."""
    block: Chunk = np.empty(0, np.uint8)
    num_bytes = 0
    while num_bytes < total_bytes:
        chunk = np.empty(min(chunk_bytes, total_bytes - num_bytes), np.uint8)
        num_filled = 0
        while num_filled < chunk.size:
            if not block.size:
                block = next(blocks)
            num_copied = min(block.size, chunk.size - num_filled)
            chunk[num_filled : num_filled + num_copied] = block[:num_copied]
            block, num_filled = block[num_copied:], num_filled + num_copied
        num_bytes += num_filled
        yield chunk
        del chunk  # or it would live on while the next one is filled
    for _ in blocks:  # checksums and hashes are compared after the last byte, when more is requested
        pass


#: Returns a view of words with any strides and byte order, so that a file is mapped only while it is read.
ViewFactory = Callable[[], npt.NDArray[Any]]


def from_strided_view(info: ArrayInfo, make_view: ViewFactory) -> LazyArray:
    """Return an array in C order over a view."""
    return _array_in_c_order(info, partial(_iter_view_chunks, make_view, np.dtype(f"<u{info.itemsize}")))


def to_c_contiguous(array: LazyArray, index: tuple[int, ...] = ()) -> LazyArray:
    """Return an array of words, or the part of it at an index of its first axes, in C order; read on each access."""
    info = ArrayInfo(
        name=array.name,
        dtype=array.dtype,
        shape=array.shape[len(index) :],
        array_dtype=array.array_dtype.replace(">", "<"),
        element=array.element,
    )
    return from_strided_view(info, lambda: read_elements(array)[index])


def read_elements(array: LazyArray) -> npt.NDArray[Any]:
    """Return the words of an array in memory order; a view of the file where possible."""
    chunks = list(array.iter_chunks())
    data = chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, np.uint8), *chunks])
    return data.view(f"<u{array.itemsize}").reshape(array.shape, order=array.order)


def from_strided_pages(info: ArrayInfo, view_factories: Sequence[ViewFactory]) -> LazyArray:
    """Return an array in C order over several views that are concatenated along the last axis but one."""
    return _array_in_c_order(info, partial(_iter_page_chunks, info, view_factories))


def _array_in_c_order(info: ArrayInfo, reader: Callable[[int], Iterator[Chunk]]) -> LazyArray:
    values = {entry.name: getattr(info, entry.name) for entry in fields(ArrayInfo)}
    return LazyArray(**{**values, "order": "C"}, reader=reader)


def _iter_page_chunks(info: ArrayInfo, view_factories: Sequence[ViewFactory], chunk_bytes: int) -> Iterator[Chunk]:
    element_type = np.dtype(f"<u{info.itemsize}")
    chunks = (
        chunk
        for lead in np.ndindex(*info.shape[:-2])
        for view in view_factories
        for chunk in _iter_view_chunks(lambda view=view, lead=lead: view()[lead], element_type, chunk_bytes)  # type: ignore[misc]
    )
    yield from rechunk(chunks, chunk_bytes, info.nbytes)


def _iter_view_chunks(make_view: ViewFactory, element_type: np.dtype[Any], chunk_bytes: int) -> Iterator[Chunk]:
    elements = make_view()
    elements = elements.view(
        element_type.newbyteorder(elements.dtype.byteorder)
    )  # bits, not numbers: a NaN keeps its payload
    if elements.flags.c_contiguous and elements.dtype == element_type:
        data = elements.reshape(-1).view(np.uint8)
        yield from _iter_buffer_chunks(data, chunk_bytes)
        return
    chunk_elements = chunk_bytes // element_type.itemsize
    for begin in range(0, elements.size, max(chunk_elements, 1)):
        chunk = np.empty(min(chunk_elements, elements.size - begin), element_type)
        _copy_elements(elements, begin, begin + chunk.size, chunk)
        yield chunk.view(np.uint8)
        del chunk


def _copy_elements(view: npt.NDArray[Any], begin: int, end: int, target: npt.NDArray[Any]) -> None:
    """Copy the elements from `begin` to `end`, in C order."""
    if view.ndim <= 1:
        target[:] = view.reshape(-1)[begin:end]
        return
    row_size = math.prod(view.shape[1:])
    first_row, last_row = -(-begin // row_size), end // row_size
    if first_row > last_row:
        _copy_elements(view[last_row], begin - last_row * row_size, end - last_row * row_size, target)
        return
    head_size, middle_size = first_row * row_size - begin, (last_row - first_row) * row_size
    if head_size:
        _copy_elements(view[first_row - 1], row_size - head_size, row_size, target[:head_size])
    if middle_size:
        target[head_size : head_size + middle_size].reshape(last_row - first_row, *view.shape[1:])[...] = view[
            first_row:last_row
        ]
    if head_size + middle_size < target.size:
        _copy_elements(view[last_row], 0, end - last_row * row_size, target[head_size + middle_size :])


T = TypeVar("T")
_NAMES_PER_BATCH = 4096


class LazySequence(Sequence[T], Generic[T]):
    """A sequence whose items are created on each access from an integer."""

    def __init__(self, item_ids: npt.NDArray[np.int64], make_item: Callable[[int], T]) -> None:
        self.item_ids = item_ids
        self.make_item = make_item

    def __len__(self) -> int:
        return self.item_ids.size

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> list[T]: ...
    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self.make_item(item_id) for item_id in self.item_ids[index].tolist()]
        return self.make_item(int(self.item_ids[index]))

    def __iter__(self) -> Iterator[T]:
        return (self.make_item(int(item_id)) for item_id in self.item_ids)


class LazyArrayList(LazySequence[LazyArray]):
    """Arrays whose names and bytes are known without creating them."""

    def __init__(
        self,
        item_ids: npt.NDArray[np.int64],
        make_item: Callable[[int], LazyArray],
        names_for_ids: Callable[[npt.NDArray[np.int64]], list[str]],
        id_for_name: Callable[[str], int | None],
        nbytes: int,
        elements: tuple[str, ...] = (),
    ) -> None:
        super().__init__(item_ids, make_item)  # the numbers ascend
        self.names_for_ids = names_for_ids
        self.id_for_name = id_for_name
        self.nbytes = nbytes  # of all arrays
        self.elements = elements  # as `Source.elements`

    def iter_names(self) -> Iterator[str]:
        """Iterate over the names, in order."""
        for start in range(0, len(self), _NAMES_PER_BATCH):
            yield from self.names_for_ids(self.item_ids[start : start + _NAMES_PER_BATCH])

    def find(self, name: str) -> LazyArray | None:
        """Return the array of this name; None if there is none."""
        item_id = self.id_for_name(name)
        if item_id is None:
            return None
        index = int(np.searchsorted(self.item_ids, item_id))
        return self[index] if index < len(self) and self.item_ids[index] == item_id else None
