"""What every source yields: named arrays whose bytes come in pieces.

A piece is a read-only run of little-endian words in memory order. Pieces are cut along the leading axes, so that a
frame made from one never splits an element, and they are views of the mapped file wherever the file allows it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..errors import KvmnnError, SourceError

if TYPE_CHECKING:
    from ..cache_info import CacheInfo
    from .packed import PackedOptions

Order = Literal["C", "F"]
Piece = npt.NDArray[np.uint8]


class UnsupportedArrayError(SourceError):
    """An array that is well-formed but of a type or size that no frame holds."""


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
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    array_dtype: str
    order: Order = "C"

    @property
    def itemsize(self) -> int:
        """Bytes per array element (1 for raw bytes, else the word size)."""
        return np.dtype(self.array_dtype).itemsize

    @property
    def word_bytes(self) -> int:
        """Bytes per coded word: 2 or 4."""
        return dtypes.by_name(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize

    @property
    def swapped(self) -> bool:
        """Whether the array's words are big-endian and so differ from the bytes of its pieces."""
        return self.array_dtype.startswith(">")

    def piece_bytes(self, limit: int) -> int:
        """Bytes of every piece but the last: the most whole rows of the leading axes that fit into `limit`.

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
            Most bytes per piece; 0 yields the array whole.

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


def swap_words(piece: Piece, itemsize: int) -> Piece:
    """A copy of `piece` with the bytes of every `itemsize`-byte word reversed."""
    return piece.view(np.dtype(f"u{itemsize}")).byteswap().view(np.uint8)


def rechunked(blocks: Iterator[Piece], step: int, total: int) -> Iterator[Piece]:
    """`total` bytes that come in `blocks`, copied into fresh runs of `step` bytes, the last one shorter."""
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


@dataclass
class Source:
    """What was taken from one input.

    Parameters
    ----------
    arrays
        In the input's order.
    metadata
        What else the input carried.
    skipped
        One line for each array that was left out.
    notes
        One line for each thing that was inferred rather than read or said.
    cache
        What packed files hold, where the input is such files.
    token_major
        Whether the arrays are ``[token, kv_head, head_dim]``.
    lossy
        Whether the words are not the input's own but made from what an engine had rounded.
    """

    arrays: list[NamedArray]
    metadata: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    cache: CacheInfo | None = None
    token_major: bool = False
    lossy: bool = False


@dataclass(frozen=True)
class ReadOptions:
    """What the caller asks of a source.

    Parameters
    ----------
    dtype
        Name of the dtype to take arrays as; None infers it from each array. Raw bytes need one.
    fallbacks
        What arrays and raw bytes whose own type does not say may be taken as, where `dtype` is None: the first that has
        the word size.
    tensors
        Names to take from a file of many arrays; empty takes all.
    skip_unsupported
        Leave arrays out that no frame holds (float64, int64, empty ...) instead of refusing the file. Arrays named in
        `tensors` are never left out.
    packed
        What packed files are said to be.
    """

    dtype: str | None = None
    fallbacks: tuple[str, ...] = ()
    tensors: tuple[str, ...] = ()
    skip_unsupported: bool = False
    packed: PackedOptions | None = None


def select(
    where: str, entries: Sequence[tuple[str, Callable[[], NamedArray]]], options: ReadOptions
) -> tuple[list[NamedArray], list[str]]:
    """Take the arrays that `options` ask for out of a file's `entries` (name, maker).

    Returns
    -------
    The arrays in file order, and one line per array that was left out.

    Raises
    ------
    SourceError
        For a name the file does not have, an array no frame holds, or a file with nothing to take.
    """
    known = Counter(name for name, _ in entries)
    for name, count in known.items():
        if count > 1:
            raise SourceError(f"{where}: has {count} arrays named {name!r}")
    for name in options.tensors:
        if name not in known:
            raise SourceError(f"{where}: no array named {name!r}; it has {_some(known)}")
    arrays: list[NamedArray] = []
    skipped: list[str] = []
    for name, make in entries:
        if options.tensors and name not in options.tensors:
            continue
        try:
            arrays.append(make())
        except UnsupportedArrayError as exc:
            if options.tensors or not options.skip_unsupported:
                raise
            skipped.append(str(exc))
    if not arrays:
        raise SourceError(f"{where}: holds no array that can be encoded")
    return arrays, skipped


def _some(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    shown = ", ".join(repr(name) for name in names[:most])
    return (shown or "none") + (f" and {len(names) - most} more" if len(names) > most else "")


def dtype_name(array_dtype: np.dtype[np.generic], options: ReadOptions, where: str) -> str:
    """The dtype name under which an array of numpy type `array_dtype` is encoded.

    Raises
    ------
    UnsupportedArrayError
        For object and structured types, word sizes other than 2 and 4, and types that need a dtype and have none.
    """
    if array_dtype.hasobject:
        raise UnsupportedArrayError(f"{where}: holds Python objects (pickles), which are never loaded")
    if array_dtype.fields is not None or array_dtype.subdtype is not None:
        raise UnsupportedArrayError(f"{where}: structured type {array_dtype} is not supported")
    try:
        if options.dtype is not None:
            return _taken_as(options.dtype, array_dtype)
        return dtypes.of_array(np.empty(0, array_dtype)).name
    except (TypeError, KvmnnError) as exc:
        for fallback in options.fallbacks if options.dtype is None else ():
            with suppress(TypeError):
                return _taken_as(fallback, array_dtype)
        raise UnsupportedArrayError(f"{where}: {exc}") from None


def _taken_as(name: str, array_dtype: np.dtype[np.generic]) -> str:
    dtype = dtypes.by_name(name)
    if array_dtype != np.uint8:
        dtypes.check_array(np.empty(0, array_dtype), dtype)
    return name


def checked(array: NamedArray, where: str) -> NamedArray:
    """`array` itself, unless it is one that no frame holds: empty, or not a whole number of words."""
    if array.nbytes == 0:
        raise UnsupportedArrayError(f"{where}: is empty (shape {list(array.shape)}), there is nothing to encode")
    if array.nbytes % array.word_bytes:
        raise UnsupportedArrayError(
            f"{where}: {array.nbytes} bytes are not a whole number of {array.word_bytes}-byte {array.dtype} words"
        )
    return array
