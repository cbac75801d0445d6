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
from ._pickles import Global
from .tensors import UNTYPED, ElementType, Storage
from .torch_names import STORAGE_TYPES, Names

MAGIC = 0x1950A86A20F9469CFC6C
MAGIC_PICKLE = b"\x8a\x0a" + MAGIC.to_bytes(10, "little") + b"."
PROTOCOL = 1001


class LegacyReader:
    """The object of a legacy checkpoint; storages are placed once their keys are known, and read when needed."""

    def __init__(self, file: MappedFile, names: Names, max_opcodes: int) -> None:
        self._file = file
        self._data = file.view(0, file.size)
        self._names = names
        self._max_opcodes = max_opcodes
        self.storages: dict[str, Storage] = {}
        self._parts: dict[str, Storage] = {}
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
        self.position, protocol = _pickles.scan(self._data, begin, self._max_opcodes)
        self.protocol = max(self.protocol, protocol)
        return _pickles.load(
            self._data, begin, self.position, self._names.resolve, self._persistent, self._names.set_state
        )

    def _persistent(self, name: object) -> Storage:
        match name:
            case ("storage", Global(name=kind), str(key), str(), int(count), part) if kind in STORAGE_TYPES:
                element = STORAGE_TYPES[kind]
                if element is UNTYPED:
                    raise CheckpointError(
                        f"storage {key[:80]!r} has no type, which a legacy file needs: torch.load refuses it too"
                    )
                root = self._storage(key, element, count)
                return root if part is None else self._part(root, part)
        raise CheckpointError("a persistent id that does not name a storage")

    def _part(self, root: Storage, view: object) -> Storage:
        """A storage within another, as ``(key, offset, number of elements)``."""
        match view:
            case (str(key), int(offset), int(count)):
                pass
            case _:
                raise CheckpointError(f"storage {root.key[:80]!r}: a part that is not a key, an offset and a size")
        step = root.element.itemsize
        begin, end = offset * step, (offset + count) * step
        if not 0 <= begin <= end <= root.nbytes:
            raise CheckpointError(
                f"storage {key[:80]!r} is bytes {begin} to {end} of storage {root.key[:80]!r}, which has {root.nbytes}"[
                    :300
                ]
            )
        part = Storage(key, root.element, end - begin, lambda: root.read()[begin:end], root=root, begin=begin)
        known = self._parts.setdefault(key, part)
        if known is not part and (known.root, known.begin, known.nbytes) != (root, begin, end - begin):
            raise CheckpointError(f"storage {key[:80]!r} is given two places or sizes")
        return known

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
        for key in self._parts:
            if key in self.storages:
                raise CheckpointError(f"storage {key[:80]!r} is a whole storage and a part of one")
        for key in self.storages:
            if key not in self._places:
                raise CheckpointError(f"storage {key[:80]!r} is not in the file")

    def _bytes(self, key: str) -> Bytes:
        return self._file.view(self._places[key], self.storages[key].nbytes)
