"""Read files of ``torch.save``: the legacy format and zip archives.

Legacy files come from torch before 1.6, or from ``_use_new_zipfile_serialization=False``: five pickles, then the raw
storages. The pickles are a magic number, a protocol version, facts about the machine, the object, and the keys of the
storages in the order of the storages. Each storage is its number of elements (int64) and its little-endian elements.
Before torch 0.4 a storage could be a part of another, its root; only roots have elements of their own.

The format is detected by content. Only the directory and the pickle are read at first; the bytes of a storage are read
with the first tensor in it. A training checkpoint is mostly optimizer state, and none of that is ever read.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Literal

import numpy as np

from ..._util.dataclass import dataclass
from ...dtypes import Bytes
from ...errors import CheckpointError, LimitError
from ...files.mapped_file import MappedFile
from ...files.zip_archive import METHOD_STORED, ZipArchive, ZipError, ZipMember
from . import _pickles
from ._pickles import AllowedGlobal
from .allowed_globals import ELEMENT_TYPE_BY_STORAGE, AllowedGlobals
from .tensors import ELEMENT_TYPES, UNTYPED, ElementType, TorchStorage

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_MAGIC_PICKLE = b"\x8a\x0a" + LEGACY_MAGIC.to_bytes(10, "little") + b"."
LEGACY_PROTOCOL = 1001


class LegacyReader:
    """Reader of a legacy checkpoint; storages are located once their keys are known, and read on demand."""

    def __init__(self, file: MappedFile, allowed_globals: AllowedGlobals, max_opcodes: int) -> None:
        self._file = file
        self._data = file.view(0, file.size)
        self._allowed_globals = allowed_globals
        self._max_opcodes = max_opcodes
        self.storages: dict[str, TorchStorage] = {}
        self._parts: dict[str, TorchStorage] = {}
        self._storage_offsets: dict[str, int] = {}
        self.protocol = 0
        self.position = self.pickle_bytes = 0
        self.root = self._read_root()

    def _read_root(self) -> object:
        if self._load_pickle() != LEGACY_MAGIC:
            raise CheckpointError("a pickle without torch's magic number: not a checkpoint that torch.save wrote")
        version = self._load_pickle()
        if version != LEGACY_PROTOCOL:
            raise CheckpointError(f"legacy format version {version}: expected {LEGACY_PROTOCOL}"[:200])
        self._load_pickle()
        root = self._load_pickle()
        keys = self._load_pickle()
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise CheckpointError("the keys of the storages are not a list of strings")
        self.pickle_bytes = self.position
        self._locate_storages(keys)
        return root

    def _load_pickle(self) -> object:
        begin = self.position
        self.position, protocol = _pickles.scan(self._data, begin, self._max_opcodes)
        self.protocol = max(self.protocol, protocol)
        return _pickles.load(
            self._data,
            begin,
            self.position,
            self._allowed_globals.resolve,
            self._resolve_persistent,
            self._allowed_globals.set_state,
        )

    def _resolve_persistent(self, persistent_id: object) -> TorchStorage:
        match persistent_id:
            case ("storage", AllowedGlobal(name=kind), str(key), str(), int(count), part) if (
                kind in ELEMENT_TYPE_BY_STORAGE
            ):
                element_type = ELEMENT_TYPE_BY_STORAGE[kind]
                if element_type is UNTYPED:
                    raise CheckpointError(
                        f"storage {key[:80]!r} has no type, which a legacy file needs: torch.load refuses it too"
                    )
                root = self._get_storage(key, element_type, count)
                return root if part is None else self._get_part(root, part)
        raise CheckpointError("a persistent id that does not name a storage")

    def _get_part(self, root: TorchStorage, view: object) -> TorchStorage:
        """Return the part of a storage that ``(key, offset, number of elements)`` describes."""
        match view:
            case (str(key), int(offset), int(count)):
                pass
            case _:
                raise CheckpointError(f"storage {root.key[:80]!r}: a part that is not a key, an offset and a size")
        itemsize = root.element_type.itemsize
        begin, end = offset * itemsize, (offset + count) * itemsize
        if not 0 <= begin <= end <= root.nbytes:
            raise CheckpointError(
                f"storage {key[:80]!r} is bytes {begin} to {end} of storage {root.key[:80]!r}, which has {root.nbytes}"[
                    :300
                ]
            )
        part = TorchStorage(
            key, root.element_type, end - begin, lambda: root.read()[begin:end], root=root, root_offset=begin
        )
        known_part = self._parts.setdefault(key, part)
        if (known_part.root, known_part.root_offset, known_part.nbytes) != (root, begin, end - begin):
            raise CheckpointError(f"storage {key[:80]!r} is given two places or sizes")
        return known_part

    def _get_storage(self, key: str, element_type: ElementType, count: int) -> TorchStorage:
        nbytes = count * element_type.itemsize
        if not 0 <= nbytes <= self._file.size:
            raise CheckpointError(f"storage {key[:80]!r} of {nbytes} bytes in a file of {self._file.size}"[:200])
        registered_storage = self.storages.setdefault(
            key, TorchStorage(key, element_type, nbytes, lambda: self._file.view(self._storage_offsets[key], nbytes))
        )
        if registered_storage.nbytes != nbytes or registered_storage.element_type != element_type:
            raise CheckpointError(f"storage {key[:80]!r} is given two sizes or types")
        return registered_storage

    def _locate_storages(self, keys: list[str]) -> None:
        """Find the offset of each storage."""
        for key in keys:
            storage = self.storages.get(key)
            if storage is None:
                raise CheckpointError(f"storage {key[:80]!r} belongs to no tensor")
            begin = self.position + 8
            if begin + storage.nbytes > self._file.size:
                raise CheckpointError(
                    f"offset {self.position}: storage {key[:80]!r} needs {storage.nbytes} bytes, the file has "
                    f"{max(self._file.size - begin, 0)} left: it is cut off"
                )
            count = int.from_bytes(self._data[self.position : begin].tobytes(), "little", signed=True)
            expected_count = storage.nbytes // storage.element_type.itemsize
            if count != expected_count:
                raise CheckpointError(
                    f"offset {self.position}: storage {key[:80]!r} has {count} elements, its tensors say "
                    f"{expected_count}"
                )
            if key in self._storage_offsets:
                raise CheckpointError(f"storage {key[:80]!r} is there twice")
            self._storage_offsets[key] = begin
            self.position = begin + storage.nbytes
        for key in self._parts:
            if key in self.storages:
                raise CheckpointError(f"storage {key[:80]!r} is a whole storage and a part of one")
        for key in self.storages:
            if key not in self._storage_offsets:
                raise CheckpointError(f"storage {key[:80]!r} is not in the file")


MAX_INFLATED_BYTES = 256 << 20
"""Bytes of the largest deflated member that is read."""
_MAX_CACHED_BYTES = 32 << 20


class TorchArchive:
    """The members of a torch archive by their name below its one top folder."""

    def __init__(self, file: MappedFile) -> None:
        self.file = file
        self.members: dict[str, ZipMember] = {}
        self._inflated_members: dict[str, Bytes] = {}
        self._verified_names: set[str] = set()
        with _wrap_archive_errors():
            self._zip_archive = ZipArchive(file)
        self._index_members(self._zip_archive.members)

    def read_member(self, name: str, max_bytes: int = MAX_INFLATED_BYTES) -> Bytes:
        """Return all bytes of a member after checking its CRC; a view of the file if it is stored uncompressed."""
        if name in self._inflated_members:
            return self._inflated_members[name]
        member = self.members[name]
        with _wrap_archive_errors():
            begin, nbytes = self._zip_archive.locate_data(member)
        data = self.file.view(begin, nbytes)
        if member.method != METHOD_STORED:
            data = _inflate_member(member, data, max_bytes)
        if name not in self._verified_names:
            if zlib.crc32(data.data) != member.crc:
                raise CheckpointError(f"member {name!r}: the data does not match its checksum")
            self._verified_names.add(name)
        if member.method != METHOD_STORED:
            if sum(cached.size for cached in self._inflated_members.values()) + data.size > _MAX_CACHED_BYTES:
                self._inflated_members.clear()
            self._inflated_members[name] = data
        return data

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
    """Convert errors of the zip archive to errors of the checkpoint."""
    try:
        yield
    except ZipError as exc:
        raise CheckpointError(str(exc)) from None


MAX_PICKLE_BYTES = 64 << 20
"""Bytes of the largest ``data.pkl``; a training checkpoint of LLaVA-1.5's compressor has 0.3 MB."""
MAX_OPCODES = 4 << 20

