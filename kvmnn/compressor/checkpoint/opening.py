"""Checkpoints: what ``torch.save`` writes (zip and legacy) and ``.safetensors``, opened by content.

Only the directory and the pickle are read here; the bytes of a storage are touched when a tensor that lies in it is
asked for. A training checkpoint is mostly optimizer state, and none of that is ever read.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from ...errors import CheckpointError, LimitError
from ...files.mapped import STDIN, MappedFile, head_of
from ..kvcm.header import MAGIC_BYTES
from . import _pickles
from ._pickles import Global
from .archive import Archive
from .legacy import MAGIC_PICKLE, LegacyReader
from .tensors import ELEMENT_TYPES, UNTYPED, ElementType, Storage, Tensor
from .torch_names import STORAGE_TYPES, Names, set_state

MAX_PICKLE = 64 << 20
"""Bytes of the largest ``data.pkl``; a training checkpoint of LLaVA-1.5's compressor has 0.3 MB."""
MAX_OPCODES = 4 << 20

MAX_SAFETENSORS_HEADER = 16 << 20
"""Bytes: every tensor becomes an object here, and a compressor has hundreds."""
_SAFETENSORS = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "C64": "complex64",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F8_E8M0": "float8_e8m0fnu",
}
_NESTED = (("model_state_dict", "compressor"), ("compressor",))


@dataclass
class Checkpoint:
    """An opened checkpoint.

    Attributes
    ----------
    path, label
        The file, and what messages call it.
    kind
        ``"torch zip"``, ``"torch legacy"`` or ``"safetensors"``.
    root
        The saved object: dicts, lists, `Tensor`s and plain values; what is not looked at is `Unknown`.
    size
        Bytes of the file.
    pickle_bytes
        Bytes of its pickles, or of the header of a ``.safetensors`` file.
    storages
        All storages, by key.
    notices
        What is unusual about the file.
    metadata
        ``__metadata__`` of a ``.safetensors`` file.
    """

    path: str
    label: str
    kind: str
    root: object
    size: int
    pickle_bytes: int
    storages: dict[str, Storage]
    notices: list[str] = field(default_factory=list)
    metadata: dict[str, str] = field(default_factory=dict)


def open_checkpoint(path: str | os.PathLike[str], *, max_bytes: int | None = None) -> Checkpoint:
    """Open a checkpoint without running anything in it.

    Parameters
    ----------
    path
        A file that torch.save wrote, or a ``.safetensors`` file; ``"-"`` for standard input.
    max_bytes
        Most bytes of all its storages; None for no limit but those of the format.

    Raises
    ------
    CheckpointError
        When it is none, is damaged, or asks for a class or function that weights do not need.
    SourceError
        When it cannot be read.
    LimitError
        When it holds more than `max_bytes`.
    """
    if os.fspath(path) != STDIN and os.path.isdir(path):
        raise CheckpointError(
            f"{os.fspath(path)}: is a directory: expected a checkpoint file (.pth, .pt, .safetensors)"
        )
    file = MappedFile(path, max_bytes=max_bytes)
    with naming(file.label):
        opened = _opened(file)
        held = sum(storage.nbytes for storage in opened.storages.values())
        if max_bytes is not None and held > max_bytes:
            raise LimitError(f"its storages hold {held} bytes, above the limit of {max_bytes}")
        return opened


def _opened(file: MappedFile) -> Checkpoint:
    head = file.head(512)
    match kind_of(head):
        case "torch zip" if _begins_with_an_array(head):
            raise CheckpointError(
                "is a .npz file of arrays, which is not read as a checkpoint: "
                "kvmnn export -o NAME.safetensors writes what convert reads"
            )
        case "torch zip":
            return _zip(file)
        case "torch legacy":
            return _legacy(file)
        case "safetensors":
            return _safetensors(file)
    raise CheckpointError(_guess(head))


def kind_of(head: bytes) -> str | None:
    """What kind of checkpoint a file with these first bytes is, if it is one."""
    if head.startswith(b"PK\3\4"):
        return "torch zip"
    if head.startswith(b"\x80") and head[2:].startswith(MAGIC_PICKLE):
        return "torch legacy"
    if head[8:9] == b"{" and head[4:8] == bytes(4):
        return "safetensors"
    return None


def is_checkpoint(path: str) -> bool:
    """Whether a file is a checkpoint of torch's, zip or legacy, or has the name of one."""
    if path.lower().endswith((".pth", ".pt")):
        return True
    return kind_of(head_of(path)) == "torch legacy" or is_torch_zip(path)


def is_torch_zip(path: str) -> bool:
    """Whether a zip archive has a ``data.pkl`` and so comes from torch rather than from numpy."""
    head = head_of(path, 4096)
    return kind_of(head) == "torch zip" and not _begins_with_an_array(head)


