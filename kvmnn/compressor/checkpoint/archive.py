"""The zip archives that ``torch.save`` writes, read from a mapped file.

The directory is read here rather than by `zipfile`, which needs ten times as long for the thousands of members of a
training checkpoint. Every size is checked against the file before anything is read, and no two members may overlap,
so an archive can claim no more than it holds, deflated members excepted, and those have a limit.
"""

from __future__ import annotations

import struct
import zlib
from operator import attrgetter
from typing import NamedTuple

import numpy as np

from ...dtypes import Bytes
from ...errors import CheckpointError, LimitError
from ...files.mapped import MappedFile

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_COMMENT = 0xFFFF
_U32 = 0xFFFF_FFFF
_ENCRYPTED = 0x1
_STORED, _DEFLATED = 0, 8
_MAX_DEFLATE = 1_032
"""Bytes that deflate can make of one, at most."""

MAX_ENTRIES = 1 << 18

MAX_INFLATED = 256 << 20
"""Bytes of the largest deflated member that is read."""
_MAX_KEPT = 32 << 20


class Member(NamedTuple):
    """One file in the archive: its name, where its local header lies, and what the directory says of it."""

    name: str
    offset: int
    method: int
    flags: int
    crc: int
    packed_bytes: int
    nbytes: int


class Archive:
    """The members of a torch archive by their name below its one top folder.

    Raises
    ------
    CheckpointError
        For a file that is cut off, damaged, or no archive of torch's.
    """

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.members: dict[str, Member] = {}
        self._inflated: dict[str, Bytes] = {}
        self._proven: set[str] = set()
        entries, self.directory_offset = self._directory()
        self._check_overlap(entries)
        self._sort_in(entries)

    def read(self, name: str, max_bytes: int = MAX_INFLATED) -> Bytes:
        """All bytes of a member, compared with its checksum; a view of the file where it is stored as it is.

        Raises
        ------
        LimitError
            For a deflated member of more than `max_bytes` bytes.
        """
        member = self.members[name]
        where = f"member {name!r}"
        if member.flags & _ENCRYPTED:
            raise CheckpointError(f"{where} is encrypted")
        if member.method == _STORED:
            data = self.file.view(self._begin(member), member.nbytes)
        elif member.method == _DEFLATED:
            if name in self._inflated:
                return self._inflated[name]
            data = self._inflate(member, where, max_bytes)
        else:
            raise CheckpointError(f"{where}: compression method {member.method} is neither stored nor deflated")
        if name not in self._proven:
            if zlib.crc32(data.data) != member.crc:
                raise CheckpointError(f"{where}: the data does not match its checksum")
            self._proven.add(name)
        return data

    def _directory(self) -> tuple[list[Member], int]:
        count, nbytes, begin, end = self._end_record()
        if count > MAX_ENTRIES:
            raise LimitError(f"the archive has {count} members: at most {MAX_ENTRIES} are taken")
        if begin + nbytes > end or count * _ENTRY.size > nbytes:
            raise CheckpointError(
                f"the zip directory does not fit: {count} entries in {nbytes} bytes at offset {begin}, "
                f"which must end before offset {end}"
            )
        data = self.file.view(begin, nbytes).tobytes()
        entries: list[Member] = []
        position = 0
        for _ in range(count):
            if position + _ENTRY.size > nbytes:
                raise CheckpointError(f"the zip directory ends within entry {len(entries)} of {count}")
            fields = _ENTRY.unpack_from(data, position)
            signature, _, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes, comment_bytes = fields[
                :13
            ]
            if signature != b"PK\1\2":
                raise CheckpointError(
                    f"offset {begin + position}: entry {len(entries)} of the zip directory is damaged"
                )
            position += _ENTRY.size
            name = data[position : position + name_bytes]
            extra = data[position + name_bytes : position + name_bytes + extra_bytes]
            position += name_bytes + extra_bytes + comment_bytes
            offset = fields[16]
            if _U32 in (packed, size, offset):
                packed, size, offset = _wide(extra, packed, size, offset)
            entries.append(Member(name.decode("utf-8", "surrogateescape"), offset, method, flags, crc, packed, size))
        return entries, begin

    def _end_record(self) -> tuple[int, int, int, int]:
        """Number of entries, size and offset of the directory, and where the records behind it begin."""
        size = self.file.size
        start = max(0, size - _END.size - _MAX_COMMENT)
        tail = self.file.view(start, size - start).tobytes()
        at = tail.rfind(b"PK\5\6", 0, len(tail) - _END.size + 4)
        if at < 0:
            raise CheckpointError(f"a zip archive without its directory: the file ({size} bytes) is cut off")
        _, disk, first_disk, _, count, nbytes, begin, _ = _END.unpack_from(tail, at)
        end = start + at
        if disk or first_disk:
            raise CheckpointError("a zip archive in several parts")
        if count == 0xFFFF or _U32 in (nbytes, begin):
            locator = at - _END64_LOCATOR.size
            if locator >= 0 and tail[locator : locator + 4] == b"PK\6\7":
                _, _, end64, _ = _END64_LOCATOR.unpack_from(tail, locator)
                if end64 + _END64.size > start + locator:
                    raise CheckpointError("the zip64 record of the archive lies outside the file")
                record = _END64.unpack(self.file.view(end64, _END64.size).tobytes())
                if record[0] != b"PK\6\6":
                    raise CheckpointError(f"offset {end64}: the zip64 record of the archive is damaged")
                return record[7], record[8], record[9], end64
        return count, nbytes, begin, end

    def _check_overlap(self, entries: list[Member]) -> None:
        position = 0
        for member in sorted(entries, key=attrgetter("offset")):
            if member.offset < position:
                raise CheckpointError(f"member {member.name[:80]!r} overlaps the one before it")
            position = member.offset + _LOCAL.size + member.packed_bytes
        if position > self.directory_offset:
            raise CheckpointError(
                f"the members reach offset {position}, the directory begins at {self.directory_offset}"
            )

    def _sort_in(self, entries: list[Member]) -> None:
        pickles = [member.name for member in entries if ("/" + member.name).endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].count("/") != 1:
            raise CheckpointError(f"a zip archive with {len(pickles)} data.pkl: expected one, in the top folder")
        root = pickles[0][: -len("data.pkl")]
        length = len(root)
        for member in entries:
            if not member.name.startswith(root):
                raise CheckpointError(f"member {member.name[:80]!r} lies outside the top folder {root[:80]!r}")
            if self.members.setdefault(member.name[length:], member) is not member:
                raise CheckpointError(f"two members are called {member.name[:80]!r}")
        if "constants.pkl" in self.members:
            raise CheckpointError("a TorchScript archive, which holds code: save the state_dict instead")

    def _begin(self, member: Member) -> int:
        """Where the data lies: behind the local header, whose length only it knows."""
        local = _LOCAL.unpack(self.file.view(member.offset, _LOCAL.size).tobytes())
        begin: int = member.offset + _LOCAL.size + local[9] + local[10]
        stored = member.method == _STORED
        if local[0] != b"PK\3\4" or (stored and member.packed_bytes != member.nbytes):
            raise CheckpointError(f"offset {member.offset}: the header of member {member.name[:80]!r} is damaged")
        if begin + member.packed_bytes > self.directory_offset:
            raise CheckpointError(f"member {member.name[:80]!r} reaches into the directory")
        return begin

    def _inflate(self, member: Member, where: str, max_bytes: int) -> Bytes:
        if member.nbytes > min(max_bytes, member.packed_bytes * _MAX_DEFLATE):
            raise LimitError(
                f"{where}: {member.nbytes} bytes deflated to {member.packed_bytes}: at most {max_bytes} bytes, and "
                f"{_MAX_DEFLATE} for one, are read"
            )
        packed = self.file.view(self._begin(member), member.packed_bytes)
        engine = zlib.decompressobj(-zlib.MAX_WBITS)
        try:
            data = engine.decompress(packed.data, member.nbytes + 1)
        except zlib.error as exc:
            raise CheckpointError(f"{where}: the deflated data is damaged: {exc}") from None
        if len(data) != member.nbytes:
            raise CheckpointError(f"{where}: the deflated data is not the {member.nbytes} bytes that it should be")
        if sum(kept.size for kept in self._inflated.values()) + len(data) > _MAX_KEPT:
            self._inflated.clear()
        self._inflated[member.name.partition("/")[2]] = np.frombuffer(data, np.uint8)
        return np.frombuffer(data, np.uint8)


def _wide(extra: bytes, packed: int, size: int, offset: int) -> tuple[int, int, int]:
    """Sizes and offset of a member that 32 bits do not hold, from its zip64 field."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            wide = iter(struct.unpack(f"<{length // 8}Q", extra[position + 4 :][: length // 8 * 8]))
            try:
                size = next(wide) if size == _U32 else size
                packed = next(wide) if packed == _U32 else packed
                offset = next(wide) if offset == _U32 else offset
            except StopIteration:
                break
            return packed, size, offset
        position += 4 + length
    raise CheckpointError("a zip entry of more than 4 GiB without its zip64 field")
