"""The header of a ``.safetensors`` file, checked as the format demands.

It has at most `MAX_HEADER` bytes, unique names, and offsets that tile the data without holes or overlaps, so that no
byte of a file is left unread. A million tensors are a second's work: they are kept as arrays of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from ..arrays.valid_names import shortened
from ..errors import SourceError
from . import _safetensors_header
from .file_bytes import FileBytes

MAX_HEADER = 100_000_000
"""Bytes, as the safetensors package has it: a million tensors, which take a second and 300 MB to read."""
METADATA = "__metadata__"

_ITEM_BYTES = {
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 1),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
}


class Tensor(NamedTuple):
    """An entry of the header: type and shape, and where its bytes lie behind the header."""

    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


class Tensors(Sequence[Tensor]):
    """All entries, in the order of their data.

    Parameters
    ----------
    text
        The header.
    where
        Begins the messages.

    Attributes
    ----------
    begins, ends
        int64: where the bytes of each lie behind the header.
    codes, kinds
        uint8: the type of each, by its place in the list of types.
    metadata
        What the header says besides.

    Raises
    ------
    SourceError
        For a header that is damaged, or has a name twice.
    """

    def __init__(self, text: bytes, where: str) -> None:
        capacity = len(text) // _safetensors_header.SHORTEST_ENTRY + 1
        places = np.empty((3, capacity), np.uint32)
        codes = np.empty(capacity, np.uint8)
        numbers = np.empty((3, capacity), np.int64)
        count, self.kinds, self.metadata = _safetensors_header.scan(text, where, _ITEM_BYTES, places, codes, numbers)
        self._text = text
        self._places, self.codes, (self.begins, self.ends, hashes) = (
            places[:, :count],
            codes[:count],
            numbers[:, :count],
        )
        self._sort(hashes)
        self._check_names(where)

    def _sort(self, hashes: npt.NDArray[np.int64]) -> None:
        if (self.begins[1:] < self.ends[:-1]).any():
            order = np.lexsort((self.ends, self.begins))
            self._places, self.codes = self._places[:, order], self.codes[order]
            self.begins, self.ends, hashes = self.begins[order], self.ends[order], hashes[order]
        self._by_hash = np.argsort(hashes, kind="stable").astype(np.uint32)
        self._hashes = hashes[self._by_hash]

    def _check_names(self, where: str) -> None:
        same = self._hashes[1:] == self._hashes[:-1]
        seen: set[str] = set()
        for place in np.flatnonzero(np.append(same, False) | np.append(False, same)):
            name = self.name(int(self._by_hash[place]))
            if name in seen:
                raise SourceError(f"{where}: the name {shortened(name)} appears twice in the header")
            seen.add(name)

    def names(self, numbers: npt.NDArray[np.int64]) -> list[str]:
        """The names of some tensors."""
        return _safetensors_header.strings_at(self._text, self._places[0, numbers], self._places[1, numbers])

    def name(self, number: int) -> str:
        """The name of one."""
        number %= len(self)
        place = self._places[:2, number : number + 1]
        return _safetensors_header.strings_at(self._text, place[0], place[1])[0]

    def find(self, name: str) -> int | None:
        """The number of the tensor of this name; None if there is none."""
        sought = hash(name)
        place = int(np.searchsorted(self._hashes, sought))
        while place < len(self) and self._hashes[place] == sought:
            number = int(self._by_hash[place])
            if self.name(number) == name:
                return number
            place += 1
        return None

    def __len__(self) -> int:
        return self.codes.size

    @overload
    def __getitem__(self, index: int) -> Tensor: ...
    @overload
    def __getitem__(self, index: slice) -> list[Tensor]: ...
    def __getitem__(self, index: int | slice) -> Tensor | list[Tensor]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        shape = _safetensors_header.shape_at(self._text, self._places[2, index])
        kind = self.kinds[self.codes[index]]
        return Tensor(self.name(index), kind, shape, int(self.begins[index]), int(self.ends[index]))

    def __iter__(self) -> Iterator[Tensor]:
        return (self[number] for number in range(len(self)))


class Header(NamedTuple):
    """What a header says, and where the data begins (bytes)."""

    tensors: Tensors
    metadata: dict[str, str]
    start: int


def read_header(file: FileBytes, *, most: int = MAX_HEADER) -> Header:
    """The tensors in the order of their data, the metadata, and where the data begins; all checked.

    Parameters
    ----------
    file
        The whole file.
    most
        Bytes of the longest header that is taken.

    Raises
    ------
    SourceError
        For a header that is longer, damaged, or not of the file's size.
    """
    where = file.label
    if file.size < 8:
        raise SourceError(f"{where}: {file.size} bytes are too few for a .safetensors file")
    length = int.from_bytes(file.head(8), "little")
    if length > most:
        raise SourceError(f"{where}: a header of {length} bytes is above the limit of {most}")
    if 8 + length > file.size:
        raise SourceError(f"{where}: is truncated: the header needs {length} bytes, the file has {file.size - 8}")
    text = file.view(8, length).tobytes()
    file.drop(8, length)
    tensors = Tensors(text, where)
    _check_tiling(where, tensors, file.size - 8 - length)
    return Header(tensors, tensors.metadata, 8 + length)


def _check_tiling(where: str, tensors: Tensors, data_bytes: int) -> None:
    ends = np.append(0, tensors.ends)
    wrong = np.flatnonzero(tensors.begins != ends[:-1])
    if wrong.size:
        number = int(wrong[0])
        raise SourceError(
            f"{where}: tensor {shortened(tensors.name(number))} begins at {tensors.begins[number]}, "
            f"expected {ends[number]}: data must have no holes and no overlaps"
        )
    if ends[-1] != data_bytes:
        what = "is truncated" if ends[-1] > data_bytes else "has trailing bytes"
        raise SourceError(f"{where}: {what}: its tensors need {ends[-1]} bytes of data, it has {data_bytes}")
