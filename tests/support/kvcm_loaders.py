"""What the runtime's two loaders accept, as a model; checked against the verdicts recorded from the loaders."""

from __future__ import annotations

import struct

_ADDRESS_SPACE = 3 << 30


def src_accepts(data: bytes) -> bool:
    """The loader in src/cache_manager."""
    return _walk(data, strict=True)


def csrc_accepts(data: bytes) -> bool:
    """The loader in csrc/cache: checks less, and asks for memory before it knows that there is data."""
    return _walk(data, strict=False)


def _walk(data: bytes, *, strict: bool) -> bool:
    if len(data) < 44:
        return False
    magic, version, dtype, _, layers, _, _, _, _, _, count, metadata = struct.unpack_from("<IIHHIIIIIIII", data)
    if magic != 0x4B56434D or version != 1 or not layers or not count:
        return False
    if strict and (layers > 10_000 or count > 4_096 or dtype > 2):
        return False
    word = 4 if dtype == 2 else 2
    position = 44 + metadata
    for _ in range(layers * count):
        if position + 12 > len(data):
            return False
        rows, cols, has_bias = struct.unpack_from("<III", data, position)
        elements = rows * cols
        if not elements or (strict and elements > 100_000_000) or elements * word > _ADDRESS_SPACE:
            return False
        position += 12 + word * (elements + (rows if has_bias else 0))
        if position > len(data):
            return False
    return True
