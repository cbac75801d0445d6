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
from ..frames.hashing import integrity_checksum
from .space import KEY_BYTES, MAX_LAYERS
from .token_ids import MAX_TOKENS, Ids

FRAME_MAGIC, DENSE_MAGIC = b"KVMNNPU1", b"KVMNNPU2"
MAX_HISTORY_ROWS = 256
"""Rows that the streams of a dense unit refer to in the unit before it."""
MAX_CHAIN_UNITS = 8
"""Units before a dense unit that it needs, at most: the next begins anew."""

_UNIT_STRUCT = struct.Struct(f"<8sIII{KEY_BYTES}s{KEY_BYTES}s")
_DENSE_STRUCT = struct.Struct(f"<III{KEY_BYTES}s")
_CHECKSUM_STRUCT = struct.Struct("<Q")
_FRAME_DTYPE = np.dtype([("bytes", "<u8"), ("checksum", "<u8"), ("raw_checksum", "<u8")])
_STREAM_DTYPE = np.dtype([("bytes", "<u8"), ("checksum", "<u8")])
_NO_TABLES = bytes(KEY_BYTES)


class DamagedUnitError(KvmnnError):
    """A unit that is not what was put."""


class UnitFrame(NamedTuple):
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
class DenseUnitInfo:
    """What the streams of a dense unit need.

    Parameters
    ----------
    block_sums
        ``[block]``: checksums of the words of the unit's whole blocks in all layers (`behind.unit_sums`); a
        unit behind it refers to its rows only where these are the same in what is put.
    history_rows
        Rows right before the unit that its streams refer to; 0 for none.
    chain_length
        Units that these rows need, one behind the other.
    tables_key
        Key of the table sets; empty for streams that have their own.
    """

    block_sums: tuple[int, ...]
    history_rows: int = 0
    chain_length: int = 0
    tables_key: bytes = b""


@dataclass(frozen=True, eq=False)
class Unit:
    """Neighbouring blocks of one text.

    Parameters
    ----------
    namespace_key
        Key of the space.
    parent
        Key of the block before the first; that of the space at the beginning of a text.
    start
        Tokens before the first.
    ids
        ``[token]``: of these blocks; the last may be shorter than a block.
    frames
        K and V of the first layer, K and V of the next ... (`Namespace.parts`).
    dense
        What dense streams need; None for frames.
    """

    namespace_key: bytes
    parent: bytes
    start: int
    ids: Ids
    frames: tuple[UnitFrame, ...]
    dense: DenseUnitInfo | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        blocks = None if self.dense is None else len(self.dense.block_sums)
        return count_header_bytes(self.ids.size, len(self.frames), blocks) + sum(
            len(frame.data) for frame in self.frames
        )

    def to_pieces(self) -> list[Bytes | bytes]:
        """The bytes of the file, in order."""
        magic = FRAME_MAGIC if self.dense is None else DENSE_MAGIC
        head = _UNIT_STRUCT.pack(magic, self.ids.size, len(self.frames), self.start, self.namespace_key, self.parent)
        ids = self.ids.astype("<u4").tobytes()
        if self.dense is None:
            frame_rows = [
                (len(unit_frame.data), unit_frame.checksum, unit_frame.raw_checksum) for unit_frame in self.frames
            ]
            head += ids + np.array(frame_rows, _FRAME_DTYPE).tobytes()
        else:
            block_sums = np.array(self.dense.block_sums, "<u8")
            head += _DENSE_STRUCT.pack(
                self.dense.history_rows, self.dense.chain_length, block_sums.size, self.dense.tables_key or _NO_TABLES
            )
            streams = np.array(
                [(len(unit_frame.data), unit_frame.checksum) for unit_frame in self.frames], _STREAM_DTYPE
            )
            head += ids + block_sums.tobytes() + streams.tobytes()
        return [head + _CHECKSUM_STRUCT.pack(integrity_checksum(head)), *(frame.data for frame in self.frames)]


def count_header_bytes(num_tokens: int, num_frames: int, num_blocks: int | None = None) -> int:
    """Bytes before the first frame, or before the first stream of a unit with `num_blocks` whole blocks."""
    size = _UNIT_STRUCT.size + 4 * num_tokens + _CHECKSUM_STRUCT.size
    return (
        size + _FRAME_DTYPE.itemsize * num_frames
        if num_blocks is None
        else size + _DENSE_STRUCT.size + 8 * num_blocks + _STREAM_DTYPE.itemsize * num_frames
    )


