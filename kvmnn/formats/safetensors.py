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
from ..arrays.lazy_arrays import Lazily, LazyArrays
from ..arrays.named_array import ArrayInfo, NamedArray, UnsupportedArrayError, UntypedArrayError
from ..arrays.source import Source
from ..dtypes import FLOAT8_NAMES
from ..errors import OutputError, SourceError
from ..files.mapped import MappedFile
from .options import ReadOptions
from .reading import FLOAT8_WORDS, check_own_type, checked, dtype_name, nothing_taken, some, with_bytes
from .safetensors_header import MAX_HEADER, METADATA, Header, Tensors, read_header
from .sinks import Runs, SeekableSink, beginnings

_NUMPY = {
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
_FLOAT8 = {
    "F8_E4M3": "float8_e4m3fn",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2": "float8_e5m2",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
}
_FLOAT8_KINDS = {name: kind for kind, name in _FLOAT8.items()}
_SELF_SAID = {"F16": "fp16", "BF16": "bf16", "F32": "fp32", **_FLOAT8}


def read(path: str, options: ReadOptions) -> Source:
    """Every tensor, in the order of its data, and the file's ``__metadata__``.

    F16, BF16 and F32 are taken as they are, float8 types as numbers or codes (`ReadOptions.codes`). I16, U16, I32, U32
    and U8 are plain words or bytes and are taken when `options.dtype` says as what; all other types are unsupported. An
    array is made when it is asked for: a file may have a million.
    """
    return read_mapped(MappedFile(path, max_bytes=options.max_bytes), options)


def is_safetensors(head: bytes) -> bool:
    """Whether a file that begins with `head` has a header as such files have it."""
    return head[8:10] in (b'{"', b"{}") and int.from_bytes(head[:8], "little") <= MAX_HEADER


def read_mapped(file: MappedFile, options: ReadOptions) -> Source:
    """The same of an open file."""
    header = read_header(file)
    of_bytes = with_bytes(options, header.metadata)
    dtypes_found = {kind: _dtype_of(kind, of_bytes if kind == "U8" else options) for kind in header.tensors.kinds}
    make = partial(_array, file, header, dtypes_found, options)
    wanted = _wanted(file.label, header.tensors, options)
    words = _code_counts(header.tensors, options)
    fine = _held_by_frames(header.tensors, dtypes_found, words)[wanted]
    taken, left_out = wanted[fine], wanted[~fine]
    if left_out.size and (options.tensors or not options.skip_unsupported):
        make(int(left_out[0]))
    if not taken.size:
        raise nothing_taken(file.label, [_why_not(make, int(number)) for number in left_out[:1]])
    nbytes = int((header.tensors.ends[taken] - header.tensors.begins[taken] + 3 * words[taken]).sum())
    elements = _elements(header.tensors, taken[words[taken] > 0], options)
    arrays = LazyArrays(taken, make, header.tensors.names, header.tensors.find, nbytes, elements)
    return Source(arrays, header.metadata, Lazily(left_out, partial(_why_not, make)))


def _code_counts(tensors: Tensors, options: ReadOptions) -> npt.NDArray[np.int64]:
    """For each tensor how many codes become numbers: none where codes are wanted."""
    counts = np.zeros(len(tensors), np.int64)
    if options.codes:
        return counts
    for code, kind in enumerate(tensors.kinds):
        if kind in _FLOAT8 or (kind == "U8" and options.dtype in FLOAT8_NAMES):
            those = tensors.codes == code
            counts[those] = (tensors.ends - tensors.begins)[those]
    return counts


def _elements(tensors: Tensors, decoded: npt.NDArray[np.int64], options: ReadOptions) -> tuple[str, ...]:
    """Types of the codes that become numbers."""
    kinds = [tensors.kinds[code] for code in np.unique(tensors.codes[decoded])]
    return tuple(_FLOAT8.get(kind, options.dtype or "") for kind in kinds)


def _wanted(path: str, tensors: Tensors, options: ReadOptions) -> npt.NDArray[np.int64]:
    """The numbers of the tensors that `options` ask for."""
    if not options.tensors:
        return np.arange(len(tensors))
    found = {name: tensors.find(name) for name in options.tensors}
    for name, number in found.items():
        if number is None:
            raise SourceError(f"{path}: no array named {name!r}; it has {some(map(tensors.name, range(len(tensors))))}")
    return np.array(sorted({number for number in found.values() if number is not None}), np.int64)


def _dtype_of(kind: str, options: ReadOptions) -> str | UnsupportedArrayError:
    """What tensors of a type are taken as, or why they are not."""
    if kind not in _NUMPY:
        return UnsupportedArrayError(f"type {kind} is not one that frames hold (F16, BF16, F32, F8_E4M3, F8_E5M2)")
    if not (options.dtype or options.fallbacks) and kind not in _SELF_SAID:
        return UntypedArrayError(f"type {kind} needs a dtype to be taken as (--dtype)")
    try:
        check_own_type(_SELF_SAID.get(kind), options, "")
        if kind in _FLOAT8:
            return FLOAT8_WORDS
        return dtype_name(np.dtype(_NUMPY[kind]), options, "")
    except UnsupportedArrayError as exc:
        return type(exc)(str(exc).removeprefix(": "))


def _held_by_frames(
    tensors: Tensors, found: dict[str, str | UnsupportedArrayError], decoded: npt.NDArray[np.int64]
) -> npt.NDArray[np.bool_]:
    """For each tensor whether `_array` makes one of it."""
    words = [0 if isinstance(dtype, Exception) else dtypes.by_name(dtype).itemsize for dtype in found.values()]
    nbytes = tensors.ends - tensors.begins
    word = np.array([word or 1 for word in words], np.uint8)[tensors.codes]
    known = np.array([word > 0 for word in words], np.bool_)[tensors.codes]
    fine: npt.NDArray[np.bool_] = known & (nbytes > 0) & ((nbytes % word == 0) | (decoded > 0))
    return fine


def _array(
    file: MappedFile,
    header: Header,
    found: dict[str, str | UnsupportedArrayError],
    options: ReadOptions,
    number: int,
) -> NamedArray:
    tensor = header.tensors[number]
    where = f"{file.label}: tensor {tensor.name!r}"
    dtype = found[tensor.kind]
    if isinstance(dtype, UnsupportedArrayError):
        raise type(dtype)(f"{where}: {dtype}")
    array = NamedArray(
        name=tensor.name,
        dtype=dtype,
        shape=tensor.shape,
        array_dtype=_NUMPY[tensor.kind],
        element=_FLOAT8.get(tensor.kind, ""),
        reader=partial(file.runs, header.start + tensor.begin, tensor.end - tensor.begin),
    )
    return checked(array, where, options)


def _why_not(make: Callable[[int], NamedArray], number: int) -> str:
    try:
        make(number)
    except UnsupportedArrayError as exc:
        return str(exc)
    raise AssertionError(f"tensor {number} can be taken")


def layout(arrays: Sequence[ArrayInfo], metadata: dict[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header of a file that holds `arrays`, and the position in the file (bytes) at which each one's data begins.

    Arrays with wider words come first, so that every tensor is aligned.

    Raises
    ------
    OutputError
        For what the format cannot express: Fortran order, a tensor named ``__metadata__``.
    """
    header: dict[str, Any] = {METADATA: metadata} if metadata else {}
    begins: dict[str, int] = {}
    position = 0
    for array in sorted(arrays, key=lambda a: -a.itemsize):
        header[array.name] = {
            "dtype": _kind(array),
            "shape": list(array.shape),
            "data_offsets": [position, position + array.nbytes],
        }
        begins[array.name] = position
        position += array.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    start = 8 + len(text)
    return len(text).to_bytes(8, "little") + text, {name: start + begin for name, begin in begins.items()}


def _kind(array: ArrayInfo) -> str:
    if array.order == "F":
        raise OutputError(f"array {array.name!r} is in Fortran order, which .safetensors cannot hold: use .npy or .npz")
    if array.name == METADATA:
        raise OutputError(f"an array named {METADATA!r} cannot be stored in .safetensors: use .npy or .npz")
    if array.itemsize == array.word_bytes == 2 and array.dtype == "bf16" and array.array_dtype[1] in "uV":
        return "BF16"
    if array.itemsize == 1 and array.element:
        return _FLOAT8_KINDS[array.element]
    kind = {"f": "F", "i": "I", "u": "U", "V": "U"}[array.array_dtype[1]]
    return f"{kind}{8 * array.itemsize}"


def write_safetensors(sink: SeekableSink, arrays: Sequence[ArrayInfo], runs: Runs, metadata: dict[str, str]) -> None:
    """All arrays as tensors; big-endian ones become little-endian, the only order the format has."""
    header, begins_at = layout(arrays, metadata)
    sink.write(header)
    for index, data, begins in beginnings(runs):
        if begins:
            sink.seek(begins_at[arrays[index].name])
        sink.write(data.data)
        del data
