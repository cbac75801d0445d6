"""Run one kind of work on many files with any executor: results arrive in order, each exactly once."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from dataclasses import replace

from .._util.packages import get_version
from .._util.text import escape_control, join_lines
from ..errors import KvmnnError, OptionError
from .executors import DaskExecutor, ProcessExecutor
from .journal import TaskJournal, compute_stamp
from .tasks import Task, TaskFunction, TaskResult, make_failed_result, run_task

MAX_PENDING_TASKS = 1024
"""Tasks that may be started before the result of the first of them is yielded."""

MAX_PENDING_LINE_BYTES = 64 << 20
"""Limit on the bytes of results that wait for an earlier one; above it no task is started."""

STALL_CHECK_SECONDS = 5.0
"""Time without a result after which the processes are checked."""
_MAX_PROBES = 3
"""Maximum number of empty tasks to probe an executor that lost a task."""

ExecutorOrFactory = Executor | Callable[[], Executor]


def run_tasks(
    tasks: Iterable[Task | str],
    work: TaskFunction,
    executor: ExecutorOrFactory | None = None,
    *,
    max_running: int | Callable[[], int] | None = None,
    journal: TaskJournal | None = None,
) -> Generator[TaskResult, None, None]:
    """Run a work on many files.

    A task that fails yields a `TaskResult` with its error, and the others continue. A task whose process dies (killed,
    out of memory) is run once more, and fails if that process dies as well.

    Parameters
    ----------
    tasks
        Inputs; a path is a task without output. All are held in memory: 70 MB for 100,000.
    work
        Function that is called with each task.
    executor
        Any executor of `concurrent.futures`: threads, processes, ``client.get_executor(pure=False)`` of Dask, MPI. It
        is not shut down. Or a function that creates one, which is shut down, and replaced if a dead process breaks it.
        None for a `ProcessExecutor` with a process for each processor.
    max_running
        How many tasks the executor has at a time, or a function that is called repeatedly for it. The default is twice
        the number of its workers, if it reports that, else twice the number of processors.
    journal
        Journal that records each task when it ends, and provides the results of recorded ones.

    Yields
    ------
    TaskResult
        One for each task, in the order of `tasks`. The number of waiting results is bounded (`MAX_PENDING_TASKS`,
        `MAX_PENDING_LINE_BYTES`).

    Raises
    ------
    OptionError
        If two tasks have the same path or output, or an output lies in another one; nothing is started then.
    KvmnnError
        If the executor does not run tasks any more.

    Notes
    -----
    If the iterator is closed early, or an exception such as `KeyboardInterrupt` leaves it, waiting tasks are cancelled,
    and an executor that was created here is shut down with ``cancel_futures``.
    """
    from .._util.parallel import cpu_count

    all_tasks = [Task(task) if isinstance(task, str) else task for task in tasks]
    _check_distinct(all_tasks)
    runner = _TaskRunner(all_tasks, work, executor or (lambda: ProcessExecutor(cpu_count())), max_running, journal)
    try:
        yield from runner.iter_results()
    finally:
        runner.stop()


class _TaskRunner:
    """State of a run.

    Tasks are identified by index. `_lost_indices` are tasks whose executor broke; each runs alone to find the one that
    breaks it. `_retry_indices` are tasks that the executor gave up without breaking.
    """

    def __init__(
        self,
        tasks: list[Task],
        work: TaskFunction,
        executor: ExecutorOrFactory,
        max_running: int | Callable[[], int] | None,
        journal: TaskJournal | None,
    ) -> None:
        self._tasks, self._work, self._journal = tasks, work, journal
        self._make_executor = None if isinstance(executor, Executor) else executor
        self.executor = executor if isinstance(executor, Executor) else executor()
        self._max_running = max_running
        self._running: dict[Future[TaskResult], int] = {}
        self._input_stamps: dict[int, str | None] = {}
        self._ready: dict[int, TaskResult | None] = {}  # None: in the journal
        self._pending_bytes = 0
        self._lost_indices: deque[int] = deque()
        self._retry_indices: deque[int] = deque()
        self._attempts: dict[int, int] = {}
        self._next_index = 0  # to start
        self._first_pending = 0  # to yield
        self._was_refused = False  # the executor refused the last task

    def iter_results(self) -> Iterator[TaskResult]:
        while self._first_pending < len(self._tasks):
            self._submit_pending()
            while self._first_pending in self._ready:
                yield self._pop_ready()
            if self._running:
                ended_futures, _ = wait(self._running, STALL_CHECK_SECONDS, FIRST_COMPLETED)
                if not ended_futures:
                    self._check_stall()
                self._collect_ended(ended_futures)

    def _check_stall(self) -> None:
        """Unblock a pool with a dead process, or check the connection of a cluster, after a time without results."""
        if isinstance(self.executor, ProcessExecutor):
            self.executor.break_if_stuck()
        elif isinstance(self.executor, DaskExecutor):
            self.executor.check_connection()

    def stop(self) -> None:
        """Cancel waiting tasks and shut down an executor that was created here."""
        for future, index in self._running.items():
            if not future.cancel() and future.done() and future.exception() is None and self._journal is not None:
                self._journal.record_end(self._tasks[index], future.result(), self._input_stamps[index])
        if self._make_executor is not None:
            self.executor.shutdown(cancel_futures=bool(self._running))
        self._running.clear()

    def _pop_ready(self) -> TaskResult:
        result = self._ready.pop(self._first_pending)
        task = self._tasks[self._first_pending]
        self._first_pending += 1
        if result is not None:
            self._pending_bytes -= len(result.line)
            return result
        if self._journal is None:
            raise RuntimeError("a finished task without its file")
        return self._journal.read_result(task)

    def _submit_pending(self) -> None:
        """Submit tasks up to the limit of the executor."""
        if self._lost_indices:
            if not self._running:
                self._submit(self._lost_indices.popleft())
            return
        max_running = self._get_max_running()
        while len(self._running) < max_running and (self._retry_indices or self._can_start()):
            if self._retry_indices:
                index = self._retry_indices.popleft()
            else:
                index, self._next_index = self._next_index, self._next_index + 1
                if self._journal is not None and self._journal.is_finished(self._tasks[index]):
                    self._ready[index] = None
                    continue
            if not self._submit(index):
                return

    def _can_start(self) -> bool:
        if self._next_index >= len(self._tasks):
            return False
        return self._next_index == self._first_pending or (
            self._next_index - self._first_pending < MAX_PENDING_TASKS and self._pending_bytes < MAX_PENDING_LINE_BYTES
        )

    def _get_max_running(self) -> int:
        if callable(self._max_running):
            return max(1, self._max_running())
        if self._max_running is not None:
            return max(1, self._max_running)
        from .._util.parallel import cpu_count

        return 2 * int(getattr(self.executor, "_max_workers", None) or cpu_count())

    def _submit(self, index: int) -> bool:
        """Submit a task; return False if the executor was broken, and was replaced."""
        task = self._prepare_task(index)
        try:
            self._running[self.executor.submit(run_task, self._work, task, get_version())] = index
        except BrokenExecutor as error:
            if self._was_refused:
                self._check_script_guard()
                raise _make_idle_error(error) from error
            self._was_refused = True
            self._retry_indices.appendleft(index)
            self._collect_ended(wait(self._running).done, error)
            return False
        except KvmnnError:
            raise
        except Exception as exc:  # it was shut down, or its cluster is gone
            raise _make_idle_error(exc) from exc
        self._was_refused = False
        return True

    def _prepare_task(self, index: int) -> Task:
        """Return the task, with permission to replace output that only an earlier run of it can have left."""
        task = self._tasks[index]
        if index not in self._input_stamps:
            self._input_stamps[index] = compute_stamp(task.path) if self._journal is not None else None
            if task.output is not None and not task.replace:
                output = task.output
                may_replace = not any(os.path.lexists(output + suffix) for suffix in task.output_suffixes)
                if self._journal is not None:
                    may_replace = may_replace or self._journal.is_own_output(task)
                    if may_replace:
                        self._journal.record_start(task)
                    may_replace = may_replace or self._journal.was_started(task)
                task = self._tasks[index] = replace(task, replace=may_replace)
        return task

    def _collect_ended(
        self, ended_futures: Iterable[Future[TaskResult]], executor_error: BrokenExecutor | None = None
    ) -> None:
        """Record ended tasks, and retry those that the executor lost."""
        lost_tasks: list[tuple[int, BaseException]] = []
        for future in sorted(ended_futures, key=lambda future: self._running[future]):
            index = self._running.pop(future)
            try:
                self._record_result(index, future.result())
            except BrokenExecutor as exc:
                executor_error = exc
                lost_tasks.append((index, exc))
            except (Exception, CancelledError) as exc:  # an error of the executor: those of the work are in its results
                lost_tasks.append((index, exc))
        if executor_error is not None and self._running:  # all running tasks end with the executor
            self._collect_ended(wait(self._running).done, executor_error)
        elif executor_error is not None:
            self._replace_executor(executor_error)
        for index, cause in lost_tasks:
            self._retry_or_fail(index, cause, has_process_died=executor_error is not None)

    def _record_result(self, index: int, result: TaskResult) -> None:
        if self._journal is not None:
            self._journal.record_end(self._tasks[index], result, self._input_stamps[index])
        del self._input_stamps[index]
        self._ready[index] = result
        self._pending_bytes += len(result.line)

    def _replace_executor(self, executor_error: BrokenExecutor) -> None:
        """Replace a broken executor."""
        self._check_script_guard()
        if self._make_executor is None:
            raise KvmnnError(
                f"the executor is broken and cannot be replaced: {_format_exception(executor_error)}; give a function "
                f"that makes executors"
            ) from executor_error
        self.executor.shutdown()
        self.executor = self._make_executor()

    def _check_script_guard(self) -> None:
        """Raise if processes ended because the main script starts processes when it is imported."""
        if isinstance(self.executor, ProcessExecutor) and self.executor.is_unguarded():
            script = getattr(sys.modules["__main__"], "__file__", "this script")
            raise KvmnnError(
                f"{script}: starts processes whenever it is imported, and new processes import it: put what it does "
                'under if __name__ == "__main__":'
            ) from None

    def _retry_or_fail(self, index: int, exc: BaseException, *, has_process_died: bool) -> None:
        """Retry a task that the executor did not finish; fail it the second time."""
        self._attempts[index] = self._attempts.get(index, 0) + 1
        if self._attempts[index] == 1:
            self._lost_indices.append(index)  # runs alone: a concurrent task may have been the reason
            return
        self._probe_executor()
        task = self._tasks[index]
        name = escape_control(task.path, keep_line_ends=False)
        reason = (
            "ended while it was at this, twice" if has_process_died else f"gave this up twice: {_format_exception(exc)}"
        )
        self._record_result(
            index, make_failed_result(task, f"{name}: the process {reason}{' (out of memory?)' * has_process_died}")
        )

    def _probe_executor(self) -> None:
        """Raise if the executor cannot run an empty task; a worker that a task kills may lose the next one as well."""
        for attempt in range(_MAX_PROBES):
            try:
                probe = self.executor.submit(_do_nothing)
                while not wait([probe], STALL_CHECK_SECONDS).done:
                    self._check_stall()
                probe.result()
                return
            except KvmnnError:
                raise
            except (Exception, CancelledError) as exc:
                if attempt == _MAX_PROBES - 1:
                    self._check_script_guard()
                    raise _make_idle_error(exc) from exc


def _do_nothing() -> None:
    """Do nothing: tests whether an executor runs tasks at all."""


def _make_idle_error(exc: BaseException) -> KvmnnError:
    return KvmnnError(f"the executor does nothing any more: {_format_exception(exc)}")


def _format_exception(exc: BaseException) -> str:
    return join_lines(f"{type(exc).__name__}: {str(exc)[:500]}") if str(exc) else type(exc).__name__


def _check_distinct(tasks: list[Task]) -> None:
    paths: set[str] = set()
    outputs: dict[str, str] = {}
    for task in tasks:
        if task.path in paths:
            raise OptionError(f"{task.path}: is given twice")
        paths.add(task.path)
        for name in (
            [] if task.output is None else [os.path.abspath(task.output + suffix) for suffix in task.output_suffixes]
        ):
            if name in outputs:
                raise OptionError(f"{outputs[name]} and {task.path} would both be written to {name}")
            outputs[name] = task.path
    checked_folders: set[str] = set()  # folders with nothing above them that is an output: most outputs share theirs
    for name, path in outputs.items():
        parent, visited = os.path.dirname(name), []
        while parent not in checked_folders and parent != os.path.dirname(parent):
            visited.append(parent)
            if parent in outputs:
                if outputs[parent] != path:
                    raise OptionError(f"{path} would be written into {parent}, which {outputs[parent]} is written to")
                visited.clear()
            parent = os.path.dirname(parent)
        checked_folders.update(visited)
