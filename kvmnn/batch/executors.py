"""Executors for many files: local processes, which end with their parent, and a Dask cluster (extra ``dask``)."""

from __future__ import annotations

import logging
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import connection, resource_tracker
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnContext, SpawnProcess
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from .._util.packages import import_optional
from ..errors import KvmnnError, OptionError, SourceError

ResultT = TypeVar("ResultT")

MAX_EXIT_SECONDS = 30.0
"""Time for a process to finish a write and remove temporary files before it is killed."""

_PROCESS_NAME = "kvmnn-many"
_NO_MAIN_GUARD_EXIT_CODE = 76
"""Exit code of a process that would start others while it imports the main script."""


class _NamedProcess(SpawnProcess):
    """A process whose name is recognisable before it has imported anything."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.name = f"{_PROCESS_NAME}-{self.name}"


class _NamedSpawnContext(SpawnContext):
    Process = _NamedProcess


class ProcessExecutor(ProcessPoolExecutor):
    """A `ProcessPoolExecutor` of spawned processes that ignore SIGINT.

    They end when `shutdown` cancels futures, on SIGTERM or SIGHUP, and when their parent has ended for any reason. A
    running task is unwound first, so that its temporary files are removed.

    Parameters
    ----------
    jobs
        Number of processes.
    """

    def __init__(self, jobs: int) -> None:
        _exit_if_unguarded()
        context = _NamedSpawnContext()
        self._jobs = jobs
        self._all_processes: set[BaseProcess] = set()
        _start_resource_tracker()
        self._reader, self._writer = context.Pipe(duplex=False)
        self._dead_pids: set[int | None] = set()
        super().__init__(jobs, mp_context=context, initializer=_initialize_worker, initargs=(self._reader,))

    def submit(self, fn: Callable[..., ResultT], /, *args: Any, **kwargs: Any) -> Future[ResultT]:
        """Submit a task, as `ProcessPoolExecutor`."""
        if self._executor_manager_thread is not None and len(self._processes or ()) == self._jobs:
            return super().submit(_run_interruptibly, fn, *args, **kwargs)  # starts no process any more
        with _block_sigint():
            future = super().submit(_run_interruptibly, fn, *args, **kwargs)
        self._all_processes.update((self._processes or {}).values())
        return future

    def is_unguarded(self) -> bool:
        """Return whether a process ended because the main script starts processes when it is imported."""
        return any(process.exitcode == _NO_MAIN_GUARD_EXIT_CODE for process in self._all_processes)

    def break_if_stuck(self) -> None:
        """Kill all processes if one died while it sent a result: the pool would wait for the rest of it forever.

        Call it when no task has ended for some seconds; it acts on the second call.
        """
        processes = list((self._processes or {}).values())
        dead_pids = {process.pid for process in processes if connection.wait([process.sentinel], 0)}
        if not dead_pids & self._dead_pids:
            self._dead_pids = dead_pids
            return
        for process in processes:
            process.kill()
        self._result_queue._writer.close()  # type: ignore[attr-defined]  # the last open end

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Shut down, as `ProcessPoolExecutor`; with `cancel_futures`, running tasks are ended as well.

        If nothing runs, the processes are ended through their pipe, because a process that was killed while waiting may
        hold the lock of the queue.
        """
        if cancel_futures or not self._pending_work_items:
            self._writer.close()
        super().shutdown(wait, cancel_futures=cancel_futures)
        if wait:
            self._writer.close()
            self._reader.close()


def _exit_if_unguarded() -> None:
    """End a new process that is still importing the main script; its parent reports it once."""
    process = multiprocessing.current_process()
    if process.name.startswith(_PROCESS_NAME) and getattr(process, "_inheriting", False):
        os._exit(_NO_MAIN_GUARD_EXIT_CODE)


def _start_resource_tracker() -> None:
    """Start the resource tracker of multiprocessing, if needed, so that SIGHUP does not end it before us."""
    sighup = getattr(signal, "SIGHUP", None)
    if sighup is None or threading.current_thread() is not threading.main_thread():
        resource_tracker.ensure_running()
        return
    previous_handler = signal.signal(sighup, signal.SIG_IGN)
    try:
        resource_tracker.ensure_running()
    finally:
        signal.signal(sighup, previous_handler)


