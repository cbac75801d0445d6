"""Named arrays whose bytes come in pieces.

A piece is a read-only run of little-endian words in memory order. Pieces are cut along the leading axes, so that a
frame made from one never splits an element, and they are views of the mapped file wherever the file allows it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..dtypes import Bytes, Words
from ..errors import MissingOptionError, SourceError
from ..files.changes import Reading

Order = Literal["C", "F"]
"""Which axis runs fastest in memory: the last or the first."""

Piece = Bytes
"""A run of little-endian words in memory order; do not write to it."""

_STEP = 8 << 20


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
    def word_bytes(self) -> int:
        """Bytes per coded word: 2 or 4."""
        return dtypes.by_name(self.dtype).itemsize

    @property
    def type_name(self) -> str:
        """What people call its elements: `dtype`; of bytes, which are only coded as words, `element` or "bytes"."""
        return (self.element or "bytes") if self.itemsize == 1 else self.dtype

    @property
    def has_axes(self) -> bool:
        """Whether its axes count words or codes; those of raw bytes count parts of words."""
        return self.itemsize == self.word_bytes or bool(self.element)

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.itemsize

    @property
    def swapped(self) -> bool:
        """Whether the array's words are big-endian and so differ from the bytes of its pieces."""
        return self.array_dtype.startswith(">")

    def piece_bytes(self, limit: int) -> int:
        """Bytes of every piece but the last: as many complete rows of the leading axes as fit into `limit`.

        Parameters
        ----------
        limit
            Bytes; 0 means that the array is never cut.
        """
        if limit == 0 or self.nbytes <= limit:
            return self.nbytes
        if self.itemsize != self.word_bytes:
            return max(limit // self.word_bytes, 1) * self.word_bytes
        row = self.nbytes
        for length in self.shape if self.order == "C" else self.shape[::-1]:
            row //= length
            if row <= limit:
                return limit // row * row
        return self.itemsize

    def piece_count(self, limit: int) -> int:
        """How many pieces of at most `limit` bytes the array is cut into."""
        return -(-self.nbytes // self.piece_bytes(limit))

    def index_of(self, offset: int) -> tuple[int, ...]:
        """The index of the element that the byte at `offset` (bytes, memory order) belongs to."""
        return tuple(int(i) for i in np.unravel_index(offset // self.itemsize, self.shape or (1,), order=self.order))


@dataclass(frozen=True, kw_only=True)
class NamedArray(ArrayInfo):
    """An array on its way in: what it is, and a way to read its bytes in bounded memory.

    Parameters
    ----------
    reader
        ``reader(step)`` iterates over the file's own bytes of the array in runs of `step` bytes, the last one shorter.
    """

    reader: Callable[[int], Iterator[Piece]] = field(repr=False, compare=False)

    def pieces(self, limit: int = 0) -> Iterator[Piece]:
        """Iterate over the array's bytes as little-endian words in memory order.

        Parameters
        ----------
        limit
            Most bytes per piece; 0 yields the array in one piece.

        Yields
        ------
        uint8 array, 1-D and contiguous; do not write to it.

        Raises
        ------
        SourceError
            When the file turns out to be damaged or shorter than it said.
        """
        found = 0
        for piece in self.reader(self.piece_bytes(limit)):
            found += piece.size
            yield swap_words(piece, self.itemsize) if self.swapped else piece
            del piece
        if found != self.nbytes:
            raise SourceError(f"array {self.name!r}: {found} bytes came where {self.nbytes} were announced")

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
        words = np.empty(self.nbytes, np.uint8)
        done = 0
        with Reading():
            for piece in self.pieces(_STEP):
                place = words[done : done + piece.size]
                place[:] = piece[: place.size]
                done += piece.size
                del piece
        return words.view(np.dtype(self.array_dtype).newbyteorder("<")).reshape(self.shape, order=self.order)


def in_memory(name: str, words: Words) -> NamedArray:
    """An array in memory (float16, float32, or uint16 for bf16) under a name."""
    kind = dtypes.of_array(words)
    data = np.ascontiguousarray(words, kind.numpy).reshape(-1).view(np.uint8)
    return NamedArray(
        name=name, dtype=kind.name, shape=words.shape, array_dtype=kind.numpy.str, reader=partial(_runs, data)
    )


def bytes_array(name: str, data: bytes) -> NamedArray:
    """Bytes in memory as an array of bytes, which are no numbers, under a name."""
    words = np.frombuffer(data, np.uint8)
    return NamedArray(name=name, dtype="fp16", shape=words.shape, array_dtype="|u1", reader=partial(_runs, words))


def _runs(data: Piece, step: int) -> Iterator[Piece]:
    for begin in range(0, data.size, max(step, 1)):
        yield data[begin : begin + step]


def swap_words(piece: Piece, itemsize: int) -> Piece:
    """A copy of `piece` with the bytes of every `itemsize`-byte word reversed."""
    return piece.view(np.dtype(f"u{itemsize}")).byteswap().view(np.uint8)


def rechunked(blocks: Iterator[Piece], step: int, total: int) -> Iterator[Piece]:
    """`total` bytes that come in `blocks`, copied into fresh runs of `step` bytes, the last one shorter.

    `blocks` is run to its end: checksums and hashes are compared behind the last byte, when more is asked for.
    """
    rest: Piece = np.empty(0, np.uint8)
    done = 0
    while done < total:
        run = np.empty(min(step, total - done), np.uint8)
        filled = 0
        while filled < run.size:
            if not rest.size:
                rest = next(blocks)
            count = min(rest.size, run.size - filled)
            run[filled : filled + count] = rest[:count]
            rest, filled = rest[count:], filled + count
        done += filled
        yield run
        del run  # or it would live on while the next one is filled
    for _ in blocks:
        pass
