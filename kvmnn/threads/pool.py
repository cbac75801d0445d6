"""The one thread pool: Python threads over kernels that hold no GIL."""

from __future__ import annotations

import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeAlias, TypeVar

from ..checks import validate_int
from ..errors import KvmnnError
from .helpers import is_cancelled

T = TypeVar("T")
R = TypeVar("R")
Job: TypeAlias = Callable[[], None]

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


def parallel_run(jobs: Iterable[Job], threads: int) -> None:
    """Call all jobs, as `parallel_map` does."""
    parallel_map(lambda job: job(), jobs, threads)


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
