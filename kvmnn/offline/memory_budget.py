"""A bound on the memory that workers take together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class MemoryBudget:
    """Bytes shared by any number of threads; a worker that needs more than all of them waits until it is alone."""

    def __init__(self, nbytes: int) -> None:
        self._limit = nbytes
        self._used = 0
        self._changed = threading.Condition()

    @contextmanager
    def holding(self, nbytes: int) -> Iterator[None]:
        """Wait until `nbytes` are free, and hold them inside the ``with`` block."""
        with self._changed:
            self._changed.wait_for(lambda: self._used == 0 or self._used + nbytes <= self._limit)
            self._used += nbytes
        try:
            yield
        finally:
            with self._changed:
                self._used -= nbytes
                self._changed.notify_all()
