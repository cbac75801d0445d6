"""A Dask cluster as an executor (extra ``dask``)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ..errors import KvmnnError, SourceError
from ..optional import package

R = TypeVar("R")

SECONDS_TO_CONNECT = 30
_SECONDS_BETWEEN = 5.0
_LEAST = 8


@contextmanager
def dask(address: str) -> Iterator[tuple[Executor, Callable[[], int]]]:
    """The executor of a cluster, and how many tasks it should have at a time: twice as many as it has threads now.

    Parameters
    ----------
    address
        Of the scheduler, e.g. ``tcp://10.0.0.1:8786``.

    Raises
    ------
    MissingDependencyError
        Without the package ``distributed``.
    SourceError
        Where no scheduler answers.
    """
    distributed = package("distributed")
    with _silence():
        client = distributed.Client.__new__(distributed.Client)  # by hand: one that fails must be at hand
        try:
            client.__init__(address, timeout=SECONDS_TO_CONNECT, set_as_default=False)
        except (OSError, ValueError, ImportError) as exc:
            client.status = "closed"  # or it would wait for its scheduler when it is collected, and fail aloud
            raise SourceError(f"{address}: no Dask scheduler answers there: {exc}") from None
        executor = Cluster(client)
        try:
            yield executor, executor.ahead
        finally:
            with suppress(Exception):  # it may be gone
                client.close(timeout=SECONDS_TO_CONNECT)


class Cluster(Executor):
    """Dask's own executor, but for a cluster that is gone: Dask would wait for ever for what it is given then."""

    def __init__(self, client: Any) -> None:
        self._client, self._executor = client, client.get_executor(pure=False)
        self._known, self._at = _LEAST, float("-inf")

    def submit(self, fn: Callable[..., R], /, *args: Any, **kwargs: Any) -> Future[R]:
        """Run it once, somewhere."""
        self.check()
        found: Future[R] = self._executor.submit(fn, *args, **kwargs)
        return found

    def ahead(self) -> int:
        """Workers come and go, so their threads are counted again every few seconds."""
        if time.monotonic() - self._at >= _SECONDS_BETWEEN:
            self.check()
            with suppress(Exception):
                self._known = max(_LEAST, 2 * sum(self._client.nthreads().values()))
            self._at = time.monotonic()
        return self._known

    def check(self) -> None:
        """`KvmnnError` where the scheduler is gone: what it was given never ends then."""
        if self._client.status not in ("running", "connecting"):
            raise KvmnnError(f"the Dask scheduler is gone ({self._client.status}); what is finished can be resumed")


@contextmanager
def _silence() -> Iterator[None]:
    """Dask's log says nothing: what is wrong is said once, by the run."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in ("distributed", "tornado")]
    levels = {name: logging.getLogger(name).level for name in ("distributed", *names)}
    try:
        for name in levels:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
