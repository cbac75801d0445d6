"""A bound on the memory that workers take together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class MemoryBudget:
    """Bytes shared by any number of threads; a worker that needs more than all of them waits until it is alone."""

    def __init__(self, nbytes: int) -> None:
        self._max_bytes = nbytes
        self._used_bytes = 0
        self._condition = threading.Condition()

    @contextmanager
    def reserve(self, nbytes: int) -> Iterator[None]:
        """Wait until `nbytes` are free, and hold them inside the ``with`` block."""
        with self._condition:
            self._condition.wait_for(lambda: self._used_bytes == 0 or self._used_bytes + nbytes <= self._max_bytes)
            self._used_bytes += nbytes
        try:
            yield
        finally:
            with self._condition:
                self._used_bytes -= nbytes
                self._condition.notify_all()
