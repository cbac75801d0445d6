"""Pages that LMCache keeps on disk: raw words, whose type and layer are in the file's name.

The name is ``model@world@worker@hash@dtype``, with a layer behind another ``@`` where layers lie apart, and a suffix:
``.pt`` of its local disk, which is no file of torch's, or ``.data`` of its file system. SGLang's pages (``.bin``) say
neither type nor shape. The shapes are those of memory: ``2,layer,token,hidden``, and ``2,layer,page,head,dim`` of
SGLang, which `kvmnn.arrays.Laid` takes.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import NamedTuple

from ..dtypes import FLOAT8_NAMES

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
"""Letters that variants of a float8 type share."""
_MIN_SEPARATORS = 4
"""Signs between the fields of a name without a layer."""


class PageInfo(NamedTuple):
    """What a name says."""

    #: Of the words, or a float8 type of codes; empty for bytes, of which the name tells no more.
    dtype: str
    #: None where the page holds all layers.
    layer: int | None
    #: False where the name is an engine's own word (``fp8_e4m3``), which is another variant on AMD's processors.
    is_exact: bool = True

    def can_be(self, dtype: str | None) -> bool:
        """Whether a page of this name may hold `dtype`."""
        if dtype is None or self.dtype in ("", dtype):
            return True
        return not self.is_exact and dtype[:_FAMILY] == self.dtype[:_FAMILY]


def parse_page_name(path: str) -> PageInfo | None:
    """What the name of a page says; None for all other names, and for types that no frame holds."""
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
