"""``.npz`` archives: stored members are mapped, deflated ones inflated piece by piece; nothing is ever unpickled.

`files.zip_archive` reads the archive's directory; the members' data is taken from the mapped file, so that an archive
of thousands of arrays is opened once and only a piece of a member is ever in memory.

What kvmnn knows of a cache beyond its arrays is in the archive's comment, which numpy passes over: ``numpy.load`` finds
the arrays and nothing else.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from ..arrays.named_array import ArrayInfo, NamedArray, Piece
from ..arrays.source import BESIDE_KEY, COMPLETENESS_KEY, ENGINE_KEY, Source
from ..errors import LimitError, SourceError
from ..files.json_document import parse
from ..files.mapped import MappedFile
from ..files.names import member_names
from ..files.zip_archive import MAX_COMMENT, STORED, Inflater, Member, ZipArchive, ZipError, first_member
from ..packed.cache_info import METADATA_KEY
from . import npy
from .npy import MAX_HEADER, Header
from .options import ReadOptions
from .raw import own_bytes
from .reading import checked, dtype_name, select, with_bytes
from .sinks import Runs, SeekableSink, beginnings


def read(path: str, options: ReadOptions) -> Source:
    """Every ``.npy`` member, in archive order, under its name without ``.npy``."""
    return read_mapped(MappedFile(path, max_bytes=options.max_bytes), options)


def is_npz(head: bytes) -> bool:
    """Whether a file that begins with `head` is a zip archive whose first member is a ``.npy`` file."""
    return first_member(head).endswith(b".npy")


def read_mapped(file: MappedFile, options: ReadOptions) -> Source:
    """The same of an open file."""
    with _naming(file.label):
        archive = ZipArchive(file)
    for member in archive.members:
        if not member.name.endswith(".npy"):
            raise SourceError(f"{file.label}: {member.where} is not a .npy file")
    metadata = _metadata(archive.comment, file.label)
    members = [_Member(archive, member) for member in archive.members]
    both = options, with_bytes(options, metadata)
    entries = [(member.name.removesuffix(".npy"), partial(_array, member, *both)) for member in members]
    arrays, skipped = select(file.label, entries, options)
    return Source(arrays, metadata, skipped=skipped)


_KEPT = (ENGINE_KEY, METADATA_KEY, BESIDE_KEY, COMPLETENESS_KEY)


def comment_of(metadata: Mapping[str, str]) -> bytes | None:
    """The comment of an archive with this metadata; None where none is long enough for it."""
    kept = {key: metadata[key] for key in _KEPT if key in metadata}
    text = json.dumps(kept).encode() if kept else b""
    return text if len(text) <= MAX_COMMENT else None


def _metadata(comment: bytes, path: str) -> dict[str, str]:
    if not any(comment.startswith(f'{{"{key}"'.encode()) for key in _KEPT):
        return {}  # somebody else's
    said = parse(comment.decode(errors="replace"), f"{path}: the archive's comment").text_map()
    return {key: said[key] for key in _KEPT if key in said}


def _array(member: _Member, options: ReadOptions, of_bytes: ReadOptions) -> NamedArray:
    header = Header(member.head(), member.where)
    dtype = dtype_name(header.dtype, of_bytes if header.dtype == np.uint8 else options, member.where)
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
    return checked(array, member.where, options)


class _Member:
    """One file in the archive."""

    def __init__(self, archive: ZipArchive, member: Member) -> None:
        self.name = member.name
        self.size = member.nbytes
        self.where = f"{archive.file.label}: {member.where}"
        self._archive = archive
        self._member = member

    def head(self) -> bytes:
        """Enough of its beginning to hold a ``.npy`` header."""
        nbytes = min(MAX_HEADER, self.size)
        with self._naming():
            if self._member.method == STORED:
                begin, _ = self._archive.packed(self._member)
                return self._archive.file.view(begin, nbytes).tobytes()
            return self._inflater().read(nbytes).tobytes()

    def runs(self, skip: int, step: int) -> Iterator[Piece]:
        """The data from `skip` on in runs of `step` bytes; then its checksum is compared."""
        with self._naming():
            if self._member.method == STORED:
                begin, _ = self._archive.packed(self._member)
                crc = zlib.crc32(self._archive.file.view(begin, skip).data)
                pieces = self._archive.file.runs(begin + skip, self.size - skip, step)
            else:
                inflater = self._inflater()
                crc = zlib.crc32(inflater.read(skip).data)
                pieces = inflater.runs(self.size - skip, step)
            for piece in pieces:
                crc = zlib.crc32(piece.data, crc)
                yield piece
                del piece
        if crc != self._member.crc:
            raise SourceError(f"{self.where}: the data does not match its checksum")

    def _inflater(self) -> Inflater:
        begin, nbytes = self._archive.packed(self._member)
        return Inflater(self._archive.file, begin, nbytes, self._member.where)

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Put the file's name in front of what is said of the archive."""
        with _naming(self._archive.file.label):
            yield


@contextmanager
def _naming(label: str) -> Iterator[None]:
    try:
        yield
    except ZipError as exc:
        raise SourceError(f"{label}: not a readable .npz archive: {exc}") from None
    except LimitError as exc:
        raise LimitError(f"{label}: {exc}") from None


def write_npz(sink: SeekableSink, arrays: Sequence[ArrayInfo], runs: Runs, metadata: dict[str, str]) -> None:
    """All arrays as ``numpy.savez`` writes them, uncompressed and with a fixed date."""
    names = member_names([array.name for array in arrays], ".npy", ".npz")
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED, allowZip64=True) as archive, ExitStack() as open_member:
        archive.comment = comment_of(metadata) or b""
        for index, data, begins in beginnings(runs):
            if begins:
                open_member.close()
                info = zipfile.ZipInfo(names[index])
                member = open_member.enter_context(archive.open(info, "w", force_zip64=True))
                npy.write_header(member, arrays[index])
            member.write(own_bytes(arrays[index], data).data)
            del data
