"""``.npz`` archives: stored members are mapped, deflated ones inflated piece by piece; nothing is ever unpickled."""

from __future__ import annotations

import struct
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import IO

import numpy as np

from ..errors import SourceError
from .base import NamedArray, Piece, ReadOptions, Source, checked, dtype_name, select
from .mapped import MappedFile
from .npy import HEADER_MOST, Header

_LOCAL_SIGNATURE = b"PK\3\4"
_LOCAL_HEADER = struct.Struct("<4s22xHH")
_ENCRYPTED = 0x1
_INFLATE_STEP = 1 << 20


def read(path: str, options: ReadOptions) -> Source:
    """Every ``.npy`` member, in archive order, under its name without ``.npy``."""
    file = MappedFile(path)
    with _zip_errors(path), zipfile.ZipFile(path) as archive:
        members = archive.infolist()
    for member in members:
        if not member.filename.endswith(".npy"):
            raise SourceError(f"{path}: member {member.filename!r} is not a .npy file")
    entries = [(m.filename.removesuffix(".npy"), partial(_member, file, m, options)) for m in members]
    arrays, skipped = select(path, entries, options)
    return Source(arrays, skipped=skipped)


def _member(file: MappedFile, member: zipfile.ZipInfo, options: ReadOptions) -> NamedArray:
    where = f"{file.path}: member {member.filename!r}"
    if member.flag_bits & _ENCRYPTED:
        raise SourceError(f"{where}: is encrypted")
    with _opened(file.path, member, where) as stream:
        header = Header(stream.read(HEADER_MOST), where)
    dtype = dtype_name(header.dtype, options, where)
    if header.size + header.nbytes != member.file_size:
        raise SourceError(
            f"{where}: the .npy header promises {header.nbytes} bytes of data after {header.size} of header, "
            f"the archive says {member.file_size} in all"
        )
    if member.compress_type == zipfile.ZIP_STORED:
        reader = partial(_stored, file, member, header.size, where)
    else:
        reader = partial(_inflated, file.path, member, header.size, where)
    array = NamedArray(
        name=member.filename.removesuffix(".npy"),
        dtype=dtype,
        shape=header.shape,
        array_dtype=header.dtype.str,
        order=header.order,
        reader=reader,
    )
    return checked(array, where)


def _stored(file: MappedFile, member: zipfile.ZipInfo, skip: int, where: str, step: int) -> Iterator[Piece]:
    """The member's data as views of the archive, with the checksum that zipfile would have checked."""
    local = file.view(member.header_offset, _LOCAL_HEADER.size)
    signature, name_bytes, extra_bytes = _LOCAL_HEADER.unpack(local.data)
    if signature != _LOCAL_SIGNATURE or member.compress_size != member.file_size:
        raise SourceError(f"{where}: the archive's local header is damaged")
    data = member.header_offset + _LOCAL_HEADER.size + name_bytes + extra_bytes
    crc = zlib.crc32(file.view(data, skip).data)
    for piece in file.runs(data + skip, member.file_size - skip, step):
        crc = zlib.crc32(piece.data, crc)
        yield piece
    if crc != member.CRC:
        raise SourceError(f"{where}: the data does not match its checksum")


def _inflated(path: str, member: zipfile.ZipInfo, skip: int, where: str, step: int) -> Iterator[Piece]:
    with _opened(path, member, where) as stream:
        stream.read(skip)
        left = member.file_size - skip
        while left:
            piece = np.empty(min(step, left), np.uint8)
            _fill(stream, piece.data, where)
            left -= piece.size
            yield piece
        stream.read(1)  # reaching the end is what makes zipfile compare the checksum


def _fill(stream: IO[bytes], target: memoryview, where: str) -> None:
    while target:
        chunk = stream.read(min(len(target), _INFLATE_STEP))
        if not chunk:
            raise SourceError(f"{where}: the data ends {len(target)} bytes early")
        target[: len(chunk)] = chunk
        target = target[len(chunk) :]


@contextmanager
def _opened(path: str, member: zipfile.ZipInfo, where: str) -> Iterator[IO[bytes]]:
    with _zip_errors(where), zipfile.ZipFile(path) as archive, archive.open(member) as stream:
        yield stream


@contextmanager
def _zip_errors(where: str) -> Iterator[None]:
    try:
        yield
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as exc:
        raise SourceError(f"{where}: not a readable .npz archive: {exc}") from None