@contextmanager
def _block_sigint() -> Iterator[None]:
    """Start processes in the block without SIGINT, which a terminal sends to them as well."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    _start_resource_tracker()  # starting it later would unblock SIGINT
    pending: list[int] = []  # signals that arrive meanwhile: starting a process must not be interrupted
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, *_EXIT_SIGNALS)}
        handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, frame: pending.append(number))
    previous_mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, previous_mask)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in pending[:1]:
            signal.raise_signal(number)


class _ExitRequestedError(BaseException):
    """The process must end; raised so that temporary files are removed."""


_EXIT_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_is_working = _is_exiting = False


def _initialize_worker(reader: Connection) -> None:
    """Set up a new process."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in _EXIT_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _handle_exit_signal)
    os.dup2(2, 1)  # output of libraries must not mix with the results
    threading.Thread(target=_watch_parent, args=(reader,), daemon=True).start()


def _handle_exit_signal(number: int, frame: object) -> None:
    global _is_exiting
    if not _is_working:
        os._exit(128 + number)
    if not _is_exiting:  # the removal of temporary files is not interrupted
        _is_exiting = True
        raise _ExitRequestedError


def _watch_parent(reader: Connection) -> None:
    """Wait until the parent closes its end of the pipe, or ends; then end this process."""
    with suppress(EOFError, OSError):
        reader.recv_bytes()
    with suppress(OSError):
        os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(MAX_EXIT_SECONDS)
    os._exit(128 + signal.SIGTERM)


def _run_interruptibly(fn: Callable[..., ResultT], *args: Any, **kwargs: Any) -> ResultT:
    global _is_working
    try:
        _is_working = True
        try:
            return fn(*args, **kwargs)
        finally:
            _is_working = False
    except _ExitRequestedError:
        os._exit(128 + signal.SIGTERM)


CONNECT_TIMEOUT_SECONDS = 30
_RECOUNT_INTERVAL_SECONDS = 5.0
_MIN_RUNNING_TASKS = 8


@contextmanager
def connect_dask(address: str) -> Iterator[tuple[Executor, Callable[[], int]]]:
    """Connect to a Dask cluster.

    Parameters
    ----------
    address
        Address of the scheduler, e.g. ``tcp://10.0.0.1:8786``.

    Yields
    ------
    Its executor, and a function that returns how many tasks to run at a time: twice the number of its threads.

    Raises
    ------
    MissingDependencyError
        If the package ``distributed`` is not installed.
    SourceError
        If no scheduler answers.
    """
    distributed = import_optional("distributed")
    with _silence_logs():
        # without the constructor, as a client that fails to connect must be closed by hand
        client = distributed.Client.__new__(distributed.Client)
        try:
            client.__init__(address, timeout=CONNECT_TIMEOUT_SECONDS, set_as_default=False)
        except (OSError, ValueError, ImportError) as exc:
            client.status = "closed"  # else its finaliser would wait for the scheduler, and log errors
            if isinstance(exc, ValueError):
                raise OptionError(f"{address}: is no address of a Dask scheduler: {exc}") from None
            raise SourceError(f"{address}: no Dask scheduler answers there: {exc}") from None
        executor = DaskExecutor(client)
        try:
            yield executor, executor.get_max_running
        finally:
            with suppress(Exception):  # the cluster may be gone
                client.close(timeout=CONNECT_TIMEOUT_SECONDS)


class DaskExecutor(Executor):
    """Executor of Dask that raises an error if the cluster is gone; that of Dask would wait forever."""

    def __init__(self, client: Any) -> None:
        self._client, self._executor = client, client.get_executor(pure=False)
        self._max_running, self._counted_at = _MIN_RUNNING_TASKS, float("-inf")

    def submit(self, fn: Callable[..., ResultT], /, *args: Any, **kwargs: Any) -> Future[ResultT]:
        """Submit a task that runs once, on any worker."""
        self.check_connection()
        future: Future[ResultT] = self._executor.submit(fn, *args, **kwargs)
        return future

    def get_max_running(self) -> int:
        """Return how many tasks to run at a time; threads are counted every few seconds, as workers come and go."""
        if time.monotonic() - self._counted_at >= _RECOUNT_INTERVAL_SECONDS:
            self.check_connection()
            with suppress(Exception):
                self._max_running = max(_MIN_RUNNING_TASKS, 2 * sum(self._client.nthreads().values()))
            self._counted_at = time.monotonic()
        return self._max_running

    def check_connection(self) -> None:
        """Raise `KvmnnError` if the scheduler is gone."""
        if self._client.status not in ("running", "connecting"):
            raise KvmnnError(f"the Dask scheduler is gone ({self._client.status}); what is finished can be resumed")


@contextmanager
def _silence_logs() -> Iterator[None]:
    """Turn off the log of Dask, because the run reports errors itself."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in ("distributed", "tornado")]
    levels = {name: logging.getLogger(name).level for name in ("distributed", *names)}
    try:
        for name in levels:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
