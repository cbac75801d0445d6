"""Checkpoints from before torch 1.6, and ``_use_new_zipfile_serialization=False``: five pickles, then raw storages.

The pickles are a magic number, a protocol version, facts about the machine, the object, and the keys of the storages
in the order in which these follow, each as its number of elements (int64) and its little-endian words.
"""

from __future__ import annotations

from .. import _pickles
from .._pickles import Global
from ..errors import CheckpointError
from ..mapped import MappedFile
from .tensors import Bytes, ElementType, Storage
from .torch_names import STORAGE_TYPES, Names

MAGIC = 0x1950A86A20F9469CFC6C
MAGIC_PICKLE = b"\x8a\x0a" + MAGIC.to_bytes(10, "little") + b"."
PROTOCOL = 1001


class LegacyReader:
    """The object of a legacy checkpoint; storages are placed once their keys are known, and read when needed."""

    def __init__(self, file: MappedFile, names: Names, opcodes_most: int) -> None:
        self._file = file
        self._data = file.view(0, file.size)
        self._names = names
        self._opcodes_most = opcodes_most
        self.storages: dict[str, Storage] = {}
        self._places: dict[str, int] = {}
        self.protocol = 0
        self.position = self.pickle_bytes = 0
        self.root = self._read()

    def _read(self) -> object:
        if self._pickle() != MAGIC:
            raise CheckpointError("a pickle without torch's magic number: not a checkpoint that torch.save wrote")
        version = self._pickle()
        if version != PROTOCOL:
            raise CheckpointError(f"legacy format version {version}: expected {PROTOCOL}"[:200])
        self._pickle()
        root = self._pickle()
        keys = self._pickle()
        if not isinstance(keys, list) or not all(isinstance(key, str) for key in keys):
            raise CheckpointError("the keys of the storages are not a list of strings")
        self.pickle_bytes = self.position
        self._place(keys)
        return root

    def _pickle(self) -> object:
        begin = self.position
        self.position, protocol = _pickles.scan(self._data, begin, self._opcodes_most)
        self.protocol = max(self.protocol, protocol)
        return _pickles.load(self._data, begin, self.position, self._names.resolve, self._persistent)

    def _persistent(self, name: object) -> Storage:
        match name:
            case ("storage", Global(name=kind), str(key), str(), int(count), None) if kind in STORAGE_TYPES:
                return self._storage(key, STORAGE_TYPES[kind], count)
            case ("storage", Global(), str(key), str(), int(), tuple()):
                raise CheckpointError(f"storage {key[:80]!r} is a view of another, as torch before 0.4 had them")
        raise CheckpointError("a persistent id that does not name a storage")

    def _storage(self, key: str, element: ElementType, count: int) -> Storage:
        nbytes = count * element.itemsize
        if not 0 <= nbytes <= self._file.size:
            raise CheckpointError(f"storage {key[:80]!r} of {nbytes} bytes in a file of {self._file.size}"[:200])
        known = self.storages.setdefault(key, Storage(key, element, nbytes, lambda: self._bytes(key)))
        if known.nbytes != nbytes or known.element != element:
            raise CheckpointError(f"storage {key[:80]!r} is given two sizes or types")
        return known

    def _place(self, keys: list[str]) -> None:
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
            expected = storage.nbytes // storage.element.itemsize
            if count != expected:
                raise CheckpointError(
                    f"offset {self.position}: storage {key[:80]!r} has {count} elements, its tensors say {expected}"
                )
            if key in self._places:
                raise CheckpointError(f"storage {key[:80]!r} is there twice")
            self._places[key] = begin
            self.position = begin + storage.nbytes
        for key in self.storages:
            if key not in self._places:
                raise CheckpointError(f"storage {key[:80]!r} is not in the file")

    def _bytes(self, key: str) -> Bytes:
        return self._file.view(self._places[key], self.storages[key].nbytes)
