"""One work on many files, by any executor: results in order, as they come, each exactly once."""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, CancelledError, Executor, Future, wait
from dataclasses import replace

from ..errors import KvmnnError, OptionError
from ..text import one_line, visible
from ..version import version
from .cluster import Cluster
from .finished import FinishedFile
from .processes import Processes
from .stamps import stamp
from .tasks import Done, Task, Work, carry_out, failed

WINDOW = 1024
"""Tasks that may be begun before the first of them is released."""

HELD_BYTES = 64 << 20
"""Of lines that wait for one before them; above it nothing is begun."""

SECONDS_OF_PATIENCE = 5.0
"""Without a result, after which processes are asked whether they are stuck."""
_PROBES = 3
"""How often an executor that lost a task is asked whether it does anything."""

Executors = Executor | Callable[[], Executor]


def run(
    tasks: Iterable[Task | str],
    work: Work,
    executor: Executors | None = None,
    *,
    ahead: int | Callable[[], int] | None = None,
    finished: FinishedFile | None = None,
) -> Generator[Done, None, None]:
    """Do a work on many files.

    A task that fails is a `Done` with its error, and the others go on. One whose process ends (killed, out of memory)
    is done once more, and has failed if that ends as well.

    Parameters
    ----------
    tasks
        What to work on; a path is a task without output. All are held: 70 MB for a hundred thousand.
    work
        What is done with each.
    executor
        Anything of `concurrent.futures`: threads, processes, Dask's ``client.get_executor(pure=False)``, MPI's. It is
        not shut down. Or a function that makes one, which is shut down, and replaced where its processes break it (as
        one that is killed breaks a `ProcessPoolExecutor`). None: `Processes`, one for each processor.
    ahead
        How many tasks the executor has at a time, or a function that is asked again and again. The default keeps twice
        as many as the executor has workers, where it says so, and twice as many as there are processors elsewhere.
    finished
        Where tasks are noted down as soon as they are finished, and from which those are taken that are there.

    Yields
    ------
    Done
        One for each task, in the order of `tasks`. What waits for its turn is bounded (`WINDOW`, `HELD_BYTES`).

    Raises
    ------
    OptionError
        Before anything is begun: two tasks have the same path or output, or an output lies in another one.
    KvmnnError
        Where the executor does nothing any more.

    Notes
    -----
    When the iterator is closed before its end, or an exception such as `KeyboardInterrupt` leaves it, tasks that wait
    are cancelled, and an executor that was made here is shut down with ``cancel_futures``.
    """
    from ..threads.pool import cpu_count  # and numpy, which a worker may have no need of

    all_tasks = [Task(task) if isinstance(task, str) else task for task in tasks]
    _check_distinct(all_tasks)
    runner = _Runner(all_tasks, work, executor or (lambda: Processes(cpu_count())), ahead, finished)
    try:
        yield from runner.results()
    finally:
        runner.end()


