"""``.safetensors`` files, read and written without the safetensors package.

The header has at most `MAX_HEADER_BYTES` bytes, unique names, and offsets that tile the data without gaps or overlaps,
so that every byte of a file is read. A million tensors take a second: their entries are stored as numpy arrays.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from .. import dtypes
from .._util.named_tuple import NamedTuple
from ..arrays.array import ArrayInfo, LazyArray, LazyArrayList, LazySequence, UnsupportedArrayError, UntypedArrayError
from ..arrays.naming import shorten_name
from ..arrays.source import Source
from ..dtypes import FLOAT8_NAMES
from ..errors import OutputError, SourceError, UnsuitableOptionError
from ..files.mapped_file import FileHead, MappedFile
from . import _safetensors_header
from .base import ArrayChunks, FileBytes, FileFormat, SeekableSink, mark_first_chunks
from .options import ReadOptions
from .tensor_selection import (
    FLOAT8_FRAME_DTYPE,
    add_byte_fallback,
    check_declared_dtype,
    format_names,
    make_no_tensor_error,
    resolve_dtype_name,
    validate_array,
)

MAX_HEADER_BYTES = 100_000_000
"""Header limit of the safetensors package: a million tensors, which take a second and 300 MB to read."""
METADATA_ENTRY = "__metadata__"

_ITEMSIZE_BY_KIND = {
    **dict.fromkeys(("BOOL", "I8", "U8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 1),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
}


class TensorEntry(NamedTuple):
    """An entry of the header: type, shape, and byte range after the header."""

    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


class TensorIndex(Sequence[TensorEntry]):
    """All entries of a header, in the order of their data.

    Attributes
    ----------
    begins, ends
        int64: byte range of each tensor after the header.
    kind_codes, kinds
        uint8: the type of each tensor, as an index in the list of types.
    metadata
        The other entries of the header.
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
        """Return the names of some tensors."""
        return _safetensors_header.read_strings_at(
            self._header_text, self._text_positions[0, tensor_ids], self._text_positions[1, tensor_ids]
        )

    def get_name(self, tensor_id: int) -> str:
        """Return the name of a tensor."""
        tensor_id %= len(self)
        text_position = self._text_positions[:2, tensor_id : tensor_id + 1]
        return _safetensors_header.read_strings_at(self._header_text, text_position[0], text_position[1])[0]

    def find_id(self, name: str) -> int | None:
        """Return the number of the tensor of this name; None if there is none."""
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
    """A parsed header, and the offset of the data in bytes."""

    tensors: TensorIndex
    metadata: dict[str, str]
    data_start: int


def read_header(file: FileBytes, *, max_header_bytes: int = MAX_HEADER_BYTES) -> SafetensorsHeader:
    """Return the validated header: the tensors in the order of their data, the metadata, and the data offset."""
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


_NUMPY_TYPE_BY_KIND = {
    "F16": "<f2",
    "BF16": "<u2",
    "F32": "<f4",
    "I16": "<i2",
    "U16": "<u2",
    "I32": "<i4",
    "U32": "<u4",
    "U8": "|u1",
    "F8_E4M3": "|u1",
    "F8_E4M3FNUZ": "|u1",
    "F8_E5M2": "|u1",
    "F8_E5M2FNUZ": "|u1",
}
_FLOAT8_NAME_BY_KIND = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_KIND_BY_FLOAT8_NAME = {name: kind for kind, name in _FLOAT8_NAME_BY_KIND.items()}
_DTYPE_BY_KIND = {"F16": "fp16", "BF16": "bf16", "F32": "fp32", **_FLOAT8_NAME_BY_KIND}