TorchFileKind = Literal["torch zip", "torch legacy"]


@dataclass(frozen=True)
class TorchFile:
    """The content of a file that torch saved."""

    #: How the file is stored.
    kind: TorchFileKind
    #: The saved object: dicts, lists, `TorchTensor`s and plain values; unneeded values are `OpaqueValue`.
    root: object
    #: Bytes of its pickles.
    pickle_bytes: int
    #: All storages, by key.
    storages: dict[str, TorchStorage]
    #: Notes about unusual properties of the file.
    notices: list[str]


ZIP_SIGNATURE = b"PK\3\4"
PICKLE_SIGNATURE = b"\x80"


def detect_torch_kind(head: bytes) -> TorchFileKind | None:
    """Return the torch file kind for these first bytes; None for other files.

    A ``.npz`` file is a zip as well.
    """
    if head.startswith(ZIP_SIGNATURE):
        return "torch zip"
    if head.startswith(PICKLE_SIGNATURE) and head[2:].startswith(LEGACY_MAGIC_PICKLE):
        return "torch legacy"
    return None


def read_torch(file: MappedFile, kind: TorchFileKind, allowed_globals: AllowedGlobals) -> TorchFile:
    """Return the object in a torch file of this kind; nothing that its pickle names is executed."""
    if kind == "torch legacy":
        reader = LegacyReader(file, allowed_globals, MAX_OPCODES)
        notices = _list_notices(reader.protocol, allowed_globals.used_numpy)
        return TorchFile("torch legacy", reader.root, reader.pickle_bytes, reader.storages, notices)
    archive = TorchArchive(file)
    is_big_endian = _read_is_big_endian(archive)
    storages: dict[str, TorchStorage] = {}

    def resolve_persistent(persistent_id: object) -> TorchStorage:
        if isinstance(persistent_id, tuple) and len(persistent_id) == 5:
            id_type, kind, key, location, count = persistent_id
            element_type = ELEMENT_TYPE_BY_STORAGE.get(kind.name) if isinstance(kind, AllowedGlobal) else None
            if element_type and id_type == "storage" and isinstance(key, str) and isinstance(location, str):
                return _get_zip_storage(archive, storages, key, element_type, count, is_big_endian)
        raise CheckpointError("a persistent id that does not name a storage")

    data = archive.read_member("data.pkl", MAX_PICKLE_BYTES)
    if data.size > MAX_PICKLE_BYTES:
        raise LimitError(f"data.pkl has {data.size} bytes: at most {MAX_PICKLE_BYTES} are read")
    end, protocol = _pickles.scan(data, 0, MAX_OPCODES)
    root = _pickles.load(data, 0, end, allowed_globals.resolve, resolve_persistent, allowed_globals.set_state)
    notices = _list_notices(protocol, allowed_globals.used_numpy)
    if is_big_endian and any(storage.element_type is UNTYPED for storage in storages.values()):
        notices.append(
            "big-endian, but words of uint16, uint32, uint64 and complex32 are taken as little-endian, as by torch.load"
        )
    return TorchFile("torch zip", root, data.size, storages, notices)