class _Runner:
    """The state of a run.

    Tasks are known by their index. `_lost` are those whose executor broke: which of them broke it is found by running
    each alone. `_again` are those that the executor gave up by themselves.
    """

    def __init__(
        self,
        tasks: list[Task],
        work: Work,
        executor: Executors,
        ahead: int | Callable[[], int] | None,
        finished: FinishedFile | None,
    ) -> None:
        self._tasks, self._work, self._finished = tasks, work, finished
        self._make = None if isinstance(executor, Executor) else executor
        self.executor = executor if isinstance(executor, Executor) else executor()
        self._ahead = ahead
        self._running: dict[Future[Done], int] = {}
        self._seen: dict[int, str | None] = {}
        self._ready: dict[int, Done | None] = {}  # None: in the file of finished tasks
        self._held = 0
        self._lost: deque[int] = deque()
        self._again: deque[int] = deque()
        self._attempts: dict[int, int] = {}
        self._next = 0  # to be begun
        self._first = 0  # to be released
        self._refused = False  # the last task that was handed over

    def results(self) -> Iterator[Done]:
        while self._first < len(self._tasks):
            self._fill()
            while self._first in self._ready:
                yield self._release()
            if self._running:
                ended, _ = wait(self._running, SECONDS_OF_PATIENCE, FIRST_COMPLETED)
                if not ended:
                    self._look()
                self._collect(ended)

    def _look(self) -> None:
        """Nothing ended for a while: free what a dead process blocks, and ask a cluster whether it is there."""
        if isinstance(self.executor, Processes):
            self.executor.free()
        elif isinstance(self.executor, Cluster):
            self.executor.check()

    def end(self) -> None:
        """Leave nothing running that can be ended."""
        for future, index in self._running.items():
            if not future.cancel() and future.done() and future.exception() is None and self._finished is not None:
                self._finished.end(self._tasks[index], future.result(), self._seen[index])
        if self._make is not None:
            self.executor.shutdown(cancel_futures=bool(self._running))
        self._running.clear()

    def _release(self) -> Done:
        found = self._ready.pop(self._first)
        task = self._tasks[self._first]
        self._first += 1
        if found is not None:
            self._held -= len(found.line)
            return found
        if self._finished is None:
            raise RuntimeError("a finished task without its file")
        return self._finished.read(task)

    def _fill(self) -> None:
        """Give the executor what it may have."""
        if self._lost:
            if not self._running:
                self._submit(self._lost.popleft())
            return
        most = self._most()
        while len(self._running) < most and (self._again or self._may_begin()):
            if self._again:
                index = self._again.popleft()
            else:
                index, self._next = self._next, self._next + 1
                if self._finished is not None and self._finished.has(self._tasks[index]):
                    self._ready[index] = None
                    continue
            if not self._submit(index):
                return

    def _may_begin(self) -> bool:
        if self._next >= len(self._tasks):
            return False
        return self._next == self._first or (self._next - self._first < WINDOW and self._held < HELD_BYTES)

    def _most(self) -> int:
        if callable(self._ahead):
            return max(1, self._ahead())
        if self._ahead is not None:
            return max(1, self._ahead)
        from ..threads.pool import cpu_count

        return 2 * int(getattr(self.executor, "_max_workers", None) or cpu_count())

    def _submit(self, index: int) -> bool:
        """Hand a task over; False where the executor is broken, and was replaced."""
        task = self._begun(index)
        try:
            self._running[self.executor.submit(carry_out, self._work, task, version())] = index
        except BrokenExecutor as broken:
            if self._refused:
                raise _idle(broken) from broken
            self._refused = True
            self._again.appendleft(index)
            self._collect(wait(self._running).done, broken)
            return False
        except KvmnnError:
            raise
        except Exception as exc:  # it is shut down, or its cluster is gone
            raise _idle(exc) from exc
        self._refused = False
        return True

    def _begun(self, index: int) -> Task:
        """The task, which may replace what only it can have left."""
        task = self._tasks[index]
        if index not in self._seen:
            self._seen[index] = stamp(task.path) if self._finished is not None else None
            if task.output is not None and not task.replace:
                output = task.output
                free = not any(os.path.lexists(output + ending) for ending in task.endings)
                if self._finished is not None:
                    free = free or self._finished.wrote(task)
                    if free:
                        self._finished.begin(task)
                    free = free or self._finished.was_begun(task)
                task = self._tasks[index] = replace(task, replace=free)
        return task

    def _collect(self, ended: Iterable[Future[Done]], broken: BrokenExecutor | None = None) -> None:
        """Take what is finished, and find out what is lost."""
        lost: list[tuple[int, BaseException]] = []
        for future in sorted(ended, key=lambda future: self._running[future]):
            index = self._running.pop(future)
            try:
                self._finish(index, future.result())
            except BrokenExecutor as exc:
                broken = exc
                lost.append((index, exc))
            except (Exception, CancelledError) as exc:  # the work's own are in what it returns: this is the executor's
                lost.append((index, exc))
        if broken is not None and self._running:  # all of them end
            self._collect(wait(self._running).done, broken)
        elif broken is not None:
            self._renew(broken)
        for index, cause in lost:
            self._lose(index, cause, alone=broken is not None)

    def _finish(self, index: int, done: Done) -> None:
        if self._finished is not None:
            self._finished.end(self._tasks[index], done, self._seen[index])
        del self._seen[index]
        self._ready[index] = done
        self._held += len(done.line)

    def _renew(self, broken: BrokenExecutor) -> None:
        """Another executor in the place of one that is broken."""
        if isinstance(self.executor, Processes) and self.executor.is_unguarded():
            script = getattr(sys.modules["__main__"], "__file__", "this script")
            raise KvmnnError(
                f"{script}: starts processes whenever it is imported, and new processes import it: put what it does "
                'under if __name__ == "__main__":'
            ) from None
        if self._make is None:
            raise KvmnnError(
                f"the executor is broken and cannot be replaced: {_said(broken)}; give a function that makes executors"
            ) from broken
        self.executor.shutdown()
        self.executor = self._make()

    def _lose(self, index: int, exc: BaseException, *, alone: bool) -> None:
        """The executor did not bring a task to its end: once more, or it has failed."""
        self._attempts[index] = self._attempts.get(index, 0) + 1
        if self._attempts[index] == 1:
            self._lost.append(index)  # begun again when nothing runs beside it, which might have been the reason
            return
        self._probe()
        task = self._tasks[index]
        name = visible(task.path, lines=False)
        why = "ended while it was at this, twice" if alone else f"gave this up twice: {_said(exc)}"
        self._finish(index, failed(task, f"{name}: the process {why}{' (out of memory?)' * alone}"))

    def _probe(self) -> None:
        """Raise where the executor cannot even do nothing; a worker that dies of a task may take the next one along."""
        for attempt in range(_PROBES):
            try:
                probe = self.executor.submit(_nothing)
                while not wait([probe], SECONDS_OF_PATIENCE).done:
                    self._look()
                probe.result()
                return
            except KvmnnError:
                raise
            except (Exception, CancelledError) as exc:
                if attempt == _PROBES - 1:
                    raise _idle(exc) from exc


def _nothing() -> None:
    """The least work."""


def _idle(exc: BaseException) -> KvmnnError:
    return KvmnnError(f"the executor does nothing any more: {_said(exc)}")


def _said(exc: BaseException) -> str:
    return one_line(f"{type(exc).__name__}: {str(exc)[:500]}") if str(exc) else type(exc).__name__


def _check_distinct(tasks: list[Task]) -> None:
    paths: set[str] = set()
    outputs: dict[str, str] = {}
    for task in tasks:
        if task.path in paths:
            raise OptionError(f"{task.path}: is given twice")
        paths.add(task.path)
        for name in [] if task.output is None else [os.path.abspath(task.output + end) for end in task.endings]:
            if name in outputs:
                raise OptionError(f"{outputs[name]} and {task.path} would both be written to {name}")
            outputs[name] = task.path
    clear: set[str] = set()  # folders with nothing above them that is an output: most outputs share theirs
    for name, path in outputs.items():
        above, passed = os.path.dirname(name), []
        while above not in clear and above != os.path.dirname(above):
            passed.append(above)
            if above in outputs:
                if outputs[above] != path:
                    raise OptionError(f"{path} would be written into {above}, which {outputs[above]} is written to")
                passed.clear()
            above = os.path.dirname(above)
        clear.update(passed)
