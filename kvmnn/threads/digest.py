"""SHA-256 beside the work: a piece is hashed on another thread while the next thing happens."""

from __future__ import annotations

import hashlib
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType

from ..dtypes import Bytes

_MIN_THREAD_BYTES = 1 << 20


class Digester:
    """Hashes pieces in the order in which they are given, holding on to one of them at most.

    Use as a context manager; leaving it waits for the last piece.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "kvmnn-digest")
        self._last: Future[None] | None = None

    def update(self, digest: hashlib._Hash, piece: Bytes) -> None:
        """Feed `piece`, which must not change any more, to `digest`; large ones return at once."""
        self.wait()
        if piece.size < _MIN_THREAD_BYTES:
            digest.update(piece.data)
        else:
            self._last = self._pool.submit(digest.update, piece.data)

    def wait(self) -> None:
        """Return when everything given has been hashed."""
        if self._last is not None:
            self._last.result()
            self._last = None

    def __enter__(self) -> Digester:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True)
        self._last = None
