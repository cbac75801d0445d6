"""Numbers out of a state file one after the other, and the cells of a stream: positions and sequences."""

from __future__ import annotations

import numpy as np

from ...dtypes import Bytes, Indices, Positions
from ..file_bytes import FileBytes

_MIN_RUN_CELLS = 64
"""Cells in a run, below which they are taken one by one."""
_SCAN_BYTES = 1 << 20
"""Bytes of cells that are looked at together then."""


class ParseError(Exception):
    """The file is not what was tried."""


class BinaryReader:
    """Numbers out of a file, one after the other."""

    def __init__(self, file: FileBytes, position: int = 0) -> None:
        self.file, self.position = file, position

    @property
    def remaining_bytes(self) -> int:
        return self.file.size - self.position

    def read(self, nbytes: int, field_name: str) -> Bytes:
        return self.file.view(self.skip(nbytes, field_name), nbytes)

    def skip(self, nbytes: int, field_name: str) -> int:
        """Where the next `nbytes` bytes begin."""
        if nbytes > self.remaining_bytes:
            raise ParseError(
                f"{field_name}: {nbytes:,} bytes are needed at offset {self.position:,}, {self.remaining_bytes:,} are "
                f"left"
            )
        self.position += nbytes
        return self.position - nbytes

    def read_ints(self, count: int, field_name: str, dtype: str = "<i4") -> Indices:
        itemsize = np.dtype(dtype).itemsize
        return np.frombuffer(self.read(count * itemsize, field_name), dtype).astype(np.int64)

    def read_u32(self, field_name: str) -> int:
        return int(self.read_ints(1, field_name, "<u4")[0])

    def read_u64(self, field_name: str) -> int:
        return int.from_bytes(self.read(8, field_name).tobytes(), "little")


def read_cells(cursor: BinaryReader, num_cells: int, extra_bytes: int) -> tuple[Positions, Indices, Indices]:
    """Positions, numbers of sequences and their ids; cells of equally many sequences are taken together."""
    positions: list[Indices] = []
    counts: list[Indices] = []
    sequence_ids: list[Indices] = []
    num_read = 0
    run_length = _MIN_RUN_CELLS
    while num_read < num_cells:
        if (
            run_length < _MIN_RUN_CELLS
            and (single_cells := _read_cells_singly(cursor, num_cells - num_read, extra_bytes)) is not None
        ):
            cell_arrays = single_cells
        else:
            run = _read_equal_cells(cursor, num_cells - num_read, extra_bytes)
            cell_arrays, run_length = (run[:, 0], run[:, 1], run[:, 2 + extra_bytes // 4 :].reshape(-1)), len(run)
        for array_list, array in zip((positions, counts, sequence_ids), cell_arrays, strict=True):
            array_list.append(array)
        num_read += len(cell_arrays[0])
    all_positions = np.concatenate(positions)
    if (all_positions < 0).any():
        raise ParseError(f"a cell has the position {int(all_positions.min())}")
    return all_positions, np.concatenate(counts), np.concatenate(sequence_ids)


def _read_cells_singly(
    cursor: BinaryReader, max_cells: int, extra_bytes: int
) -> tuple[Positions, Indices, Indices] | None:
    """The next cells, whatever their numbers of sequences, as far as a window reaches; None where it holds not one."""
    nbytes = min(_SCAN_BYTES, cursor.remaining_bytes) // 4 * 4
    values = np.frombuffer(cursor.file.view(cursor.position, nbytes), "<u4")
    value_list, head_values = values.tolist(), 2 + extra_bytes // 4
    starts: list[int] = []
    end = 0
    while (
        len(starts) < max_cells
        and end + 1 < len(value_list)
        and end + head_values + value_list[end + 1] <= len(value_list)
    ):
        starts.append(end)
        end += head_values + value_list[end + 1]
    if not starts:
        return None
    cursor.skip(4 * end, "cells")
    signed_values, begins = values[:end].view("<i4").astype(np.int64), np.array(starts)
    is_id = np.ones(end, bool)
    for head_index in range(head_values):
        is_id[begins + head_index] = False
    return signed_values[begins], signed_values[begins + 1], signed_values[is_id]


def _read_equal_cells(cursor: BinaryReader, max_cells: int, extra_bytes: int) -> Indices:
    """The next cells with as many sequences as the first of them: position, number, extra words, ids."""
    if cursor.remaining_bytes < 8:
        raise ParseError(f"a cell needs 8 bytes at offset {cursor.position:,}, {cursor.remaining_bytes:,} are left")
    num_sequences = int(np.frombuffer(cursor.file.view(cursor.position, 8), "<u4")[1])
    cell_bytes, lookahead = 8 + extra_bytes + 4 * num_sequences, 16
    while True:  # ever longer looks, so that cells that differ cost no more than they are
        num_viewed = min(max_cells, lookahead, cursor.remaining_bytes // cell_bytes)
        if not num_viewed:
            raise ParseError(f"a cell of {num_sequences:,} sequences at offset {cursor.position:,}")
        cells = np.frombuffer(cursor.file.view(cursor.position, num_viewed * cell_bytes), "<i4").reshape(num_viewed, -1)
        is_equal = cells[:, 1] == cells[0, 1]
        run_length = num_viewed if is_equal.all() else int(np.argmin(is_equal))
        if run_length < num_viewed or num_viewed < lookahead:
            break
        lookahead *= 4
    cursor.skip(run_length * cell_bytes, "cells")
    return cells[:run_length].astype(np.int64)
