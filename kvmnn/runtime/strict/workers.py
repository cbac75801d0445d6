"""A bounded pool of threads for kernels that release the GIL."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")


class WorkerPool:
    """Threads that are started on first use; none if `threads` is 0."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self._executor: ThreadPoolExecutor | None = None

    def submit(self, task: Callable[[], ResultT]) -> Future[ResultT]:
        """Run `task` on a thread, or in this call if no thread is available."""
        if self.threads:
            try:
                if self._executor is None:
                    self._executor = ThreadPoolExecutor(self.threads, thread_name_prefix="kvmnn-runtime")
                return self._executor.submit(task)
            except RuntimeError:  # no new thread to be had, or the pool was shut down from elsewhere
                self._executor = None
        future: Future[ResultT] = Future()
        try:
            future.set_result(task())
        except Exception as error:
            future.set_exception(error)
        return future

    def close(self) -> None:
        """Wait for the threads and end them."""
        if self._executor is not None:
            self._executor.shutdown(wait=True, cancel_futures=True)
            self._executor = None


class PendingJobs(Generic[ResultT]):
    """Open jobs in the order of their submission, each with its raw bytes; `nbytes` is their sum."""

    def __init__(self, workers: WorkerPool, max_jobs: int, max_bytes: int) -> None:
        self._workers = workers
        self._max_open, self._max_bytes = max_jobs, max_bytes
        self.jobs: list[tuple[ResultT, int, Future[object]]] = []
        self.nbytes = 0
        self.peak_jobs = self.peak_async_jobs = 0
        """Maximum number of open jobs at one time, and of those on threads."""

    def has_capacity(self, nbytes: int) -> bool:
        """Return whether one more job of `nbytes` bytes may be submitted; a single job always may."""
        return not self.jobs or (len(self.jobs) < self._max_open and self.nbytes + nbytes <= self._max_bytes)

    def submit(self, job: ResultT, nbytes: int, task: Callable[[], object]) -> None:
        """Submit `task`; `take_finished` returns `job` together with the future of its result."""
        self.jobs.append((job, nbytes, self._workers.submit(task)))
        self.nbytes += nbytes
        self.peak_jobs = max(self.peak_jobs, len(self.jobs))
        if self._workers.threads:
            self.peak_async_jobs = self.peak_jobs

    def take_finished(self, *, wait: bool = False) -> list[tuple[ResultT, Future[object]]]:
        """Return and remove the finished jobs; with `wait`, wait for all jobs."""
        finished_jobs = []
        open_jobs = []
        for job, nbytes, future in self.jobs:
            if wait:
                future.exception() if not future.cancelled() else None
            if future.done():
                finished_jobs.append((job, future))
                self.nbytes -= nbytes
            else:
                open_jobs.append((job, nbytes, future))
        self.jobs = open_jobs
        return finished_jobs

    def cancel_all(self) -> None:
        """Cancel the jobs that have not started, and discard the results of all others."""
        for _, _, future in self.jobs:
            future.cancel()
        self.jobs, self.nbytes = [], 0
