"""Pages that LMCache keeps on disk: raw words, whose type and layer are in the file's name.

The name is ``model@world@worker@hash@dtype``, with a layer behind another ``@`` where layers lie apart, and a suffix:
``.pt`` of its local disk, which is no file of torch's, or ``.data`` of its file system. SGLang's pages (``.bin``) say
neither type nor shape. The shapes are those of memory: ``2,layer,token,hidden``, and ``2,layer,page,head,dim`` of
SGLang, which `kvmnn.arrays.Laid` takes.
"""

from __future__ import annotations

from pathlib import PurePath
from typing import NamedTuple

_TYPES = {
    "half": "fp16",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float": "fp32",
    "float32": "fp32",
}
_MARKS = 4
"""Signs between the fields of a name without a layer."""


class Page(NamedTuple):
    """What a name says.

    Parameters
    ----------
    dtype
        Of the words.
    layer
        None where the page holds all layers.
    """

    dtype: str
    layer: int | None


def page_in(path: str) -> Page | None:
    """What the name of a page says; None for all other names, and for types that no frame holds."""
    name = PurePath(path).name
    for suffix in (".pt", ".data"):
        name = name.removesuffix(suffix)
    fields = name.split("@")
    if len(fields) > _MARKS + 1 and fields[-2] in _TYPES and fields[-1].isascii() and fields[-1].isdecimal():
        return Page(_TYPES[fields[-2]], int(fields[-1][:9]))
    if len(fields) > _MARKS and fields[-1] in _TYPES:
        return Page(_TYPES[fields[-1]], None)
    return None
