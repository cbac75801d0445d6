"""Evaluations of the command in the process of the test, where its worker processes are not what is tested."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pytest

from kvmnn.evaluation import EvaluationSettings, workers
from kvmnn.evaluation.measure import CellMeasurer


def measure_in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let evaluations measure here: a process for each configuration takes a second or two of CPU time to start."""

    def run_here(tasks: Sequence[workers.EvaluationTask], order: Mapping[str, Any], jobs: int) -> Iterator[Any]:
        settings = EvaluationSettings.from_dict(order["settings"])
        measurer = CellMeasurer(order["model"], settings, order["start"], order["references"])
        return workers._run_in_process(tasks, measurer)

    monkeypatch.setattr(workers, "_run_in_workers", run_here)
