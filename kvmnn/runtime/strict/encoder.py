"""Encode cold rows of the strict runtime into frames: what is due, which thread does it, and the outcome."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import numpy as np

from ...dtypes import Elements
from ...errors import KvmnnError
from ...frames import Block
from ..config import RuntimeConfig
from ..metrics import LatencyHistogram
from ..schedule import CompressionScope
from .codec import KVFrames, RowCodec
from .layer import StrictLayer
from .layer_storage import TokenSegment
from .workers import PendingJobs, WorkerPool

MAX_ENCODE_ATTEMPTS = 3
"""Failures after which a piece stays raw."""


@dataclass(frozen=True, eq=False)
class EncodeJob:
    """One encoding."""

    #: Whose rows.
    layer: int
    #: What the frames will stand for. In modes that only measure, a piece that no layer holds.
    segment: TokenSegment
    #: The request that it belongs to; results of earlier ones are not looked at.
    generation: int


@dataclass(frozen=True, eq=False)
class SegmentEncodeResult:
    """What came of it."""

    block: Block
    #: Checked frames; None where they do not gain.
    frames: KVFrames | None
    #: How long encoding and checking took.
    compress_ns: int
    verify_ns: int


def encode_and_verify(codec: RowCodec, rows: Elements) -> SegmentEncodeResult:
    """Encode rows and check that the frames give them back; `KvmnnError` where they do not, or encoding fails."""
    start_ns = time.perf_counter_ns()
    rows = np.ascontiguousarray(rows)  # once; every step below would do it again for itself
    block = codec.encode(rows)
    if block.fallback:
        raise KvmnnError("the rows cannot be encoded")
    encoded_ns = time.perf_counter_ns()
    frames = codec.to_verified_frames(block, rows)
    return SegmentEncodeResult(block, frames, encoded_ns - start_ns, time.perf_counter_ns() - encoded_ns)


MAX_PLAN_WAIT_STEPS = 64
"""Maximum number of steps that a layer with a pending plan is not encoded: its blocks would be cut."""


class AsyncEncoder:
    """Submits the blocks of all layers that became cold, and applies the results."""

    def __init__(
        self,
        config: RuntimeConfig,
        codec: RowCodec,
        workers: WorkerPool,
        layers: Sequence[StrictLayer],
        waits: LatencyHistogram,
    ) -> None:
        self.jobs: PendingJobs[EncodeJob] = PendingJobs(workers, config.max_queue, config.max_bytes_in_flight)
        self.num_finished = self.last_compress_ns = 0
        self.peak_waiting = 0
        """Maximum number of blocks that were due and did not fit into the queue at one time."""
        self._config, self._codec, self._workers, self._wait_latencies = config, codec, workers, waits
        self._layers = layers
        self._scope = CompressionScope(config)
        self._trigger_tokens, self._interval = config.h2o.effective_trigger_tokens, config.h2o.effective_interval
        self._generation = 0

    def reset(self) -> None:
        """Forget what is open: results of an earlier request are not looked at."""
        self._generation += 1
        self.jobs.cancel_all()
        self.jobs.peak_jobs = self.jobs.peak_async_jobs = 0
        self.num_finished = self.peak_waiting = self.last_compress_ns = 0

    def schedule(self, number: int, step: int, *, has_pending_plan: bool) -> int:
        """Hand in what is cold in a layer that may be about to evict; returns how many blocks."""
        layer = self._layers[number]
        if not layer.has_triggered:
            if layer.rows.tokens < self._trigger_tokens:
                return 0
            layer.has_triggered = True
        if has_pending_plan and step - (layer.last_step or 0) < MAX_PLAN_WAIT_STEPS:
            return 0  # blocks made now would be cut
        if not layer.is_compressed(step):
            return 0
        if layer.last_step is None or step - layer.last_step >= self._interval:
            layer.queue_due()
            layer.last_step = step
        return self._submit_due(number) if layer.waiting_segments else 0

    def flush(self) -> None:
        """Encode everything that is cold in the layers of the scope, and wait for it."""
        for number, layer in enumerate(self._layers):
            if not layer.is_compressed(1):
                continue
            layer.queue_due()
            while layer.peek_due() is not None:
                self._submit_due(number)
                self.collect_finished(wait=True)
        self.collect_finished(wait=True)

    def collect_finished(self, *, wait: bool = False) -> None:
        """Take in the encodings that are done."""
        if not self.jobs.jobs:
            return
        if wait:
            with self._wait_latencies.measure():
                finished_jobs = self.jobs.take_finished(wait=True)
        else:
            finished_jobs = self.jobs.take_finished()
        for job, future in finished_jobs:
            if job.generation == self._generation and job.segment.is_alive:
                has_failed = future.cancelled() or future.exception() is not None
                self._apply_result(job, None if has_failed else cast(SegmentEncodeResult, future.result()))
        self.num_finished += len(finished_jobs)

    def _submit_due(self, number: int) -> int:
        layer, num_submitted = self._layers[number], 0
        while (segment := layer.peek_due()) is not None and segment.rows is not None:
            rows = segment.rows
            if not self.jobs.has_capacity(rows.nbytes):
                layer.counters.skips += 1
                num_waiting = sum(len(other.waiting_segments) for other in self._layers)
                self.peak_waiting = max(self.peak_waiting, num_waiting)
                break
            job = EncodeJob(number, segment, self._generation)
            self.jobs.submit(job, rows.nbytes, partial(encode_and_verify, self._codec, rows))
            layer.waiting_segments.popleft()
            segment.state = "queued"
            num_submitted += 1
            if not self._workers.threads:
                self.collect_finished()
        return num_submitted

    def _apply_result(self, job: EncodeJob, result: SegmentEncodeResult | None) -> None:
        layer, segment = self._layers[job.layer], job.segment
        counters, raw_bytes = layer.counters, segment.resident_bytes
        keeps_rows = self._config.mode != "store"
        if result is None:
            segment.attempts += 1
            segment.state = "due" if segment.attempts < MAX_ENCODE_ATTEMPTS else "settled"
        elif result.frames is None or keeps_rows:
            segment.state = "settled"
        else:
            segment.frames, segment.rows, segment.state = result.frames, None, "stored"
        if segment.state == "settled" and not keeps_rows:
            segment.own_rows()
        if result is None:
            counters.fallbacks += 1
            if segment.state == "due":
                layer.waiting_segments.append(segment)
            return
        counters.timings.compress.add(result.compress_ns)
        counters.timings.verify.add(result.verify_ns)
        self.last_compress_ns = result.compress_ns
        counters.updates += 1
        counters.raw_bytes += raw_bytes
        counters.compressed_bytes += result.frames.nbytes if result.frames is not None else raw_bytes
