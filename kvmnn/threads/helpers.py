"""Threads for work that may take seconds in compiled code: the caller only waits, and an interrupt finds it waiting."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, TypeVar

R = TypeVar("R")

_cancel_event: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("given_up", default=None)
_abandoned_executors: list[InterruptibleExecutor] = []
_POLL_SECONDS = 0.3


class InterruptibleExecutor:
    """Up to `threads` threads, made when they are needed.

    Use as a context manager. It is left when all work is done; by an error when what has begun is done; and by an
    interrupt, or when a generator that is in it is closed, at once: what has begun then ends by itself, as soon as it
    looks at `is_cancelled`, and nobody gets its results.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._cancel = threading.Event()
        self._lock = threading.Lock()
        self._num_active = 0

    def submit(self, work: Callable[..., R], *arguments: Any) -> Future[R]:
        """Begin `work` with the caller's context as soon as a thread is free."""
        context = contextvars.copy_context()
        context.run(_cancel_event.set, self._cancel)
        return self._pool.submit(context.run, self._run_counted, work, *arguments)

    @property
    def is_active(self) -> bool:
        """Whether any work that has begun is not done."""
        return self._num_active > 0

    def _run_counted(self, work: Callable[..., R], *arguments: Any) -> R:
        with self._lock:
            self._num_active += 1
        try:
            return work(*arguments)
        finally:
            with self._lock:
                self._num_active -= 1

    def __enter__(self) -> InterruptibleExecutor:
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        is_interrupt = error_type is not None and not issubclass(error_type, Exception)
        if error_type is not None:
            self._cancel.set()
        if is_interrupt:
            _abandoned_executors[:] = [executor for executor in (*_abandoned_executors, self) if executor.is_active]
        self._pool.shutdown(wait=not is_interrupt, cancel_futures=True)


def wait_for_result(future: Future[R]) -> R:
    """What it comes to; as `Future.result`, but an interrupt that came right before the wait began is heard, too."""
    while not future.done():
        wait([future], _POLL_SECONDS)
    return future.result()


def is_cancelled() -> bool:
    """Whether nobody waits any more for what this thread works on; long work asks by turns."""
    event = _cancel_event.get()
    return event is not None and event.is_set()


def any_alive() -> bool:
    """Whether threads are still at work that were left by an interrupt: the end of Python would wait for them."""
    return any(executor.is_active for executor in _abandoned_executors)
