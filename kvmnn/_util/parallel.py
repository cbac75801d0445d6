"""Threads: one pool of Python threads over kernels that release the GIL, ordered pipelines, and hashing in parallel.

The main thread only waits, so that an interrupt is handled at once. A pipeline bounds the bytes and the number of items
in flight.
"""

from __future__ import annotations

import contextvars
import hashlib
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import TracebackType
from typing import TYPE_CHECKING, Any, Generic, TypeAlias, TypeVar

from ..errors import KvmnnError
from .validation import validate_int

if TYPE_CHECKING:
    from ..dtypes import Bytes

R = TypeVar("R")

_cancel_event: contextvars.ContextVar[threading.Event | None] = contextvars.ContextVar("given_up", default=None)
_abandoned_executors: list[InterruptibleExecutor] = []
_POLL_SECONDS = 0.3


class InterruptibleExecutor:
    """A thread pool of up to `threads` threads, which start on demand.

    Use as a context manager. A normal exit waits for all work, and an error for the work that has started. An
    interrupt, or closing a generator inside it, exits at once: work that has started ends at its next check of
    `is_cancelled`, and its results are dropped.
    """

    def __init__(self, threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(threads, name)
        self._cancel = threading.Event()
        self._lock = threading.Lock()
        self._num_active = 0

    def submit(self, work: Callable[..., R], *arguments: Any) -> Future[R]:
        """Schedule `work` on the next free thread, in the caller's context."""
        context = contextvars.copy_context()
        context.run(_cancel_event.set, self._cancel)
        return self._pool.submit(context.run, self._run_counted, work, *arguments)

    @property
    def is_active(self) -> bool:
        """Return whether any work has started and is not done."""
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
    """Return a future's result as `Future.result` does, but notice an interrupt that came right before the wait."""
    while not future.done():
        wait([future], _POLL_SECONDS)
    return future.result()


def is_cancelled() -> bool:
    """Return whether the result of the current thread's work is no longer needed; long work checks this regularly."""
    event = _cancel_event.get()
    return event is not None and event.is_set()


def any_alive() -> bool:
    """Return whether threads still run after an interrupt; Python would wait for them at exit."""
    return any(executor.is_active for executor in _abandoned_executors)


T = TypeVar("T")
Job: TypeAlias = Callable[[], object]

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def cpu_count() -> int:
    """Return the number of processors that this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def resolve_threads(threads: int | None) -> int:
    """Return a number of threads of at least 1; None means every processor. Errors as for `validate_int`."""
    return cpu_count() if threads is None else validate_int(threads, "threads", 1)


def parallel_map(function: Callable[[T], R], items: Iterable[T], threads: int) -> list[R]:
    """Return `[function(item) for item in items]`, computed on up to `threads` threads including the caller's.

    Each worker takes the next item when it is free, so items of unequal size are balanced. The first exception, in the
    order of the items, is raised after all workers have stopped; items that have not started are skipped. They are also
    skipped once `is_cancelled` is true.
    """
    pending = deque(enumerate(items))
    num_workers = min(threads, len(pending))
    if num_workers <= 1:
        return [_call_unless_cancelled(function, item) for _, item in pending]
    results: dict[int, R] = {}
    failures: dict[int, BaseException] = {}

    def work() -> None:
        while not failures:
            try:
                index, item = pending.popleft()
            except IndexError:
                return
            try:
                results[index] = _call_unless_cancelled(function, item)
            except BaseException as failure:
                failures[index] = failure

    futures = [_get_executor().submit(contextvars.copy_context().run, work) for _ in range(num_workers - 1)]
    try:
        work()
    finally:
        pending.clear()
        for future in futures:
            future.cancel()  # one that has not started yet has nothing to do any more
        wait(futures)
    if failures:
        raise failures[min(failures)]
    return [results[index] for index in range(len(results))]


def parallel_run(jobs: Iterable[Job], threads: int, stop: threading.Event | None = None) -> None:
    """Call all jobs as `parallel_map` does; once one of them has set `stop`, skip those that have not started."""
    parallel_map(lambda job: None if stop is not None and stop.is_set() else job(), jobs, threads)


def _call_unless_cancelled(function: Callable[[T], R], item: T) -> R:
    if is_cancelled():
        raise KvmnnError("nobody waits for this any more")
    return function(item)


def _get_executor() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max_workers=max(32, cpu_count()), thread_name_prefix="kvmnn")
        return _pool


def stop_idle_threads() -> None:
    """End the threads of `parallel_map`, which are idle between its calls; the next call starts its own."""
    global _pool
    with _lock:
        pool, _pool = _pool, None
    if pool is not None:
        pool.shutdown()


def _reset_pool() -> None:
    """Drop the pool in a forked child, which has no threads; it creates its own on demand."""
    global _pool, _lock
    _pool = None
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_pool)


Progress = Callable[[int], object]
"""Callback that receives the number of raw bytes processed since the last call."""

MAX_IN_FLIGHT_BYTES = 32 << 20
"""Bytes of items that may be in progress, or done and waiting for their turn, at one time."""

_MIN_IN_FLIGHT_JOBS = 256
_JOBS_PER_CORE = 16
"""Items that may be in flight, however small: results may be larger than their inputs."""


def ordered_map(
    work: Callable[[T, int | None], R],
    items: Iterable[T],
    get_size: Callable[[T], int],
    threads: int | None = None,
) -> Iterator[tuple[T, R]]:
    """Yield ``(item, work(item, threads))`` in the order of `items`, which is consumed only as fast as needed.

    Items run in parallel, limited by `MAX_IN_FLIGHT_BYTES` and `compute_max_in_flight_jobs`, and share the threads. An
    item that exceeds half of these bytes, or is alone, gets all threads. None runs on the caller's thread, so that an
    interrupt ends the iteration at once.
    """
    cores = resolve_threads(threads)
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
    """Return how many items may be in progress, or done and waiting for their turn, on `cores` threads."""
    return max(_MIN_IN_FLIGHT_JOBS, _JOBS_PER_CORE * cores)


def _iter_with_last(items: Iterable[T], can_look_ahead: Callable[[T], bool]) -> Iterator[tuple[T, bool]]:
    """Yield each item and whether it is known to be the last; look ahead only if `can_look_ahead(item)`."""
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
    """Items on the pool, oldest first, limited by their number and total bytes."""

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


_MIN_THREAD_BYTES = 1 << 20


class BackgroundHasher:
    """Hash chunks on another thread in the order in which they are given, holding at most one of them.

    Use as a context manager; leaving it waits for the last chunk.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(1, "kvmnn-digest")
        self._pending_update: Future[None] | None = None

    def update(self, digest: hashlib._Hash, chunk: Bytes) -> None:
        """Feed `chunk`, which must not change any more, to `digest`; return at once if it is large."""
        self.wait()
        if chunk.size < _MIN_THREAD_BYTES:
            digest.update(chunk.data)
        else:
            self._pending_update = self._pool.submit(digest.update, chunk.data)

    def wait(self) -> None:
        """Wait until all chunks are hashed."""
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
