"""Threads for work that may take seconds in compiled code: the caller only waits, and an interrupt finds it waiting."""

from __future__ import annotations

import contextvars
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import Any, TypeVar

R = TypeVar("R")

_given_up: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("given_up", default=None)
_left: list[Helpers] = []
_LOOK_UP_SECONDS = 0.3


class Helpers:
    """Up to `threads` threads, made when they are needed.

    Use as a context manager. It is left when all work is done; by an error when what has begun is done; and by an
    interrupt, or when a generator that is in it is closed, at once: what has begun then ends by itself, as soon as it
    looks at `is_given_up`, and nobody gets its results.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._at_work = 0

    def submit(self, work: Callable[..., R], *arguments: Any) -> Future[R]:
        """Begin `work` with the caller's context as soon as a thread is free."""
        context = contextvars.copy_context()
        context.run(_given_up.set, self._stop)
        return self._pool.submit(context.run, self._counted, work, *arguments)

    @property
    def is_at_work(self) -> bool:
        """Whether any work that has begun is not done."""
        return self._at_work > 0

    def _counted(self, work: Callable[..., R], *arguments: Any) -> R:
        with self._lock:
            self._at_work += 1
        try:
            return work(*arguments)
        finally:
            with self._lock:
                self._at_work -= 1

    def __enter__(self) -> Helpers:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        at_once = kind is not None and not issubclass(kind, Exception)
        if kind is not None:
            self._stop.set()
        if at_once:
            _left[:] = [helpers for helpers in (*_left, self) if helpers.is_at_work]
        self._pool.shutdown(wait=not at_once, cancel_futures=True)


def result_of(future: Future[R]) -> R:
    """What it comes to; as `Future.result`, but an interrupt that came right before the wait began is heard, too."""
    while not future.done():
        wait([future], _LOOK_UP_SECONDS)
    return future.result()


def is_given_up() -> bool:
    """Whether nobody waits any more for what this thread works on; long work asks by turns."""
    stop = _given_up.get()
    return stop is not None and stop.is_set()


def are_left() -> bool:
    """Whether threads are still at work that were left by an interrupt: the end of Python would wait for them."""
    return any(helpers.is_at_work for helpers in _left)
