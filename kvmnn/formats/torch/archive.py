"""The zip archives that ``torch.save`` writes."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np

from ...dtypes import Bytes
from ...errors import CheckpointError, LimitError
from ...files.mapped import MappedFile
from ...files.zip_archive import STORED, Member, ZipArchive, ZipError

MAX_INFLATED = 256 << 20
"""Bytes of the largest deflated member that is read."""
_MAX_KEPT = 32 << 20


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
        with _checkpoint_errors():
            self._zip = ZipArchive(file)
        self._sort_in(self._zip.members)

    def read(self, name: str, max_bytes: int = MAX_INFLATED) -> Bytes:
        """All bytes of a member, compared with its checksum; a view of the file where it is stored as it is.

        Raises
        ------
        LimitError
            For a deflated member of more than `max_bytes` bytes.
        """
        if name in self._inflated:
            return self._inflated[name]
        member = self.members[name]
        with _checkpoint_errors():
            begin, nbytes = self._zip.packed(member)
        packed = self.file.view(begin, nbytes)
        data = packed if member.method == STORED else _inflated(member, packed, max_bytes)
        if name not in self._proven:
            if zlib.crc32(data.data) != member.crc:
                raise CheckpointError(f"member {name!r}: the data does not match its checksum")
            self._proven.add(name)
        if member.method != STORED:
            self._keep(name, data)
        return data

    def _keep(self, name: str, data: Bytes) -> None:
        if sum(kept.size for kept in self._inflated.values()) + data.size > _MAX_KEPT:
            self._inflated.clear()
        self._inflated[name] = data

    def _sort_in(self, entries: list[Member]) -> None:
        pickles = [member.name for member in entries if ("/" + member.name).endswith("/data.pkl")]
        if len(pickles) != 1 or pickles[0].count("/") != 1:
            raise CheckpointError(f"a zip archive with {len(pickles)} data.pkl: expected one, in the top folder")
        root = pickles[0][: -len("data.pkl")]
        length = len(root)
        for member in entries:
            if not member.name.startswith(root):
                raise CheckpointError(f"{member.where} lies outside the top folder {root[:80]!r}")
            if member.name[length:] in self.members:
                raise CheckpointError(f"two members are called {member.name[:80]!r}")
            self.members[member.name[length:]] = member._replace(name=member.name[length:])
        if "constants.pkl" in self.members:
            raise CheckpointError("a TorchScript archive, which holds code: save the state_dict instead")


def _inflated(member: Member, packed: Bytes, max_bytes: int) -> Bytes:
    where = member.where
    if member.nbytes > max_bytes:
        raise LimitError(
            f"{where}: {member.nbytes} bytes deflated to {member.packed_bytes}: at most {max_bytes} bytes are read"
        )
    engine = zlib.decompressobj(-zlib.MAX_WBITS)
    try:
        data = engine.decompress(packed.data, member.nbytes + 1)
    except zlib.error as exc:
        raise CheckpointError(f"{where}: the deflated data is damaged: {exc}") from None
    if len(data) != member.nbytes:
        raise CheckpointError(f"{where}: the deflated data is not the {member.nbytes} bytes that it should be")
    return np.frombuffer(data, np.uint8)


@contextmanager
def _checkpoint_errors() -> Iterator[None]:
    """What is wrong with an archive is wrong with the checkpoint."""
    try:
        yield
    except ZipError as exc:
        raise CheckpointError(str(exc)) from None
