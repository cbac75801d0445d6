"""Plain arrays into packed files, streamed: each run of rows goes to its place in a buffer or the mapped file."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import numpy as np

from ...arrays.named_array import Piece
from ...dtypes import Part
from ...errors import KvmnnError
from ...files.mapped import MappedFile
from ...files.output import failures
from ...packed.layout import PackLayout
from ...packed.rows import HeadRows, head_bytes

RowOrder = Literal["head", "token"]
"""Which axis runs slowest: ``[kv_head, token, head_dim]`` or ``[token, kv_head, head_dim]``."""

_DROP_BYTES = 16 << 20
_READ_BYTES = 256 << 10
_WRITE_AT_ONCE = 16 << 20
"""Bytes of a file that is filled in memory and written in one go: its pages one by one cost the system far more."""


class PackedPart:
    """One layer's K or V file being filled; padding is zero, as in the files that the engine makes.

    Parameters
    ----------
    target
        The name that the caller knows the file by.
    path
        Where the bytes go; an existing empty file.
    layout, part, capacity
        What it holds, and for how many tokens it has room.
    tokens
        How many come.
    order
        Of the axes of what comes.

    Raises
    ------
    OutputError
        When the disk has no room for the file.
    """

    def __init__(
        self,
        target: Path,
        path: Path,
        layout: PackLayout,
        part: Part,
        *,
        capacity: int,
        tokens: int,
        order: RowOrder = "head",
    ) -> None:
        self._heads, self._tokens, self._order = layout.kv_heads, tokens, order
        self._access = HeadRows(layout, part, capacity)
        self._row = layout.head_dim * layout.itemsize
        head = head_bytes(layout, part, capacity)
        self._rest: Piece = np.empty(0, np.uint8)
        self._position = 0  # rows that have come
        self._dirty = 0
        self._filled = 0  # bytes besides rows that have come
        self._target, self._path = target, path
        self._map: mmap.mmap | None = None
        if head * layout.kv_heads <= _WRITE_AT_ONCE:
            self._buffer = np.zeros((layout.kv_heads, head), np.uint8)
        else:
            with failures(target), open(path, "r+b") as file:
                make_room(file.fileno(), head * layout.kv_heads)
                self._map = mmap.mmap(file.fileno(), 0)
            self._buffer = np.frombuffer(self._map, np.uint8).reshape(layout.kv_heads, head)

    def fill(self, run: Piece) -> None:
        """Take the next bytes of what the file holds besides rows, before any row comes."""
        buffer = self._buffer.reshape(-1)
        if self._filled + run.size > buffer.size:
            raise KvmnnError(f"{self._target}: more bytes came than the file has")
        buffer[self._filled : self._filled + run.size] = run
        self._filled += run.size

    def write(self, run: Piece) -> None:
        """The next bytes of the array, little-endian words."""
        for head, token, rows in self._places(run):
            self._access.write(self._buffer[head], token, rows)
        self._dirty += run.size
        if self._dirty >= _DROP_BYTES:
            self._drop()
            self._dirty = 0

    def rewind(self) -> None:
        """Check that every row has come, and go back to the first one; from now on the file is what is looked at."""
        expected = self._tokens * self._heads
        if self._position != expected or self._rest.size:
            raise KvmnnError(f"{self._target}: {self._position} rows came, {expected} were announced")
        self._position = 0
        if self._buffer.flags.writeable and self._map is None:
            self._write()

    def _write(self) -> None:
        """What was filled in memory into the file, which takes its place."""
        with failures(self._target):
            with open(self._path, "r+b", buffering=0) as file:
                rest = self._buffer.reshape(-1).data
                while rest:
                    rest = rest[file.write(rest) :]
            mapped = MappedFile(self._path)
        self._buffer = mapped.view(0, mapped.size).reshape(self._buffer.shape)

    def holds(self, run: Piece) -> bool:
        """Whether the next bytes of the array are in the file."""
        for head, token, rows in self._places(run):
            found = np.empty_like(rows)
            self._access.read(self._buffer[head], token, found)
            if not np.array_equal(found, rows):
                return False
        return True

    def runs(self) -> Iterator[Piece]:
        """The rows in the file, head after head, behind `rewind`; each run is good until the next."""
        held = np.empty(max(1, _READ_BYTES // self._row) * self._row, np.uint8)
        for head in self._buffer:
            for begin in range(0, self._tokens, held.size // self._row):
                run = held[: (self._tokens - begin) * self._row]
                self._access.read(head, begin, run)
                yield run
            self._drop()

    def close(self) -> None:
        """Let go of the file."""
        del self._buffer
        if self._map:
            self._map.close()

    def _drop(self) -> None:
        if self._map and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)  # shared pages: what was written stays in the file

    def _places(self, run: Piece) -> Iterator[tuple[int, int, Piece]]:
        """The complete rows that have come, as runs of one head: ``(head, first token, rows)``."""
        if self._rest.size:
            run = np.concatenate([self._rest, run])
        count = run.size // self._row
        self._rest = run[count * self._row :].copy()
        if self._position + count > self._tokens * self._heads:
            raise KvmnnError(f"{self._target}: more rows came than {self._tokens} tokens have")
        table = run[: count * self._row].reshape(count, self._row)
        yield from self._by_head(table) if self._order == "head" else self._by_token(table)
        self._position += count

    def _by_head(self, table: Piece) -> Iterator[tuple[int, int, Piece]]:
        done = 0
        while done < len(table):
            head, token = divmod(self._position + done, self._tokens)
            count = min(self._tokens - token, len(table) - done)
            yield head, token, table[done : done + count].reshape(-1)
            done += count

    def _by_token(self, table: Piece) -> Iterator[tuple[int, int, Piece]]:
        heads = self._heads
        for head in range(heads):
            first = (head - self._position) % heads
            if first < len(table):
                chosen = np.ascontiguousarray(table[first::heads])
                yield head, (self._position + first) // heads, chosen.reshape(-1)


def make_room(handle: int, nbytes: int) -> None:
    """Give the file its size; where the system can, reserve it too: a full disk under a mapping would kill us."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(handle, 0, nbytes)
    else:
        os.ftruncate(handle, nbytes)
