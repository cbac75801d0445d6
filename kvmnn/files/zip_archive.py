"""Zip archives, read from a mapped file, of which only one reading is possible.

The directory is read here rather than by `zipfile`, which needs ten times as long for the thousands of members of a
training checkpoint and believes what it reads. Here an archive can claim no more than it holds: no two members overlap,
stored ones lie within the file, and deflated ones are at most `MAX_DEFLATE` times as large as what they are made of.
What two programs could read differently is refused: a local header that is not what the directory says, several parts,
bytes behind the archive, names with NUL.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from ..dtypes import Bytes
from ..errors import LimitError, SourceError
from .mapped import MappedFile

STORED, DEFLATED = 0, 8
MAX_DEFLATE = 1_032
"""Bytes that deflate can make of one, at most."""
MAX_ENTRIES = 1 << 18

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
MAX_COMMENT = 0xFFFF
_U16, _U32 = 0xFFFF, 0xFFFF_FFFF
_ENCRYPTED, _SIZES_BEHIND, _UTF8 = 0x1, 0x8, 0x800
_STEP = 1 << 20


def first_member(head: bytes) -> bytes:
    """The name of the first member of an archive that begins with `head`; empty of what is none."""
    is_one = head.startswith(b"PK\x03\x04")
    return head[30 : 30 + int.from_bytes(head[26:28], "little")] if is_one else b""


class ZipError(SourceError):
    """An archive that is damaged, or that could be read in two ways; the message does not name the file."""


class Member(NamedTuple):
    """One file in the archive: its name, where its local header lies, and what the directory says of it."""

    name: str
    raw_name: bytes
    offset: int
    method: int
    flags: int
    crc: int
    packed_bytes: int
    nbytes: int

    @property
    def where(self) -> str:
        """What messages call it."""
        return f"member {self.name[:80]!r}"


class ZipArchive:
    """The members of an archive, in the order of its directory, and its comment.

    Raises
    ------
    ZipError
        For a file that is cut off, damaged, no zip archive, or one whose members overlap.
    LimitError
        For more than `MAX_ENTRIES` members.
    """

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.comment = b""
        self.members, self.directory_offset = self._directory()
        self._ends = sorted([member.offset for member in self.members] + [self.directory_offset])
        self._check_overlap()

    def packed(self, member: Member) -> tuple[int, int]:
        """Where a member's data lies (offset and bytes), once its local header agrees with the directory.

        Raises
        ------
        ZipError
            When the two differ, or the member is encrypted or packed by another method than deflate.
        LimitError
            When it claims more than its bytes can hold.
        """
        where = member.where
        if member.flags & _ENCRYPTED:
            raise ZipError(f"{where} is encrypted")
        if member.method not in (STORED, DEFLATED):
            raise ZipError(f"{where}: compression method {member.method} is neither stored nor deflated")
        fields = _LOCAL.unpack(self.file.view(member.offset, _LOCAL.size).tobytes())
        begin: int = member.offset + _LOCAL.size + fields[9] + fields[10]
        end = begin + member.packed_bytes
        if fields[0] != b"PK\3\4" or end > self._ends[bisect_right(self._ends, member.offset)]:
            raise ZipError(f"offset {member.offset}: the header of {where} is damaged, or it reaches into what follows")
        tail = self.file.view(member.offset + _LOCAL.size, fields[9] + fields[10]).tobytes()
        self._compare(member, fields, tail[: fields[9]], tail[fields[9] :])
        if member.method == STORED and member.packed_bytes != member.nbytes:
            raise ZipError(f"{where}: the header is damaged: {member.packed_bytes} bytes are stored as {member.nbytes}")
        if member.nbytes > member.packed_bytes * MAX_DEFLATE:
            raise LimitError(
                f"{where}: {member.nbytes} bytes deflated to {member.packed_bytes}: deflate makes at most "
                f"{MAX_DEFLATE} of one"
            )
        return begin, member.packed_bytes

    def _compare(self, member: Member, local: tuple[int, ...], name: bytes, extra: bytes) -> None:
        """The local header with the directory; where sizes and checksum follow the data, it may have zeros."""
        packed, size = local[7], local[8]
        if _U32 in (packed, size):
            packed, size, _ = _wide(extra, packed, size, 0)
        found = {"name": name, "flags": local[2], "method": local[3], "checksum": local[6], "size": (packed, size)}
        expected = {
            "name": member.raw_name,
            "flags": member.flags,
            "method": member.method,
            "checksum": member.crc,
            "size": (member.packed_bytes, member.nbytes),
        }
        if member.flags & _SIZES_BEHIND:
            found["checksum"] = found["checksum"] or member.crc
            found["size"] = expected["size"] if not any((packed, size)) else found["size"]
        for what, value in expected.items():
            if found[what] != value:
                raise ZipError(f"{member.where}: its header and the archive's directory differ in its {what}")

    def _directory(self) -> tuple[list[Member], int]:
        count, nbytes, begin, end = self._end_record()
        if count > MAX_ENTRIES:
            raise LimitError(f"the archive has {count} members: at most {MAX_ENTRIES} are taken")
        if begin + nbytes != end or count * _ENTRY.size > nbytes:
            raise ZipError(
                f"the zip directory does not fit: {count} entries in {nbytes} bytes at offset {begin}, "
                f"which must end at offset {end}"
            )
        data = self.file.view(begin, nbytes).tobytes()
        entries: list[Member] = []
        position = 0
        for _ in range(count):
            if position + _ENTRY.size > nbytes:
                raise ZipError(f"the zip directory ends within entry {len(entries)} of {count}")
            member, length = _entry(data, position)
            if member is None:
                raise ZipError(f"offset {begin + position}: entry {len(entries)} of the zip directory is damaged")
            entries.append(member)
            position += length
        if position != nbytes:
            raise ZipError(f"the zip directory has {nbytes} bytes, its {count} entries take {position}")
        return entries, begin

    def _end_record(self) -> tuple[int, int, int, int]:
        """Number of entries, size and offset of the directory, and where the records behind it begin."""
        size = self.file.size
        start = max(0, size - _END.size - MAX_COMMENT)
        tail = self.file.view(start, size - start).tobytes()
        at = tail.rfind(b"PK\5\6", 0, len(tail) - _END.size + 4)
        if at < 0:
            raise ZipError(f"a zip archive without its directory: the file ({size} bytes) is cut off")
        _, disk, first_disk, here, count, nbytes, begin, comment = _END.unpack_from(tail, at)
        if at + _END.size + comment != len(tail):
            behind = len(tail) - at - _END.size
            raise ZipError(f"{behind} bytes lie behind the end of the archive, which says {comment}")
        self.comment = tail[at + _END.size :]
        end = start + at
        locator = at - _END64_LOCATOR.size
        wide = locator >= 0 and tail[locator : locator + 4] == b"PK\6\7"
        if wide:
            _, end_disk, end64, disks = _END64_LOCATOR.unpack_from(tail, locator)
            if end64 + _END64.size > start + locator:
                raise ZipError("the zip64 record of the archive lies outside the file")
            record = _END64.unpack(self.file.view(end64, _END64.size).tobytes())
            if record[0] != b"PK\6\6":
                raise ZipError(f"offset {end64}: the zip64 record of the archive is damaged")
            narrow = (disk, first_disk, here, count, nbytes, begin)
            disk, first_disk, here, count, nbytes, begin = (*record[4:10],)
            differs = any(
                short not in (full, limit)
                for short, full, limit in zip(narrow, record[4:10], (_U16,) * 4 + (_U32,) * 2, strict=True)
            )
            if differs or end_disk or disks > 1:
                raise ZipError("the two records at the end of the archive differ")
            end = end64
        elif _U16 in (here, count) or _U32 in (nbytes, begin):
            raise ZipError("the archive's zip64 record is missing")
        if disk or first_disk or here != count:
            raise ZipError("a zip archive in several parts")
        return count, nbytes, begin, end

    def _check_overlap(self) -> None:
        position = 0
        for member in sorted(self.members, key=lambda member: member.offset):
            if member.offset < position:
                raise ZipError(f"{member.where} overlaps the one before it")
            position = member.offset + _LOCAL.size + len(member.raw_name) + member.packed_bytes
        if position > self.directory_offset:
            raise ZipError(f"the members reach offset {position}, the directory begins at {self.directory_offset}")


class Inflater:
    """A deflated range of a file, inflated as it is asked for."""

    def __init__(self, file: MappedFile, begin: int, nbytes: int, where: str) -> None:
        self._chunks = file.runs(begin, nbytes, _STEP)
        self._engine = zlib.decompressobj(-zlib.MAX_WBITS)
        self._rest = b""
        self._where = where

    def runs(self, nbytes: int, step: int) -> Iterator[Bytes]:
        """`nbytes` bytes in runs of `step`, after which the deflated data must have ended."""
        while nbytes:
            piece = self.read(min(step, nbytes))
            nbytes -= piece.size
            yield piece
            del piece
        if self._some(1):
            raise ZipError(f"{self._where}: holds more data than the archive says")

    def read(self, nbytes: int) -> Bytes:
        """The next `nbytes` bytes."""
        piece = np.empty(nbytes, np.uint8)
        done = 0
        while done < nbytes:
            some = self._some(min(nbytes - done, _STEP))
            if not some:
                raise ZipError(f"{self._where}: the data ends {nbytes - done} bytes early")
            piece.data[done : done + len(some)] = some
            done += len(some)
        return piece

    def _some(self, most: int) -> bytes:
        """At least one byte and at most `most`, or none at the end."""
        while not self._engine.eof:
            chunk = self._rest or next(self._chunks, None)
            if chunk is None:
                return b""
            try:
                some = self._engine.decompress(chunk if isinstance(chunk, bytes) else chunk.data, most)
            except zlib.error as exc:
                raise ZipError(f"{self._where}: the deflated data is damaged: {exc}") from None
            self._rest = self._engine.unconsumed_tail
            if some:
                return some
        return b""


def _entry(data: bytes, position: int) -> tuple[Member | None, int]:
    """An entry of the directory and its length; None where it is damaged."""
    fields = _ENTRY.unpack_from(data, position)
    signature, _, _, flags, method, _, _, crc, packed, size, name_bytes, extra_bytes, comment_bytes, disk = fields[:14]
    length = _ENTRY.size + name_bytes + extra_bytes + comment_bytes
    if signature != b"PK\1\2" or position + length > len(data):
        return None, 0
    behind = position + _ENTRY.size + name_bytes
    name, extra = data[position + _ENTRY.size : behind], data[behind : behind + extra_bytes]
    offset = fields[16]
    if disk not in (0, _U16):
        raise ZipError("a zip archive in several parts")
    if _U32 in (packed, size, offset):
        packed, size, offset = _wide(extra, packed, size, offset)
    return Member(_text(name, flags), name, offset, method, flags, crc, packed, size), length


def _text(name: bytes, flags: int) -> str:
    """A name: UTF-8 where it says so, else the code page of old; no program agrees on one with NUL."""
    try:
        text = name.decode("utf-8" if flags & _UTF8 else "cp437")
    except UnicodeDecodeError:
        raise ZipError(f"a member's name is not UTF-8: {name[:40]!r}") from None
    if "\0" in text:
        raise ZipError(f"member {text[:80]!r} has NUL in its name")
    return text


def _wide(extra: bytes, packed: int, size: int, offset: int) -> tuple[int, int, int]:
    """Sizes and offset of a member that 32 bits do not hold, from its zip64 field."""
    position = 0
    while position + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, position)
        if kind == 1:
            numbers = extra[position + 4 : position + 4 + length]
            wide = iter(struct.unpack_from(f"<{len(numbers) // 8}Q", numbers))
            try:
                size = next(wide) if size == _U32 else size
                packed = next(wide) if packed == _U32 else packed
                offset = next(wide) if offset == _U32 else offset
            except StopIteration:
                break
            return packed, size, offset
        position += 4 + length
    raise ZipError("a zip entry of more than 4 GiB without its zip64 field")
