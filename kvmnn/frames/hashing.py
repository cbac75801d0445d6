"""The engine's 64-bit hash."""

from __future__ import annotations

from typing import Any

from ..errors import KvmnnError
from . import _hashing
from .words import raw_bytes_of


def fnv1a64(data: Any, seed: int = _hashing.SEED) -> int:
    """The engine's 64-bit hash of bytes (bytes-like, or an array's bytes in C order).

    FNV-1a's steps from the engine's own start value, which is *not* the standard basis (docs/format.md, "Hash"). Pass
    the hash of one piece as `seed` of the next to hash their concatenation.
    """
    if not 0 <= seed < 1 << 64:
        raise KvmnnError(f"seed {seed}: expected an unsigned 64-bit number")
    return _hashing.fnv1a64(raw_bytes_of(data, "data"), seed)
