"""Token ids as the store takes them, the keys of their blocks, and how far two texts agree."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import KvmnnError
from .space import KEY_BYTES

MAX_ID = (1 << 24) - 1
MAX_TOKENS = 1 << 24
Ids = npt.NDArray[np.uint32]
"""Token ids, ``[token]``, little-endian."""

_LETTERS = 3
"""Bytes of an id where ids are compared as text: the first is the highest."""


def as_ids(token_ids: Sequence[int] | npt.NDArray[Any]) -> Ids:
    """Token ids as an array.

    Raises
    ------
    KvmnnError
        Unless they are 1 to 2**24 whole numbers from 0 to 2**24 - 1.
    """
    try:
        found = np.asarray(token_ids)
    except (ValueError, OverflowError):
        raise KvmnnError("token ids: expected a list of at least one whole number, found no numbers") from None
    if found.ndim != 1 or found.size == 0 or found.dtype.kind not in "iu":
        there = "none" if found.shape == (0,) else f"{found.dtype.name} of shape {list(found.shape)}"
        raise KvmnnError(f"token ids: expected a list of at least one whole number, found {there}")
    if found.size > MAX_TOKENS:
        raise KvmnnError(f"token ids: there are {found.size:,}, expected at most {MAX_TOKENS:,}")
    least, most = int(found.min()), int(found.max())
    if least < 0 or most > MAX_ID:
        place, wrong = (found.argmin(), least) if least < 0 else (found.argmax(), most)
        raise KvmnnError(f"token ids: number {place + 1:,}: expected one from 0 to {MAX_ID:,}, found {wrong:,}")
    return found.astype("<u4")


def block_keys(parent: bytes, ids: Ids, block_tokens: int) -> list[bytes]:
    """The keys of all whole blocks of `ids`, which follow the block with the key `parent`.

    A key is the BLAKE2b hash of 16 bytes over the key of the block before and the ids as little-endian 32-bit words.
    """
    data, step = ids.tobytes(), 4 * block_tokens
    keys = []
    for begin in range(0, len(data) - step + 1, step):
        parent = hashlib.blake2b(parent + data[begin : begin + step], digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys


def text_key(space: bytes, ids: Ids) -> bytes:
    """The key of a whole text in a space."""
    return hashlib.blake2b(b"text" + space + ids.tobytes(), digest_size=KEY_BYTES).digest()


def as_text(ids: Ids) -> bytes:
    """Three bytes an id, such that texts sort as their ids do."""
    return np.ascontiguousarray(ids.astype(">u4").view(np.uint8).reshape(-1, 4)[:, 4 - _LETTERS :]).tobytes()


def agreeing_texts(one: bytes, other: bytes) -> int:
    """How many ids two texts of `as_text` have in common from their beginning."""
    size = min(len(one), len(other))
    return agreeing(np.frombuffer(one, np.uint8, size), np.frombuffer(other, np.uint8, size)) // _LETTERS


def agreeing(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """How many entries two lists have in common from their beginning."""
    size = min(one.size, other.size)
    differing = np.flatnonzero(one[:size] != other[:size])
    return int(differing[0]) if differing.size else size
