"""The engine's worker, in the two extreme timings that the operating system may give it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...frames import Block
from ..schedule import BlockRange

Timing = Literal["eager", "lazy"]
TIMINGS: tuple[Timing, ...] = ("eager", "lazy")


@dataclass(frozen=True, eq=False)
class Encoded:
    """What came of a range: a block (None where it was skipped or not encoded) and how long that took."""

    index: int
    due: BlockRange
    block: Block | None
    nanoseconds: int = 0


class Tasks:
    """Encodings between submission and application.

    Parameters
    ----------
    timing
        ``"eager"``: a task is finished before the call that submits it goes on. ``"lazy"``: no task is finished before
        somebody waits.

    Attributes
    ----------
    open
        Tasks submitted and not finished.
    """

    def __init__(self, timing: Timing) -> None:
        self._timing = timing
        self._waiting: list[Callable[[], Encoded]] = []
        self._finished: list[Encoded] = []
        self.open = 0

    def submit(self, task: Callable[[], Encoded]) -> int:
        """Hand in a task; returns how many were open just then, this one included."""
        self._waiting.append(task)
        self.open += 1
        submitted = self.open
        if self._timing == "eager":
            self.finish()
        return submitted

    def finish(self) -> None:
        """Wait for all tasks."""
        waiting, self._waiting = self._waiting, []
        self._finished += [task() for task in waiting]
        self.open = 0

    def drain(self) -> list[Encoded]:
        """The finished results, in the order of their submission; they are given out once."""
        finished, self._finished = self._finished, []
        return finished

    def clear(self) -> None:
        """Forget everything."""
        self._waiting, self._finished, self.open = [], [], 0
