"""The three element types of a KV cache, how arrays map to them, and names for types of arrays.

A frame stores words of two or four bytes and never looks at their meaning; the names below exist for people and
manifests. bf16 has no numpy type of its own, so it travels as ``uint16`` words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .errors import ArrayTypeError, KvmnnError

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[Any]
"""K or V, or any array of fp16, bf16 or fp32 words."""
Floats = npt.NDArray[np.float32]
Indices = npt.NDArray[np.int64]
Positions = npt.NDArray[np.int64]
"""Where tokens stand in their text."""
KVPair = tuple[Words, Words]
"""Keys and values of the same tokens."""

Part = Literal["key", "value"]
"""K or V."""
PARTS: tuple[Part, Part] = ("key", "value")
PART_LETTERS: dict[Part, str] = {"key": "k", "value": "v"}
"""In names of files and columns."""


@dataclass(frozen=True)
class DType:
    """An element type: its name, its word size in bytes and the numpy type that holds its words."""

    name: str
    itemsize: int
    numpy: np.dtype


FP16 = DType("fp16", 2, np.dtype("<f2"))
BF16 = DType("bf16", 2, np.dtype("<u2"))
FP32 = DType("fp32", 4, np.dtype("<f4"))

BY_NAME: dict[str, DType] = {d.name: d for d in (FP16, BF16, FP32)}

_ARRAY_KINDS = "fiuV"


def by_name(name: str) -> DType:
    """The `DType` called `name`; `KvmnnError` for any other name, `TypeError` for anything but a string."""
    if not isinstance(name, str):
        raise TypeError(f"dtype must be a string ({', '.join(BY_NAME)}), not {type(name).__name__}")
    try:
        return BY_NAME[name]
    except KeyError:
        raise KvmnnError(f"unknown dtype {name!r}: expected one of {', '.join(BY_NAME)}") from None


def of_array(array: npt.NDArray[Any]) -> DType:
    """The `DType` an array stands for when nobody says: float16, float32, or 16-bit words for bf16.

    Raises
    ------
    ArrayTypeError
        For every other numpy type, uint8 included: raw bytes need a dtype from the caller. It is a `TypeError`.
    """
    dt = array.dtype
    if dt.kind == "f" and dt.itemsize == 2:
        return FP16
    if dt.kind == "f" and dt.itemsize == 4:
        return FP32
    if dt.kind in "uV" and dt.itemsize == 2:
        return BF16
    raise ArrayTypeError(
        f"cannot infer a dtype from numpy type {dt}: expected float16, float32 or uint16 (bf16); "
        "for other words of that size say dtype='fp16', 'bf16' or 'fp32'"
    )


def check_array(array: npt.NDArray[Any], dtype: DType) -> None:
    """Raise `TypeError` unless `array` may be taken as words of `dtype`: kind f, i, u or V of the same word size."""
    dt = array.dtype
    if dt.kind not in _ARRAY_KINDS or dt.hasobject:
        raise TypeError(f"numpy type {dt} holds no {dtype.name} words: expected kind f, i, u or V")
    if dt.itemsize != dtype.itemsize:
        raise TypeError(f"numpy type {dt} has {dt.itemsize}-byte words, {dtype.name} has {dtype.itemsize}-byte words")
