"""Ordered work on many pieces with a bound on the bytes, and on the number of pieces, in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

from . import pool
from .helpers import Helpers, result_of

T = TypeVar("T")
R = TypeVar("R")

Progress = Callable[[int], object]
"""Called with the number of raw bytes that have been dealt with since the last call."""

IN_FLIGHT = 32 << 20
"""Bytes of pieces that may be in work, or done and waiting for their turn, at one time."""

_LEAST_JOBS = 256
_JOBS_OF_A_CORE = 16
"""Pieces that may be in flight, however small: results may be larger than what they are made from."""


def ordered(
    work: Callable[[T, int | None], R],
    items: Iterable[T],
    size: Callable[[T], int],
    threads: int | None = None,
) -> Iterator[tuple[T, R]]:
    """Yield ``(item, work(item, threads))`` in the order of `items`, which is pulled from no faster than needed.

    Items run side by side, as many as `IN_FLIGHT` has room for but at most `in_flight_jobs`, and share the threads. One
    that fills more than half of it, or is alone, has all threads to itself. None runs on the caller's thread, so that
    an interrupt ends this at once (`helpers`).

    Parameters
    ----------
    work
        Called with an item and the number of threads it may use (None for all).
    size
        Bytes of an item.
    threads
        None for all processors.
    """
    cores = pool.resolve_threads(threads)
    large = IN_FLIGHT // 2 if cores > 1 else -1
    with Helpers(cores, "kvmnn-piece") as helpers:
        window = _Window(work, size, cores, helpers)
        for item, last in _with_last(items, lambda item: size(item) <= large):
            if size(item) > large or (last and window.is_empty):
                yield from window.drain()
                yield item, result_of(helpers.submit(work, item, threads))
            else:
                yield from window.make_room(size(item))
                window.submit(item)
        yield from window.drain()


def in_flight_jobs(cores: int) -> int:
    """Items that may be in work, or done and waiting for their turn, at one time, with so many threads."""
    return max(_LEAST_JOBS, _JOBS_OF_A_CORE * cores)


def _with_last(items: Iterable[T], may_look: Callable[[T], bool]) -> Iterator[tuple[T, bool]]:
    """Items, and whether each is known to be the last; looks ahead only behind an item that `may_look` accepts."""
    source = iter(items)
    ahead: list[T] = []
    while True:
        if not ahead:
            ahead.extend(_one(source))
        if not ahead:
            return
        item = ahead.pop()
        if may_look(item):
            ahead.extend(_one(source))
            yield item, not ahead
        else:
            yield item, False


def _one(source: Iterator[T]) -> Iterator[T]:
    for item in source:
        yield item
        return


class _Window(Generic[T, R]):
    """Items on the pool, oldest first, and the bytes they amount to; both have bounds."""

    def __init__(
        self, work: Callable[[T, int | None], R], size: Callable[[T], int], cores: int, helpers: Helpers
    ) -> None:
        self._work = work
        self._size = size
        self._cores = cores
        self._most = in_flight_jobs(cores)
        self._helpers = helpers
        self._waiting: deque[tuple[T, Future[R]]] = deque()
        self._bytes = 0

    @property
    def is_empty(self) -> bool:
        return not self._waiting

    def submit(self, item: T) -> None:
        share = self._cores // max(1, min(self._cores, IN_FLIGHT // max(1, self._size(item))))
        job = self._helpers.submit(self._work, item, share)
        self._waiting.append((item, job))
        self._bytes += self._size(item)

    def make_room(self, nbytes: int) -> Iterator[tuple[T, R]]:
        while self._waiting and (self._bytes + nbytes > IN_FLIGHT or len(self._waiting) >= self._most):
            yield self._oldest()

    def drain(self) -> Iterator[tuple[T, R]]:
        while self._waiting:
            yield self._oldest()

    def _oldest(self) -> tuple[T, R]:
        item, future = self._waiting.popleft()
        self._bytes -= self._size(item)
        return item, result_of(future)