def _begins_with_an_array(head: bytes) -> bool:
    """Whether the first member of a zip archive is called as numpy calls its arrays."""
    name_bytes = int.from_bytes(head[26:28], "little")
    return head[30 : 30 + name_bytes].endswith(b".npy")


@contextmanager
def naming(label: str, what: str = "") -> Iterator[None]:
    """Put the file's name, and what in it is meant, in front of messages that lack them."""
    try:
        yield
    except (CheckpointError, LimitError) as exc:
        kind = type(exc)
        where = f"{label}: {what}: " if what else f"{label}: "
        text = str(exc)
        raise kind(text if text.startswith(f"{label}: ") else where + text) from None


def _zip(file: MappedFile) -> Checkpoint:
    archive = Archive(file)
    names = Names()
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
    root = _pickles.load(data, 0, end, names.resolve, persistent, set_state)
    notices = _notices(protocol, names.used_numpy)
    if big_endian and any(storage.element is UNTYPED for storage in storages.values()):
        notices.append(
            "big-endian, but words of uint16, uint32, uint64 and complex32 are taken as little-endian, as by torch.load"
        )
    return Checkpoint(file.path, file.label, "torch zip", root, file.size, data.size, storages, notices)


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


def _legacy(file: MappedFile) -> Checkpoint:
    names = Names()
    reader = LegacyReader(file, names, MAX_OPCODES)
    notices = _notices(reader.protocol, names.used_numpy)
    return Checkpoint(
        file.path, file.label, "torch legacy", reader.root, file.size, reader.pickle_bytes, reader.storages, notices
    )


def _notices(protocol: int, used_numpy: bool) -> list[str]:
    notices = []
    if protocol > 2:
        notices.append(f"written with pickle protocol {protocol}, which torch.load (weights_only) may refuse")
    if used_numpy:
        notices.append("holds numpy scalars, which torch.load (weights_only) refuses; they are ignored")
    return notices


def _safetensors(file: MappedFile) -> Checkpoint:
    from ...formats.safetensors_header import read_header

    header = read_header(file, most=MAX_SAFETENSORS_HEADER)
    root: dict[str, object] = {}
    storages: dict[str, Storage] = {}
    for entry in header.tensors:
        kind = _SAFETENSORS.get(entry.kind)
        element = ElementType(entry.kind[:40], "", 1) if kind is None else ELEMENT_TYPES[kind]
        size = entry.end - entry.begin
        storage = Storage(entry.name, element, size, partial(file.view, header.start + entry.begin, size))
        storages[entry.name] = storage
        strides = tuple(_strides(entry.shape))
        _nest(root, entry.name, Tensor(storage, element, 0, entry.shape, strides))
    return Checkpoint(
        file.path, file.label, "safetensors", root, file.size, header.start, storages, metadata=header.metadata
    )


def _nest(root: dict[str, object], name: str, value: Tensor) -> None:
    """Put a flat name where a ``.pth`` would have it."""
    for path in _NESTED:
        lead = ".".join(path) + "."
        if name.startswith(lead):
            for key in path:
                root = root.setdefault(key, {})  # type: ignore[assignment]
            name = name.removeprefix(lead)
            break
    root[name] = value


def _strides(shape: tuple[int, ...]) -> Iterator[int]:
    step = 1
    for length in shape:
        step *= length
    for length in shape:
        step = step // length if length else 0
        yield step


def _guess(head: bytes) -> str:
    """What a file that is no checkpoint may be."""
    if not head:
        return "is empty: expected a checkpoint"
    if head.startswith(b"version https://git-lfs"):
        size = next((line[5:] for line in head.split(b"\n") if line.startswith(b"size ")), b"?").decode(
            "ascii", "replace"
        )
        return f"is a Git LFS pointer to a file of {size[:20]} bytes, not the file itself: git lfs pull fetches it"
    if head.startswith(MAGIC_BYTES):
        return "is a weight file already: kvmnn inspect shows it, kvmnn export turns it into .safetensors"
    if head[257:262] == b"ustar":
        return "is a tar archive, as torch before 0.1.10 wrote them: save it again with a newer torch"
    if head.startswith(b"\x80"):
        return "is a pickle without torch's magic number: not a checkpoint that torch.save wrote"
    if all(byte in _TEXT for byte in head):
        line = head.split(b"\n")[0][:40].decode("ascii")
        return f"is a text file that begins with {line!r}: expected a checkpoint"
    return (
        f"is no checkpoint: begins with {head[:8].hex(' ')}, expected a zip archive, a legacy torch file or safetensors"
    )


_TEXT = frozenset(range(0x20, 0x7F)) | {0x09, 0x0A, 0x0D}
