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
from ..errors import KvmnnError, SourceError

ResultT = TypeVar("ResultT")

MAX_EXIT_SECONDS = 30.0
"""For removing temporary files, once a write that waits for the disk is over; then a process is ended where it is."""

_PROCESS_NAME = "kvmnn-many"
_UNGUARDED_EXIT_CODE = 76
"""Exit code of a process that would start others while it imports the script that made it."""


class _NamedProcess(SpawnProcess):
    """A process that can be told by its name before it has imported anything."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.name = f"{_PROCESS_NAME}-{self.name}"


class _NamedSpawnContext(SpawnContext):
    Process = _NamedProcess


class ProcessExecutor(ProcessPoolExecutor):
    """A `ProcessPoolExecutor` of new processes (``spawn``), which SIGINT does not reach.

    They end when `shutdown` is told to cancel futures, when they get SIGTERM or SIGHUP, and when the process that made
    them is gone, however it went; what they are at is unwound first, so that temporary files are removed.

    Parameters
    ----------
    jobs
        How many.
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
        """As `ProcessPoolExecutor` has it."""
        if self._executor_manager_thread is not None and len(self._processes or ()) == self._jobs:
            return super().submit(_run_interruptibly, fn, *args, **kwargs)  # which starts nothing any more
        with _block_sigint():
            future = super().submit(_run_interruptibly, fn, *args, **kwargs)
        self._all_processes.update((self._processes or {}).values())
        return future

    def is_unguarded(self) -> bool:
        """Whether a process ended because the script that made it starts processes whenever it is imported."""
        return any(process.exitcode == _UNGUARDED_EXIT_CODE for process in self._all_processes)

    def break_if_stuck(self) -> None:
        """Break where one was killed while it handed over a result: all would wait for the rest of that for ever.

        To be called when nothing was finished for some seconds; twice, before anything is done.
        """
        processes = list((self._processes or {}).values())
        dead_pids = {process.pid for process in processes if connection.wait([process.sentinel], 0)}
        if not dead_pids & self._dead_pids:
            self._dead_pids = dead_pids
            return
        for process in processes:
            process.kill()
        self._result_queue._writer.close()  # type: ignore[attr-defined]  # the last end that is open

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """As `ProcessPoolExecutor` has it, and with `cancel_futures` what runs is ended as well.

        Where nothing runs, processes are not asked to end but made to: one that was killed while it waited keeps
        the lock with which the others would hear of it.
        """
        if cancel_futures or not self._pending_work_items:
            self._writer.close()
        super().shutdown(wait, cancel_futures=cancel_futures)
        if wait:
            self._writer.close()
            self._reader.close()


def _exit_if_unguarded() -> None:
    """End a new process that is still importing the script: its parent says why, once for all of them."""
    process = multiprocessing.current_process()
    if process.name.startswith(_PROCESS_NAME) and getattr(process, "_inheriting", False):
        os._exit(_UNGUARDED_EXIT_CODE)


def _start_resource_tracker() -> None:
    """Start multiprocessing's own process where it is not there yet, such that SIGHUP does not end it before us."""
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
    """Processes that are started meanwhile never see SIGINT, which a terminal sends to them, too."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    _start_resource_tracker()  # which would end the blocking if it were started meanwhile
    pending: list[int] = []  # another thread may get them, and what starts a process must not be left half-way
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
    """The process is to end; raised so that temporary files are removed."""


_EXIT_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name))
_is_working = _is_exiting = False


def _initialize_worker(reader: Connection) -> None:
    """What a new process does first."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    for number in _EXIT_SIGNALS:
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _handle_exit_signal)
    os.dup2(2, 1)  # what libraries print must not come between the lines
    threading.Thread(target=_watch_parent, args=(reader,), daemon=True).start()


def _handle_exit_signal(number: int, frame: object) -> None:
    global _is_exiting
    if not _is_working:
        os._exit(128 + number)
    if not _is_exiting:  # what is being removed is removed to the end
        _is_exiting = True
        raise _ExitRequestedError


def _watch_parent(reader: Connection) -> None:
    """Wait for the other end to be closed, by its owner or by its end."""
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
    """The executor of a cluster, and how many tasks it should have at a time: twice as many as it has threads now.

    Parameters
    ----------
    address
        Of the scheduler, e.g. ``tcp://10.0.0.1:8786``.

    Raises
    ------
    MissingDependencyError
        Without the package ``distributed``.
    SourceError
        Where no scheduler answers.
    """
    distributed = import_optional("distributed")
    with _silence_logs():
        client = distributed.Client.__new__(distributed.Client)  # by hand: one that fails must be at hand
        try:
            client.__init__(address, timeout=CONNECT_TIMEOUT_SECONDS, set_as_default=False)
        except (OSError, ValueError, ImportError) as exc:
            client.status = "closed"  # or it would wait for its scheduler when it is collected, and fail aloud
            raise SourceError(f"{address}: no Dask scheduler answers there: {exc}") from None
        executor = DaskExecutor(client)
        try:
            yield executor, executor.get_max_running
        finally:
            with suppress(Exception):  # it may be gone
                client.close(timeout=CONNECT_TIMEOUT_SECONDS)


class DaskExecutor(Executor):
    """Dask's own executor, but for a cluster that is gone: Dask would wait for ever for what it is given then."""

    def __init__(self, client: Any) -> None:
        self._client, self._executor = client, client.get_executor(pure=False)
        self._max_running, self._counted_at = _MIN_RUNNING_TASKS, float("-inf")

    def submit(self, fn: Callable[..., ResultT], /, *args: Any, **kwargs: Any) -> Future[ResultT]:
        """Run it once, somewhere."""
        self.check_connection()
        future: Future[ResultT] = self._executor.submit(fn, *args, **kwargs)
        return future

    def get_max_running(self) -> int:
        """Workers come and go, so their threads are counted again every few seconds."""
        if time.monotonic() - self._counted_at >= _RECOUNT_INTERVAL_SECONDS:
            self.check_connection()
            with suppress(Exception):
                self._max_running = max(_MIN_RUNNING_TASKS, 2 * sum(self._client.nthreads().values()))
            self._counted_at = time.monotonic()
        return self._max_running

    def check_connection(self) -> None:
        """`KvmnnError` where the scheduler is gone: what it was given never ends then."""
        if self._client.status not in ("running", "connecting"):
            raise KvmnnError(f"the Dask scheduler is gone ({self._client.status}); what is finished can be resumed")


@contextmanager
def _silence_logs() -> Iterator[None]:
    """Dask's log says nothing: what is wrong is said once, by the run."""
    names = [name for name in logging.root.manager.loggerDict if name.partition(".")[0] in ("distributed", "tornado")]
    levels = {name: logging.getLogger(name).level for name in ("distributed", *names)}
    try:
        for name in levels:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)
