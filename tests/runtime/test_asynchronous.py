"""Threads work next to the calls: nothing waits for them, and what is open is bounded. Workers are held, not timed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from store_options import store_options

from kvmnn.runtime import LosslessRuntime

CONFIG = store_options(front_n=2, async_threads=1)
HEADS, HEAD_DIM, LAYERS, PROMPT = 2, 8, 2, 4 + 16 * 6 + 16
BLOCK_BYTES = 2 * HEADS * 16 * HEAD_DIM * 2


class Run:
    """Two layers of rows that compress."""

    def __init__(self, **options: Any) -> None:
        config = replace(CONFIG, **options)
        self.runtime = LosslessRuntime(config, layers=LAYERS, kv_heads=HEADS, head_dim=HEAD_DIM, dtype="fp16")
        self.inner: Any = self.runtime._runtime
        self.rows = (np.arange(400)[None, :, None] // 8 + np.zeros((HEADS, 400, HEAD_DIM))).astype(np.float16)
        self.end = 0

    def call(self, layer: int, tokens: int) -> None:
        new = self.rows[:, self.end : self.end + tokens]
        keys, values = self.runtime.begin_call(layer, new, new)
        assert keys.tobytes() == values.tobytes() == self.rows[:, : self.end + tokens].tobytes()
        self.runtime.end_call()

    def step(self, tokens: int = 1) -> None:
        for layer in range(LAYERS):
            self.call(layer, tokens)
        self.runtime.end_step()
        self.end += tokens

    @property
    def blocks(self) -> list[int]:
        return [layer.blocks for layer in self.runtime.collect_metrics().layers]

    @contextmanager
    def held_worker(self) -> Iterator[None]:
        """The only thread does nothing else inside."""
        started, release = threading.Event(), threading.Event()

        def hold() -> None:
            started.set()
            release.wait()

        self.inner._workers.submit(hold)
        started.wait()
        try:
            yield
        finally:
            release.set()


def test_async_encoder_calls_do_not_wait_for_results() -> None:
    run = Run()
    with run.runtime:
        with run.held_worker():
            run.step(PROMPT)
            for _ in range(20):
                run.step()  # would never return if a token waited for the last layer's encodings
            metrics = run.runtime.collect_metrics()
            assert (run.blocks, metrics.wait.count) == ([0, 0], 0)
            assert metrics.h2o_lossless_async_queue_peak == len(run.inner._encoder.jobs.jobs) == 14
        for _, _, future in run.inner._encoder.jobs.jobs:
            future.result()
        run.call(0, 1)  # takes in what is there, of both layers
        assert run.blocks == [7, 7]


@pytest.mark.parametrize(
    ("options", "most"), [({"max_queue": 3}, 3), ({"max_bytes_in_flight": 5 * BLOCK_BYTES}, 5), ({"max_queue": 1}, 1)]
)
def test_async_encoder_open_jobs_are_bounded(options: dict[str, int], most: int) -> None:
    run = Run(**options)
    with run.runtime:
        with run.held_worker():
            run.step(PROMPT)
            for _ in range(3):
                run.step()
                jobs = run.inner._encoder.jobs
                assert len(jobs.jobs) == most and jobs.nbytes == most * BLOCK_BYTES
        metrics = run.runtime.collect_metrics()
        assert metrics.h2o_lossless_async_queue_peak == metrics.h2o_lossless_queue_depth_peak == most
        assert metrics.waiting_blocks_peak == 12 - most
        assert metrics.h2o_lossless_backpressure_skip_count > 0 and metrics.h2o_lossless_fallback_count == 0
        run.runtime.flush()
        assert run.blocks == [6, 6]
        run.step()


def test_prefetch_restores_blocks_of_the_next_layer() -> None:
    run = Run()
    with run.runtime:
        run.step(PROMPT)
        run.step()
        run.runtime.flush()
        for _, future in list(run.inner._restorer._prefetches.values()):
            future.result()
        run.inner._restorer.reset()
        run.call(0, 1)
        coming = list(run.inner._restorer._prefetches.values())
        assert [piece for piece, _ in coming] == run.inner._layers[1].rows.segments[1:]
        assert len({future for _, future in coming}) == 1  # handed over together
        for _, future in coming:
            future.result()  # here a model would compute attention
        before = run.runtime.collect_metrics()
        run.call(1, 1)
        after = run.runtime.collect_metrics()
        assert (before.restores_ahead, after.restores_ahead, after.restores_late) == (0, 6, 0)


def test_prefetch_zero_layers_restores_nothing() -> None:
    run = Run(prefetch_layers=0)
    with run.runtime:
        run.step(PROMPT)
        run.step()
        run.runtime.flush()
        run.inner._restorer.reset()
        run.call(0, 1)
        assert not run.inner._restorer._prefetches


def test_prefetch_rows_are_bounded_by_max_bytes_in_flight() -> None:
    run = Run(max_bytes_in_flight=3 * BLOCK_BYTES, async_threads=1)
    with run.runtime:
        run.step(PROMPT)
        run.step()
        run.runtime.flush()
        restorer: Any = run.inner._restorer
        restorer.reset()
        stored = run.inner._layers[1].rows.segments[1:]
        restorer.prefetch(stored)
        assert [piece for piece, _ in restorer._prefetches.values()] == stored[:3]


@pytest.mark.parametrize("mode", ["probe", "full"])
def test_measuring_modes_store_no_blocks(mode: Any) -> None:
    run = Run(mode=mode, async_threads=0)
    run.step(PROMPT)
    for _ in range(40):
        run.step()
    layer = run.runtime.collect_metrics().layers[0]
    assert (layer.updates, layer.raw_bytes) == (8, 8 * BLOCK_BYTES)
    assert not run.inner._layers[0].rows.segments and not run.inner._layers[0].waiting_segments
