"""The engine's worker, in the two extreme timings that the operating system may give it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from ...frames import Block
from ..schedule import BlockRange

WorkerTiming = Literal["eager", "lazy"]
WORKER_TIMINGS: tuple[WorkerTiming, ...] = ("eager", "lazy")


@dataclass(frozen=True, eq=False)
class RangeEncodeResult:
    """What came of a range: a block (None where it was skipped or not encoded) and how long that took."""

    index: int
    block_range: BlockRange
    block: Block | None
    nanoseconds: int = 0


class EmulatedTaskQueue:
    """Encodings between submission and application.

    Parameters
    ----------
    timing
        ``"eager"``: a task is finished before the call that submits it goes on. ``"lazy"``: no task is finished before
        somebody waits.

    Attributes
    ----------
    num_open
        Tasks submitted and not finished.
    """

    def __init__(self, timing: WorkerTiming) -> None:
        self._timing = timing
        self._queued: list[Callable[[], RangeEncodeResult]] = []
        self._results: list[RangeEncodeResult] = []
        self.num_open = 0

    def submit(self, task: Callable[[], RangeEncodeResult]) -> int:
        """Hand in a task; returns how many were open just then, this one included."""
        self._queued.append(task)
        self.num_open += 1
        num_open = self.num_open
        if self._timing == "eager":
            self.run_all()
        return num_open

    def run_all(self) -> None:
        """Wait for all tasks."""
        queued, self._queued = self._queued, []
        self._results += [task() for task in queued]
        self.num_open = 0

    def take_results(self) -> list[RangeEncodeResult]:
        """The finished results, in the order of their submission; they are given out once."""
        results, self._results = self._results, []
        return results

    def clear(self) -> None:
        """Forget everything."""
        self._queued, self._results, self.num_open = [], [], 0
