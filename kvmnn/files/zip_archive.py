"""Zip archives, read from a mapped file, that can be read in only one way.

`zipfile` takes ten times as long for the thousands of members of a training checkpoint, and does not check its input.
Here an archive can claim no more than it contains: no two members overlap, stored ones lie within the file, and
deflated ones are at most `MAX_DEFLATE_RATIO` times as large as their data. Ambiguous archives are rejected: a local
header that contradicts the directory, several parts, bytes after the archive, names with NUL.
"""

from __future__ import annotations

import struct
import zlib
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from .._util.named_tuple import NamedTuple
from ..dtypes import Bytes
from ..errors import LimitError, SourceError
from .mapped_file import MappedFile

METHOD_STORED, METHOD_DEFLATED = 0, 8
MAX_DEFLATE_RATIO = 1_032
"""Maximum compression ratio of deflate."""
MAX_ENTRIES = 1 << 18

_END_RECORD = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64_RECORD = struct.Struct("<4sQ2H2L4Q")
_DIRECTORY_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL_HEADER = struct.Struct("<4s5H3L2H")
MAX_COMMENT_BYTES = 0xFFFF
_U16_MAX, _U32_MAX = 0xFFFF, 0xFFFF_FFFF
_FLAG_ENCRYPTED, _FLAG_DATA_DESCRIPTOR, _FLAG_UTF8 = 0x1, 0x8, 0x800
_CHUNK_BYTES = 1 << 20


def read_first_member_name(head: bytes) -> bytes:
    """Return the name of the first member of an archive that begins with `head`; empty if it is not an archive."""
    is_zip = head.startswith(b"PK\x03\x04")
    return head[30 : 30 + int.from_bytes(head[26:28], "little")] if is_zip else b""


class ZipError(SourceError):
    """A damaged or ambiguous archive; the message does not name the file."""


class ZipMember(NamedTuple):
    """A file in the archive: its name, the offset of its local header, and its directory entry."""

    name: str
    raw_name: bytes
    offset: int
    method: int
    flags: int
    crc: int
    compressed_bytes: int
    nbytes: int

    @property
    def label(self) -> str:
        """Return the name of the member for messages."""
        return f"member {self.name[:80]!r}"


