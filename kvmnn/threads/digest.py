"""SHA-256 beside the work: a piece is hashed on another thread while the next thing happens."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from ..dtypes import Bytes

_MIN_THREAD_BYTES = 1 << 20


class BackgroundHasher:
    """Hashes pieces in the order in which they are given, holding on to one of them at most.

    Use as a context manager; leaving it waits for the last piece.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "kvmnn-digest")
        self._pending_update: Future[None] | None = None

    def update(self, digest: hashlib._Hash, chunk: Bytes) -> None:
        """Feed `chunk`, which must not change any more, to `digest`; large ones return at once."""
        self.wait()
        if chunk.size < _MIN_THREAD_BYTES:
            digest.update(chunk.data)
        else:
            self._pending_update = self._pool.submit(digest.update, chunk.data)

    def wait(self) -> None:
        """Return when everything given has been hashed."""
        if self._pending_update is not None:
            self._pending_update.result()
            self._pending_update = None

    def __enter__(self) -> BackgroundHasher:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)
        self._pending_update = None
