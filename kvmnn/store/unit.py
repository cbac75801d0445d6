"""A storage unit: the frames of some blocks that were put together, and what tells whether they are what was put.

One header, then K and V of every layer as a frame each (docs/prefix-store.md has the bytes).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..dtypes import Bytes
from ..errors import KvmnnError
from ..frames.hashing import checksum
from .space import KEY_BYTES, MAX_LAYERS
from .token_ids import MAX_TOKENS, Ids

MAGIC = b"KVMNNPU1"
_FIELDS = struct.Struct(f"<8sIII{KEY_BYTES}s{KEY_BYTES}s")
_CHECKSUM = struct.Struct("<Q")
_FRAME = np.dtype([("bytes", "<u8"), ("checksum", "<u8"), ("raw_checksum", "<u8")])


class DamagedError(KvmnnError):
    """A unit that is not what was put."""


class Frame(NamedTuple):
    """K or V of one layer.

    Parameters
    ----------
    data
        The frame.
    checksum, raw_checksum
        Of the frame, and of the words it holds (`frames.hashing.rows_checksum`).
    """

    data: Bytes | bytes
    checksum: int
    raw_checksum: int


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
        K and V of the first layer, K and V of the next ...
    """

    space: bytes
    parent: bytes
    start: int
    ids: Ids
    frames: tuple[Frame, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return header_bytes(self.ids.size, len(self.frames)) + sum(len(frame.data) for frame in self.frames)

    def pieces(self) -> list[Bytes | bytes]:
        """The bytes of the file, in order."""
        table = np.array([(len(each.data), each.checksum, each.raw_checksum) for each in self.frames], _FRAME)
        fields = _FIELDS.pack(MAGIC, self.ids.size, len(self.frames), self.start, self.space, self.parent)
        head = fields + self.ids.astype("<u4").tobytes() + table.tobytes()
        return [head + _CHECKSUM.pack(checksum(head)), *(frame.data for frame in self.frames)]


def header_bytes(tokens: int, frames: int) -> int:
    """Bytes before the first frame."""
    return _FIELDS.size + 4 * tokens + _FRAME.itemsize * frames + _CHECKSUM.size


def parse(data: Bytes) -> Unit:
    """The unit in the bytes of a file; frames are views of `data`, whose checksums are not compared yet.

    Raises
    ------
    DamagedError
        For anything that `Unit.pieces` would not have given.
    """
    parent, space, start, ids, table = _header(data)
    rows = table.tolist()
    ends = list(accumulate((size for size, _, _ in rows), initial=header_bytes(ids.size, len(rows))))
    if ends[-1] != data.size:
        raise DamagedError(f"has {data.size:,} bytes: its header says {ends[-1]:,}")
    frames = [
        Frame(data[begin:end], frame_sum, raw_sum)
        for (begin, end), (_, frame_sum, raw_sum) in zip(pairwise(ends), rows, strict=True)
    ]
    return Unit(space, parent, start, ids, tuple(frames))


def parse_ids(data: Bytes) -> tuple[bytes, int, Ids]:
    """Key of the space, tokens before the unit and ids of the unit whose bytes begin with `data`; errors as `parse`."""
    _, space, start, ids, _ = _header(data)
    return space, start, ids


def _header(data: Bytes) -> tuple[bytes, bytes, int, Ids, npt.NDArray[np.void]]:
    if data.size < _FIELDS.size:
        raise DamagedError(f"has {data.size:,} bytes: too few for a header")
    magic, tokens, frames, start, space, parent = _FIELDS.unpack_from(data.data)
    if magic != MAGIC:
        raise DamagedError("does not begin as a unit does")
    if not (1 <= tokens <= MAX_TOKENS and 2 <= frames <= 2 * MAX_LAYERS and start <= MAX_TOKENS):
        raise DamagedError("has impossible sizes in its header")
    size = header_bytes(tokens, frames)
    if size > data.size:
        raise DamagedError(f"has {data.size:,} bytes: its header alone has {size:,}")
    (said,) = _CHECKSUM.unpack_from(data.data, size - _CHECKSUM.size)
    if checksum(data[: size - _CHECKSUM.size]) != said:
        raise DamagedError("its header does not match its checksum")
    ids = np.frombuffer(data, "<u4", tokens, _FIELDS.size)
    table = np.frombuffer(data, _FRAME, frames, _FIELDS.size + 4 * tokens)
    return parent, space, start, ids, table
