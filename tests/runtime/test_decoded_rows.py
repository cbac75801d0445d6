"""The cache of decoded rows: what it keeps, and what it forgets."""

from __future__ import annotations

import numpy as np

from kvmnn.runtime.strict.layer_storage import TokenSegment
from kvmnn.runtime.strict.restorer import DecodedRowCache


def test_decoded_row_cache_dead_segments_free_capacity() -> None:
    rows = np.zeros((2, 1, 4, 8), np.float16)
    pieces = [TokenSegment(4, None, "stored") for _ in range(3)]
    cache = DecodedRowCache(2, 1 << 20)
    for piece in pieces:
        cache.insert(piece, rows)
    assert [cache.contains(piece) for piece in pieces] == [True, True, False] and cache.nbytes == 2 * rows.nbytes
    pieces[0].is_alive = False
    cache.insert(pieces[2], rows)
    assert [cache.contains(piece) for piece in pieces] == [False, True, True] and cache.nbytes == 2 * rows.nbytes


def test_decoded_row_cache_insert_beyond_max_bytes_is_dropped() -> None:
    """The bytes of the new rows count before they are there."""
    rows = np.zeros((2, 1, 4, 8), np.float16)
    first, second = TokenSegment(4, None, "stored"), TokenSegment(4, None, "stored")
    for room, held in ((0, 0), (rows.nbytes - 1, 0), (rows.nbytes, 1), (2 * rows.nbytes - 1, 1), (2 * rows.nbytes, 2)):
        cache = DecodedRowCache(10, room)
        cache.insert(first, rows)
        cache.insert(second, rows)
        assert (len(cache), cache.nbytes) == (held, held * rows.nbytes) and cache.nbytes <= room
