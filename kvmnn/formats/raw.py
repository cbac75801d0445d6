"""Raw little-endian words of a file or standard input; the dtype comes from the caller or a page's name.

LMCache stores pages on disk under the name ``model@world@worker@hash@dtype``, with another ``@`` and the layer if
layers are separate, and a suffix: ``.pt`` of its local disk (not a torch file), or ``.data`` of its file system.
SGLang's pages (``.bin``) record neither type nor shape. The shapes are those in memory: ``2,layer,token,hidden``, and
``2,layer,page,head,dim`` of SGLang, see `kvmnn.arrays.AxisSpec`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import PurePath

from .. import dtypes
from .._util.named_tuple import NamedTuple
from ..arrays.array import ArrayInfo, Chunk, LazyArray, byteswap
from ..arrays.naming import array_name_from_path
from ..arrays.source import Source
from ..dtypes import FLOAT8_NAMES
from ..errors import MissingOptionError, SourceError
from ..files.mapped_file import HEAD_BYTES, STDIN, MappedFile
from .base import ArrayChunks, Sink
from .detection_errors import UNKNOWN_FILE, explain_unknown_file
from .options import ReadOptions
from .tensor_selection import FLOAT8_FRAME_DTYPE, check_declared_dtype, validate_array

_DTYPE_BY_TYPE_NAME = {
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float": "fp32",
    "float32": "fp32",
    **{name: name for name in FLOAT8_NAMES},
    "uint8": "",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e4m3fn": "float8_e4m3fn",
    "fp8_e4m3fnuz": "float8_e4m3fnuz",
    "fp8_e5m2": "float8_e5m2",
    "fp8_e5m2fnuz": "float8_e5m2fnuz",
}
_FAMILY = len("float8_e4m3")
"""Number of letters that variants of a float8 type share."""
_MIN_SEPARATORS = 4
"""Number of ``@`` in a name without a layer."""


class PageInfo(NamedTuple):
    """Contents of the name of a page file."""

    #: Dtype of the words, or float8 type of codes; empty for bytes of unknown type.
    dtype: str
    #: Layer number; None if the page contains all layers.
    layer: int | None
    #: False for an engine's own type name (``fp8_e4m3``), which means another variant on AMD GPUs.
    is_exact: bool = True

    def can_be(self, dtype: str | None) -> bool:
        """Return whether a page of this name may contain words of `dtype`."""
        if dtype is None or self.dtype in ("", dtype):
            return True
        return not self.is_exact and dtype[:_FAMILY] == self.dtype[:_FAMILY]


def parse_page_name(path: str) -> PageInfo | None:
    """Parse the name of a page file; None for all other names, and for types that frames do not support."""
    name = PurePath(path).name
    for suffix in (".pt", ".data"):
        name = name.removesuffix(suffix)
    fields = name.split("@")
    if (
        len(fields) > _MIN_SEPARATORS + 1
        and fields[-2] in _DTYPE_BY_TYPE_NAME
        and fields[-1].isascii()
        and fields[-1].isdecimal()
    ):
        return PageInfo(_DTYPE_BY_TYPE_NAME[fields[-2]], int(fields[-1][:9]), not fields[-2].startswith("fp8"))
    if len(fields) > _MIN_SEPARATORS and fields[-1] in _DTYPE_BY_TYPE_NAME:
        return PageInfo(_DTYPE_BY_TYPE_NAME[fields[-1]], None, not fields[-1].startswith("fp8"))
    return None


def read(file: MappedFile, options: ReadOptions) -> Source:
    """Read all words of the file as one 1-D array."""
    page = parse_page_name(file.path)
    if page is not None and not page.can_be(options.dtype):
        check_declared_dtype(page.dtype, options, file.label)
    dtype_names = [options.dtype] if options.dtype else [page.dtype] if page and page.dtype else options.fallback_dtypes
    if not dtype_names:
        explanation = explain_unknown_file(file.path, file.read_head(HEAD_BYTES))
        error_type = MissingOptionError if explanation == UNKNOWN_FILE else SourceError
        raise error_type(
            f"{file.label}: {explanation}; raw bytes need a dtype (--dtype fp16, bf16 or fp32); float8_e4m3fn and the "
            "like are for codes of one byte"
        )
    element = dtype_names[0] if dtype_names[0] in FLOAT8_NAMES else ""
    dtype = dtypes.parse_dtype(FLOAT8_FRAME_DTYPE if element else dtype_names[0])
    if file.size == 0:
        raise SourceError(f"{file.label}: is empty, there is nothing to encode")
    if file.size % dtype.itemsize and not element:
        raise SourceError(
            f"{file.label}: {file.size} bytes are not a whole number of {dtype.itemsize}-byte {dtype.name} words"
        )
    array = LazyArray(
        name="stdin" if file.path == STDIN else _choose_array_name(file.path, page),
        dtype=dtype.name,
        shape=(file.size if element else file.size // dtype.itemsize,),
        array_dtype="|u1" if element else dtype.numpy_dtype.str,
        element=element,
        reader=partial(file.iter_chunks, 0, file.size),
    )
    return Source([validate_array(array, file.label, options)])


def _choose_array_name(path: str, page: PageInfo | None) -> str:
    return array_name_from_path(path) if page is None or page.layer is None else f"layer_{page.layer}"


def write_raw(sink: Sink, arrays: Sequence[ArrayInfo], chunks: ArrayChunks, metadata: dict[str, str]) -> None:
    """Write the bytes of the arrays without any header, in memory order and in each array's own byte order."""
    for index, data in chunks:
        sink.write(convert_to_declared_byte_order(arrays[index], data).data)
        del data  # or it would live on while the next run is decoded


def convert_to_declared_byte_order(array: ArrayInfo, data: Chunk) -> Chunk:
    """Convert little-endian words of an array to the byte order that the array declares."""
    return byteswap(data, array.itemsize) if array.is_big_endian else data
