"""Work for `kvmnn.batch`, in a module, so that new processes and workers of a cluster find it."""

from __future__ import annotations

import os
import signal
import struct
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvmnn.batch import Task, TaskOutcome
from kvmnn.errors import SourceError


def size(task: Task) -> Mapping[str, Any]:
    """The size of a file."""
    return {"bytes": os.path.getsize(task.path)}


@dataclass(frozen=True)
class Behaving:
    """Notes each call in a file of its own below `log`, then does what the file's name says.

    ``kill``: the process kills itself, each time; ``once``: the first time only; ``half``: in the middle of its
    result; ``bad``: fails; ``raise``: with an error that nobody foresaw; ``big``: takes 600 MB; ``slow``: a while;
    ``strange``: a result that is no JSON.
    """

    log: str
    seconds: float = 0.0

    def __call__(self, task: Task) -> TaskOutcome:
        name = Path(task.path).name
        with open(os.path.join(self.log, name), "ab") as log:
            log.write(b"x")
        time.sleep(self.seconds * (10 if "slow" in name else 1))
        calls = os.path.getsize(os.path.join(self.log, name))
        if "kill" in name or ("once" in name and calls == 1):
            os.kill(os.getpid(), signal.SIGKILL)
        if "half" in name and calls == 1:
            _half_a_result()
        if "bad" in name:
            raise SourceError(f"{task.path}: is bad")
        if "raise" in name:
            raise ZeroDivisionError("by zero")
        if "big" in name:
            held = bytearray(600 << 20)
            held[::4096] = b"x" * len(held[::4096])
            time.sleep(30)
        if "strange" in name:
            return TaskOutcome(document=object())
        return TaskOutcome(document={"name": name}, notes=("noted",) if "note" in name else ())


@dataclass(frozen=True)
class Writing:
    """Writes its output; the first time for ``once`` it dies after that, before anybody knows."""

    log: str

    def __call__(self, task: Task) -> Mapping[str, Any]:
        assert task.output is not None
        made = Path(task.output + ".out")
        if made.exists() and not task.replace:
            raise SourceError(f"{made}: exists already")
        made.write_text(task.path)
        marker = Path(self.log, Path(task.path).name)
        if "once" in task.path and not marker.exists():
            marker.touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return {"made": str(made)}


@dataclass(frozen=True)
class SlowWriting:
    """Writes its output, and takes a while before and after."""

    log: str
    seconds: float

    def __call__(self, task: Task) -> Mapping[str, Any]:
        time.sleep(self.seconds)
        document = Writing(self.log)(task)
        time.sleep(self.seconds)
        return document


def _half_a_result() -> None:
    """The beginning of a result in the pipe of a `ProcessPoolExecutor`, and death."""
    import gc
    from multiprocessing.queues import SimpleQueue

    queue = next(found for found in gc.get_objects() if isinstance(found, SimpleQueue))
    queue._wlock.acquire()
    os.write(queue._writer.fileno(), struct.pack("!i", 1000) + b"x")
    os.kill(os.getpid(), signal.SIGKILL)
