"""Fields and vectors of FlatBuffers, read out of bytes that nobody has checked; `struct.error` outside of them."""

from __future__ import annotations

import struct
from collections.abc import Iterator

MAX_TABLES = 100_000
MAX_INTS = 1_000


class NotFlatBufferError(Exception):
    """The bytes are not those of a FlatBuffer."""


def follow(data: memoryview, place: int) -> int:
    """Return what the offset at `place` leads to."""
    return place + int(struct.unpack_from("<I", data, place)[0])


def find_field(data: memoryview, table: int, number: int) -> int | None:
    """Return where a field of a table lies; None for one that is left out."""
    slots = table - struct.unpack_from("<i", data, table)[0]
    if slots < 0:
        raise NotFlatBufferError("table of fields before the file")
    if 4 + 2 * number >= struct.unpack_from("<H", data, slots)[0]:
        return None
    offset = struct.unpack_from("<H", data, slots + 4 + 2 * number)[0]
    return table + offset if offset else None


def find_vector(data: memoryview, table: int, number: int, max_entries: int) -> tuple[int, int]:
    """Return where the entries of a vector begin, and their number; one of more than `max_entries` counts as empty."""
    place = find_field(data, table, number)
    if place is None:
        return 0, 0
    start = follow(data, place)
    count = int(struct.unpack_from("<I", data, start)[0])
    return start + 4, count if count <= max_entries else 0


def read_ints(data: memoryview, table: int, number: int) -> tuple[int, ...]:
    """Return a vector of 32-bit integers of at most `MAX_INTS` entries."""
    start, count = find_vector(data, table, number, MAX_INTS)
    return struct.unpack_from(f"<{count}i", data, start)


def iter_tables(data: memoryview, table: int, number: int) -> Iterator[int]:
    """Iterate over the tables of a vector of at most `MAX_TABLES` entries."""
    start, count = find_vector(data, table, number, MAX_TABLES)
    for index in range(count):
        yield follow(data, start + 4 * index)
