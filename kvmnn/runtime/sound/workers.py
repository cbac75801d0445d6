"""A bounded pool of threads over kernels that hold no GIL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

R = TypeVar("R")


class Workers:
    """Threads, made when they are first needed; none where `threads` is 0."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, function: Callable[[], R]) -> Future[R]:
        """Run `function` on a thread; in the call itself where there is none, or none takes it."""
        if self.threads:
            try:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix="kvmnn-runtime")
                return self._executor.submit(function)
            except RuntimeError:  # no new thread to be had, or the pool was shut down from elsewhere
                self._executor = None
        return run_now(function)

    def close(self) -> None:
        """Wait for the threads and end them."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None


def run_now(function: Callable[[], R]) -> Future[R]:
    """A future that is done: of `function` run in this call."""
    future: Future[R] = Future()
    try:
        future.set_result(function())
    except Exception as error:
        future.set_exception(error)
    return future


class OpenJobs(Generic[R]):
    """Jobs that were handed in, in their order, with the raw bytes that they hold.

    Attributes
    ----------
    open
        What was handed in with each, its bytes, and its result to come.
    nbytes, peak
        Bytes of those that are open, and most that were open at one time.
    async_peak
        Likewise on threads: without any, a job is open in its own call only.
    """

    def __init__(self, workers: Workers, max_open: int, max_bytes: int) -> None:
        self._workers = workers
        self._max_open, self._max_bytes = max_open, max_bytes
        self.open: list[tuple[R, int, Future[object]]] = []
        self.nbytes = self.peak = self.async_peak = 0

    def has_room(self, nbytes: int) -> bool:
        """Whether one more job of `nbytes` may be handed in; the only one always may."""
        return not self.open or (len(self.open) < self._max_open and self.nbytes + nbytes <= self._max_bytes)

    def submit(self, what: R, nbytes: int, function: Callable[[], object]) -> None:
        """Hand in a job; `what` comes back with its result."""
        self.open.append((what, nbytes, self._workers.submit(function)))
        self.nbytes += nbytes
        self.peak = max(self.peak, len(self.open))
        if self._workers.threads:
            self.async_peak = self.peak

    def finished(self, *, wait: bool = False) -> list[tuple[R, Future[object]]]:
        """What is done, each once; with `wait`, everything."""
        done = []
        still_open = []
        for what, nbytes, future in self.open:
            if wait:
                future.exception() if not future.cancelled() else None
            if future.done():
                done.append((what, future))
                self.nbytes -= nbytes
            else:
                still_open.append((what, nbytes, future))
        self.open = still_open
        return done

    def forget(self) -> None:
        """Cancel what has not started and take no results of the rest."""
        for _, _, future in self.open:
            future.cancel()
        self.open, self.nbytes = [], 0
