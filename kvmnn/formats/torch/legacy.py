"""Checkpoints from before torch 1.6, and ``_use_new_zipfile_serialization=False``: five pickles, then raw storages.

The pickles are a magic number, a protocol version, facts about the machine, the object, and the keys of the storages
in the order in which these follow, each as its number of elements (int64) and its little-endian words. Before torch 0.4
a storage could be a part of another, its root; only roots have words of their own.
"""

from __future__ import annotations

from ...dtypes import Bytes
from ...errors import CheckpointError
from ...files.mapped import MappedFile
from . import _pickles
from ._pickles import AllowedGlobal
from .tensors import UNTYPED, ElementType, TorchStorage
from .torch_names import ELEMENT_TYPE_BY_STORAGE, AllowedGlobals

LEGACY_MAGIC = 0x1950A86A20F9469CFC6C
LEGACY_MAGIC_PICKLE = b"\x8a\x0a" + LEGACY_MAGIC.to_bytes(10, "little") + b"."
LEGACY_PROTOCOL = 1001


class LegacyReader:
    """The object of a legacy checkpoint; storages are placed once their keys are known, and read when needed."""

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
        """A storage within another, as ``(key, offset, number of elements)``."""
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
        registered_part = self._parts.setdefault(key, part)
        if registered_part is not part and (
            registered_part.root,
            registered_part.root_offset,
            registered_part.nbytes,
        ) != (root, begin, end - begin):
            raise CheckpointError(f"storage {key[:80]!r} is given two places or sizes")
        return registered_part

    def _get_storage(self, key: str, element_type: ElementType, count: int) -> TorchStorage:
        nbytes = count * element_type.itemsize
        if not 0 <= nbytes <= self._file.size:
            raise CheckpointError(f"storage {key[:80]!r} of {nbytes} bytes in a file of {self._file.size}"[:200])
        registered_storage = self.storages.setdefault(
            key, TorchStorage(key, element_type, nbytes, lambda: self._read_storage(key))
        )
        if registered_storage.nbytes != nbytes or registered_storage.element_type != element_type:
            raise CheckpointError(f"storage {key[:80]!r} is given two sizes or types")
        return registered_storage

    def _locate_storages(self, keys: list[str]) -> None:
        """Find where each storage lies."""
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

    def _read_storage(self, key: str) -> Bytes:
        return self._file.view(self._storage_offsets[key], self.storages[key].nbytes)
