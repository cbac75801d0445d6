"""Ordered work on many pieces with a bound on the bytes, and on the number of pieces, in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from typing import Generic, TypeVar

from . import pool
from .helpers import InterruptibleExecutor, wait_for_result

T = TypeVar("T")
R = TypeVar("R")

Progress = Callable[[int], object]
"""Called with the number of raw bytes that have been dealt with since the last call."""

MAX_IN_FLIGHT_BYTES = 32 << 20
"""Bytes of pieces that may be in work, or done and waiting for their turn, at one time."""

_MIN_IN_FLIGHT_JOBS = 256
_JOBS_PER_CORE = 16
"""Pieces that may be in flight, however small: results may be larger than what they are made from."""


def ordered_map(
    work: Callable[[T, int | None], R],
    items: Iterable[T],
    get_size: Callable[[T], int],
    threads: int | None = None,
) -> Iterator[tuple[T, R]]:
    """Yield ``(item, work(item, threads))`` in the order of `items`, which is pulled from no faster than needed.

    Items run side by side, as many as `MAX_IN_FLIGHT_BYTES` has room for but at most `compute_max_in_flight_jobs`, and
    share the threads. One that fills more than half of it, or is alone, has all threads to itself. None runs on the
    caller's thread, so that
    an interrupt ends this at once (`executor`).

    Parameters
    ----------
    work
        Called with an item and the number of threads it may use (None for all).
    get_size
        Bytes of an item.
    threads
        None for all processors.
    """
    cores = pool.resolve_threads(threads)
    large_bytes = MAX_IN_FLIGHT_BYTES // 2 if cores > 1 else -1
    with InterruptibleExecutor(cores, "kvmnn-piece") as executor:
        window = _InFlightWindow(work, get_size, cores, executor)
        for item, is_last in _iter_with_last(items, lambda item: get_size(item) <= large_bytes):
            if get_size(item) > large_bytes or (is_last and window.is_empty):
                yield from window.drain()
                yield item, wait_for_result(executor.submit(work, item, threads))
            else:
                yield from window.free_capacity(get_size(item))
                window.submit(item)
        yield from window.drain()


def compute_max_in_flight_jobs(cores: int) -> int:
    """Items that may be in work, or done and waiting for their turn, at one time, with so many threads."""
    return max(_MIN_IN_FLIGHT_JOBS, _JOBS_PER_CORE * cores)


def _iter_with_last(items: Iterable[T], can_look_ahead: Callable[[T], bool]) -> Iterator[tuple[T, bool]]:
    """Items, and whether each is known to be the last; looks ahead only behind an item that `can_look_ahead`
    accepts.
    """
    source = iter(items)
    lookahead: list[T] = []
    while True:
        if not lookahead:
            lookahead.extend(_iter_next(source))
        if not lookahead:
            return
        item = lookahead.pop()
        if can_look_ahead(item):
            lookahead.extend(_iter_next(source))
            yield item, not lookahead
        else:
            yield item, False


def _iter_next(source: Iterator[T]) -> Iterator[T]:
    for item in source:
        yield item
        return


class _InFlightWindow(Generic[T, R]):
    """Items on the pool, oldest first, and the bytes they amount to; both have bounds."""

    def __init__(
        self,
        work: Callable[[T, int | None], R],
        get_size: Callable[[T], int],
        cores: int,
        executor: InterruptibleExecutor,
    ) -> None:
        self._work = work
        self._get_size = get_size
        self._cores = cores
        self._max_jobs = compute_max_in_flight_jobs(cores)
        self._executor = executor
        self._pending: deque[tuple[T, Future[R]]] = deque()
        self._bytes = 0

    @property
    def is_empty(self) -> bool:
        return not self._pending

    def submit(self, item: T) -> None:
        num_threads = self._cores // max(1, min(self._cores, MAX_IN_FLIGHT_BYTES // max(1, self._get_size(item))))
        future = self._executor.submit(self._work, item, num_threads)
        self._pending.append((item, future))
        self._bytes += self._get_size(item)

    def free_capacity(self, nbytes: int) -> Iterator[tuple[T, R]]:
        while self._pending and (self._bytes + nbytes > MAX_IN_FLIGHT_BYTES or len(self._pending) >= self._max_jobs):
            yield self._pop_oldest()

    def drain(self) -> Iterator[tuple[T, R]]:
        while self._pending:
            yield self._pop_oldest()

    def _pop_oldest(self) -> tuple[T, R]:
        item, future = self._pending.popleft()
        self._bytes -= self._get_size(item)
        return item, wait_for_result(future)
