"""A process of its own for one task: ``python -m`` this module, a task on standard input, JSON lines back.

Its peak memory is that of one configuration alone, and several of them use several processors. Lines are
`kvmnn.evaluation.running.messages.Message`.
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

from ...errors import KvmnnError

_SECONDS_BETWEEN = 0.25


def main() -> int:
    """Carry out the task on standard input."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears it and ends this process
    signal.signal(signal.SIGTERM, _leave)
    lines = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not come between the lines
    try:
        _serve(json.load(sys.stdin), lines)
    except BrokenPipeError:  # nobody listens any more
        with suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), lines.fileno())
        return 1
    finally:  # nothing is left to unwind, and an exception in the interpreter's own end would be printed
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    return 0


def _leave(number: int, frame: object) -> None:
    """Unwind, so that temporary files go."""
    raise SystemExit(128 + number)


def _serve(order: Mapping[str, Any], lines: IO[str]) -> None:
    from ..measuring.cell import Measurer, RefusedError
    from ..setup.settings import Settings
    from .messages import Message
    from .tasks import Task, carry_out

    def send(message: Message) -> None:
        lines.write(json.dumps(message.to_dict()) + "\n")
        lines.flush()

    pending, last = 0, time.monotonic()

    def advance(tokens: int) -> None:
        nonlocal pending, last
        pending += tokens
        if time.monotonic() - last >= _SECONDS_BETWEEN:
            send(Message(tokens=pending))
            pending, last = 0, time.monotonic()

    try:
        task = Task.from_dict(order["task"])
        measuring = Measurer(order["model"], Settings.from_dict(order["settings"]), order.get("start"), fresh=True)
        with closing(measuring) as measurer:
            for key, cell in carry_out(task, measurer, advance):
                if pending:
                    send(Message(tokens=pending))
                    pending = 0
                send(Message(key=key, cell=cell.to_dict()))
    except RefusedError as exc:
        send(Message(refused=str(exc)))
    except (KvmnnError, TypeError, MemoryError) as exc:
        send(Message(error=type(exc).__name__, message=str(exc) or "out of memory"))


if __name__ == "__main__":
    raise SystemExit(main())
