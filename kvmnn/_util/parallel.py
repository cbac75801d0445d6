"""Threads: one pool of Python threads over kernels that release the GIL, ordered pipelines, and hashing in parallel.

The main thread only waits, so that an interrupt is handled at once. A pipeline bounds the bytes and
the number of pieces in flight.
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


T = TypeVar("T")
Job: TypeAlias = Callable[[], object]

_lock = threading.Lock()
_pool: ThreadPoolExecutor | None = None


def cpu_count() -> int:
    """Processors this process may run on."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:
        return os.cpu_count() or 1


def resolve_threads(threads: int | None) -> int:
    """The number of threads a caller means: None for every processor; errors as `checks.whole`, from 1 on."""
    return cpu_count() if threads is None else validate_int(threads, "threads", 1)


def parallel_map(function: Callable[[T], R], items: Iterable[T], threads: int) -> list[R]:
    """`[function(item) for item in items]` on up to `threads` threads, the caller's among them.

    Workers pull the next item when they are free, so items of unequal size share out evenly. The first exception, in
    the order of the items, is raised after all workers have stopped; items not yet started are then left alone. So are
    they where nobody waits for this any more (`futures.is_given_up`).
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


def _reset_pool() -> None:
    """A forked child has no threads: it makes a pool of its own when it needs one."""
    global _pool, _lock
    _pool = None
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_pool)


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
    """Items that may be in work, or done and waiting for their turn, at one time, with so many threads."""
    return max(_MIN_IN_FLIGHT_JOBS, _JOBS_PER_CORE * cores)


def _iter_with_last(items: Iterable[T], can_look_ahead: Callable[[T], bool]) -> Iterator[tuple[T, bool]]:
    """Items, and whether each is known to be the last; looks ahead only after an item that `can_look_ahead`
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
