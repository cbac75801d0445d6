"""What is timed, and what runs before it."""

from __future__ import annotations

import numpy as np

from kvmnn.evaluation.timing import measure_generation_times, measure_project_times


class Recorder:
    """A runner that records the sizes of its steps and its resets."""

    def __init__(self) -> None:
        self.runs: list[list[int]] = [[]]

    def reset(self) -> None:
        self.runs.append([])

    def step(self, ids, *, end_chunk=False):
        self.runs[-1].append(len(ids))
        return np.zeros((len(ids), 4), np.float32)


def test_generation_times_are_of_warm_repeats() -> None:
    runner = Recorder()
    cell = measure_generation_times(runner, np.arange(200), 3)
    warm, *timed = runner.runs
    assert warm == [128] + [1] * 5
    assert timed == [[128, 39, *[1] * 32]] * 3
    assert (cell.repeats, cell.prompt_tokens, cell.decoded_tokens) == (3, 167, 32)
    runner = Recorder()
    times = measure_project_times(runner, np.arange(200), 3)
    assert [len(run) for run in runner.runs[1:]] == [5, *[1] * 3, *[64] * 3]
    assert (times.repeats, times.new_tokens, times.prompt_tokens) == (3, 64, 64)
