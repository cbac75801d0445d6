"""Tasks of a run on many files, and their results."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from typing import Any

from .._util.dataclass import dataclass
from .._util.packages import get_version
from .._util.text import escape_control, join_lines
from ..errors import KvmnnError


@dataclass(frozen=True)
class Task:
    """Input of one call of the work. It is pickled with its fields."""

    #: File or folder; identifies the task, so each is unique in a run.
    path: str
    #: Common beginning of the names of the files that the work writes, each followed by one of `output_suffixes`; None
    #: if it writes nothing.
    output: str | None = None
    #: Suffixes of the output files.
    output_suffixes: tuple[str, ...] = ("",)
    #: Set by `run_tasks`: whether the work may replace existing output, as only an earlier attempt at this task can
    #: have written it.
    replace: bool = False


@dataclass(frozen=True)
class TaskOutcome:
    """Result of the work on a task, if it is more than a document."""

    #: Any JSON value; None for none.
    document: Any = None
    #: What failed, in one line; None if nothing did.
    error: str | None = None
    #: Notes on what was inferred or left out.
    notes: tuple[str, ...] = ()


TaskFunction = Callable[[Task], "TaskOutcome | Mapping[str, Any]"]
"""A document for a task, or an `TaskOutcome`. It is pickled where an executor has processes: a function of a module, or
an instance of a class with ``__call__``. What it raises becomes the task's error."""


@dataclass(frozen=True)
class TaskResult:
    """A task that has ended."""

    #: Path of the task.
    path: str
    #: Why it failed, with its path; None if it did not.
    error: str | None
    #: A JSON object without line breaks: ``path``, ``ok``, ``seconds``; and ``error``, ``document`` and ``notes`` if
    #: there are any.
    line: str

    @property
    def ok(self) -> bool:
        """Return whether the task succeeded."""
        return self.error is None

    def to_dict(self) -> dict[str, Any]:
        """Return the object of `line`."""
        # the line is the result: it was made in another process, and journals keep it
        document: dict[str, Any] = json.loads(self.line)
        return document


def run_task(work: TaskFunction, task: Task, expected_version: str) -> TaskResult:
    """Run the work on one task; an exception becomes the error of the task."""
    start_time = time.perf_counter()
    if get_version() != expected_version:
        return make_failed_result(
            task, f"{task.path}: kvmnn {expected_version} asked for this, and the worker has kvmnn {get_version()}"
        )
    try:
        work_result = work(task)
        outcome = work_result if isinstance(work_result, TaskOutcome) else TaskOutcome(document=work_result)
        return _make_result(task, outcome, time.perf_counter() - start_time)
    except Exception as exc:
        return make_failed_result(task, _format_error(task, exc), time.perf_counter() - start_time)


def make_failed_result(task: Task, error: str, seconds: float = 0.0) -> TaskResult:
    """Return the result of a task that failed outside its work."""
    return _make_result(task, TaskOutcome(error=error), seconds)


def _make_result(task: Task, outcome: TaskOutcome, seconds: float) -> TaskResult:
    error, name = outcome.error, escape_control(task.path, keep_line_ends=False)
    if error is not None and not re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w.-])", error):
        error = f"{name}: {error}"
    line: dict[str, Any] = {"path": task.path, "ok": error is None, "seconds": round(seconds, 6)}
    if error is not None:
        line["error"] = error
    if outcome.document is not None:
        line["document"] = outcome.document
    if outcome.notes:
        line["notes"] = list(outcome.notes)
    return TaskResult(task.path, error, json.dumps(line))


def _format_error(task: Task, exc: Exception) -> str:
    if isinstance(exc, KvmnnError):
        return escape_control(str(exc).strip(), keep_line_ends=False)
    name = escape_control(task.path, keep_line_ends=False)
    if isinstance(exc, MemoryError):
        return f"{name}: out of memory"
    if isinstance(exc, OSError):
        return f"{name}: {join_lines(str(exc.strerror or exc))}"
    return f"{name}: unexpected {type(exc).__name__}: {join_lines(str(exc)[:500]) or 'no message'}"
