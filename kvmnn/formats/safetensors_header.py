"""The header of a ``.safetensors`` file, checked as the format demands.

It has at most `MAX_HEADER_BYTES` bytes, unique names, and offsets that tile the data without holes or overlaps, so that
no byte of a file is left unread. A million tensors are a second's work: they are kept as arrays of numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, overload

import numpy as np
import numpy.typing as npt

from ..arrays.valid_names import shorten_name
from ..errors import SourceError
from . import _safetensors_header
from .file_bytes import FileBytes

MAX_HEADER_BYTES = 100_000_000
"""Bytes, as the safetensors package has it: a million tensors, which take a second and 300 MB to read."""
METADATA_ENTRY = "__metadata__"

_ITEMSIZE_BY_KIND = {
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 1),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
}


class TensorEntry(NamedTuple):
    """An entry of the header: type and shape, and where its bytes lie behind the header."""

    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorIndex(Sequence[TensorEntry]):
    """All entries, in the order of their data.

    Parameters
    ----------
    header_text
        The header.
    label
        Begins the messages.

    Attributes
    ----------
    begins, ends
        int64: where the bytes of each lie behind the header.
    kind_codes, kinds
        uint8: the type of each, by its place in the list of types.
    metadata
        What the header says besides.

    Raises
    ------
    SourceError
        For a header that is damaged, or has a name twice.
    """

    def __init__(self, header_text: bytes, label: str) -> None:
        capacity = len(header_text) // _safetensors_header.MIN_ENTRY_BYTES + 1
        text_positions = np.empty((3, capacity), np.uint32)
        kind_codes = np.empty(capacity, np.uint8)
        offsets_and_hashes = np.empty((3, capacity), np.int64)
        num_tensors, self.kinds, self.metadata = _safetensors_header.scan(
            header_text, label, _ITEMSIZE_BY_KIND, text_positions, kind_codes, offsets_and_hashes
        )
        self._header_text = header_text
        self._text_positions, self.kind_codes, (self.begins, self.ends, hashes) = (
            text_positions[:, :num_tensors],
            kind_codes[:num_tensors],
            offsets_and_hashes[:, :num_tensors],
        )
        self._sort(hashes)
        self._check_names(label)

    def _sort(self, hashes: npt.NDArray[np.int64]) -> None:
        if (self.begins[1:] < self.ends[:-1]).any():
            order = np.lexsort((self.ends, self.begins))
            self._text_positions, self.kind_codes = self._text_positions[:, order], self.kind_codes[order]
            self.begins, self.ends, hashes = self.begins[order], self.ends[order], hashes[order]
        self._ids_by_hash = np.argsort(hashes, kind="stable").astype(np.uint32)
        self._hashes = hashes[self._ids_by_hash]

    def _check_names(self, label: str) -> None:
        has_equal_hash = self._hashes[1:] == self._hashes[:-1]
        unique_names: set[str] = set()
        for hash_index in np.flatnonzero(np.append(has_equal_hash, False) | np.append(False, has_equal_hash)):
            name = self.get_name(int(self._ids_by_hash[hash_index]))
            if name in unique_names:
                raise SourceError(f"{label}: the name {shorten_name(name)} appears twice in the header")
            unique_names.add(name)

    def get_names(self, tensor_ids: npt.NDArray[np.int64]) -> list[str]:
        """The names of some tensors."""
        return _safetensors_header.read_strings_at(
            self._header_text, self._text_positions[0, tensor_ids], self._text_positions[1, tensor_ids]
        )

    def get_name(self, tensor_id: int) -> str:
        """The name of one."""
        tensor_id %= len(self)
        text_position = self._text_positions[:2, tensor_id : tensor_id + 1]
        return _safetensors_header.read_strings_at(self._header_text, text_position[0], text_position[1])[0]

    def find_id(self, name: str) -> int | None:
        """The number of the tensor of this name; None if there is none."""
        name_hash = hash(name)
        hash_index = int(np.searchsorted(self._hashes, name_hash))
        while hash_index < len(self) and self._hashes[hash_index] == name_hash:
            tensor_id = int(self._ids_by_hash[hash_index])
            if self.get_name(tensor_id) == name:
                return tensor_id
            hash_index += 1
        return None

    def __len__(self) -> int:
        return self.kind_codes.size

    @overload
    def __getitem__(self, index: int) -> TensorEntry: ...
    @overload
    def __getitem__(self, index: slice) -> list[TensorEntry]: ...
    def __getitem__(self, index: int | slice) -> TensorEntry | list[TensorEntry]:
        if isinstance(index, slice):
            return [self[tensor_id] for tensor_id in range(*index.indices(len(self)))]
        shape = _safetensors_header.read_shape_at(self._header_text, self._text_positions[2, index])
        kind = self.kinds[self.kind_codes[index]]
        return TensorEntry(self.get_name(index), kind, shape, int(self.begins[index]), int(self.ends[index]))

    def __iter__(self) -> Iterator[TensorEntry]:
        return (self[tensor_id] for tensor_id in range(len(self)))


class SafetensorsHeader(NamedTuple):
    """What a header says, and where the data begins (bytes)."""

    tensors: TensorIndex
    metadata: dict[str, str]
    data_start: int


def read_header(file: FileBytes, *, max_header_bytes: int = MAX_HEADER_BYTES) -> SafetensorsHeader:
    """The tensors in the order of their data, the metadata, and where the data begins; all checked.

    Parameters
    ----------
    file
        The whole file.
    max_header_bytes
        Bytes of the longest header that is taken.

    Raises
    ------
    SourceError
        For a header that is longer, damaged, or not of the file's size.
    """
    label = file.label
    if file.size < 8:
        raise SourceError(f"{label}: {file.size} bytes are too few for a .safetensors file")
    header_bytes = int.from_bytes(file.read_head(8), "little")
    if header_bytes > max_header_bytes:
        raise SourceError(f"{label}: a header of {header_bytes} bytes is above the limit of {max_header_bytes}")
    if 8 + header_bytes > file.size:
        raise SourceError(f"{label}: is truncated: the header needs {header_bytes} bytes, the file has {file.size - 8}")
    header_text = file.view(8, header_bytes).tobytes()
    file.release_pages(8, header_bytes)
    tensors = TensorIndex(header_text, label)
    _check_tiling(label, tensors, file.size - 8 - header_bytes)
    return SafetensorsHeader(tensors, tensors.metadata, 8 + header_bytes)


def _check_tiling(label: str, tensors: TensorIndex, data_bytes: int) -> None:
    ends = np.append(0, tensors.ends)
    misplaced_ids = np.flatnonzero(tensors.begins != ends[:-1])
    if misplaced_ids.size:
        tensor_id = int(misplaced_ids[0])
        raise SourceError(
            f"{label}: tensor {shorten_name(tensors.get_name(tensor_id))} begins at {tensors.begins[tensor_id]}, "
            f"expected {ends[tensor_id]}: data must have no holes and no overlaps"
        )
    if ends[-1] != data_bytes:
        problem = "is truncated" if ends[-1] > data_bytes else "has trailing bytes"
        raise SourceError(f"{label}: {problem}: its tensors need {ends[-1]} bytes of data, it has {data_bytes}")
