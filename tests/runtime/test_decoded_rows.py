"""The cache of decoded rows: what it keeps, and what it forgets."""

from __future__ import annotations

import numpy as np

from kvmnn.runtime.sound.decoded_rows import DecodedRows
from kvmnn.runtime.sound.piece import Piece


def test_rows_of_dead_pieces_make_room() -> None:
    rows = np.zeros((2, 1, 4, 8), np.float16)
    pieces = [Piece(4, None, "stored") for _ in range(3)]
    cache = DecodedRows(2, 1 << 20)
    for piece in pieces:
        cache.insert(piece, rows)
    assert [cache.has(piece) for piece in pieces] == [True, True, False] and cache.nbytes == 2 * rows.nbytes
    pieces[0].alive = False
    cache.insert(pieces[2], rows)
    assert [cache.has(piece) for piece in pieces] == [False, True, True] and cache.nbytes == 2 * rows.nbytes