def parse_unit(data: Bytes) -> Unit:
    """The unit in the bytes of a file; frames are views of `data`, whose checksums are not compared yet.

    Raises
    ------
    DamagedError
        For anything that `Unit.to_pieces` would not have given.
    """
    header = parse_header(data)
    ends = list(accumulate((size for size, _, _ in header.frame_rows), initial=header.nbytes))
    if ends[-1] != data.size:
        raise DamagedUnitError(f"has {data.size:,} bytes: its header says {ends[-1]:,}")
    frames = [
        UnitFrame(data[begin_byte:end_byte], frame_sum, raw_sum)
        for (begin_byte, end_byte), (_, frame_sum, raw_sum) in zip(pairwise(ends), header.frame_rows, strict=True)
    ]
    return Unit(header.namespace_key, header.parent, header.start, header.ids, tuple(frames), header.dense)


class UnitHeader(NamedTuple):
    """What the header of a unit says: `nbytes` of it, and of each frame bytes, checksum, checksum of the words."""

    namespace_key: bytes
    parent: bytes
    start: int
    ids: Ids
    dense: DenseUnitInfo | None
    frame_rows: list[tuple[int, int, int]]
    nbytes: int


def parse_header(data: Bytes) -> UnitHeader:
    """The header of the unit whose bytes begin with `data`; errors as `parse_unit`."""
    if data.size < _UNIT_STRUCT.size:
        raise DamagedUnitError(f"has {data.size:,} bytes: too few for a header")
    magic, num_tokens, num_frames, start, namespace, parent = _UNIT_STRUCT.unpack_from(data.data)
    if magic not in (FRAME_MAGIC, DENSE_MAGIC):
        raise DamagedUnitError("does not begin as a unit does")
    if not (1 <= num_tokens <= MAX_TOKENS and 1 <= num_frames <= 2 * MAX_LAYERS and start <= MAX_TOKENS):
        raise DamagedUnitError("has impossible sizes in its header")
    position, history, chain, num_blocks, tables = _UNIT_STRUCT.size, 0, 0, None, _NO_TABLES
    if magic == DENSE_MAGIC:
        if data.size < position + _DENSE_STRUCT.size:
            raise DamagedUnitError(f"has {data.size:,} bytes: too few for a header")
        history, chain, num_blocks, tables = _DENSE_STRUCT.unpack_from(data.data, position)
        position += _DENSE_STRUCT.size
        if (
            num_blocks > num_tokens
            or history > min(MAX_HISTORY_ROWS, start)
            or chain > MAX_CHAIN_UNITS
            or bool(chain) != bool(history)
        ):
            raise DamagedUnitError("has impossible sizes in its header")
    size = count_header_bytes(num_tokens, num_frames, num_blocks)
    if size > data.size:
        raise DamagedUnitError(f"has {data.size:,} bytes: its header alone has {size:,}")
    (stored_checksum,) = _CHECKSUM_STRUCT.unpack_from(data.data, size - _CHECKSUM_STRUCT.size)
    if integrity_checksum(data[: size - _CHECKSUM_STRUCT.size]) != stored_checksum:
        raise DamagedUnitError("its header does not match its checksum")
    ids = np.frombuffer(data, "<u4", num_tokens, position)
    position += 4 * num_tokens
    if num_blocks is None:
        return UnitHeader(
            namespace, parent, start, ids, None, np.frombuffer(data, _FRAME_DTYPE, num_frames, position).tolist(), size
        )
    sums = tuple(np.frombuffer(data, "<u8", num_blocks, position).tolist())
    streams = np.frombuffer(data, _STREAM_DTYPE, num_frames, position + 8 * num_blocks).tolist()
    dense = DenseUnitInfo(sums, history, chain, b"" if tables == _NO_TABLES else tables)
    return UnitHeader(
        namespace,
        parent,
        start,
        ids,
        dense,
        [(nbytes, stream_checksum, 0) for nbytes, stream_checksum in streams],
        size,
    )
