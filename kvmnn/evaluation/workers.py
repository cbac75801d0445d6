"""Worker processes of an evaluation, and the JSON lines that they exchange with it."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import field
from typing import Any

import numpy as np

from .. import errors
from .._util.dataclass import dataclass
from ..errors import KvmnnError
from ..files.schema import Record
from ..lm.documents import Document
from ..policies.registry import is_registered_from_script, list_registered_files
from .measure import AdvanceCallback, CellMeasurer, UnsupportedConfigurationError
from .records import Cell, CellKind, RefusedCell, read_cell
from .settings import Configuration, EvaluationSettings


@dataclass(frozen=True, kw_only=True)
class WorkerMessage(Record):
    """A JSON line of a worker.

    Attributes
    ----------
    tokens : int or None
        Fed since the last line.
    key, cell : str, mapping
        A cell that is finished.
    refused : str or None
        Why the model cannot run the configuration; the last line.
    error, message : str
        Class and text of what was raised; the last line.
    """

    tokens: int | None = field(default=None, metadata={"omit": True})
    key: str | None = field(default=None, metadata={"omit": True})
    cell: Mapping[str, object] | None = field(default=None, metadata={"omit": True})
    refused: str | None = field(default=None, metadata={"omit": True})
    error: str | None = field(default=None, metadata={"omit": True})
    message: str = field(default="", metadata={"omit": True})


@dataclass(frozen=True)
class MissingCell(Record):
    """A cell to measure."""

    #: Kind of the cell.
    kind: CellKind
    #: Key of the cell in the store (`kvmnn.evaluation.runner`).
    key: str
    #: Index of the document in the task.
    document: int
    #: Whether a time series is recorded.
    trace: bool = False


def _list_documents(documents: tuple[Document, ...]) -> list[dict[str, Any]]:
    """List the fields of documents that measuring needs, with their ids."""
    names = ("name", "ids", "nbytes", "sha256", "begins_with_bos", "requested_tokens", "scored_from")
    return [
        {name: getattr(document, name) for name in names} | {"ids": document.ids.tolist()} for document in documents
    ]


@dataclass(frozen=True)
class EvaluationTask(Record):
    """Cells of one configuration that one process measures in sequence."""

    configuration: Configuration
    documents: tuple[Document, ...] = field(metadata={"convert": _list_documents})
    cells: tuple[MissingCell, ...]
    #: Keys of cells that must be finished before this task begins.
    required_keys: frozenset[str] = field(default=frozenset(), metadata={"json": False})

    @property
    def num_tokens(self) -> int:
        """Number of tokens of its cells, the unit of progress."""
        documents = [self.documents[cell.document] for cell in self.cells if cell.kind != "timing"]
        return sum(
            document.num_scored if self.configuration.uses_initial_cache else document.num_fed for document in documents
        )

    def get_kind(self, key: str) -> CellKind:
        """Return the kind of one of its cells."""
        return next(cell.kind for cell in self.cells if cell.key == key)

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> EvaluationTask:
        """Parse a task from its `to_dict`."""
        return cls(
            Configuration.from_dict(document["configuration"]),
            tuple(Document(**{**entry, "ids": np.array(entry["ids"], np.int64)}) for entry in document["documents"]),
            tuple(MissingCell.from_dict(entry) for entry in document["cells"]),
        )


def run_task(
    task: EvaluationTask, measurer: CellMeasurer, advance: AdvanceCallback
) -> Iterator[tuple[str, Cell | None]]:
    """Measure the cells of a task; yield each with its key as soon as it is finished, None for one of kind "reference".

    What the model cannot do by the definition of a project is a cell too, a `RefusedCell`.
    """
    is_first = True
    for cell in task.cells:
        document = task.documents[cell.document]
        if cell.kind == "score":
            yield (
                cell.key,
                measurer.measure_score_cell(
                    task.configuration, document, advance, record_trace=cell.trace, measure_memory=is_first
                ),
            )
            is_first = False
            continue
        if cell.kind == "reference":
            measurer.write_reference(task.configuration, document, advance)
            yield cell.key, None
            continue
        result: Cell
        try:
            if cell.kind == "seed":
                result = measurer.measure_by_definition(task.configuration, document, advance)
            else:
                result = measurer.measure_timing_cell(task.configuration, document)
        except UnsupportedConfigurationError as exc:
            result = RefusedCell(str(exc))
        yield cell.key, result


@dataclass(frozen=True)
class WorkerEvent:
    """Event of a task: tokens fed, a cell finished (with its key; no cell if of kind "reference"), or a refusal."""

    task: EvaluationTask
    tokens: int = 0
    key: str | None = None
    cell: Cell | None = None
    refusal_reason: str | None = None


def run_tasks(
    tasks: Sequence[EvaluationTask],
    model: str,
    settings: EvaluationSettings,
    jobs: int,
    start: str | None = None,
    references: str | None = None,
) -> Generator[WorkerEvent, None, None]:
    """Run tasks and yield their events.

    Parameters
    ----------
    tasks
        Each with cells to measure, after those that have the cells which it requires.
    model
        Path.
    settings
        How.
    jobs
        Processes at a time, one for each task; 0, and with a policy that a script or notebook defines: in this process,
        where no peak memory can be measured.
    start
        Directory of K and V that texts begin with (`kvmnn.lm.warm_start`), where they do.
    references
        Directory for the distributions of the full cache (`kvmnn.evaluation.divergence`), if any are needed.

    Raises
    ------
    KvmnnError
        Error of a task; the processes of the others are ended.
    """
    if jobs == 0 or is_registered_from_script():
        return _run_in_process(tasks, CellMeasurer(model, settings, start, references))
    order = {
        "model": model,
        "settings": settings.to_dict(),
        "start": start,
        "references": references,
        "policy_files": list_registered_files(),
    }
    return _run_in_workers(tasks, order, jobs)


def _run_in_process(tasks: Sequence[EvaluationTask], cell_measurer: CellMeasurer) -> Generator[WorkerEvent, None, None]:
    with closing(cell_measurer) as measurer:
        for task in tasks:
            fed_tokens: list[int] = []
            try:
                for key, cell in run_task(task, measurer, fed_tokens.append):
                    yield WorkerEvent(task, tokens=sum(fed_tokens), key=key, cell=cell)
                    fed_tokens.clear()
            except UnsupportedConfigurationError as exc:
                yield WorkerEvent(task, refusal_reason=str(exc))


def _run_in_workers(
    tasks: Sequence[EvaluationTask], order: Mapping[str, object], jobs: int
) -> Generator[WorkerEvent, None, None]:
    pending, finished_keys = list(tasks), set[str]()
    workers: dict[int, _WorkerProcess] = {}
    messages: queue.SimpleQueue[tuple[int, WorkerMessage | None]] = queue.SimpleQueue()
    number = 0
    try:
        while pending or workers:
            ready = [task for task in pending if task.required_keys <= finished_keys]
            for task in ready[: max(jobs - len(workers), 0)]:
                pending = [entry for entry in pending if entry is not task]
                request = json.dumps({**order, "task": task.to_dict()})
                with _defer_signals():
                    workers[number] = _WorkerProcess(number, task, request, messages)
                number += 1
            worker_number, message = messages.get()
            process = workers[worker_number]
            if message is None:
                process.wait_for_end()
                del workers[worker_number]
                continue
            if message.error is not None:
                raise _create_error(message.error, message.message)
            if message.key is not None:
                finished_keys.add(message.key)
            yield _to_event(process.task, message)
    finally:
        for process in workers.values():
            process.terminate()


@contextmanager
def _defer_signals() -> Iterator[None]:
    """Hold SIGINT and SIGTERM back in the block: an interruption would leave a process that nobody ends."""
    pending: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        handlers = {number: handler for number, handler in handlers.items() if callable(handler)}
    for number in handlers:
        signal.signal(number, lambda number, frame: pending.append(number))
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in pending[:1]:
            signal.raise_signal(number)


class _WorkerProcess:
    """A worker process and the thread that reads its output."""

    def __init__(
        self,
        number: int,
        task: EvaluationTask,
        order: str,
        messages: queue.SimpleQueue[tuple[int, WorkerMessage | None]],
    ) -> None:
        self.task = task
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "kvmnn.evaluation.worker_main"],
            env=os.environ | {"PYTHONPATH": os.pathsep.join(entry or os.getcwd() for entry in sys.path)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            encoding="utf-8",
        )
        self._thread = threading.Thread(target=self._read_messages, args=(number, order, messages), daemon=True)
        self._thread.start()

    def wait_for_end(self) -> None:
        """Wait for the end of a process that has sent everything."""
        code = self._process.wait()
        self._thread.join()
        if code:
            raise KvmnnError(f"{self.task.configuration.label}: the process that measured it ended with code {code}")

    def terminate(self) -> None:
        """Terminate the process."""
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
    cell = None if message.cell is None else read_cell(task.get_kind(key), message.cell, task.configuration.label)
    return WorkerEvent(task, key=key, cell=cell)


def _create_error(name: str, message: str) -> Exception:
    """Recreate the error that a worker raised, with the same class."""
    if name in ("MemoryError", "TypeError"):
        return MemoryError(message) if name == "MemoryError" else TypeError(message)
    error_class = getattr(errors, name, KvmnnError)
    try:
        error = error_class(message)
    except TypeError:  # a class that wants more than a message
        error = KvmnnError(message)
    return error if isinstance(error, Exception) else KvmnnError(message)
