"""The tables that dense units share: for each layer one set for K and one for V, if any, all of them one object."""

from __future__ import annotations

import hashlib
import struct
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property

import numpy as np

from ..arrays.layer_cache import LayerCache
from ..dense import RopeConfig, SharedTables
from ..dtypes import Elements
from ..errors import KvmnnError
from ..threads.pool import parallel_map, resolve_threads
from .space import KEY_BYTES, MAX_LAYERS, Namespace, list_parts
from .unit import DamagedUnitError

TABLES_MAGIC = b"KVMNNPT2"
MAX_TABLE_TOKENS = 512
"""Sets are made of at most so many tokens ..."""
MIN_TABLE_TOKENS = 256
"""... and of no fewer."""
MAX_TABLE_SETS_BYTES = 256 << 20

_TABLES_STRUCT = struct.Struct("<8sI")
_MAX_CACHED_SETS = 8


class TableSets:
    """Table sets of a space: K and V of the first layer, K and V of the next ...

    Parameters
    ----------
    sets
        In this order.
    """

    def __init__(self, sets: Sequence[SharedTables]) -> None:
        self.sets = tuple(sets)

    @cached_property
    def data(self) -> bytes:
        """The bytes of the object: magic, number of sets, their sizes, the sets."""
        sizes = np.array([len(tables.data) for tables in self.sets], "<u4")
        return (
            _TABLES_STRUCT.pack(TABLES_MAGIC, len(self.sets))
            + sizes.tobytes()
            + b"".join(tables.data for tables in self.sets)
        )

    @cached_property
    def key(self) -> bytes:
        """What units call it by: the BLAKE2b hash of 16 bytes over its bytes."""
        return hashlib.blake2b(self.data, digest_size=KEY_BYTES).digest()


def build_table_sets(
    layers: Sequence[LayerCache], namespace: Namespace, rotary: RopeConfig | None, threads: int | None
) -> TableSets:
    """Sets for the layers of a text, made of its first tokens."""

    def build_tables(job: tuple[tuple[int, int], Elements]) -> SharedTables:
        (_, part), elements = job
        samples = [elements[:, :MAX_TABLE_TOKENS]]
        return SharedTables.from_arrays(
            samples, dtype=namespace.dtype, rotary=None if part else select_rotary(rotary, elements)
        )

    jobs = zip(namespace.parts, list_parts(layers), strict=True)
    return TableSets(parallel_map(build_tables, jobs, resolve_threads(threads)))


def select_rotary(rotary: RopeConfig | None, keys: Elements) -> RopeConfig | None:
    """The rotation of a layer's K, unless its heads have fewer words: it would cost size only, but is refused."""
    return rotary if rotary is not None and rotary.dims <= keys.shape[2] else None


def parse_table_sets(data: bytes, key: bytes) -> TableSets:
    """The sets in the bytes of an object.

    Raises
    ------
    DamagedError
        For anything but the object with this key.
    """
    if hashlib.blake2b(data, digest_size=KEY_BYTES).digest() != key:
        raise DamagedUnitError("its tables are damaged")
    try:
        magic, num_sets = _TABLES_STRUCT.unpack_from(data)
        if magic != TABLES_MAGIC or not 1 <= num_sets <= 2 * MAX_LAYERS:
            raise DamagedUnitError("its tables are none")
        sizes = np.frombuffer(data, "<u4", num_sets, _TABLES_STRUCT.size).tolist()
        begin_byte = _TABLES_STRUCT.size + 4 * num_sets
        sets = []
        for size in sizes:
            sets.append(SharedTables(data[begin_byte : begin_byte + size]))
            begin_byte += size
    except (struct.error, ValueError, KvmnnError) as error:  # of somebody who made the key fit
        raise DamagedUnitError(f"its tables are none: {error}") from None
    return TableSets(sets)


def make_object_name(namespace_key: bytes, key: bytes) -> str:
    """The name of the object, among those of all spaces."""
    return f"{namespace_key.hex()}-{key.hex()}"


def list_object_keys(names: Sequence[str], namespace_key: bytes) -> list[bytes]:
    """The keys of a space's objects, of names of `make_object_name`; others are passed over."""
    name_prefix = f"{namespace_key.hex()}-"
    keys = []
    for name in sorted(names):
        if name.startswith(name_prefix):
            try:
                key = bytes.fromhex(name[len(name_prefix) :])
            except ValueError:
                continue
            if len(key) == KEY_BYTES:
                keys.append(key)
    return keys


class TableSetCache:
    """The table sets of a store, the last used in memory.

    Parameters
    ----------
    read
        The bytes of an object by its name; None where it is not there.
    names
        The names of all.
    """

    def __init__(self, read: Callable[[str], bytes | None], names: Callable[[], Sequence[str]]) -> None:
        self._read_object, self._list_names = read, names
        self._cached_sets: OrderedDict[tuple[bytes, bytes], TableSets] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, namespace_key: bytes, key: bytes) -> TableSets:
        """The sets with this key; `DamagedUnitError` where they are gone or damaged."""
        with self._lock:
            cached = self._cached_sets.get((namespace_key, key))
            if cached is not None:
                self._cached_sets.move_to_end((namespace_key, key))
                return cached
        data = self._read_object(make_object_name(namespace_key, key))
        if data is None:
            raise DamagedUnitError("its tables are gone")
        return self._put(namespace_key, key, parse_table_sets(data, key))

    def get_any(self, namespace_key: bytes) -> TableSets | None:
        """Sets of a space, whichever: None where it has none that can be read."""
        with self._lock:
            cached_keys = [key for cached_namespace, key in self._cached_sets if cached_namespace == namespace_key]
        for key in cached_keys or list_object_keys(self._list_names(), namespace_key):
            try:
                return self.get(namespace_key, key)
            except DamagedUnitError:
                continue
        return None

    def put(self, namespace_key: bytes, sets: TableSets) -> None:
        """Keep new sets in memory."""
        self._put(namespace_key, sets.key, sets)

    def _put(self, namespace_key: bytes, key: bytes, sets: TableSets) -> TableSets:
        with self._lock:
            self._cached_sets[namespace_key, key] = sets
            if len(self._cached_sets) > _MAX_CACHED_SETS:
                self._cached_sets.popitem(last=False)
        return sets
