"""The one thread pool: Python threads over kernels that hold no GIL."""

from __future__ import annotations

import contextvars
import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeAlias, TypeVar

from ..checks import whole
from ..errors import KvmnnError
from .helpers import is_given_up

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
    return cpu_count() if threads is None else whole(threads, "threads", 1)


def map_pulled(function: Callable[[T], R], items: Iterable[T], threads: int) -> list[R]:
    """`[function(item) for item in items]` on up to `threads` threads, the caller's among them.

    Workers pull the next item when they are free, so items of unequal size share out evenly. The first exception, in
    the order of the items, is raised after all workers have stopped; items not yet started are then left alone. So are
    they where nobody waits for this any more (`helpers.is_given_up`).
    """
    todo = deque(enumerate(items))
    workers = min(threads, len(todo))
    if workers <= 1:
        return [_wanted(function, item) for _, item in todo]
    results: dict[int, R] = {}
    failures: dict[int, BaseException] = {}

    def work() -> None:
        while not failures:
            try:
                index, item = todo.popleft()
            except IndexError:
                return
            try:
                results[index] = _wanted(function, item)
            except BaseException as failure:
                failures[index] = failure

    helpers = [_executor().submit(contextvars.copy_context().run, work) for _ in range(workers - 1)]
    try:
        work()
    finally:
        todo.clear()
        for helper in helpers:
            helper.cancel()  # one that has not started yet has nothing to do any more
        wait(helpers)
    if failures:
        raise failures[min(failures)]
    return [results[index] for index in range(len(results))]


def run_pulled(jobs: Iterable[Job], threads: int) -> None:
    """Call all jobs, as `map_pulled` does."""
    map_pulled(lambda job: job(), jobs, threads)


def _wanted(function: Callable[[T], R], item: T) -> R:
    if is_given_up():
        raise KvmnnError("nobody waits for this any more")
    return function(item)


def _executor() -> ThreadPoolExecutor:
    global _pool
    with _lock:
        if _pool is None:
            _pool = ThreadPoolExecutor(max_workers=max(32, cpu_count()), thread_name_prefix="kvmnn")
        return _pool


def _forget_pool() -> None:
    """A forked child has no threads: it makes a pool of its own when it needs one."""
    global _pool, _lock
    _pool = None
    _lock = threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
