"""Token ids as the store takes them, the keys of their blocks, and how far two texts agree."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..errors import KvmnnError
from ..packed.cache_info import MAX_TOKEN_ID
from .space import KEY_BYTES

MAX_ID = MAX_TOKEN_ID
MAX_TOKENS = 1 << 24
Ids = npt.NDArray[np.uint32]
"""Token ids, ``[token]``, little-endian."""

_SHORT, _LONG = 3, 5
"""Bytes of an id where ids are compared as text: the highest first; of a long one behind `_ESCAPE`."""
_ESCAPE = 0xFF
_MIN_LONG = _ESCAPE << 16
"""The least id whose three bytes would begin as a long one does. Vocabularies are smaller; placeholders of pictures are
hashes of up to 32 bits.
"""


def as_ids(token_ids: Sequence[int] | npt.NDArray[Any]) -> Ids:
    """Token ids as an array.

    Raises
    ------
    KvmnnError
        Unless they are 1 to 2**24 whole numbers from 0 to 2**32 - 1.
    """
    try:
        found = np.asarray(token_ids)
    except (ValueError, OverflowError):
        raise KvmnnError("token ids: expected a list of at least one whole number, found no numbers") from None
    if found.dtype.kind in "fO" and found.ndim == 1:  # integers too large for numpy's types
        for number, each in enumerate(token_ids):
            if type(each) is int and not 0 <= each <= MAX_ID:
                raise _wrong_id(number, each)
    if found.ndim != 1 or found.size == 0 or found.dtype.kind not in "iu":
        there = "none" if found.shape == (0,) else f"{found.dtype.name} of shape {list(found.shape)}"
        raise KvmnnError(f"token ids: expected a list of at least one whole number, found {there}")
    if found.size > MAX_TOKENS:
        raise KvmnnError(f"token ids: there are {found.size:,}, expected at most {MAX_TOKENS:,}")
    least, most = int(found.min()), int(found.max())
    if least < 0 or most > MAX_ID:
        raise _wrong_id(int(found.argmin() if least < 0 else found.argmax()), least if least < 0 else most)
    return found.astype("<u4")


def _wrong_id(place: int, found: int) -> KvmnnError:
    return KvmnnError(f"token ids: number {place + 1:,}: expected one from 0 to {MAX_ID:,}, found {found:,}")


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
    """Return ids as bytes that sort as they do: three for an id of a vocabulary, five for a larger one."""
    words = np.ascontiguousarray(ids.astype(">u4").view(np.uint8).reshape(-1, 4))
    if not ids.size or int(ids.max()) < _MIN_LONG:
        return words[:, 4 - _SHORT :].tobytes()
    long = (ids >= _MIN_LONG).tolist()
    return b"".join(
        bytes([_ESCAPE]) + word.tobytes() if is_long else word[4 - _SHORT :].tobytes()
        for word, is_long in zip(words, long, strict=True)
    )


def agreeing_texts(one: bytes, other: bytes) -> int:
    """How many ids two texts of `as_text` have in common from their beginning."""
    size = min(len(one), len(other))
    return ids_in_text(one[: agreeing(np.frombuffer(one, np.uint8, size), np.frombuffer(other, np.uint8, size))])


def ids_in_text(text: bytes) -> int:
    """How many whole ids the bytes of `as_text` have."""
    count = text[::_SHORT].find(_ESCAPE)
    if count < 0:
        return len(text) // _SHORT
    place = count * _SHORT
    while place < len(text):
        place += _LONG if text[place] == _ESCAPE else _SHORT
        count += place <= len(text)
    return count


def agreeing(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> int:
    """How many entries two lists have in common from their beginning."""
    size = min(one.size, other.size)
    differing = np.flatnonzero(one[:size] != other[:size])
    return int(differing[0]) if differing.size else size
