"""What ``torch.save`` writes, zip and legacy, opened by content.

Only the directory and the pickle are read here; the bytes of a storage are touched when a tensor that lies in it is
asked for. A training checkpoint is mostly optimizer state, and none of that is ever read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from ...errors import CheckpointError, LimitError
from ...files.mapped import MappedFile, read_head
from . import _pickles
from ._pickles import AllowedGlobal
from .archive import TorchArchive
from .legacy import LEGACY_MAGIC_PICKLE, LegacyReader
from .tensors import ELEMENT_TYPES, UNTYPED, ElementType, TorchStorage
from .torch_names import ELEMENT_TYPE_BY_STORAGE, AllowedGlobals

MAX_PICKLE_BYTES = 64 << 20
"""Bytes of the largest ``data.pkl``; a training checkpoint of LLaVA-1.5's compressor has 0.3 MB."""
MAX_OPCODES = 4 << 20

TorchFileKind = Literal["torch zip", "torch legacy"]


@dataclass(frozen=True)
class TorchFile:
    """What a file of torch's holds.

    Parameters
    ----------
    kind
        How it is stored.
    root
        The saved object: dicts, lists, `TorchTensor`s and plain values; what is not looked at is `OpaqueValue`.
    pickle_bytes
        Bytes of its pickles.
    storages
        All storages, by key.
    notices
        What is unusual about the file.
    """

    kind: TorchFileKind
    root: object
    pickle_bytes: int
    storages: dict[str, TorchStorage]
    notices: list[str]


def detect_torch_kind(head: bytes) -> TorchFileKind | None:
    """How a file of torch's with these first bytes is stored, if it is one; a ``.npz`` file is a zip as well."""
    if head.startswith(b"PK\3\4"):
        return "torch zip"
    if head.startswith(b"\x80") and head[2:].startswith(LEGACY_MAGIC_PICKLE):
        return "torch legacy"
    return None


def is_torch_zip(path: str) -> bool:
    """Whether a zip archive has a ``data.pkl`` and so comes from torch rather than from numpy."""
    head = read_head(path, 4096)
    return detect_torch_kind(head) == "torch zip" and not has_npy_first_member(head)


def has_npy_first_member(head: bytes) -> bool:
    """Whether the first member of a zip archive is called as numpy calls its arrays."""
    name_bytes = int.from_bytes(head[26:28], "little")
    return head[30 : 30 + name_bytes].endswith(b".npy")


def read_torch(file: MappedFile, kind: TorchFileKind, allowed_globals: AllowedGlobals) -> TorchFile:
    """The object in a file of this kind; nothing that its pickle names is run.

    Parameters
    ----------
    file
        The whole file.
    kind
        As `detect_torch_kind` finds it.
    allowed_globals
        What the pickle may name.

    Raises
    ------
    CheckpointError
        When it is damaged, or asks for what `allowed_globals` does not have.
    LimitError
        For a pickle that is too long.
    """
    return _read_zip(file, allowed_globals) if kind == "torch zip" else _read_legacy(file, allowed_globals)


def _read_zip(file: MappedFile, allowed_globals: AllowedGlobals) -> TorchFile:
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
    """The storage of a key; its member must be there and have the size that the pickle says."""
    storage = storages.get(key)
    if storage is None:
        member = archive.members.get(f"data/{key}")
        if member is None:
            raise CheckpointError(f"storage {key[:80]!r} is not in the archive")
        if not isinstance(count, int) or member.nbytes != count * element_type.itemsize:
            raise CheckpointError(
                f"storage {key[:80]!r} has {member.nbytes} bytes: expected {str(count)[:40]} elements of "
                f"{element_type.itemsize}"
            )
        is_swapped = (
            is_big_endian and element_type.itemsize > 1
        )  # torch.load takes untyped ones as bytes, which have no order
        storage = TorchStorage(
            key, element_type, member.nbytes, partial(archive.read_member, f"data/{key}"), is_swapped
        )
        storages[key] = storage
    elif (
        not _is_same_type(storage.element_type, element_type)
        or not isinstance(count, int)
        or storage.nbytes != count * element_type.itemsize
    ):
        raise CheckpointError(f"storage {key[:80]!r} is given two sizes or types")
    return storage


def _is_same_type(first_type: ElementType, second_type: ElementType) -> bool:
    """Whether a storage may be called both; torch saves float8 views of uint8 tensors as bytes and as untyped."""
    byte_types = (UNTYPED, ELEMENT_TYPES["uint8"])
    return first_type is second_type or (first_type in byte_types and second_type in byte_types)


def _read_is_big_endian(archive: TorchArchive) -> bool:
    if "byteorder" not in archive.members:
        return False
    order = archive.read_member("byteorder", 64).tobytes()
    if order not in (b"little", b"big"):
        raise CheckpointError(f"the byteorder record is {order[:20]!r}: expected b'little' or b'big'")
    return order == b"big"


def _read_legacy(file: MappedFile, allowed_globals: AllowedGlobals) -> TorchFile:
    reader = LegacyReader(file, allowed_globals, MAX_OPCODES)
    notices = _list_notices(reader.protocol, allowed_globals.used_numpy)
    return TorchFile("torch legacy", reader.root, reader.pickle_bytes, reader.storages, notices)


def _list_notices(protocol: int, used_numpy: bool) -> list[str]:
    notices = []
    if protocol > 2:
        notices.append(f"written with pickle protocol {protocol}, which torch.load (weights_only) may refuse")
    if used_numpy:
        notices.append("holds numpy scalars, which torch.load (weights_only) refuses; they are ignored")
    return notices
