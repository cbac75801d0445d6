"""``.safetensors`` files, read and written without the safetensors package.

The header is read by `safetensors_header`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import dtypes
from ..arrays.lazy_arrays import LazyArrayList, LazySequence
from ..arrays.named_array import ArrayInfo, LazyArray, UnsupportedArrayError, UntypedArrayError
from ..arrays.source import Source
from ..dtypes import FLOAT8_NAMES
from ..errors import OutputError, SourceError
from ..files.mapped import MappedFile
from .options import ReadOptions
from .reading import (
    FLOAT8_FRAME_DTYPE,
    add_byte_fallback,
    check_declared_dtype,
    format_names,
    make_no_tensor_error,
    resolve_dtype_name,
    validate_array,
)
from .safetensors_header import MAX_HEADER_BYTES, METADATA_ENTRY, SafetensorsHeader, TensorIndex, read_header
from .sinks import ArrayChunks, SeekableSink, mark_first_chunks

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


def read(path: str, options: ReadOptions) -> Source:
    """Every tensor, in the order of its data, and the file's ``__metadata__``.

    F16, BF16 and F32 are taken as they are, float8 types as numbers or codes (`ReadOptions.codes`). I16, U16, I32, U32
    and U8 are plain words or bytes and are taken when `options.dtype` says as what; all other types are unsupported. An
    array is made when it is asked for: a file may have a million.
    """
    return read_mapped(MappedFile(path, max_bytes=options.max_bytes), options)


def is_safetensors(head: bytes) -> bool:
    """Whether a file that begins with `head` has a header as such files have it."""
    return head[8:10] in (b'{"', b"{}") and int.from_bytes(head[:8], "little") <= MAX_HEADER_BYTES


def read_mapped(file: MappedFile, options: ReadOptions) -> Source:
    """The same of an open file."""
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
    nbytes = int(
        (header.tensors.ends[selected_ids] - header.tensors.begins[selected_ids] + 3 * code_counts[selected_ids]).sum()
    )
    code_types = _list_decoded_types(header.tensors, selected_ids[code_counts[selected_ids] > 0], options)
    arrays = LazyArrayList(
        selected_ids, make_array, header.tensors.get_names, header.tensors.find_id, nbytes, code_types
    )
    return Source(arrays, header.metadata, LazySequence(unsupported_ids, partial(_explain_unsupported, make_array)))


def _count_decoded_codes(tensors: TensorIndex, options: ReadOptions) -> npt.NDArray[np.int64]:
    """For each tensor how many codes become numbers: none where codes are wanted."""
    counts = np.zeros(len(tensors), np.int64)
    if options.codes:
        return counts
    for code, kind in enumerate(tensors.kinds):
        if kind in _FLOAT8_NAME_BY_KIND or (kind == "U8" and options.dtype in FLOAT8_NAMES):
            is_of_kind = tensors.kind_codes == code
            counts[is_of_kind] = (tensors.ends - tensors.begins)[is_of_kind]
    return counts


def _list_decoded_types(
    tensors: TensorIndex, decoded_ids: npt.NDArray[np.int64], options: ReadOptions
) -> tuple[str, ...]:
    """Types of the codes that become numbers."""
    kinds = [tensors.kinds[code] for code in np.unique(tensors.kind_codes[decoded_ids])]
    return tuple(_FLOAT8_NAME_BY_KIND.get(kind, options.dtype or "") for kind in kinds)


def _select_tensor_ids(path: str, tensors: TensorIndex, options: ReadOptions) -> npt.NDArray[np.int64]:
    """The numbers of the tensors that `options` ask for."""
    if not options.tensors:
        return np.arange(len(tensors))
    id_by_name = {name: tensors.find_id(name) for name in options.tensors}
    for name, tensor_id in id_by_name.items():
        if tensor_id is None:
            raise SourceError(
                f"{path}: no array named {name!r}; it has {format_names(map(tensors.get_name, range(len(tensors))))}"
            )
    return np.array(sorted({tensor_id for tensor_id in id_by_name.values() if tensor_id is not None}), np.int64)


def _resolve_kind_dtype(kind: str, options: ReadOptions) -> str | UnsupportedArrayError:
    """What tensors of a type are taken as, or why they are not."""
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
    """For each tensor whether `_make_tensor_array` makes one of it."""
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
    """The header of a file that holds `arrays`, and the position in the file (bytes) at which each one's data begins.

    Arrays with wider words come first, so that every tensor is aligned.

    Raises
    ------
    OutputError
        For what the format cannot express: Fortran order, a tensor named ``__metadata__``.
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
    """All arrays as tensors; big-endian ones become little-endian, the only order the format has."""
    header, data_offsets = build_header(arrays, metadata)
    sink.write(header)
    for index, data, is_first in mark_first_chunks(chunks):
        if is_first:
            sink.seek(data_offsets[arrays[index].name])
        sink.write(data.data)
        del data
