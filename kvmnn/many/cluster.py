"""A Dask cluster as an executor (extra ``dask``)."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager, suppress
from typing import Any, TypeVar

from ..errors import KvmnnError, SourceError
from ..optional import import_optional

ResultT = TypeVar("ResultT")

CONNECT_TIMEOUT_SECONDS = 30
_RECOUNT_INTERVAL_SECONDS = 5.0
_MIN_RUNNING_TASKS = 8


@contextmanager
def connect_dask(address: str) -> Iterator[tuple[Executor, Callable[[], int]]]:
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
    distributed = import_optional("distributed")
    with _silence_logs():
        client = distributed.Client.__new__(distributed.Client)  # by hand: one that fails must be at hand
        try:
            client.__init__(address, timeout=CONNECT_TIMEOUT_SECONDS, set_as_default=False)
        except (OSError, ValueError, ImportError) as exc:
            client.status = "closed"  # or it would wait for its scheduler when it is collected, and fail aloud
            raise SourceError(f"{address}: no Dask scheduler answers there: {exc}") from None
        executor = DaskExecutor(client)
        try:
            yield executor, executor.get_max_running
        finally:
            with suppress(Exception):  # it may be gone
                client.close(timeout=CONNECT_TIMEOUT_SECONDS)


class DaskExecutor(Executor):
    """Dask's own executor, but for a cluster that is gone: Dask would wait for ever for what it is given then."""

    def __init__(self, client: Any) -> None:
        self._client, self._executor = client, client.get_executor(pure=False)
        self._max_running, self._counted_at = _MIN_RUNNING_TASKS, float("-inf")

    def submit(self, fn: Callable[..., ResultT], /, *args: Any, **kwargs: Any) -> Future[ResultT]:
        """Run it once, somewhere."""
        self.check_connection()
        future: Future[ResultT] = self._executor.submit(fn, *args, **kwargs)
        return future

    def get_max_running(self) -> int:
        """Workers come and go, so their threads are counted again every few seconds."""
        if time.monotonic() - self._counted_at >= _RECOUNT_INTERVAL_SECONDS:
            self.check_connection()
            with suppress(Exception):
                self._max_running = max(_MIN_RUNNING_TASKS, 2 * sum(self._client.nthreads().values()))
            self._counted_at = time.monotonic()
        return self._max_running

    def check_connection(self) -> None:
        """`KvmnnError` where the scheduler is gone: what it was given never ends then."""
        if self._client.status not in ("running", "connecting"):
            raise KvmnnError(f"the Dask scheduler is gone ({self._client.status}); what is finished can be resumed")


@contextmanager
def _silence_logs() -> Iterator[None]:
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
