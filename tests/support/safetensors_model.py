"""The header of a .safetensors file as Python's JSON parser reads it: what it says, or that it is none."""

from __future__ import annotations

import json
import math
from typing import Any

SIZES = {
    "BOOL": 1, "I8": 1, "U8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E4M3FNUZ": 1, "F8_E5M2FNUZ": 1, "F8_E8M0": 1,
    "F16": 2, "BF16": 2, "I16": 2, "U16": 2, "F32": 4, "I32": 4, "U32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of an element; those of other types are not checked."""
Found = tuple[list[tuple[str, str, tuple[int, ...], int, int]], dict[str, str]]


def header(text: bytes) -> Found | None:
    """Name, type, shape, begin and end of tensors in the order of their data, and the metadata; None for none."""
    try:
        pairs = json.loads(text.decode(), object_pairs_hook=Pairs)
    except (ValueError, RecursionError):
        return None
    entries = unique(pairs)
    if entries is None:
        return None
    metadata = unique(entries.pop("__metadata__", Pairs()))
    if metadata is None or not all(isinstance(value, str) for value in metadata.values()):
        return None
    found = []
    for name, value in entries.items():
        entry = unique(value)
        if entry is None or set(entry) != {"dtype", "shape", "data_offsets"}:
            return None
        kind, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
        if not isinstance(kind, str) or len(kind) > 64 or not naturals(shape) or not naturals(offsets):
            return None
        if len(offsets) != 2 or offsets[1] < offsets[0]:
            return None
        if kind in SIZES and math.prod(shape) * SIZES[kind] != offsets[1] - offsets[0]:
            return None
        found.append((name, kind, tuple(shape), *offsets))
    return sorted(found, key=lambda t: t[3:]), metadata


class Pairs(list[tuple[str, Any]]):
    """A JSON object, names that appear twice and all."""


def unique(pairs: Any) -> dict[str, Any] | None:
    return dict(pairs) if isinstance(pairs, Pairs) and len(dict(pairs)) == len(pairs) else None


def naturals(values: Any) -> bool:
    return (
        isinstance(values, list)
        and not isinstance(values, Pairs)
        and len(values) <= 64
        and all(type(value) is int and 0 <= value < 1 << 63 for value in values)
    )
