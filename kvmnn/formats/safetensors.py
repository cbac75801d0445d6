"""``.safetensors`` files, read and written without the safetensors package.

The header is checked as the format demands: at most `MAX_HEADER` bytes, unique names, and offsets that tile the data
without holes or overlaps, so that no byte of a file is left unread.
"""

from __future__ import annotations

import gc
import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..arrays.named_array import ArrayInfo, NamedArray, UnsupportedArrayError
from ..arrays.source import Source
from ..errors import OutputError, SourceError
from ..files.mapped import MappedFile
from .options import ReadOptions
from .reading import checked, dtype_name, select
from .sinks import Runs, SeekableSink, beginnings

MAX_HEADER = 16 << 20
"""Bytes: some 180,000 tensors, which take two seconds and 200 MB to read. The library's own limit is 100 MB."""
_METADATA = "__metadata__"

_NUMPY = {
    "F16": "<f2",
    "BF16": "<u2",
    "F32": "<f4",
    "I16": "<i2",
    "U16": "<u2",
    "I32": "<i4",
    "U32": "<u4",
    "U8": "|u1",
}
_OTHER_BYTES = {
    **dict.fromkeys(("BOOL", "I8", "F8_E4M3", "F8_E5M2", "F8_E4M3FNUZ", "F8_E5M2FNUZ", "F8_E8M0"), 1),
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
}


class Tensor(NamedTuple):
    """An entry of the header: type and shape, and where its bytes lie behind the header."""

    name: str
    kind: str
    shape: tuple[int, ...]
    begin: int
    end: int


def read(path: str, options: ReadOptions) -> Source:
    """Every tensor, in the order of its data, and the file's ``__metadata__``.

    F16, BF16 and F32 are taken as they are. I16, U16, I32, U32 and U8 are plain words or bytes and are taken when
    `options.dtype` says as what; all other types are unsupported.
    """
    file = MappedFile(path, max_bytes=options.max_bytes)
    tensors, metadata, start = read_header(file)
    entries = [(t.name, partial(_array, file, t, start, options)) for t in tensors]
    arrays, skipped = select(path, entries, options)
    return Source(arrays, metadata, skipped)


def _array(file: MappedFile, tensor: Tensor, start: int, options: ReadOptions) -> NamedArray:
    where = f"{file.path}: tensor {tensor.name!r}"
    if tensor.kind not in _NUMPY:
        raise UnsupportedArrayError(f"{where}: type {tensor.kind} is not one that frames hold (F16, BF16, F32)")
    if not (options.dtype or options.fallbacks) and tensor.kind not in ("F16", "BF16", "F32"):
        raise UnsupportedArrayError(f"{where}: type {tensor.kind} needs a dtype to be taken as (--dtype)")
    array = NamedArray(
        name=tensor.name,
        dtype=dtype_name(np.dtype(_NUMPY[tensor.kind]), options, where),
        shape=tensor.shape,
        array_dtype=_NUMPY[tensor.kind],
        reader=partial(file.runs, start + tensor.begin, tensor.end - tensor.begin),
    )
    return checked(array, where)


def read_header(file: MappedFile) -> tuple[list[Tensor], dict[str, str], int]:
    """The tensors in the order of their data, the metadata, and where the data begins (bytes); all checked."""
    where = file.label
    if file.size < 8:
        raise SourceError(f"{where}: {file.size} bytes are too few for a .safetensors file")
    length = int.from_bytes(file.head(8), "little")
    if length > MAX_HEADER:
        raise SourceError(f"{where}: a header of {length} bytes is above the limit of {MAX_HEADER}")
    if 8 + length > file.size:
        raise SourceError(f"{where}: is truncated: the header needs {length} bytes, the file has {file.size - 8}")
    try:
        with _no_collections():
            found = json.loads(bytes(file.view(8, length)), object_pairs_hook=tuple)
            if not isinstance(found, tuple):
                raise SourceError(f"{where}: the header is not a JSON object")
            header = _object(found)
            del found
            metadata = header.pop(_METADATA, ())
            metadata = _object(metadata) if isinstance(metadata, tuple) else {"": None}
            tensors = sorted((_tensor(where, n, v) for n, v in header.items()), key=lambda t: (t.begin, t.end))
    except SourceError:
        raise
    except (ValueError, RecursionError) as exc:
        raise SourceError(f"{where}: the header is not valid JSON: {str(exc)[:200]}") from None
    if not all(isinstance(v, str) for v in metadata.values()):
        raise SourceError(f"{where}: {_METADATA} is not an object of strings")
    _check_tiling(where, tensors, file.size - 8 - length)
    return tensors, metadata, 8 + length


@contextmanager
def _no_collections() -> Iterator[None]:
    """Garbage is not looked for while very many objects are made, none of which is any: it would take half the time."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _object(pairs: tuple[tuple[str, Any], ...]) -> dict[str, Any]:
    """A JSON object from the pairs that stand in it; to have the parser call this for each takes twice as long."""
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name appears twice")
    return found


def _tensor(where: str, name: str, pairs: Any) -> Tensor:
    value = _object(pairs) if isinstance(pairs, tuple) else {}

    def naturals(key: str) -> list[int]:
        found = value.get(key)
        if not isinstance(found, list) or not all(type(n) is int and n >= 0 for n in found) or len(found) > 64:
            raise SourceError(f"{where}: tensor {name!r}: {key} is not a list of non-negative integers")
        return found

    shape, offsets = naturals("shape"), naturals("data_offsets")
    kind = value.get("dtype")
    if not isinstance(kind, str) or len(offsets) != 2 or offsets[1] < offsets[0]:
        raise SourceError(f"{where}: tensor {name!r}: bad dtype or data_offsets")
    itemsize = _OTHER_BYTES.get(kind) or int(_NUMPY.get(kind, "  0")[2:])
    if itemsize and math.prod(shape) * itemsize != offsets[1] - offsets[0]:
        raise SourceError(
            f"{where}: tensor {name!r}: shape {shape} of {kind} needs {math.prod(shape) * itemsize} bytes, "
            f"its data_offsets give {offsets[1] - offsets[0]}"
        )
    return Tensor(name, kind, tuple(shape), offsets[0], offsets[1])


def _check_tiling(where: str, tensors: Sequence[Tensor], data_bytes: int) -> None:
    position = 0
    for tensor in tensors:
        if tensor.begin != position:
            raise SourceError(
                f"{where}: tensor {tensor.name!r} begins at {tensor.begin}, expected {position}: "
                "data must have no holes and no overlaps"
            )
        position = tensor.end
    if position != data_bytes:
        what = "is truncated" if position > data_bytes else "has trailing bytes"
        raise SourceError(f"{where}: {what}: its tensors need {position} bytes of data, it has {data_bytes}")


def layout(arrays: Sequence[ArrayInfo], metadata: dict[str, str]) -> tuple[bytes, dict[str, int]]:
    """The header of a file that holds `arrays`, and the position in the file (bytes) at which each one's data begins.

    Arrays with wider words come first, so that every tensor is aligned.

    Raises
    ------
    OutputError
        For what the format cannot express: Fortran order, a tensor named ``__metadata__``.
    """
    header: dict[str, Any] = {_METADATA: metadata} if metadata else {}
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
    if array.name == _METADATA:
        raise OutputError(f"an array named {_METADATA!r} cannot be stored in .safetensors: use .npy or .npz")
    if array.itemsize == array.word_bytes == 2 and array.dtype == "bf16" and array.array_dtype[1] in "uV":
        return "BF16"
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
