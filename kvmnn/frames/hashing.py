"""The engine's 64-bit hash, and a checksum for memory."""

from __future__ import annotations

from typing import Any

from ..dtypes import Bytes
from ..errors import KvmnnError
from . import _hashing
from .words import as_raw_bytes


def fnv1a64(data: Any, seed: int = _hashing.SEED) -> int:
    """The engine's 64-bit hash of bytes (bytes-like, or an array's bytes in C order).

    FNV-1a's steps from the engine's own start value, which is *not* the standard basis (docs/format.md, "Hash"). Pass
    the hash of one piece as `seed` of the next to hash their concatenation.
    """
    if not 0 <= seed < 1 << 64:
        raise KvmnnError(f"seed {seed}: expected an unsigned 64-bit number")
    return _hashing.fnv1a64(as_raw_bytes(data, "data"), seed)


def integrity_checksum(data: Any, seed: int = 0) -> int:
    """64 bits that tell whether bytes are what they were, at the speed of memory.

    A change within one aligned 64-bit word always shows, any other all but always. It does not hold against intent. The
    units of the prefix store hold it, so its values stay what they are; a big-endian machine has others.
    """
    return _hashing.integrity_checksum(data if isinstance(data, bytes) else as_raw_bytes(data, "data"), seed)


def checksum_rows(rows: Bytes) -> int:
    """`integrity_checksum` of ``[row, byte]``, row after row: the same whether or not the rows lie together."""
    return _hashing.checksum_blocks(rows[:, None], 1)[0] if rows.shape[1] else 0


def checksum_blocks(rows: Bytes, block_tokens: int) -> list[int]:
    """`checksum_rows` of each block of so many tokens of ``[row, token, byte]``; the last one may be shorter.

    Bytes of a token lie together; tokens and rows may lie anywhere.
    """
    return _hashing.checksum_blocks(rows, block_tokens)


def copy_with_checksum(rows: Bytes, out: Bytes) -> int:
    """Copy ``[row, token, byte]`` to ``out``, ``[row, byte]``, contiguous; `checksum_rows` of it."""
    return _hashing.copy_rows(rows, out)