def read(file: MappedFile, options: ReadOptions) -> Source:
    """Return every tensor, in the order of its data, and the file's ``__metadata__``.

    F16, BF16 and F32 are read as they are, float8 types as numbers or codes (`ReadOptions.codes`). I16, U16, I32, U32
    and U8 are plain words or bytes, which `options.dtype` must define; all other types are unsupported. Arrays are
    created on demand: a file may have a million.
    """
    header = read_header(file)
    byte_options = add_byte_fallback(options, header.metadata)
    dtype_by_kind = {
        kind: _resolve_kind_dtype(kind, byte_options if kind == "U8" else options) for kind in header.tensors.kinds
    }
    make_array = partial(_make_tensor_array, file, header, dtype_by_kind, options)
    requested_ids = _select_tensor_ids(file.label, header.tensors, options)
    code_counts = _count_decoded_codes(header.tensors, options)
    is_supported = _find_supported_tensors(header.tensors, dtype_by_kind, code_counts)[requested_ids]
    selected_ids, unsupported_ids = requested_ids[is_supported], requested_ids[~is_supported]
    if unsupported_ids.size and (options.tensors or not options.skip_unsupported):
        make_array(int(unsupported_ids[0]))
    if not selected_ids.size:
        raise make_no_tensor_error(
            file.label, [_explain_unsupported(make_array, int(tensor_id)) for tensor_id in unsupported_ids[:1]]
        )
    tensors = header.tensors
    nbytes = int((tensors.ends - tensors.begins + 3 * code_counts)[selected_ids].sum())
    decoded_codes = np.unique(tensors.kind_codes[selected_ids[code_counts[selected_ids] > 0]])
    code_types = tuple(_FLOAT8_NAME_BY_KIND.get(tensors.kinds[code], options.dtype or "") for code in decoded_codes)
    arrays = LazyArrayList(selected_ids, make_array, tensors.get_names, tensors.find_id, nbytes, code_types)
    return Source(arrays, header.metadata, LazySequence(unsupported_ids, partial(_explain_unsupported, make_array)))


def _count_decoded_codes(tensors: TensorIndex, options: ReadOptions) -> npt.NDArray[np.int64]:
    """Return for each tensor how many codes are decoded to numbers; none if codes are requested."""
    counts = np.zeros(len(tensors), np.int64)
    if options.codes:
        return counts
    for code, kind in enumerate(tensors.kinds):
        if kind in _FLOAT8_NAME_BY_KIND or (kind == "U8" and options.dtype in FLOAT8_NAMES):
            is_of_kind = tensors.kind_codes == code
            counts[is_of_kind] = (tensors.ends - tensors.begins)[is_of_kind]
    return counts


def _select_tensor_ids(path: str, tensors: TensorIndex, options: ReadOptions) -> npt.NDArray[np.int64]:
    """Return the numbers of the tensors that `options` select."""
    if not options.tensors:
        return np.arange(len(tensors))
    id_by_name = {name: tensors.find_id(name) for name in options.tensors}
    for name, tensor_id in id_by_name.items():
        if tensor_id is None:
            raise UnsuitableOptionError(
                f"{path}: no array named {name!r}; it has {format_names(map(tensors.get_name, range(len(tensors))))}"
            )
    return np.array(sorted({tensor_id for tensor_id in id_by_name.values() if tensor_id is not None}), np.int64)


def _resolve_kind_dtype(kind: str, options: ReadOptions) -> str | UnsupportedArrayError:
    """Return the dtype for tensors of a type, or the error why they are unsupported."""
    if kind not in _NUMPY_TYPE_BY_KIND:
        return UnsupportedArrayError(f"type {kind} is not one that frames hold (F16, BF16, F32, F8_E4M3, F8_E5M2)")
    if not (options.dtype or options.fallback_dtypes) and kind not in _DTYPE_BY_KIND:
        return UntypedArrayError(f"type {kind} needs a dtype to be taken as (--dtype)")
    try:
        check_declared_dtype(_DTYPE_BY_KIND.get(kind), options, "")
        if kind in _FLOAT8_NAME_BY_KIND:
            return FLOAT8_FRAME_DTYPE
        return resolve_dtype_name(np.dtype(_NUMPY_TYPE_BY_KIND[kind]), options, "")
    except UnsupportedArrayError as exc:
        return type(exc)(str(exc).removeprefix(": "))


