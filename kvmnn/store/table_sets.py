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
from ..dense import Rotary, Tables
from ..dtypes import Words
from ..errors import KvmnnError
from ..threads.pool import map_pulled, resolve_threads
from .space import KEY_BYTES, MAX_LAYERS, Space, parts_of
from .unit import DamagedError

MAGIC = b"KVMNNPT2"
TOKENS = 512
"""Sets are made of at most so many tokens ..."""
LEAST_TOKENS = 256
"""... and of no fewer."""
MOST_BYTES = 256 << 20

_FIELDS = struct.Struct("<8sI")
_KEPT = 8


class TableSets:
    """Table sets of a space: K and V of the first layer, K and V of the next ...

    Parameters
    ----------
    sets
        In this order.
    """

    def __init__(self, sets: Sequence[Tables]) -> None:
        self.sets = tuple(sets)

    @cached_property
    def data(self) -> bytes:
        """The bytes of the object: magic, number of sets, their sizes, the sets."""
        sizes = np.array([len(each.data) for each in self.sets], "<u4")
        return _FIELDS.pack(MAGIC, len(self.sets)) + sizes.tobytes() + b"".join(each.data for each in self.sets)

    @cached_property
    def key(self) -> bytes:
        """What units call it by: the BLAKE2b hash of 16 bytes over its bytes."""
        return hashlib.blake2b(self.data, digest_size=KEY_BYTES).digest()


def made_of(layers: Sequence[LayerCache], space: Space, rotary: Rotary | None, threads: int | None) -> TableSets:
    """Sets for the layers of a text, made of its first tokens."""

    def one(job: tuple[tuple[int, int], Words]) -> Tables:
        (_, part), words = job
        given = [words[:, :TOKENS]]
        return Tables.made_of(given, dtype=space.dtype, rotary=None if part else fitting(rotary, words))

    jobs = zip(space.parts, parts_of(layers), strict=True)
    return TableSets(map_pulled(one, jobs, resolve_threads(threads)))


def fitting(rotary: Rotary | None, keys: Words) -> Rotary | None:
    """The rotation of a layer's K, unless its heads have fewer words: it would cost size only, but is refused."""
    return rotary if rotary is not None and rotary.dims <= keys.shape[2] else None


def parse(data: bytes, key: bytes) -> TableSets:
    """The sets in the bytes of an object.

    Raises
    ------
    DamagedError
        For anything but the object with this key.
    """
    if hashlib.blake2b(data, digest_size=KEY_BYTES).digest() != key:
        raise DamagedError("its tables are damaged")
    try:
        magic, count = _FIELDS.unpack_from(data)
        if magic != MAGIC or not 1 <= count <= 2 * MAX_LAYERS:
            raise DamagedError("its tables are none")
        sizes = np.frombuffer(data, "<u4", count, _FIELDS.size).tolist()
        at = _FIELDS.size + 4 * count
        sets = []
        for size in sizes:
            sets.append(Tables(data[at : at + size]))
            at += size
    except (struct.error, ValueError, KvmnnError) as error:  # of somebody who made the key fit
        raise DamagedError(f"its tables are none: {error}") from None
    return TableSets(sets)


def object_name(space: bytes, key: bytes) -> str:
    """The name of the object, among those of all spaces."""
    return f"{space.hex()}-{key.hex()}"


def keys_of(names: Sequence[str], space: bytes) -> list[bytes]:
    """The keys of a space's objects, of names of `object_name`; others are passed over."""
    begin = f"{space.hex()}-"
    found = []
    for name in sorted(names):
        if name.startswith(begin):
            try:
                key = bytes.fromhex(name[len(begin) :])
            except ValueError:
                continue
            if len(key) == KEY_BYTES:
                found.append(key)
    return found


class KeptTables:
    """The table sets of a store, the last used in memory.

    Parameters
    ----------
    read
        The bytes of an object by its name; None where it is not there.
    names
        The names of all.
    """

    def __init__(self, read: Callable[[str], bytes | None], names: Callable[[], Sequence[str]]) -> None:
        self._read, self._names = read, names
        self._kept: OrderedDict[tuple[bytes, bytes], TableSets] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, space: bytes, key: bytes) -> TableSets:
        """The sets with this key; `DamagedError` where they are gone or damaged."""
        with self._lock:
            found = self._kept.get((space, key))
            if found is not None:
                self._kept.move_to_end((space, key))
                return found
        data = self._read(object_name(space, key))
        if data is None:
            raise DamagedError("its tables are gone")
        return self._keep(space, key, parse(data, key))

    def of_space(self, space: bytes) -> TableSets | None:
        """Sets of a space, whichever: None where it has none that can be read."""
        with self._lock:
            kept = [key for known, key in self._kept if known == space]
        for key in kept or keys_of(self._names(), space):
            try:
                return self.get(space, key)
            except DamagedError:
                continue
        return None

    def keep(self, space: bytes, sets: TableSets) -> None:
        """Keep new sets in memory."""
        self._keep(space, sets.key, sets)

    def _keep(self, space: bytes, key: bytes, sets: TableSets) -> TableSets:
        with self._lock:
            self._kept[space, key] = sets
            if len(self._kept) > _KEPT:
                self._kept.popitem(last=False)
        return sets
