"""Layers of the strict runtime, and the encoding of their cold rows into frames."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import cast

import numpy as np

from ..._util.dataclass import dataclass
from ...dtypes import DType
from ...errors import KvmnnError, RestoreError
from ...packed.compaction import ReservePair
from ...policies.h2o.planner import PlannerLayerState, are_valid_pairs
from ..config import RuntimeConfig
from ..metrics import LatencyHistogram, OperationLatencies
from ..schedule import CompressionScope, compute_cold_range
from .codec import SegmentCodec, SegmentEncodeResult
from .layer_storage import LayerContents, LayerStorage, ReadRows, TokenSegment
from .restorer import RuntimeLayerCounters, describe_error
from .workers import PendingJobs, WorkerPool


def validate_ranges(layer: int, ranges: Sequence[ReservePair], tokens: int) -> list[ReservePair]:
    """Return `ranges` as a list; raise `KvmnnError` unless they are ascending ranges of a layer's tokens."""
    if not are_valid_pairs(tuple(ranges), tokens):
        raise KvmnnError(f"layer {layer}: {list(ranges)[:4]} are no ascending ranges of its {tokens} tokens")
    return list(ranges)


def invalidate_plan(state: PlannerLayerState, ranges: Sequence[ReservePair], block_tokens: int) -> None:
    """Drop the pending plan of a layer that lost tokens, and keep the scores of the remaining blocks."""
    state.pending_plan = None
    kept_blocks = [np.arange(first, first + size) // block_tokens for first, size in ranges]
    blocks = np.unique(np.concatenate(kept_blocks)) if kept_blocks else np.empty(0, np.int64)
    state.scores = state.scores[blocks[blocks < state.scores.size]]


class StrictLayer:
    """Rows of one layer, and the segments to encode; `is_planned` if the eviction planner takes part."""

    def __init__(
        self,
        layer_number: int,
        config: RuntimeConfig,
        shape: tuple[int, int],
        dtype: DType,
        *,
        is_planned: bool,
        total_latencies: OperationLatencies,
    ) -> None:
        self.is_planned = is_planned
        self.rows = LayerStorage(*shape, dtype)
        self._total_latencies = total_latencies
        self.counters = RuntimeLayerCounters(timings=OperationLatencies(total_latencies))
        self.waiting_segments: deque[TokenSegment] = deque()
        """Segments that are due and not in the queue yet."""
        self.last_step: int | None = None
        """Token step at which `queue_due` was last called."""
        self.has_triggered = False
        """Whether the layer ever had enough tokens to start; evictions may leave fewer."""
        self._config = config
        self._number, self._scope = layer_number, CompressionScope(config)
        self._applies_always = self._scope.is_always_compressed(layer_number)
        self._measured_tokens = 0
        self._next_due_tokens = 0

    def is_compressed(self, step: int) -> bool:
        """Return whether the layer is compressed at this decode step."""
        if self._applies_always is not None:
            return self._applies_always
        tokens = self.rows.tokens
        return self._scope.compute_budget(self._number, step, tokens, tokens) is not None

    def queue_due(self) -> None:
        """Add every block that has become cold to `waiting_segments`."""
        tokens = self.rows.tokens
        if tokens < self._next_due_tokens:
            return
        config = self._config
        cold_tokens, block_tokens = compute_cold_range(config, tokens), config.block_tokens
        if config.mode == "store":
            self.waiting_segments += self.rows.split_cold(cold_tokens, block_tokens)
            self._next_due_tokens = (
                self.rows.find_next_due_end(config.hot_sink_tokens, block_tokens) + config.hot_recent_tokens
            )
            return
        rows = self.rows.hot_buffer.rows
        self._measured_tokens = max(self._measured_tokens, cold_tokens.begin)
        while self._measured_tokens + block_tokens <= cold_tokens.end:
            end_token = self._measured_tokens + block_tokens
            self.waiting_segments.append(
                TokenSegment(block_tokens, rows[:, :, self._measured_tokens : end_token], "due")
            )
            self._measured_tokens = end_token
        self._next_due_tokens = (
            max(self._measured_tokens, config.hot_sink_tokens) + block_tokens + config.hot_recent_tokens
        )

    def peek_due(self) -> TokenSegment | None:
        """Return the first waiting segment that still contains tokens, without removing it."""
        while self.waiting_segments:
            segment = self.waiting_segments[0]
            if segment.is_alive and segment.state == "due":
                return segment
            self.waiting_segments.popleft()
        return None

    def build_restore_error(self, layer_number: int, segment: TokenSegment, error: Exception) -> RestoreError:
        """Build the error for a segment of this layer that cannot be restored."""
        return RestoreError(layer_number, self.rows.find_start(segment), segment.count, describe_error(error))

    def select(self, ranges: list[ReservePair], read_rows: ReadRows) -> LayerContents:
        """Call `LayerStorage.select` with the block size and hot tokens of the options."""
        return self.rows.select(
            ranges, read_rows, block_tokens=self._config.block_tokens, hot_sink=self._config.hot_sink_tokens
        )

    def replace_contents(self, contents: LayerContents, ranges: list[ReservePair]) -> None:
        """Replace the contents by those that `select` returned for `ranges`."""
        self._measured_tokens = sum(max(0, min(size, self._measured_tokens - begin)) for begin, size in ranges)
        self._next_due_tokens = 0
        self.rows.replace_contents(contents)

    def clear(self) -> None:
        """Drop all tokens and counts."""
        self.rows.clear()
        self.counters = RuntimeLayerCounters(timings=OperationLatencies(self._total_latencies))
        self.waiting_segments.clear()
        self.last_step = None
        self.has_triggered = False
        self._measured_tokens = self._next_due_tokens = 0


MAX_ENCODE_ATTEMPTS = 3
"""Failures after which a piece stays raw."""


@dataclass(frozen=True, eq=False)
class EncodeJob:
    """An encoding job."""

    #: The layer of the rows.
    layer: int
    #: The segment that the frames will replace. In modes that only measure, no layer contains it.
    segment: TokenSegment
    #: Number of the request; results of earlier requests are ignored.
    generation: int


_NO_POSITIONS = np.empty(0, np.int64)
MAX_PLAN_WAIT_STEPS = 64
"""Maximum number of steps that a layer with a pending plan is not encoded: its blocks would be cut."""


class AsyncEncoder:
    """Submits the blocks of all layers that became cold, and applies the results."""

    def __init__(
        self,
        config: RuntimeConfig,
        codec: SegmentCodec,
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
        """Cancel open jobs; results of an earlier request are ignored."""
        self._generation += 1
        self.jobs.cancel_all()
        self.jobs.peak_jobs = self.jobs.peak_async_jobs = 0
        self.num_finished = self.peak_waiting = self.last_compress_ns = 0

    def schedule(self, layer_number: int, step: int, *, has_pending_plan: bool) -> int:
        """Submit the cold segments of a layer that may be about to evict; return the number of blocks."""
        layer = self._layers[layer_number]
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
        return self._submit_due(layer_number) if layer.waiting_segments else 0

    def flush(self) -> None:
        """Encode everything that is cold in the layers of the scope, and wait for it."""
        for layer_number, layer in enumerate(self._layers):
            if not layer.is_compressed(1):
                continue
            layer.queue_due()
            while layer.peek_due() is not None:
                self._submit_due(layer_number)
                self.collect_finished(wait=True)
        self.collect_finished(wait=True)

    def collect_finished(self, *, wait: bool = False) -> None:
        """Store the results of finished encodings."""
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

    def _submit_due(self, layer_number: int) -> int:
        layer, num_submitted = self._layers[layer_number], 0
        while (segment := layer.peek_due()) is not None and segment.rows is not None:
            rows = segment.rows
            if not self.jobs.has_capacity(rows.nbytes):
                layer.counters.num_backpressure_skips += 1
                num_waiting = sum(len(waiting_layer.waiting_segments) for waiting_layer in self._layers)
                self.peak_waiting = max(self.peak_waiting, num_waiting)
                break
            job = EncodeJob(layer_number, segment, self._generation)
            positions = _NO_POSITIONS
            if self._codec.needs_positions:
                start = layer.rows.find_start(segment)
                positions = layer.rows.positions.to_array()[start : start + segment.count]
            self.jobs.submit(job, rows.nbytes, partial(self._codec.encode_segment, rows, layer_number, positions))
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