class ZipArchive:
    """The members of an archive, in the order of its directory, and its comment."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.comment = b""
        self.members, self.directory_offset = self._read_directory()
        self._ends = sorted([member.offset for member in self.members] + [self.directory_offset])
        self._check_overlap()

    def locate_data(self, member: ZipMember) -> tuple[int, int]:
        """Return offset and size of a member's data, after checking its local header against the directory."""
        label = member.label
        if member.flags & _FLAG_ENCRYPTED:
            raise ZipError(f"{label} is encrypted")
        if member.method not in (METHOD_STORED, METHOD_DEFLATED):
            raise ZipError(f"{label}: compression method {member.method} is neither stored nor deflated")
        fields = _LOCAL_HEADER.unpack(self.file.view(member.offset, _LOCAL_HEADER.size).tobytes())
        begin: int = member.offset + _LOCAL_HEADER.size + fields[9] + fields[10]
        end = begin + member.compressed_bytes
        if fields[0] != b"PK\3\4" or end > self._ends[bisect_right(self._ends, member.offset)]:
            raise ZipError(f"offset {member.offset}: the header of {label} is damaged, or it reaches into what follows")
        tail = self.file.view(member.offset + _LOCAL_HEADER.size, fields[9] + fields[10]).tobytes()
        self._check_local_header(member, fields, tail[: fields[9]], tail[fields[9] :])
        if member.method == METHOD_STORED and member.compressed_bytes != member.nbytes:
            raise ZipError(
                f"{label}: the header is damaged: {member.compressed_bytes} bytes are stored as {member.nbytes}"
            )
        if member.nbytes > member.compressed_bytes * MAX_DEFLATE_RATIO:
            raise LimitError(
                f"{label}: {member.nbytes} bytes deflated to {member.compressed_bytes}: deflate makes at most "
                f"{MAX_DEFLATE_RATIO} of one"
            )
        return begin, member.compressed_bytes

    def _check_local_header(self, member: ZipMember, local_fields: tuple[int, ...], name: bytes, extra: bytes) -> None:
        """Check a local header against the directory; if sizes and checksum follow the data, they may be zero."""
        compressed_bytes, nbytes = local_fields[7], local_fields[8]
        if _U32_MAX in (compressed_bytes, nbytes):
            compressed_bytes, nbytes, _ = _read_zip64_sizes(extra, compressed_bytes, nbytes, 0)
        size, crc = (compressed_bytes, nbytes), local_fields[6]
        expected_size = (member.compressed_bytes, member.nbytes)
        if member.flags & _FLAG_DATA_DESCRIPTOR:
            size, crc = size if any(size) else expected_size, crc or member.crc
        for field_name, value, expected_value in (
            ("name", name, member.raw_name),
            ("flags", local_fields[2], member.flags),
            ("method", local_fields[3], member.method),
            ("checksum", crc, member.crc),
            ("size", size, expected_size),
        ):
            if value != expected_value:
                raise ZipError(f"{member.label}: its header and the archive's directory differ in its {field_name}")

    def _read_directory(self) -> tuple[list[ZipMember], int]:
        count, nbytes, begin, end = self._read_end_record()
        if count > MAX_ENTRIES:
            raise LimitError(f"the archive has {count} members: at most {MAX_ENTRIES} are taken")
        if begin + nbytes != end or count * _DIRECTORY_ENTRY.size > nbytes:
            raise ZipError(
                f"the zip directory does not fit: {count} entries in {nbytes} bytes at offset {begin}, "
                f"which must end at offset {end}"
            )
        data = self.file.view(begin, nbytes).tobytes()
        entries: list[ZipMember] = []
        position = 0
        for _ in range(count):
            if position + _DIRECTORY_ENTRY.size > nbytes:
                raise ZipError(f"the zip directory ends within entry {len(entries)} of {count}")
            member, length = _parse_entry(data, position)
            if member is None:
                raise ZipError(f"offset {begin + position}: entry {len(entries)} of the zip directory is damaged")
            entries.append(member)
            position += length
        if position != nbytes:
            raise ZipError(f"the zip directory has {nbytes} bytes, its {count} entries take {position}")
        return entries, begin

    def _read_end_record(self) -> tuple[int, int, int, int]:
        """Return number of entries, size and offset of the directory, and the offset of the records after it."""
        size = self.file.size
        start = max(0, size - _END_RECORD.size - MAX_COMMENT_BYTES)
        tail = self.file.view(start, size - start).tobytes()
        record_start = tail.rfind(b"PK\5\6", 0, len(tail) - _END_RECORD.size + 4)
        if record_start < 0:
            raise ZipError(f"a zip archive without its directory: the file ({size} bytes) is cut off")
        _, disk, first_disk, disk_count, count, nbytes, begin, comment = _END_RECORD.unpack_from(tail, record_start)
        if record_start + _END_RECORD.size + comment != len(tail):
            trailing_bytes = len(tail) - record_start - _END_RECORD.size
            raise ZipError(f"{trailing_bytes} bytes lie after the end of the archive, which says {comment}")
        self.comment = tail[record_start + _END_RECORD.size :]
        end = start + record_start
        locator = record_start - _END64_LOCATOR.size
        has_zip64 = locator >= 0 and tail[locator : locator + 4] == b"PK\6\7"
        if has_zip64:
            _, end_disk, end64, disks = _END64_LOCATOR.unpack_from(tail, locator)
            if end64 + _END64_RECORD.size > start + locator:
                raise ZipError("the zip64 record of the archive lies outside the file")
            record = _END64_RECORD.unpack(self.file.view(end64, _END64_RECORD.size).tobytes())
            if record[0] != b"PK\6\6":
                raise ZipError(f"offset {end64}: the zip64 record of the archive is damaged")
            short_values, limits = (
                (disk, first_disk, disk_count, count, nbytes, begin),
                (*(_U16_MAX,) * 4, *(_U32_MAX,) * 2),
            )
            disk, first_disk, disk_count, count, nbytes, begin = (*record[4:10],)
            triples = zip(short_values, record[4:10], limits, strict=True)
            if any(short not in (full, limit) for short, full, limit in triples) or end_disk or disks > 1:
                raise ZipError("the two records at the end of the archive differ")
            end = end64
        elif _U16_MAX in (disk_count, count) or _U32_MAX in (nbytes, begin):
            raise ZipError("the archive's zip64 record is missing")
        if disk or first_disk or disk_count != count:
            raise ZipError("a zip archive in several parts")
        return count, nbytes, begin, end

    def _check_overlap(self) -> None:
        position = 0
        for member in sorted(self.members, key=lambda member: member.offset):
            if member.offset < position:
                raise ZipError(f"{member.label} overlaps the one before it")
            position = member.offset + _LOCAL_HEADER.size + len(member.raw_name) + member.compressed_bytes
        if position > self.directory_offset:
            raise ZipError(f"the members reach offset {position}, the directory begins at {self.directory_offset}")


