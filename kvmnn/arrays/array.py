"""Named arrays whose bytes come in pieces.

A piece is a read-only run of little-endian words in memory order. Pieces are cut along the leading axes, so that a
frame made from one never splits an element, and they are views of the mapped file wherever the file allows it.

Arrays whose words lie anywhere in memory, in any order of axes, read in runs as if they were contiguous.

Arrays of an input that may have a million of them: each is made when it is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, Literal, TypeVar, overload

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import Bytes, Elements
from ..errors import MissingOptionError, SourceError
from ..files.change_detection import InputGuard

Order = Literal["C", "F"]
"""Which axis runs fastest in memory: the last or the first."""

Chunk = Bytes
"""A run of little-endian words in memory order; do not write to it."""

_READ_CHUNK_BYTES = 8 << 20


class UnsupportedArrayError(SourceError):
    """An array that is well-formed but of a type or size that no frame holds."""


class UntypedArrayError(UnsupportedArrayError, MissingOptionError):
    """An array whose own type does not say what its words are, where no option does."""


@dataclass(frozen=True, kw_only=True)
class ArrayInfo:
    """What is needed to restore an array from its bytes.

    Parameters
    ----------
    name
        Unique within its source or manifest.
    dtype
        ``"fp16"``, ``"bf16"`` or ``"fp32"``: how the words are coded and what people call them.
    shape
        Axes as numpy has them, whatever the order.
    array_dtype
        The numpy type string of the array itself, e.g. ``"<f2"``, ``">f2"``, ``"<i2"`` or ``"|u1"`` (raw bytes).
    order
        ``"C"`` or ``"F"``: which axis runs fastest in memory.
    element
        One of `dtypes.FLOAT8_NAMES` where the array holds codes of that type, one byte each (`array_dtype` is
        ``"|u1"``), or float32 numbers that were made of them; empty for all others.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    array_dtype: str
    order: Order = "C"
    element: str = ""

    @property
    def itemsize(self) -> int:
        """Bytes per array element (1 for raw bytes, else the word size)."""
        return np.dtype(self.array_dtype).itemsize

    @property
    def coded_itemsize(self) -> int:
        """Bytes per coded word: 2 or 4."""
        return dtypes.parse_dtype(self.dtype).itemsize

    @property
    def type_name(self) -> str:
        """What people call its elements: `dtype`; of bytes, which are only coded as words, `element` or "bytes"."""
        return (self.element or "bytes") if self.itemsize == 1 else self.dtype

    @property
    def has_axes(self) -> bool:
        """Whether its axes count words or codes; those of raw bytes count parts of words."""
        return self.itemsize == self.coded_itemsize or bool(self.element)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.itemsize

    @property
    def is_big_endian(self) -> bool:
        """Whether the array's words are big-endian and so differ from the bytes of its pieces."""
        return self.array_dtype.startswith(">")

    def compute_chunk_bytes(self, max_bytes: int) -> int:
        """Bytes of every piece but the last: as many complete rows of the leading axes as fit into `max_bytes`.

        Parameters
        ----------
        max_bytes
            Bytes; 0 means that the array is never cut.
        """
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
        """How many pieces of at most `max_bytes` bytes the array is cut into."""
        return -(-self.nbytes // self.compute_chunk_bytes(max_bytes))

    def index_at_offset(self, offset: int) -> tuple[int, ...]:
        """The index of the element that the byte at `offset` (bytes, memory order) belongs to."""
        return tuple(int(i) for i in np.unravel_index(offset // self.itemsize, self.shape or (1,), order=self.order))


@dataclass(frozen=True, kw_only=True)
class LazyArray(ArrayInfo):
    """An array on its way in: what it is, and a way to read its bytes in bounded memory.

    Parameters
    ----------
    reader
        ``reader(step)`` iterates over the file's own bytes of the array in runs of `chunk_bytes` bytes, the last one
        shorter.
    """

    reader: Callable[[int], Iterator[Chunk]] = field(repr=False, compare=False)

    def iter_chunks(self, max_bytes: int = 0) -> Iterator[Chunk]:
        """Iterate over the array's bytes as little-endian words in memory order.

        Parameters
        ----------
        max_bytes
            Most bytes per piece; 0 yields the array in one piece.

        Yields
        ------
        uint8 array, 1-D and contiguous; do not write to it.

        Raises
        ------
        SourceError
            When the file turns out to be damaged or shorter than it said.
        """
        num_bytes = 0
        for chunk in self.reader(self.compute_chunk_bytes(max_bytes)):
            num_bytes += chunk.size
            yield byteswap(chunk, self.itemsize) if self.is_big_endian else chunk
            del chunk
        if num_bytes != self.nbytes:
            raise SourceError(f"array {self.name!r}: {num_bytes} bytes came where {self.nbytes} were announced")

    def to_numpy(self) -> npt.NDArray[Any]:
        """The array in memory, freshly allocated and writable.

        Returns
        -------
        numpy.ndarray
            Of `shape`, `order` and `array_dtype`, the latter in little-endian byte order; bf16 as uint16 words.

        Raises
        ------
        SourceError
            When the file turns out to be damaged or shorter than it said.
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
    """An array in memory (float16, float32, or uint16 for bf16) under a name."""
    element_type = dtypes.infer_dtype(elements)
    data = np.ascontiguousarray(elements, element_type.numpy_dtype).reshape(-1).view(np.uint8)
    return LazyArray(
        name=name,
        dtype=element_type.name,
        shape=elements.shape,
        array_dtype=element_type.numpy_dtype.str,
        reader=partial(_iter_buffer_chunks, data),
    )


def bytes_array(name: str, data: bytes) -> LazyArray:
    """Bytes in memory as an array of bytes, which are no numbers, under a name."""
    words = np.frombuffer(data, np.uint8)
    return LazyArray(
        name=name, dtype="fp16", shape=words.shape, array_dtype="|u1", reader=partial(_iter_buffer_chunks, words)
    )


def _iter_buffer_chunks(data: Chunk, chunk_bytes: int) -> Iterator[Chunk]:
    for begin in range(0, data.size, max(chunk_bytes, 1)):
        yield data[begin : begin + chunk_bytes]


def byteswap(chunk: Chunk, itemsize: int) -> Chunk:
    """A copy of `chunk` with the bytes of every `itemsize`-byte word reversed."""
    return chunk.view(np.dtype(f"u{itemsize}")).byteswap().view(np.uint8)


def rechunk(blocks: Iterator[Chunk], chunk_bytes: int, total_bytes: int) -> Iterator[Chunk]:
    """`total_bytes` bytes that come in `blocks`, copied into fresh runs of `chunk_bytes` bytes, the last one shorter.

    `blocks` is run to its end: checksums and hashes are compared behind the last byte, when more is asked for.
    """
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
    for _ in blocks:
        pass


ViewFactory = Callable[[], npt.NDArray[Any]]
"""Makes a view of words: any strides and byte order; what is mapped is mapped only while it is read."""


def from_strided_view(info: ArrayInfo, make_view: ViewFactory) -> LazyArray:
    """An array in C order over a view."""
    return _array_in_c_order(info, partial(_iter_view_chunks, make_view, np.dtype(f"<u{info.itemsize}")))


def to_c_contiguous(array: LazyArray, index: tuple[int, ...] = ()) -> LazyArray:
    """An array of words, or the part of it at an index of its first axes, in C order; read anew whenever it is read."""
    info = ArrayInfo(
        name=array.name,
        dtype=array.dtype,
        shape=array.shape[len(index) :],
        array_dtype=array.array_dtype.replace(">", "<"),
        element=array.element,
    )
    return from_strided_view(info, lambda: read_elements(array)[index])


def read_elements(array: LazyArray) -> npt.NDArray[Any]:
    """The words of an array as they lie in memory; a view of the file where they lie there as they are."""
    chunks = list(array.iter_chunks())
    data = chunks[0] if len(chunks) == 1 else np.concatenate([np.empty(0, np.uint8), *chunks])
    return data.view(f"<u{array.itemsize}").reshape(array.shape, order=array.order)


def from_strided_pages(info: ArrayInfo, view_factories: Sequence[ViewFactory]) -> LazyArray:
    """The same over several views that follow each other along the last axis but one."""
    return _array_in_c_order(info, partial(_iter_page_chunks, info, view_factories))


def _array_in_c_order(info: ArrayInfo, reader: Callable[[int], Iterator[Chunk]]) -> LazyArray:
    return LazyArray(
        name=info.name,
        dtype=info.dtype,
        shape=info.shape,
        array_dtype=info.array_dtype,
        order="C",
        element=info.element,
        reader=reader,
    )


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
        yield from (data[begin : begin + chunk_bytes] for begin in range(0, data.size, chunk_bytes))
        return
    chunk_elements = chunk_bytes // element_type.itemsize
    for begin in range(0, elements.size, max(chunk_elements, 1)):
        chunk = np.empty(min(chunk_elements, elements.size - begin), element_type)
        _copy_elements(elements, begin, begin + chunk.size, chunk)
        yield chunk.view(np.uint8)
        del chunk


def _copy_elements(view: npt.NDArray[Any], begin: int, end: int, target: npt.NDArray[Any]) -> None:
    """The elements from `begin` to `end`, in C order."""
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
    """A sequence whose items are made, each time anew, from numbers.

    Parameters
    ----------
    item_ids
        int64, one for each item.
    make_item
        The item of a number.
    """

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
    """Arrays whose names and bytes are known without them.

    Parameters
    ----------
    item_ids, make_item
        As above; the numbers ascend.
    names_for_ids
        The names of some numbers.
    id_for_name
        The number of a name; None if there is none.
    nbytes
        Bytes of all arrays.
    elements
        Types of the codes that some of the arrays were made from, as `Source.elements`.
    """

    def __init__(
        self,
        item_ids: npt.NDArray[np.int64],
        make_item: Callable[[int], LazyArray],
        names_for_ids: Callable[[npt.NDArray[np.int64]], list[str]],
        id_for_name: Callable[[str], int | None],
        nbytes: int,
        elements: tuple[str, ...] = (),
    ) -> None:
        super().__init__(item_ids, make_item)
        self.names_for_ids = names_for_ids
        self.id_for_name = id_for_name
        self.nbytes = nbytes
        self.elements = elements

    def iter_names(self) -> Iterator[str]:
        """The names, in order."""
        for start in range(0, len(self), _NAMES_PER_BATCH):
            yield from self.names_for_ids(self.item_ids[start : start + _NAMES_PER_BATCH])

    def find(self, name: str) -> LazyArray | None:
        """The array of this name; None if there is none."""
        item_id = self.id_for_name(name)
        if item_id is None:
            return None
        index = int(np.searchsorted(self.item_ids, item_id))
        return self[index] if index < len(self) and self.item_ids[index] == item_id else None
