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

_SHORT_ID_BYTES, _LONG_ID_BYTES = 3, 5
"""Bytes of an id where ids are compared as text: the highest first; of a long one behind `_ESCAPE_BYTE`."""
_ESCAPE_BYTE = 0xFF
_MIN_LONG_ID = _ESCAPE_BYTE << 16
"""The least id whose three bytes would begin as a long one does. Vocabularies are smaller; placeholders of pictures are
hashes of up to 32 bits.
"""


def to_token_ids(token_ids: Sequence[int] | npt.NDArray[Any]) -> Ids:
    """Token ids as an array.

    Raises
    ------
    KvmnnError
        Unless they are 1 to 2**24 whole numbers from 0 to 2**32 - 1.
    """
    try:
        array = np.asarray(token_ids)
    except (ValueError, OverflowError):
        raise KvmnnError("token ids: expected a list of at least one whole number, found no numbers") from None
    if array.dtype.kind in "fO" and array.ndim == 1:  # integers too large for numpy's types
        for number, token_id in enumerate(token_ids):
            if type(token_id) is int and not 0 <= token_id <= MAX_ID:
                raise _make_id_error(number, token_id)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        found_text = "none" if array.shape == (0,) else f"{array.dtype.name} of shape {list(array.shape)}"
        raise KvmnnError(f"token ids: expected a list of at least one whole number, found {found_text}")
    if array.size > MAX_TOKENS:
        raise KvmnnError(f"token ids: there are {array.size:,}, expected at most {MAX_TOKENS:,}")
    min_id, max_id = int(array.min()), int(array.max())
    if min_id < 0 or max_id > MAX_ID:
        raise _make_id_error(int(array.argmin() if min_id < 0 else array.argmax()), min_id if min_id < 0 else max_id)
    return array.astype("<u4")


def _make_id_error(id_index: int, token_id: int) -> KvmnnError:
    return KvmnnError(f"token ids: number {id_index + 1:,}: expected one from 0 to {MAX_ID:,}, found {token_id:,}")


def compute_block_keys(parent: bytes, ids: Ids, block_tokens: int) -> list[bytes]:
    """The keys of all whole blocks of `ids`, which follow the block with the key `parent`.

    A key is the BLAKE2b hash of 16 bytes over the key of the block before and the ids as little-endian 32-bit words.
    """
    data, step = ids.tobytes(), 4 * block_tokens
    keys = []
    for begin_byte in range(0, len(data) - step + 1, step):
        parent = hashlib.blake2b(parent + data[begin_byte : begin_byte + step], digest_size=KEY_BYTES).digest()
        keys.append(parent)
    return keys


def compute_sequence_key(namespace_key: bytes, ids: Ids) -> bytes:
    """The key of a whole text in a space."""
    return hashlib.blake2b(b"text" + namespace_key + ids.tobytes(), digest_size=KEY_BYTES).digest()


def to_sort_key(ids: Ids) -> bytes:
    """Return ids as bytes that sort as they do: three for an id of a vocabulary, five for a larger one."""
    id_bytes = np.ascontiguousarray(ids.astype(">u4").view(np.uint8).reshape(-1, 4))
    if not ids.size or int(ids.max()) < _MIN_LONG_ID:
        return id_bytes[:, 4 - _SHORT_ID_BYTES :].tobytes()
    are_long = (ids >= _MIN_LONG_ID).tolist()
    return b"".join(
        bytes([_ESCAPE_BYTE]) + id_row.tobytes() if is_long else id_row[4 - _SHORT_ID_BYTES :].tobytes()
        for id_row, is_long in zip(id_bytes, are_long, strict=True)
    )


def count_common_ids(first: bytes, second: bytes) -> int:
    """How many ids two texts of `to_sort_key` have in common from their beginning."""
    size = min(len(first), len(second))
    return count_ids_in_sort_key(
        first[: count_common_entries(np.frombuffer(first, np.uint8, size), np.frombuffer(second, np.uint8, size))]
    )


def count_ids_in_sort_key(sort_key: bytes) -> int:
    """How many whole ids the bytes of `to_sort_key` have."""
    count = sort_key[::_SHORT_ID_BYTES].find(_ESCAPE_BYTE)
    if count < 0:
        return len(sort_key) // _SHORT_ID_BYTES
    position = count * _SHORT_ID_BYTES
    while position < len(sort_key):
        position += _LONG_ID_BYTES if sort_key[position] == _ESCAPE_BYTE else _SHORT_ID_BYTES
        count += position <= len(sort_key)
    return count


def count_common_entries(first: npt.NDArray[Any], second: npt.NDArray[Any]) -> int:
    """How many entries two lists have in common from their beginning."""
    size = min(first.size, second.size)
    differing = np.flatnonzero(first[:size] != second[:size])
    return int(differing[0]) if differing.size else size