def _get_zip_storage(
    archive: TorchArchive,
    storages: dict[str, TorchStorage],
    key: str,
    element_type: ElementType,
    count: object,
    is_big_endian: bool,
) -> TorchStorage:
    """Return the storage of a key; its member must exist and have the size given in the pickle."""
    storage = storages.get(key)
    nbytes = count * element_type.itemsize if isinstance(count, int) else None
    if storage is None:
        member = archive.members.get(f"data/{key}")
        if member is None:
            raise CheckpointError(f"storage {key[:80]!r} is not in the archive")
        if member.nbytes != nbytes:
            raise CheckpointError(
                f"storage {key[:80]!r} has {member.nbytes} bytes: expected {str(count)[:40]} elements of "
                f"{element_type.itemsize}"
            )
        is_swapped = is_big_endian and element_type.itemsize > 1  # torch.load takes untyped ones as bytes
        reader = partial(archive.read_member, f"data/{key}")
        storage = storages[key] = TorchStorage(key, element_type, member.nbytes, reader, is_swapped)
    # torch saves float8 views of uint8 tensors as bytes and as untyped.
    is_same_type = len({storage.element_type, element_type} - {UNTYPED, ELEMENT_TYPES["uint8"]}) == 0
    if storage.nbytes != nbytes or not (storage.element_type is element_type or is_same_type):
        raise CheckpointError(f"storage {key[:80]!r} is given two sizes or types")
    return storage


def _read_is_big_endian(archive: TorchArchive) -> bool:
    if "byteorder" not in archive.members:
        return False
    order = archive.read_member("byteorder", 64).tobytes()
    if order not in (b"little", b"big"):
        raise CheckpointError(f"the byteorder record is {order[:20]!r}: expected b'little' or b'big'")
    return order == b"big"


def _list_notices(protocol: int, used_numpy: bool) -> list[str]:
    notices = []
    if protocol > 2:
        notices.append(f"written with pickle protocol {protocol}, which torch.load (weights_only) may refuse")
    if used_numpy:
        notices.append("holds numpy scalars, which torch.load (weights_only) refuses; they are ignored")
    return notices
