"""Memory for the arrays of `get`, used again once nothing refers to them."""

from __future__ import annotations

import sys
import threading

import numpy as np

from ..dtypes import Bytes

MAX_KEPT_BYTES = 256 << 20
"""A larger buffer is never kept."""

_UNUSED_REFERENCES = 2
"""References to a buffer that `sys.getrefcount` counts if no array has it: the attribute, and its own argument."""


class OutputMemory:
    """Allocates buffers, and keeps the last one for the next result.

    The system fills new memory with zeros when it is first written to: a quarter of the time of a `get` of frames.
    Every array that is a part of a buffer refers to it, so it is used again only when all of them are gone.
    """

    def __init__(self) -> None:
        self._buffer: Bytes = np.empty(0, np.uint8)
        self._lock = threading.Lock()

    def allocate(self, nbytes: int) -> Bytes:
        """Return an uninitialised buffer of `nbytes` bytes."""
        with self._lock:
            if sys.getrefcount(self._buffer) == _UNUSED_REFERENCES:
                # a small result must not keep a large buffer alive
                if self._buffer.size // 2 <= nbytes <= self._buffer.size:
                    return self._buffer[:nbytes]
                self._buffer = np.empty(0, np.uint8)  # before the next one: not both at a time
            buffer: Bytes = np.empty(nbytes, np.uint8)
            if nbytes <= MAX_KEPT_BYTES:
                self._buffer = buffer
            return buffer[:]
