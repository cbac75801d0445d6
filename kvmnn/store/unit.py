"""A storage unit: K and V of some blocks that were put together, and what tells whether they are what was put.

One header, then K and V of every layer as a frame or a dense stream each (docs/prefix-store.md has the bytes).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from ..dtypes import Bytes
from ..errors import KvmnnError
from ..frames.hashing import checksum
from .space import KEY_BYTES, MAX_LAYERS
from .token_ids import MAX_TOKENS, Ids

MAGIC, DENSE_MAGIC = b"KVMNNPU1", b"KVMNNPU2"
MOST_HISTORY = 256
"""Rows that the streams of a dense unit refer to in the unit before it."""
MOST_CHAIN = 8
"""Units before a dense unit that it needs, at most: the next begins anew."""

_FIELDS = struct.Struct(f"<8sIII{KEY_BYTES}s{KEY_BYTES}s")
_DENSE = struct.Struct(f"<III{KEY_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
_FRAME = np.dtype([("bytes", "<u8"), ("checksum", "<u8"), ("raw_checksum", "<u8")])
_STREAM = np.dtype([("bytes", "<u8"), ("checksum", "<u8")])
_NO_TABLES = bytes(KEY_BYTES)


class DamagedError(KvmnnError):
    """A unit that is not what was put."""


class Frame(NamedTuple):
    """K or V of one layer.

    Parameters
    ----------
    data
        The frame, or the dense stream.
    checksum, raw_checksum
        Of the frame, and of the words it holds (`frames.hashing.rows_checksum`). Of a dense stream the checksum that it
        has itself, which is of its words, and 0.
    """

    data: Bytes | bytes
    checksum: int
    raw_checksum: int


@dataclass(frozen=True, eq=False)
class Dense:
    """What the streams of a dense unit need.

    Parameters
    ----------
    sums
        ``[block]``: checksums of the words of the unit's whole blocks in all layers (`behind.unit_sums`); a
        unit behind it refers to its rows only where these are the same in what is put.
    history
        Rows right before the unit that its streams refer to; 0 for none.
    chain
        Units that these rows need, one behind the other.
    tables
        Key of the table sets; empty for streams that have their own.
    """

    sums: tuple[int, ...]
    history: int = 0
    chain: int = 0
    tables: bytes = b""


@dataclass(frozen=True, eq=False)
class Unit:
    """Neighbouring blocks of one text.

    Parameters
    ----------
    space
        Key of the space.
    parent
        Key of the block before the first; that of the space at the beginning of a text.
    start
        Tokens before the first.
    ids
        ``[token]``: of these blocks; the last may be shorter than a block.
    frames
        K and V of the first layer, K and V of the next ... (`Space.parts`).
    dense
        What dense streams need; None for frames.
    """

    space: bytes
    parent: bytes
    start: int
    ids: Ids
    frames: tuple[Frame, ...]
    dense: Dense | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        blocks = None if self.dense is None else len(self.dense.sums)
        return header_bytes(self.ids.size, len(self.frames), blocks) + sum(len(frame.data) for frame in self.frames)

    def pieces(self) -> list[Bytes | bytes]:
        """The bytes of the file, in order."""
        magic = MAGIC if self.dense is None else DENSE_MAGIC
        head = _FIELDS.pack(magic, self.ids.size, len(self.frames), self.start, self.space, self.parent)
        ids = self.ids.astype("<u4").tobytes()
        if self.dense is None:
            rows = [(len(each.data), each.checksum, each.raw_checksum) for each in self.frames]
            head += ids + np.array(rows, _FRAME).tobytes()
        else:
            sums = np.array(self.dense.sums, "<u8")
            head += _DENSE.pack(self.dense.history, self.dense.chain, sums.size, self.dense.tables or _NO_TABLES)
            streams = np.array([(len(each.data), each.checksum) for each in self.frames], _STREAM)
            head += ids + sums.tobytes() + streams.tobytes()
        return [head + _CHECKSUM.pack(checksum(head)), *(frame.data for frame in self.frames)]


def header_bytes(tokens: int, frames: int, blocks: int | None = None) -> int:
    """Bytes before the first frame, or before the first stream of a unit with `blocks` whole blocks."""
    size = _FIELDS.size + 4 * tokens + _CHECKSUM.size
    return (
        size + _FRAME.itemsize * frames
        if blocks is None
        else size + _DENSE.size + 8 * blocks + _STREAM.itemsize * frames
    )


def parse(data: Bytes) -> Unit:
    """The unit in the bytes of a file; frames are views of `data`, whose checksums are not compared yet.

    Raises
    ------
    DamagedError
        For anything that `Unit.pieces` would not have given.
    """
    head = parse_header(data)
    ends = list(accumulate((size for size, _, _ in head.rows), initial=head.nbytes))
    if ends[-1] != data.size:
        raise DamagedError(f"has {data.size:,} bytes: its header says {ends[-1]:,}")
    frames = [
        Frame(data[begin:end], frame_sum, raw_sum)
        for (begin, end), (_, frame_sum, raw_sum) in zip(pairwise(ends), head.rows, strict=True)
    ]
    return Unit(head.space, head.parent, head.start, head.ids, tuple(frames), head.dense)


class Header(NamedTuple):
    """What the header of a unit says: `nbytes` of it, and of each frame bytes, checksum, checksum of the words."""

    space: bytes
    parent: bytes
    start: int
    ids: Ids
    dense: Dense | None
    rows: list[tuple[int, int, int]]
    nbytes: int


def parse_header(data: Bytes) -> Header:
    """The header of the unit whose bytes begin with `data`; errors as `parse`."""
    if data.size < _FIELDS.size:
        raise DamagedError(f"has {data.size:,} bytes: too few for a header")
    magic, tokens, frames, start, space, parent = _FIELDS.unpack_from(data.data)
    if magic not in (MAGIC, DENSE_MAGIC):
        raise DamagedError("does not begin as a unit does")
    if not (1 <= tokens <= MAX_TOKENS and 1 <= frames <= 2 * MAX_LAYERS and start <= MAX_TOKENS):
        raise DamagedError("has impossible sizes in its header")
    at, history, chain, blocks, tables = _FIELDS.size, 0, 0, None, _NO_TABLES
    if magic == DENSE_MAGIC:
        if data.size < at + _DENSE.size:
            raise DamagedError(f"has {data.size:,} bytes: too few for a header")
        history, chain, blocks, tables = _DENSE.unpack_from(data.data, at)
        at += _DENSE.size
        if blocks > tokens or history > min(MOST_HISTORY, start) or chain > MOST_CHAIN or bool(chain) != bool(history):
            raise DamagedError("has impossible sizes in its header")
    size = header_bytes(tokens, frames, blocks)
    if size > data.size:
        raise DamagedError(f"has {data.size:,} bytes: its header alone has {size:,}")
    (said,) = _CHECKSUM.unpack_from(data.data, size - _CHECKSUM.size)
    if checksum(data[: size - _CHECKSUM.size]) != said:
        raise DamagedError("its header does not match its checksum")
    ids = np.frombuffer(data, "<u4", tokens, at)
    at += 4 * tokens
    if blocks is None:
        return Header(space, parent, start, ids, None, np.frombuffer(data, _FRAME, frames, at).tolist(), size)
    sums = tuple(np.frombuffer(data, "<u8", blocks, at).tolist())
    streams = np.frombuffer(data, _STREAM, frames, at + 8 * blocks).tolist()
    dense = Dense(sums, history, chain, b"" if tables == _NO_TABLES else tables)
    return Header(space, parent, start, ids, dense, [(nbytes, found, 0) for nbytes, found in streams], size)
