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
from ..measuring.cell import Measurer, RefusedError
from ..measuring.cells import Cell, read_cell
from ..setup.settings import Settings
from .messages import Message
from .tasks import Task, carry_out


@dataclass(frozen=True)
class Event:
    """What happened in a task: tokens fed, a cell finished (with its key), a refusal, or its end."""

    task: Task
    tokens: int = 0
    key: str | None = None
    cell: Cell | None = None
    refused: str | None = None


def events(
    tasks: Sequence[Task], model: str, settings: Settings, jobs: int, start: str | None = None
) -> Iterator[Event]:
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
    return _here(tasks, model, settings, start) if jobs == 0 else _elsewhere(tasks, model, settings, jobs, start)


def _here(tasks: Sequence[Task], model: str, settings: Settings, start: str | None) -> Iterator[Event]:
    with closing(Measurer(model, settings, start)) as measurer:
        for task in tasks:
            fed: list[int] = []
            try:
                for key, cell in carry_out(task, measurer, fed.append):
                    yield Event(task, tokens=sum(fed), key=key, cell=cell)
                    fed.clear()
            except RefusedError as exc:
                yield Event(task, refused=str(exc))


def _elsewhere(tasks: Sequence[Task], model: str, settings: Settings, jobs: int, start: str | None) -> Iterator[Event]:
    waiting = deque(tasks)
    running: dict[int, _Process] = {}
    said: queue.SimpleQueue[tuple[int, Message | None]] = queue.SimpleQueue()
    number = 0
    try:
        while waiting or running:
            while waiting and len(running) < jobs:
                task = waiting.popleft()
                order = {"model": model, "settings": settings.to_dict(), "task": task.to_dict(), "start": start}
                running[number] = _Process(number, task, json.dumps(order), said)
                number += 1
            of, message = said.get()
            process = running[of]
            if message is None:
                process.finish()
                del running[of]
                continue
            if message.error is not None:
                raise _error(message.error, message.message)
            yield _event(process.task, message)
    finally:
        for process in running.values():
            process.end()


class _Process:
    """A worker and the thread that listens to it."""

    def __init__(
        self,
        number: int,
        task: Task,
        order: str,
        said: queue.SimpleQueue[tuple[int, Message | None]],
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
        self._thread = threading.Thread(target=self._listen, args=(number, order, said), daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """It has said all: wait for it."""
        code = self._process.wait()
        self._thread.join()
        if code:
            raise KvmnnError(f"{self.task.configuration.label}: the process that measured it ended with code {code}")

    def end(self) -> None:
        """End it where it is."""
        self._process.terminate()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join()

    def _listen(self, number: int, order: str, said: queue.SimpleQueue[tuple[int, Message | None]]) -> None:
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
                    said.put((number, Message.from_dict(json.loads(line))))
        said.put((number, None))


def _event(task: Task, message: Message) -> Event:
    key = message.key
    if key is None:
        return Event(task, tokens=message.tokens or 0, refused=message.refused)
    return Event(task, key=key, cell=read_cell(task.kind_of(key), message.cell, task.configuration.label))


def _error(name: str, message: str) -> Exception:
    """What a worker raised, as the same class."""
    if name in ("MemoryError", "TypeError"):
        return MemoryError(message) if name == "MemoryError" else TypeError(message)
    kind = getattr(errors, name, KvmnnError)
    try:
        made = kind(message)
    except TypeError:  # a class that wants more than a message
        made = KvmnnError(message)
    return made if isinstance(made, Exception) else KvmnnError(message)
