"""``.npz`` archives: stored members are mapped, deflated ones decompressed in chunks; nothing is ever unpickled.

`files.zip_archive` reads the archive's directory; the members' data is taken from the mapped file, so that an archive
of thousands of arrays is opened once and only a chunk of a member is ever in memory.

kvmnn's metadata is in the archive's comment, which ``numpy.load`` ignores.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial

import numpy as np

from ..arrays.array import ArrayInfo, Chunk, LazyArray
from ..arrays.source import COMPLETENESS_KEY, ENGINE_KEY, LOSSY_KEY, SIDECAR_KEY, Source
from ..errors import LimitError, SourceError
from ..files.file_names import make_member_names
from ..files.mapped_file import MappedFile
from ..files.schema import parse_document
from ..files.zip_archive import (
    MAX_COMMENT_BYTES,
    METHOD_STORED,
    Inflater,
    ZipArchive,
    ZipError,
    ZipMember,
    read_first_member_name,
)
from ..packed.cache_info import METADATA_KEY
from . import npy
from .base import ArrayChunks, FileFormat, SeekableSink, mark_first_chunks
from .npy import MAX_NPY_HEADER_BYTES, NpyHeader
from .options import ReadOptions
from .raw import convert_to_declared_byte_order
from .tensor_selection import add_byte_fallback, resolve_dtype_name, select_tensors, validate_array


def read(file: MappedFile, options: ReadOptions) -> Source:
    """Return every ``.npy`` member, in archive order, under its name without ``.npy``."""
    with _wrap_zip_errors(file.label):
        archive = ZipArchive(file)
    for member in archive.members:
        if not member.name.endswith(".npy"):
            raise SourceError(f"{file.label}: {member.label} is not a .npy file")
    metadata = _parse_comment(archive.comment, file.label)
    members = [_NpzMember(archive, member) for member in archive.members]
    option_pair = options, add_byte_fallback(options, metadata)
    entries = [
        (member.name.removesuffix(".npy"), partial(_make_member_array, member, *option_pair)) for member in members
    ]
    arrays, skipped = select_tensors(file.label, entries, options)
    return Source(arrays, metadata, skipped_arrays=skipped)


_STORED_METADATA_KEYS = (ENGINE_KEY, METADATA_KEY, SIDECAR_KEY, COMPLETENESS_KEY, LOSSY_KEY)


def build_comment(metadata: Mapping[str, str]) -> bytes | None:
    """Return the archive comment with this metadata; None if it would exceed the limit of comments."""
    stored_metadata = {key: metadata[key] for key in _STORED_METADATA_KEYS if key in metadata}
    text = json.dumps(stored_metadata).encode() if stored_metadata else b""
    return text if len(text) <= MAX_COMMENT_BYTES else None


def _parse_comment(comment: bytes, path: str) -> dict[str, str]:
    if not any(comment.startswith(f'{{"{key}"'.encode()) for key in _STORED_METADATA_KEYS):
        return {}  # the comment of another program
    comment_metadata = parse_document(comment.decode(errors="replace"), f"{path}: the archive's comment").read_str_map()
    return {key: comment_metadata[key] for key in _STORED_METADATA_KEYS if key in comment_metadata}


def _make_member_array(member: _NpzMember, options: ReadOptions, byte_options: ReadOptions) -> LazyArray:
    header = NpyHeader(member.read_head(), member.label)
    dtype = resolve_dtype_name(header.dtype, byte_options if header.dtype == np.uint8 else options, member.label)
    if header.header_bytes + header.nbytes != member.size:
        raise SourceError(
            f"{member.label}: the .npy header promises {header.nbytes} bytes of data after {header.header_bytes} of "
            f"header, the archive says {member.size} in all"
        )
    array = LazyArray(
        name=member.name.removesuffix(".npy"),
        dtype=dtype,
        shape=header.shape,
        array_dtype=header.dtype.str,
        order=header.order,
        reader=partial(member.iter_chunks, header.header_bytes),
    )
    return validate_array(array, member.label, options)


class _NpzMember:
    """A ``.npy`` file in an archive."""

    def __init__(self, archive: ZipArchive, member: ZipMember) -> None:
        self.name = member.name
        self.size = member.nbytes
        self.label = f"{archive.file.label}: {member.label}"
        self._archive = archive
        self._member = member

    def read_head(self) -> bytes:
        """Return the first bytes, enough for a ``.npy`` header."""
        nbytes = min(MAX_NPY_HEADER_BYTES, self.size)
        file = self._archive.file
        with _wrap_zip_errors(file.label):
            begin, stored_bytes = self._archive.locate_data(self._member)
            if self._member.method == METHOD_STORED:
                return file.view(begin, nbytes).tobytes()
            return Inflater(file, begin, stored_bytes, self._member.label).read(nbytes).tobytes()

    def iter_chunks(self, skip_bytes: int, chunk_bytes: int) -> Iterator[Chunk]:
        """Yield the data from `skip_bytes` on in chunks of `chunk_bytes` bytes; then compare its checksum."""
        file = self._archive.file
        with _wrap_zip_errors(file.label):
            begin, stored_bytes = self._archive.locate_data(self._member)
            if self._member.method == METHOD_STORED:
                crc = zlib.crc32(file.view(begin, skip_bytes).data)
                chunks = file.iter_chunks(begin + skip_bytes, self.size - skip_bytes, chunk_bytes)
            else:
                inflater = Inflater(file, begin, stored_bytes, self._member.label)
                crc = zlib.crc32(inflater.read(skip_bytes).data)
                chunks = inflater.iter_chunks(self.size - skip_bytes, chunk_bytes)
            for chunk in chunks:
                crc = zlib.crc32(chunk.data, crc)
                yield chunk
                del chunk
        if crc != self._member.crc:
            raise SourceError(f"{self.label}: the data does not match its checksum")


@contextmanager
def _wrap_zip_errors(label: str) -> Iterator[None]:
    """Prefix errors of the archive with the file's name."""
    try:
        yield
    except ZipError as exc:
        raise SourceError(f"{label}: not a readable .npz archive: {exc}") from None
    except LimitError as exc:
        raise LimitError(f"{label}: {exc}") from None


def write_npz(sink: SeekableSink, arrays: Sequence[ArrayInfo], chunks: ArrayChunks, metadata: dict[str, str]) -> None:
    """Write all arrays as ``numpy.savez`` does, uncompressed and with a fixed date."""
    names = make_member_names([array.name for array in arrays], ".npy", ".npz")
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_STORED, allowZip64=True) as archive, ExitStack() as open_member:
        archive.comment = build_comment(metadata) or b""
        for index, data, is_first in mark_first_chunks(chunks):
            if is_first:
                open_member.close()
                info = zipfile.ZipInfo(names[index])
                member = open_member.enter_context(archive.open(info, "w", force_zip64=True))
                npy.write_header(member, arrays[index])
            member.write(convert_to_declared_byte_order(arrays[index], data).data)
            del data


NPZ = FileFormat(
    name="npz",
    extensions=(".npz",),
    check=lambda head: head.file is None or read_first_member_name(head.data).endswith(b".npy"),
    read_file=read,
    write=write_npz,
    is_multi_array=True,
)
