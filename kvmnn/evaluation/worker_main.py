"""Worker process for one task: ``python -m`` this module, a task on standard input, JSON lines on standard output.

Its peak memory is that of one configuration alone, and several of them use several processors. The lines are
`kvmnn.evaluation.workers.WorkerMessage`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import IO, Any

from ..errors import KvmnnError

_MIN_MESSAGE_INTERVAL_SECONDS = 0.25


def main() -> int:
    """Run the task on standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and ends this process
    signal.signal(signal.SIGTERM, _exit_on_signal)
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not come between the lines
    try:
        _run_request(json.load(sys.stdin), lines)
    except BrokenPipeError:  # nobody listens any more
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), lines.fileno())
        return 1
    finally:  # nothing is left to unwind, and an exception in the interpreter's own end would be printed
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return 0


def _exit_on_signal(number: int, frame: object) -> None:
    """Raise `SystemExit`, so that temporary files are removed."""
    raise SystemExit(128 + number)


def _run_request(request: Mapping[str, Any], lines: IO[str]) -> None:
    from ..policies.registry import load_registered_files
    from .measure import CellMeasurer, UnsupportedConfigurationError
    from .settings import EvaluationSettings
    from .workers import EvaluationTask, WorkerMessage, run_task

    def send(message: WorkerMessage) -> None:
        lines.write(json.dumps(message.to_dict()) + "\n")
        lines.flush()

    pending, last = 0, time.monotonic()

    def report_progress(tokens: int) -> None:
        nonlocal pending, last
        pending += tokens
        if time.monotonic() - last >= _MIN_MESSAGE_INTERVAL_SECONDS:
            send(WorkerMessage(tokens=pending))
            pending, last = 0, time.monotonic()

    try:
        load_registered_files(request["policy_files"])
        task = EvaluationTask.from_json(request["task"])
        cell_measurer = CellMeasurer(
            request["model"],
            EvaluationSettings.from_dict(request["settings"]),
            request.get("start"),
            request.get("references"),
            is_fresh_process=True,
        )
        with closing(cell_measurer) as measurer:
            for key, cell in run_task(task, measurer, report_progress):
                if pending:
                    send(WorkerMessage(tokens=pending))
                    pending = 0
                send(WorkerMessage(key=key, cell=None if cell is None else cell.to_dict()))
    except UnsupportedConfigurationError as exc:
        send(WorkerMessage(refused=str(exc)))
    except (KvmnnError, TypeError, MemoryError) as exc:
        send(WorkerMessage(error=type(exc).__name__, message=str(exc) or "out of memory"))


if __name__ == "__main__":
    raise SystemExit(main())
