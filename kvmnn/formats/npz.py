"""``.npz`` archives: stored members are mapped, deflated ones inflated piece by piece; nothing is ever unpickled.

The archive's directory is read by `zipfile`; the members' data is taken from the mapped file, so that an archive of
thousands of arrays is opened once and only a piece of a member is ever in memory.
"""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from functools import partial

import numpy as np

from ..arrays.named_array import ArrayInfo, NamedArray, Piece
from ..arrays.source import Source
from ..errors import SourceError
from ..files.mapped import MappedFile
from ..files.names import member_names
from . import npy
from .npy import MAX_HEADER, Header
from .options import ReadOptions
from .raw import own_bytes
from .reading import checked, dtype_name, select
from .sinks import Runs, SeekableSink, beginnings

_LOCAL_SIGNATURE = b"PK\3\4"
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED = 0x1
_STEP = 1 << 20


def read(path: str, options: ReadOptions) -> Source:
    """Every ``.npy`` member, in archive order, under its name without ``.npy``."""
    file = MappedFile(path)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
    except (zipfile.BadZipFile, NotImplementedError, ValueError, OSError) as exc:
        raise SourceError(f"{path}: not a readable .npz archive: {exc}") from None
    for member in members:
        if not member.filename.endswith(".npy"):
            raise SourceError(f"{path}: member {member.filename!r} is not a .npy file")
    entries = [(m.filename.removesuffix(".npy"), partial(_array, _Member(file, m), options)) for m in members]
    arrays, skipped = select(path, entries, options)
    return Source(arrays, skipped=skipped)


def _array(member: _Member, options: ReadOptions) -> NamedArray:
    header = Header(member.head(), member.where)
    dtype = dtype_name(header.dtype, options, member.where)
    if header.size + header.nbytes != member.size:
        raise SourceError(
            f"{member.where}: the .npy header promises {header.nbytes} bytes of data after {header.size} of header, "
            f"the archive says {member.size} in all"
        )
    array = NamedArray(
        name=member.name.removesuffix(".npy"),
        dtype=dtype,
        shape=header.shape,
        array_dtype=header.dtype.str,
        order=header.order,
        reader=partial(member.runs, header.size),
    )
    return checked(array, member.where)


class _Member:
    """One file in the archive."""

    def __init__(self, file: MappedFile, info: zipfile.ZipInfo) -> None:
        self.name = info.filename
        self.size = info.file_size
        self.where = f"{file.path}: member {info.filename!r}"
        self._file = file
        self._info = info

    def head(self) -> bytes:
        """Enough of its beginning to hold a ``.npy`` header."""
        nbytes = min(MAX_HEADER, self.size)
        begin = self._begin()
        if self._info.compress_type == zipfile.ZIP_STORED:
            return bytes(self._file.view(begin, nbytes))
        return bytes(_Inflater(self._file, begin, self._info.compress_size, self.where).read(nbytes))

    def runs(self, skip: int, step: int) -> Iterator[Piece]:
        """The data from `skip` on in runs of `step` bytes; then its checksum is compared."""
        begin = self._begin()
        if self._info.compress_type == zipfile.ZIP_STORED:
            crc = zlib.crc32(self._file.view(begin, skip).data)
            pieces = self._file.runs(begin + skip, self.size - skip, step)
        else:
            inflater = _Inflater(self._file, begin, self._info.compress_size, self.where)
            crc = zlib.crc32(inflater.read(skip).data)
            pieces = inflater.runs(self.size - skip, step)
        for piece in pieces:
            crc = zlib.crc32(piece.data, crc)
            yield piece
            del piece
        if crc != self._info.CRC:
            raise SourceError(f"{self.where}: the data does not match its checksum")

    def _begin(self) -> int:
        """Where the data lies: behind the local header, whose length only it knows."""
        info = self._info
        if info.flag_bits & _ENCRYPTED:
            raise SourceError(f"{self.where}: is encrypted")
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
            raise SourceError(f"{self.where}: compression method {info.compress_type} is neither stored nor deflated")
        local = self._file.view(info.header_offset, _LOCAL_HEADER.size)
        signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(local.data)
        stored = info.compress_type == zipfile.ZIP_STORED
        if signature != _LOCAL_SIGNATURE or (stored and info.compress_size != info.file_size):
            raise SourceError(f"{self.where}: the archive's header for it is damaged")
        return info.header_offset + _LOCAL_HEADER.size + int(name_bytes) + int(extra_bytes)


class _Inflater:
    """A deflated range of a mapped file, inflated as it is asked for."""

    def __init__(self, file: MappedFile, begin: int, nbytes: int, where: str) -> None:
        self._chunks = file.runs(begin, nbytes, _STEP)
        self._engine = zlib.decompressobj(-zlib.MAX_WBITS)
        self._rest = b""
        self._where = where

    def runs(self, nbytes: int, step: int) -> Iterator[Piece]:
        """`nbytes` bytes in runs of `step`, after which the deflated data must have ended."""
        while nbytes:
            piece = self.read(min(step, nbytes))
            nbytes -= piece.size
            yield piece
            del piece
        if self._some(1):
            raise SourceError(f"{self._where}: holds more data than the archive says")

    def read(self, nbytes: int) -> Piece:
        """The next `nbytes` bytes."""
        piece = np.empty(nbytes, np.uint8)
        done = 0
        while done < nbytes:
            some = self._some(min(nbytes - done, _STEP))
            if not some:
                raise SourceError(f"{self._where}: the data ends {nbytes - done} bytes early")
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
                raise SourceError(f"{self._where}: the deflated data is damaged: {exc}") from None
            self._rest = self._engine.unconsumed_tail
            if some:
                return some
        return b""


def write_npz(sink: SeekableSink, arrays: Sequence[ArrayInfo], runs: Runs, metadata: dict[str, str]) -> None:
    """All arrays as ``numpy.savez`` writes them, uncompressed and with a fixed date."""
    names = member_names([array.name for array in arrays], ".npy", ".npz")
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED, allowZip64=True) as archive, ExitStack() as open_member:
        for index, data, begins in beginnings(runs):
            if begins:
                open_member.close()
                info = zipfile.ZipInfo(names[index])
                member = open_member.enter_context(archive.open(info, "w", force_zip64=True))
                npy.write_header(member, arrays[index])
            member.write(own_bytes(arrays[index], data).data)
            del data