def _find_supported_tensors(
    tensors: TensorIndex, dtype_by_kind: dict[str, str | UnsupportedArrayError], code_counts: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """Return for each tensor whether `_make_tensor_array` supports it."""
    itemsizes = [
        0 if isinstance(dtype, Exception) else dtypes.parse_dtype(dtype).itemsize for dtype in dtype_by_kind.values()
    ]
    nbytes = tensors.ends - tensors.begins
    itemsize = np.array([itemsize or 1 for itemsize in itemsizes], np.uint8)[tensors.kind_codes]
    is_known_kind = np.array([itemsize > 0 for itemsize in itemsizes], np.bool_)[tensors.kind_codes]
    is_supported: npt.NDArray[np.bool_] = is_known_kind & (nbytes > 0) & ((nbytes % itemsize == 0) | (code_counts > 0))
    return is_supported


def _make_tensor_array(
    file: MappedFile,
    header: SafetensorsHeader,
    dtype_by_kind: dict[str, str | UnsupportedArrayError],
    options: ReadOptions,
    tensor_id: int,
) -> LazyArray:
    tensor = header.tensors[tensor_id]
    label = f"{file.label}: tensor {tensor.name!r}"
    dtype = dtype_by_kind[tensor.kind]
    if isinstance(dtype, UnsupportedArrayError):
        raise type(dtype)(f"{label}: {dtype}")
    array = LazyArray(
        name=tensor.name,
        dtype=dtype,
        shape=tensor.shape,
        array_dtype=_NUMPY_TYPE_BY_KIND[tensor.kind],
        element=_FLOAT8_NAME_BY_KIND.get(tensor.kind, ""),
        reader=partial(file.iter_chunks, header.data_start + tensor.begin, tensor.end - tensor.begin),
    )
    return validate_array(array, label, options)


def _explain_unsupported(make_array: Callable[[int], LazyArray], tensor_id: int) -> str:
    try:
        make_array(tensor_id)
    except UnsupportedArrayError as exc:
        return str(exc)
    raise AssertionError(f"tensor {tensor_id} can be taken")


def build_header(arrays: Sequence[ArrayInfo], metadata: dict[str, str]) -> tuple[bytes, dict[str, int]]:
    """Return the header of a file with `arrays`, and the offset in the file at which the data of each begins.

    Arrays with wider words come first, so that every tensor is aligned.
    """
    header: dict[str, Any] = {METADATA_ENTRY: metadata} if metadata else {}
    begins: dict[str, int] = {}
    position = 0
    for array in sorted(arrays, key=lambda a: -a.itemsize):
        header[array.name] = {
            "dtype": _choose_kind(array),
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        begins[array.name] = position
        position += array.nbytes
    header_text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    header_text += b" " * (-len(header_text) % 8)
    start = 8 + len(header_text)
    return len(header_text).to_bytes(8, "little") + header_text, {name: start + begin for name, begin in begins.items()}


def _choose_kind(array: ArrayInfo) -> str:
    if array.order == "F":
        raise OutputError(f"array {array.name!r} is in Fortran order, which .safetensors cannot hold: use .npy or .npz")
    if array.name == METADATA_ENTRY:
        raise OutputError(f"an array named {METADATA_ENTRY!r} cannot be stored in .safetensors: use .npy or .npz")
    if array.itemsize == array.coded_itemsize == 2 and array.dtype == "bf16" and array.array_dtype[1] in "uV":
        return "BF16"
    if array.itemsize == 1 and array.element:
        return _KIND_BY_FLOAT8_NAME[array.element]
    kind = {"f": "F", "i": "I", "u": "U", "V": "U"}[array.array_dtype[1]]
    return f"{kind}{8 * array.itemsize}"


def write_safetensors(
    sink: SeekableSink, arrays: Sequence[ArrayInfo], chunks: ArrayChunks, metadata: dict[str, str]
) -> None:
    """Write all arrays as tensors; big-endian ones become little-endian, the only order of the format."""
    header, data_offsets = build_header(arrays, metadata)
    sink.write(header)
    for index, data, is_first in mark_first_chunks(chunks):
        if is_first:
            sink.seek(data_offsets[arrays[index].name])
        sink.write(data.data)
        del data


def _has_header(head: FileHead) -> bool:
    """Return whether a stream is named so or begins with a header; files were already matched by name."""
    if head.file is None or head.suffix == ".safetensors":
        return True
    return head.data[8:10] in (b'{"', b"{}") and int.from_bytes(head.data[:8], "little") <= MAX_HEADER_BYTES


SAFETENSORS = FileFormat(
    name="safetensors",
    extensions=(".safetensors",),
    check=_has_header,
    read_file=read,
    write=write_safetensors,
    is_multi_array=True,
)
