"""One of many: what is worked on, what the work returns, and the line that is kept of it."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..errors import KvmnnError
from ..text import one_line, visible
from ..version import version


@dataclass(frozen=True)
class Task:
    """What one call of the work is about. It is pickled, and so are its fields.

    Parameters
    ----------
    path
        File or folder; names the task, so no two of a run have the same.
    output
        What the work writes begins with this name, and ends in one or more of `endings`. None: it writes nothing.
    endings
        All that may follow `output`.
    replace
        Set by `run`: when this task was begun, nothing of `output` was there, or what an earlier run had written and
        nobody changed, so that what is there now is of an earlier attempt at it, and may be replaced.
    """

    path: str
    output: str | None = None
    endings: tuple[str, ...] = ("",)
    replace: bool = False


@dataclass(frozen=True)
class Outcome:
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


Work = Callable[[Task], "Outcome | Mapping[str, Any]"]
"""A document for a task, or an `Outcome`. It is pickled where an executor has processes: a function of a module, or an
instance of a class with ``__call__``. What it raises becomes the task's error."""


@dataclass(frozen=True)
class Done:
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
        found: dict[str, Any] = json.loads(self.line)
        return found


def carry_out(work: Work, task: Task, expected: str) -> Done:
    """Do the work on one task, wherever this runs; what it raises is the task's error.

    Parameters
    ----------
    expected
        The version of kvmnn that the task comes from: on a machine of another one it fails.
    """
    started = time.perf_counter()
    if version() != expected:
        return failed(task, f"{task.path}: kvmnn {expected} asked for this, and the worker has kvmnn {version()}")
    try:
        found = work(task)
        outcome = found if isinstance(found, Outcome) else Outcome(document=found)
        return _done(task, outcome, time.perf_counter() - started)
    except Exception as exc:
        return failed(task, _said(task, exc), time.perf_counter() - started)


def failed(task: Task, error: str, seconds: float = 0.0) -> Done:
    """A task that failed before or outside its work."""
    return _done(task, Outcome(error=error), seconds)


def _done(task: Task, outcome: Outcome, seconds: float) -> Done:
    error, name = outcome.error, visible(task.path, lines=False)
    if error is not None and not re.search(rf"(?<![\w./-]){re.escape(name)}(?![\w.-])", error):
        error = f"{name}: {error}"
    line: dict[str, Any] = {"path": task.path, "ok": error is None, "seconds": round(seconds, 6)}
    if error is not None:
        line["error"] = error
    if outcome.document is not None:
        line["document"] = outcome.document
    if outcome.notes:
        line["notes"] = list(outcome.notes)
    return Done(task.path, error, json.dumps(line))


def _said(task: Task, exc: Exception) -> str:
    if isinstance(exc, KvmnnError):
        return visible(str(exc).strip(), lines=False)
    name = visible(task.path, lines=False)
    if isinstance(exc, MemoryError):
        return f"{name}: out of memory"
    if isinstance(exc, OSError):
        return f"{name}: {one_line(str(exc.strerror or exc))}"
    return f"{name}: unexpected {type(exc).__name__}: {one_line(str(exc)[:500]) or 'no message'}"
