"""What ``torch.save`` writes, zip and legacy, opened by content.

Only the directory and the pickle are read here; the bytes of a storage are touched when a tensor that lies in it is
asked for. A training checkpoint is mostly optimizer state, and none of that is ever read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

from ...errors import CheckpointError, LimitError
from ...files.mapped import MappedFile, head_of
from . import _pickles
from ._pickles import Global
from .archive import Archive
from .legacy import MAGIC_PICKLE, LegacyReader
from .tensors import ELEMENT_TYPES, UNTYPED, ElementType, Storage
from .torch_names import STORAGE_TYPES, Names

MAX_PICKLE = 64 << 20
"""Bytes of the largest ``data.pkl``; a training checkpoint of LLaVA-1.5's compressor has 0.3 MB."""
MAX_OPCODES = 4 << 20

Kind = Literal["torch zip", "torch legacy"]


@dataclass(frozen=True)
class TorchFile:
    """What a file of torch's holds.

    Parameters
    ----------
    kind
        How it is stored.
    root
        The saved object: dicts, lists, `Tensor`s and plain values; what is not looked at is `Unknown`.
    pickle_bytes
        Bytes of its pickles.
    storages
        All storages, by key.
    notices
        What is unusual about the file.
    """

    kind: Kind
    root: object
    pickle_bytes: int
    storages: dict[str, Storage]
    notices: list[str]


def kind_of(head: bytes) -> Kind | None:
    """How a file of torch's with these first bytes is stored, if it is one; a ``.npz`` file is a zip as well."""
    if head.startswith(b"PK\3\4"):
        return "torch zip"
    if head.startswith(b"\x80") and head[2:].startswith(MAGIC_PICKLE):
        return "torch legacy"
    return None


def is_torch_zip(path: str) -> bool:
    """Whether a zip archive has a ``data.pkl`` and so comes from torch rather than from numpy."""
    head = head_of(path, 4096)
    return kind_of(head) == "torch zip" and not begins_with_an_array(head)


def begins_with_an_array(head: bytes) -> bool:
    """Whether the first member of a zip archive is called as numpy calls its arrays."""
    name_bytes = int.from_bytes(head[26:28], "little")
    return head[30 : 30 + name_bytes].endswith(b".npy")


def read_torch(file: MappedFile, kind: Kind, names: Names) -> TorchFile:
    """The object in a file of this kind; nothing that its pickle names is run.

    Parameters
    ----------
    file
        The whole file.
    kind
        As `kind_of` finds it.
    names
        What the pickle may name.

    Raises
    ------
    CheckpointError
        When it is damaged, or asks for what `names` does not have.
    LimitError
        For a pickle that is too long.
    """
    return _zip(file, names) if kind == "torch zip" else _legacy(file, names)


def _zip(file: MappedFile, names: Names) -> TorchFile:
    archive = Archive(file)
    big_endian = _is_big_endian(archive)
    storages: dict[str, Storage] = {}

    def persistent(name: object) -> Storage:
        if isinstance(name, tuple) and len(name) == 5:
            what, kind, key, location, count = name
            element = STORAGE_TYPES.get(kind.name) if isinstance(kind, Global) else None
            if element and what == "storage" and isinstance(key, str) and isinstance(location, str):
                return _stored(archive, storages, key, element, count, big_endian)
        raise CheckpointError("a persistent id that does not name a storage")

    data = archive.read("data.pkl", MAX_PICKLE)
    if data.size > MAX_PICKLE:
        raise LimitError(f"data.pkl has {data.size} bytes: at most {MAX_PICKLE} are read")
    end, protocol = _pickles.scan(data, 0, MAX_OPCODES)
    root = _pickles.load(data, 0, end, names.resolve, persistent, names.set_state)
    notices = _notices(protocol, names.used_numpy)
    if big_endian and any(storage.element is UNTYPED for storage in storages.values()):
        notices.append(
            "big-endian, but words of uint16, uint32, uint64 and complex32 are taken as little-endian, as by torch.load"
        )
    return TorchFile("torch zip", root, data.size, storages, notices)


def _stored(
    archive: Archive, storages: dict[str, Storage], key: str, element: ElementType, count: object, big_endian: bool
) -> Storage:
    """The storage of a key; its member must be there and have the size that the pickle says."""
    known = storages.get(key)
    if known is None:
        member = archive.members.get(f"data/{key}")
        if member is None:
            raise CheckpointError(f"storage {key[:80]!r} is not in the archive")
        if not isinstance(count, int) or member.nbytes != count * element.itemsize:
            raise CheckpointError(
                f"storage {key[:80]!r} has {member.nbytes} bytes: expected {str(count)[:40]} elements of "
                f"{element.itemsize}"
            )
        swapped = big_endian and element.itemsize > 1  # torch.load takes untyped ones as bytes, which have no order
        known = Storage(key, element, member.nbytes, partial(archive.read, f"data/{key}"), swapped)
        storages[key] = known
    elif not _is_same(known.element, element) or not isinstance(count, int) or known.nbytes != count * element.itemsize:
        raise CheckpointError(f"storage {key[:80]!r} is given two sizes or types")
    return known


def _is_same(one: ElementType, other: ElementType) -> bool:
    """Whether a storage may be called both; torch saves float8 views of uint8 tensors as bytes and as untyped."""
    bytes_ = (UNTYPED, ELEMENT_TYPES["uint8"])
    return one is other or (one in bytes_ and other in bytes_)


def _is_big_endian(archive: Archive) -> bool:
    if "byteorder" not in archive.members:
        return False
    order = archive.read("byteorder", 64).tobytes()
    if order not in (b"little", b"big"):
        raise CheckpointError(f"the byteorder record is {order[:20]!r}: expected b'little' or b'big'")
    return order == b"big"


def _legacy(file: MappedFile, names: Names) -> TorchFile:
    reader = LegacyReader(file, names, MAX_OPCODES)
    notices = _notices(reader.protocol, names.used_numpy)
    return TorchFile("torch legacy", reader.root, reader.pickle_bytes, reader.storages, notices)


def _notices(protocol: int, used_numpy: bool) -> list[str]:
    notices = []
    if protocol > 2:
        notices.append(f"written with pickle protocol {protocol}, which torch.load (weights_only) may refuse")
    if used_numpy:
        notices.append("holds numpy scalars, which torch.load (weights_only) refuses; they are ignored")
    return notices
