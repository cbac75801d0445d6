"""Fields and vectors of FlatBuffers, read out of bytes that nobody has checked; `struct.error` outside of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator

MAX_TABLES = 100_000
MAX_INTS = 1_000


class NotFlatBufferError(Exception):
    """The bytes are not those of a FlatBuffer."""


def follow_offset(data: memoryview, offset_position: int) -> int:
    """Return what the offset at `offset_position` leads to."""
    return offset_position + int(struct.unpack_from("<I", data, offset_position)[0])


def find_field(data: memoryview, table: int, field_index: int) -> int | None:
    """Return where a field of a table lies; None for one that is left out."""
    vtable = table - struct.unpack_from("<i", data, table)[0]
    if vtable < 0:
        raise NotFlatBufferError("table of fields before the file")
    if 4 + 2 * field_index >= struct.unpack_from("<H", data, vtable)[0]:
        return None
    offset = struct.unpack_from("<H", data, vtable + 4 + 2 * field_index)[0]
    return table + offset if offset else None


def find_vector(data: memoryview, table: int, field_index: int, max_entries: int) -> tuple[int, int]:
    """Return where the entries of a vector begin, and their number; one of more than `max_entries` counts as empty."""
    field_position = find_field(data, table, field_index)
    if field_position is None:
        return 0, 0
    vector_start = follow_offset(data, field_position)
    num_entries = int(struct.unpack_from("<I", data, vector_start)[0])
    return vector_start + 4, num_entries if num_entries <= max_entries else 0


def read_ints(data: memoryview, table: int, field_index: int) -> tuple[int, ...]:
    """Return a vector of 32-bit integers of at most `MAX_INTS` entries."""
    start, num_entries = find_vector(data, table, field_index, MAX_INTS)
    return struct.unpack_from(f"<{num_entries}i", data, start)


def iter_tables(data: memoryview, table: int, field_index: int) -> Iterator[int]:
    """Iterate over the tables of a vector of at most `MAX_TABLES` entries."""
    start, num_tables = find_vector(data, table, field_index, MAX_TABLES)
    for index in range(num_tables):
        yield follow_offset(data, start + 4 * index)
