"""Tasks of an evaluation carried out: here, or by processes of their own."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass

from ... import errors
from ...errors import KvmnnError
from ..measuring.cell import CellMeasurer, UnsupportedConfigurationError
from ..measuring.cells import Cell, read_cell
from ..setup.settings import EvaluationSettings
from .messages import WorkerMessage
from .tasks import EvaluationTask, run_task


@dataclass(frozen=True)
class WorkerEvent:
    """What happened in a task: tokens fed, a cell finished (with its key), a refusal, or its end."""

    task: EvaluationTask
    tokens: int = 0
    key: str | None = None
    cell: Cell | None = None
    refusal_reason: str | None = None


def run_tasks(
    tasks: Sequence[EvaluationTask], model: str, settings: EvaluationSettings, jobs: int, start: str | None = None
) -> Iterator[WorkerEvent]:
    """Carry tasks out and say what happens.

    Parameters
    ----------
    tasks
        Each with cells to measure.
    model
        Path.
    settings
        How.
    jobs
        Processes at a time, one for each task; 0: in this process, where no peak memory can be measured.
    start
        Directory of K and V that texts begin with (`kvmnn.lm.start`), where they do.

    Raises
    ------
    KvmnnError
        What a task raised; the processes of the others are ended.
    """
    return (
        _run_in_process(tasks, model, settings, start)
        if jobs == 0
        else _run_in_workers(tasks, model, settings, jobs, start)
    )


def _run_in_process(
    tasks: Sequence[EvaluationTask], model: str, settings: EvaluationSettings, start: str | None
) -> Iterator[WorkerEvent]:
    with closing(CellMeasurer(model, settings, start)) as measurer:
        for task in tasks:
            fed_tokens: list[int] = []
            try:
                for key, cell in run_task(task, measurer, fed_tokens.append):
                    yield WorkerEvent(task, tokens=sum(fed_tokens), key=key, cell=cell)
                    fed_tokens.clear()
            except UnsupportedConfigurationError as exc:
                yield WorkerEvent(task, refusal_reason=str(exc))


def _run_in_workers(
    tasks: Sequence[EvaluationTask], model: str, settings: EvaluationSettings, jobs: int, start: str | None
) -> Iterator[WorkerEvent]:
    pending = deque(tasks)
    workers: dict[int, _WorkerProcess] = {}
    messages: queue.SimpleQueue[tuple[int, WorkerMessage | None]] = queue.SimpleQueue()
    number = 0
    try:
        while pending or workers:
            while pending and len(workers) < jobs:
                task = pending.popleft()
                order = {"model": model, "settings": settings.to_dict(), "task": task.to_dict(), "start": start}
                workers[number] = _WorkerProcess(number, task, json.dumps(order), messages)
                number += 1
            worker_number, message = messages.get()
            process = workers[worker_number]
            if message is None:
                process.wait_for_end()
                del workers[worker_number]
                continue
            if message.error is not None:
                raise _create_error(message.error, message.message)
            yield _to_event(process.task, message)
    finally:
        for process in workers.values():
            process.terminate()


class _WorkerProcess:
    """A worker and the thread that listens to it."""

    def __init__(
        self,
        number: int,
        task: EvaluationTask,
        order: str,
        messages: queue.SimpleQueue[tuple[int, WorkerMessage | None]],
    ) -> None:
        self.task = task
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvmnn.evaluation.running.worker"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self._thread = threading.Thread(target=self._read_messages, args=(number, order, messages), daemon=True)
        self._thread.start()

    def wait_for_end(self) -> None:
        """It has said all: wait for it."""
        code = self._process.wait()
        self._thread.join()
        if code:
            raise KvmnnError(f"{self.task.configuration.label}: the process that measured it ended with code {code}")

    def terminate(self) -> None:
        """End it where it is."""
        self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()

    def _read_messages(
        self, number: int, order: str, messages: queue.SimpleQueue[tuple[int, WorkerMessage | None]]
    ) -> None:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise RuntimeError("the worker has no pipes")
        try:
            with stdin:
                stdin.write(order)
        except OSError:  # it died; its end says so
            pass
        with stdout:
            for line in stdout:
                if line.endswith("\n"):
                    messages.put((number, WorkerMessage.from_dict(json.loads(line))))
        messages.put((number, None))


def _to_event(task: EvaluationTask, message: WorkerMessage) -> WorkerEvent:
    key = message.key
    if key is None:
        return WorkerEvent(task, tokens=message.tokens or 0, refusal_reason=message.refused)
    return WorkerEvent(task, key=key, cell=read_cell(task.get_kind(key), message.cell, task.configuration.label))


def _create_error(name: str, message: str) -> Exception:
    """What a worker raised, as the same class."""
    if name in ("MemoryError", "TypeError"):
        return MemoryError(message) if name == "MemoryError" else TypeError(message)
    error_class = getattr(errors, name, KvmnnError)
    try:
        error = error_class(message)
    except TypeError:  # a class that wants more than a message
        error = KvmnnError(message)
    return error if isinstance(error, Exception) else KvmnnError(message)