class Inflater:
    """A deflated range of a file, decompressed on demand."""

    def __init__(self, file: MappedFile, begin: int, nbytes: int, label: str) -> None:
        self._chunks = file.iter_chunks(begin, nbytes, _CHUNK_BYTES)
        self._decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
        self._unconsumed = b""
        self._label = label

    def iter_chunks(self, nbytes: int, chunk_bytes: int) -> Iterator[Bytes]:
        """Yield `nbytes` bytes in chunks of `chunk_bytes`; then the deflated data must have ended."""
        while nbytes:
            chunk = self.read(min(chunk_bytes, nbytes))
            nbytes -= chunk.size
            yield chunk
            del chunk
        if self._read_some(1):
            raise ZipError(f"{self._label}: holds more data than the archive says")

    def read(self, nbytes: int) -> Bytes:
        """Return the next `nbytes` bytes."""
        buffer = np.empty(nbytes, np.uint8)
        position = 0
        while position < nbytes:
            data = self._read_some(min(nbytes - position, _CHUNK_BYTES))
            if not data:
                raise ZipError(f"{self._label}: the data ends {nbytes - position} bytes early")
            buffer.data[position : position + len(data)] = data
            position += len(data)
        return buffer

    def _read_some(self, max_bytes: int) -> bytes:
        """Return at least one byte and at most `max_bytes`; empty at the end."""
        while not self._decompressor.eof:
            chunk = self._unconsumed or next(self._chunks, None)
            if chunk is None:
                return b""
            try:
                data = self._decompressor.decompress(chunk if isinstance(chunk, bytes) else chunk.data, max_bytes)
            except zlib.error as exc:
                raise ZipError(f"{self._label}: the deflated data is damaged: {exc}") from None
            self._unconsumed = self._decompressor.unconsumed_tail
            if data:
                return data
        return b""


def _parse_entry(data: bytes, position: int) -> tuple[ZipMember | None, int]:
    """Return an entry of the directory and its length; None if it is damaged."""
    fields = _DIRECTORY_ENTRY.unpack_from(data, position)
    signature, _, _, flags, method, _, _, crc, compressed_bytes, nbytes = fields[:10]
    name_bytes, extra_bytes, comment_bytes, disk, _, _, offset = fields[10:]
    length = _DIRECTORY_ENTRY.size + name_bytes + extra_bytes + comment_bytes
    if signature != b"PK\1\2" or position + length > len(data):
        return None, 0
    extra_start = position + _DIRECTORY_ENTRY.size + name_bytes
    name, extra = data[position + _DIRECTORY_ENTRY.size : extra_start], data[extra_start : extra_start + extra_bytes]
    if disk not in (0, _U16_MAX):
        raise ZipError("a zip archive in several parts")
    if _U32_MAX in (compressed_bytes, nbytes, offset):
        compressed_bytes, nbytes, offset = _read_zip64_sizes(extra, compressed_bytes, nbytes, offset)
    return ZipMember(_decode_name(name, flags), name, offset, method, flags, crc, compressed_bytes, nbytes), length


def _decode_name(name: bytes, flags: int) -> str:
    """Decode a name as UTF-8 if its flag says so, else as code page 437; reject NUL, which is ambiguous."""
    try:
        text = name.decode("utf-8" if flags & _FLAG_UTF8 else "cp437")
    except UnicodeDecodeError:
        raise ZipError(f"a member's name is not UTF-8: {name[:40]!r}") from None
    if "\0" in text:
        raise ZipError(f"member {text[:80]!r} has NUL in its name")
    return text


def _read_zip64_sizes(extra: bytes, compressed_bytes: int, nbytes: int, offset: int) -> tuple[int, int, int]:
    """Return sizes and offset of a member that exceed 32 bits, from its zip64 field."""
    position = 0
    while position + 4 <= len(extra):
        field_id, length = struct.unpack_from("<HH", extra, position)
        if field_id == 1:
            payload = extra[position + 4 : position + 4 + length]
            values = iter(struct.unpack_from(f"<{len(payload) // 8}Q", payload))
            try:
                nbytes = next(values) if nbytes == _U32_MAX else nbytes
                compressed_bytes = next(values) if compressed_bytes == _U32_MAX else compressed_bytes
                offset = next(values) if offset == _U32_MAX else offset
            except StopIteration:
                break
            return compressed_bytes, nbytes, offset
        position += 4 + length
    raise ZipError("a zip entry of more than 4 GiB without its zip64 field")
