"""The three element types of a KV cache, their numpy types, and names of other array types.

A frame stores words of two or four bytes and does not interpret them; the names exist for users and manifests. bf16 has
no numpy type, so its arrays are ``uint16`` words.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .errors import ArrayTypeError, KvmnnError

Bytes = npt.NDArray[np.uint8]
Elements = npt.NDArray[Any]
"""K or V, or any array of fp16, bf16 or fp32 words."""
Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int64]
"""Positions of tokens in their text."""
KVPair = tuple[Elements, Elements]
"""Keys and values of the same tokens."""

Part = Literal["key", "value"]
"""K or V."""
PARTS: tuple[Part, Part] = ("key", "value")
PART_LETTERS: dict[Part, str] = {"key": "k", "value": "v"}
"""Letters of K and V in names of files and columns."""


@dataclass(frozen=True)
class DType:
    """An element type: its name, its word size in bytes and its numpy type."""

    name: str
    itemsize: int
    numpy_dtype: np.dtype


FP16 = DType("fp16", 2, np.dtype("<f2"))
BF16 = DType("bf16", 2, np.dtype("<u2"))
FP32 = DType("fp32", 4, np.dtype("<f4"))

DTYPES: dict[str, DType] = {d.name: d for d in (FP16, BF16, FP32)}

FLOAT8_NAMES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
"""Types of one-byte codes: frames contain the codes, arrays the float32 values (`kvmnn.arrays.float8`)."""

_ARRAY_KINDS = "fiuV"


_ITEMSIZES_BY_KIND = {"b": (1,), "c": (8, 16), "f": (2, 4, 8), "i": (1, 2, 4, 8), "u": (1, 2, 4, 8)}
_TYPE_STRINGS_BY_NAME = {
    np.dtype(f"{kind}{size}").name: f"{kind}{size}" for kind, sizes in _ITEMSIZES_BY_KIND.items() for size in sizes
}  # as Zarr version 2 documents of other writers may have them
_TYPE_STRING_REGEX = re.compile(r"([<>=|]?)([bcfiuV])([1-9][0-9]{0,3})")


def parse_numpy_type(descr: object) -> np.dtype[Any]:
    """Return the numpy type for a type name in a file; the only way from foreign text to ``numpy.dtype``.

    numpy itself must never parse such text: ``M8[s/0]`` ends the process by SIGFPE, and other strings raise anything.
    """
    if isinstance(descr, list | tuple):
        raise ArrayTypeError("has a structured type, which no frame holds")
    text = _TYPE_STRINGS_BY_NAME.get(descr, descr) if isinstance(descr, str) else ""
    match = _TYPE_STRING_REGEX.fullmatch(text)
    if match is not None and (match[2] == "V" or int(match[3]) in _ITEMSIZES_BY_KIND[match[2]]):
        return np.dtype(text)
    if isinstance(descr, str) and descr.lstrip("|<>=") in ("O", "O4", "O8", "object"):
        raise ArrayTypeError("holds Python objects (pickles), which are never loaded")
    type_text = f"{descr!r:.40}" if isinstance(descr, str) else f"of a {type(descr).__name__}"
    raise ArrayTypeError(f"numpy type {type_text} is none that frames hold: expected float16, float32 or uint16 (bf16)")


def parse_dtype(name: str) -> DType:
    """Return the `DType` called `name`; `KvmnnError` for any other name, `TypeError` for anything but a string."""
    if not isinstance(name, str):
        raise TypeError(f"dtype must be a string ({', '.join(DTYPES)}), not {type(name).__name__}")
    try:
        return DTYPES[name]
    except KeyError:
        if name in FLOAT8_NAMES:
            raise KvmnnError(
                f"dtype {name} is for bytes of files and arrays: expected {', '.join(DTYPES)} here"
            ) from None
        raise KvmnnError(f"unknown dtype {name!r}: expected one of {', '.join(DTYPES)}") from None


def infer_dtype(array: npt.NDArray[Any]) -> DType:
    """Return the `DType` of an array by its numpy type: float16, float32, or 16-bit words as bf16."""
    numpy_dtype = array.dtype
    if numpy_dtype.kind == "f" and numpy_dtype.itemsize == 2:
        return FP16
    if numpy_dtype.kind == "f" and numpy_dtype.itemsize == 4:
        return FP32
    if numpy_dtype.kind in "uV" and numpy_dtype.itemsize == 2:
        return BF16
    raise ArrayTypeError(
        f"cannot infer a dtype from numpy type {numpy_dtype}: expected float16, float32 or uint16 (bf16); "
        "for other words of that size say dtype='fp16', 'bf16' or 'fp32'"
    )


def check_array_dtype(array: npt.NDArray[Any], dtype: DType) -> None:
    """Raise `TypeError` unless `array` may be taken as words of `dtype`: kind f, i, u or V of the same word size."""
    numpy_dtype = array.dtype
    if numpy_dtype.kind not in _ARRAY_KINDS or numpy_dtype.hasobject:
        raise TypeError(f"numpy type {numpy_dtype} holds no {dtype.name} words: expected kind f, i, u or V")
    if numpy_dtype.itemsize != dtype.itemsize:
        raise TypeError(
            f"numpy type {numpy_dtype} has {numpy_dtype.itemsize}-byte words, {dtype.name} has {dtype.itemsize}-byte "
            f"words"
        )
