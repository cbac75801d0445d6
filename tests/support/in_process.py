"""Commands in the process of the test alone, where their worker processes are not what is tested."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from kvmnn import batch
from kvmnn.evaluation import EvaluationSettings, workers
from kvmnn.evaluation.measure import CellMeasurer


def measure_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let evaluations measure here: a process for each configuration takes a second or two of CPU time to start."""

    def run_here(tasks: Sequence[workers.EvaluationTask], order: Mapping[str, Any], jobs: int) -> Iterator[Any]:
        settings = EvaluationSettings.from_dict(order["settings"])
        measurer = CellMeasurer(order["model"], settings, order["start"], order["references"])
        return workers._run_in_process(tasks, measurer)

    monkeypatch.setattr(workers, "_run_in_workers", run_here)


class InlineExecutor(Executor):
    """What `kvmnn.batch.ProcessExecutor` is for the verbs, without processes: each imports all formats for a second."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


def run_jobs_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let verbs with ``--jobs`` process their files here."""
    monkeypatch.setattr(batch, "ProcessExecutor", InlineExecutor)
