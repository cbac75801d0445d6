"""Units in memory in front of another engine: bounded in bytes, the least recently used goes first."""

from __future__ import annotations

import threading
from collections import OrderedDict


class MemoryCache:
    """Bytes of units.

    Parameters
    ----------
    max_bytes
        Of all together.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._units: OrderedDict[int, bytes] = OrderedDict()
        self._lock = threading.Lock()
        self.nbytes = 0

    def get(self, unit: int) -> bytes | None:
        """The bytes of a unit, if they are there."""
        with self._lock:
            if unit in self._units:
                self._units.move_to_end(unit)
            return self._units.get(unit)

    def put(self, unit: int, data: bytes) -> None:
        """Keep a unit; others go for it, and one that is larger than all is not kept."""
        with self._lock:
            self._evict(unit)
            if len(data) > self._max_bytes:
                return
            while self.nbytes + len(data) > self._max_bytes:
                self._evict(next(iter(self._units)))
            self._units[unit] = data
            self.nbytes += len(data)

    def evict(self, unit: int) -> None:
        """Keep a unit no longer."""
        with self._lock:
            self._evict(unit)

    def _evict(self, unit: int) -> None:
        self.nbytes -= len(self._units.pop(unit, b""))
