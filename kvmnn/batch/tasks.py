"""One of many: what is worked on, what the work returns, and the line that is kept of it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .._util.packages import get_version
from .._util.text import escape_control, join_lines
from ..errors import KvmnnError


@dataclass(frozen=True)
class Task:
    """What one call of the work is about. It is pickled, and so are its fields.

    Parameters
    ----------
    path
        File or folder; names the task, so no two of a run have the same.
    output
        What the work writes begins with this name, and ends in one or more of `output_suffixes`. None: it writes
        nothing.
    output_suffixes
        All that may follow `output`.
    replace
        Set by `run`: when this task was begun, nothing of `output` was there, or what an earlier run had written and
        nobody changed, so that what is there now is of an earlier attempt at it, and may be replaced.
    """

    path: str
    output: str | None = None
    output_suffixes: tuple[str, ...] = ("",)
    replace: bool = False


@dataclass(frozen=True)
class TaskOutcome:
    """What the work says of a task, where there is more to say than a document.

    Parameters
    ----------
    document
        Anything that JSON has; None for nothing.
    error
        What went wrong, in one line; None for nothing.
    notes
        What was inferred or left out.
    """

    document: Any = None
    error: str | None = None
    notes: tuple[str, ...] = ()


TaskFunction = Callable[[Task], "TaskOutcome | Mapping[str, Any]"]
"""A document for a task, or an `TaskOutcome`. It is pickled where an executor has processes: a function of a module, or
an instance of a class with ``__call__``. What it raises becomes the task's error."""


@dataclass(frozen=True)
class TaskResult:
    """A task that is finished.

    Parameters
    ----------
    path
        The task's.
    error
        Why it failed, with its path; None if it did not.
    line
        A JSON object without line ends: ``path``, ``ok``, ``seconds``; ``error``, ``document`` and ``notes`` where
        there are any.
    """

    path: str
    error: str | None
    line: str

    @property
    def ok(self) -> bool:
        """Whether it did not fail."""
        return self.error is None

    def to_dict(self) -> dict[str, Any]:
        """The object in `line`."""
        document: dict[str, Any] = json.loads(self.line)
        return document


def run_task(work: TaskFunction, task: Task, expected_version: str) -> TaskResult:
    """Do the work on one task, wherever this runs; what it raises is the task's error.

    Parameters
    ----------
    expected_version
        The version of kvmnn that the task comes from: on a machine of another one it fails.
    """
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
    """A task that failed before or outside its work."""
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
