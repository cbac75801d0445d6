"""Numbers out of a state file one after the other, and the cells of a stream: positions and sequences."""

from __future__ import annotations

import numpy as np

from ...dtypes import Bytes, Indices, Positions
from ..file_bytes import FileBytes

_SHORT = 64
"""Cells in a run, below which they are taken one by one."""
_WINDOW = 1 << 20
"""Bytes of cells that are looked at together then."""


class NotSoError(Exception):
    """The file is not what was tried."""


class Cursor:
    """Numbers out of a file, one after the other."""

    def __init__(self, file: FileBytes, position: int = 0) -> None:
        self.file, self.position = file, position

    @property
    def left(self) -> int:
        return self.file.size - self.position

    def take(self, nbytes: int, what: str) -> Bytes:
        return self.file.view(self.skip(nbytes, what), nbytes)

    def skip(self, nbytes: int, what: str) -> int:
        """Where the next `nbytes` bytes begin."""
        if nbytes > self.left:
            raise NotSoError(f"{what}: {nbytes:,} bytes are needed at offset {self.position:,}, {self.left:,} are left")
        self.position += nbytes
        return self.position - nbytes

    def numbers(self, amount: int, what: str, dtype: str = "<i4") -> Indices:
        size = np.dtype(dtype).itemsize
        return np.frombuffer(self.take(amount * size, what), dtype).astype(np.int64)

    def u32(self, what: str) -> int:
        return int(self.numbers(1, what, "<u4")[0])

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what).tobytes(), "little")


def read_cells(cursor: Cursor, cells: int, extra: int) -> tuple[Positions, Indices, Indices]:
    """Positions, numbers of sequences and their ids; cells of equally many sequences are taken together."""
    positions: list[Indices] = []
    counts: list[Indices] = []
    ids: list[Indices] = []
    done = 0
    length = _SHORT
    while done < cells:
        if length < _SHORT and (several := _one_by_one(cursor, cells - done, extra)) is not None:
            found = several
        else:
            run = _run(cursor, cells - done, extra)
            found, length = (run[:, 0], run[:, 1], run[:, 2 + extra // 4 :].reshape(-1)), len(run)
        for whole, part in zip((positions, counts, ids), found, strict=True):
            whole.append(part)
        done += len(found[0])
    where = np.concatenate(positions)
    if (where < 0).any():
        raise NotSoError(f"a cell has the position {int(where.min())}")
    return where, np.concatenate(counts), np.concatenate(ids)


def _one_by_one(cursor: Cursor, most: int, extra: int) -> tuple[Positions, Indices, Indices] | None:
    """The next cells, whatever their numbers of sequences, as far as a window reaches; None where it holds not one."""
    nbytes = min(_WINDOW, cursor.left) // 4 * 4
    words = np.frombuffer(cursor.file.view(cursor.position, nbytes), "<u4")
    numbers, head = words.tolist(), 2 + extra // 4
    starts: list[int] = []
    end = 0
    while len(starts) < most and end + 1 < len(numbers) and end + head + numbers[end + 1] <= len(numbers):
        starts.append(end)
        end += head + numbers[end + 1]
    if not starts:
        return None
    cursor.skip(4 * end, "cells")
    signed, begins = words[:end].view("<i4").astype(np.int64), np.array(starts)
    is_id = np.ones(end, bool)
    for place in range(head):
        is_id[begins + place] = False
    return signed[begins], signed[begins + 1], signed[is_id]


def _run(cursor: Cursor, most: int, extra: int) -> Indices:
    """The next cells with as many sequences as the first of them: position, number, extra words, ids."""
    if cursor.left < 8:
        raise NotSoError(f"a cell needs 8 bytes at offset {cursor.position:,}, {cursor.left:,} are left")
    number = int(np.frombuffer(cursor.file.view(cursor.position, 8), "<u4")[1])
    width, look = 8 + extra + 4 * number, 16
    while True:  # ever longer looks, so that cells that differ cost no more than they are
        found = min(most, look, cursor.left // width)
        if not found:
            raise NotSoError(f"a cell of {number:,} sequences at offset {cursor.position:,}")
        cells = np.frombuffer(cursor.file.view(cursor.position, found * width), "<i4").reshape(found, -1)
        same = cells[:, 1] == cells[0, 1]
        length = found if same.all() else int(np.argmin(same))
        if length < found or found < look:
            break
        look *= 4
    cursor.skip(length * width, "cells")
    return cells[:length].astype(np.int64)
