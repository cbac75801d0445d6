"""The zip archives that ``torch.save`` writes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ...dtypes import Bytes
from ...errors import CheckpointError, LimitError
from ...files.mapped import MappedFile
from ...files.zip_archive import METHOD_STORED, ZipArchive, ZipError, ZipMember

MAX_INFLATED_BYTES = 256 << 20
"""Bytes of the largest deflated member that is read."""
_MAX_CACHED_BYTES = 32 << 20


class TorchArchive:
    """The members of a torch archive by their name below its one top folder.

    Raises
    ------
    CheckpointError
        For a file that is cut off, damaged, or no archive of torch's.
    """

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.members: dict[str, ZipMember] = {}
        self._inflated_members: dict[str, Bytes] = {}
        self._verified_names: set[str] = set()
        with _wrap_archive_errors():
            self._zip_archive = ZipArchive(file)
        self._index_members(self._zip_archive.members)

    def read_member(self, name: str, max_bytes: int = MAX_INFLATED_BYTES) -> Bytes:
        """All bytes of a member, compared with its checksum; a view of the file where it is stored as it is.

        Raises
        ------
        LimitError
            For a deflated member of more than `max_bytes` bytes.
        """
        if name in self._inflated_members:
            return self._inflated_members[name]
        member = self.members[name]
        with _wrap_archive_errors():
            begin, nbytes = self._zip_archive.locate_data(member)
        compressed_data = self.file.view(begin, nbytes)
        data = (
            compressed_data if member.method == METHOD_STORED else _inflate_member(member, compressed_data, max_bytes)
        )
        if name not in self._verified_names:
            if zlib.crc32(data.data) != member.crc:
                raise CheckpointError(f"member {name!r}: the data does not match its checksum")
            self._verified_names.add(name)
        if member.method != METHOD_STORED:
            self._cache_member(name, data)
        return data

    def _cache_member(self, name: str, data: Bytes) -> None:
        if sum(cached_data.size for cached_data in self._inflated_members.values()) + data.size > _MAX_CACHED_BYTES:
            self._inflated_members.clear()
        self._inflated_members[name] = data

    def _index_members(self, entries: list[ZipMember]) -> None:
        pickles = [member.name for member in entries if ("/" + member.name).endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].count("/") != 1:
            raise CheckpointError(f"a zip archive with {len(pickles)} data.pkl: expected one, in the top folder")
        root = pickles[0][: -len("data.pkl")]
        root_length = len(root)
        for member in entries:
            if not member.name.startswith(root):
                raise CheckpointError(f"{member.label} lies outside the top folder {root[:80]!r}")
            if member.name[root_length:] in self.members:
                raise CheckpointError(f"two members are called {member.name[:80]!r}")
            self.members[member.name[root_length:]] = member._replace(name=member.name[root_length:])
        if "constants.pkl" in self.members:
            raise CheckpointError("a TorchScript archive, which holds code: save the state_dict instead")


def _inflate_member(member: ZipMember, compressed_data: Bytes, max_bytes: int) -> Bytes:
    label = member.label
    if member.nbytes > max_bytes:
        raise LimitError(
            f"{label}: {member.nbytes} bytes deflated to {member.compressed_bytes}: at most {max_bytes} bytes are read"
        )
    decompressor = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        data = decompressor.decompress(compressed_data.data, member.nbytes + 1)
    except zlib.error as exc:
        raise CheckpointError(f"{label}: the deflated data is damaged: {exc}") from None
    if len(data) != member.nbytes:
        raise CheckpointError(f"{label}: the deflated data is not the {member.nbytes} bytes that it should be")
    return np.frombuffer(data, np.uint8)


@contextmanager
def _wrap_archive_errors() -> Iterator[None]:
    """What is wrong with an archive is wrong with the checkpoint."""
    try:
        yield
    except ZipError as exc:
        raise CheckpointError(str(exc)) from None
