"""The part of the emulation that applies finished encodings (docs/runtime.md).

`EmulatedTaskQueue` decides when an encoding is finished, as the engine's worker thread would. `LayerStateUpdater` adds
the block to the state of its layer and reports events. `EmulationReport` has the sums that the engine shows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from ..._util.dataclass import dataclass
from ...frames import Block
from ..config import RuntimeConfig
from ..metrics import OperationLatencies
from ..schedule import BlockRange, CompressionScope
from .decoder import BlockDecoder
from .events import BlockAppliedEvent, CallEvent, DecodeEvent
from .layer_state import EmulatedLayerState, StoredBlock

WorkerTiming = Literal["eager", "lazy"]
WORKER_TIMINGS: tuple[WorkerTiming, ...] = ("eager", "lazy")


@dataclass(frozen=True, eq=False)
class RangeEncodeResult:
    """Result of encoding a range: a block (None if it was skipped or not encoded) and the time."""

    index: int
    block_range: BlockRange
    block: Block | None
    nanoseconds: int = 0


class EmulatedTaskQueue:
    """Encodings between submission and application.

    With `timing` ``"eager"``, a task is finished before the call that submits it continues; with ``"lazy"``, only when
    its result is awaited.
    """

    def __init__(self, timing: WorkerTiming) -> None:
        self._timing = timing
        self._queued: list[Callable[[], RangeEncodeResult]] = []
        self._results: list[RangeEncodeResult] = []
        self.num_open = 0

    def submit(self, task: Callable[[], RangeEncodeResult]) -> int:
        """Submit a task; return the number of open tasks, this one included."""
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
        """Return and remove the finished results, in the order of their submission."""
        results, self._results = self._results, []
        return results

    def clear(self) -> None:
        """Remove all tasks and results."""
        self._queued, self._results, self.num_open = [], [], 0


NS_PER_US = 1000
_SKIPPED_BLOCK = Block(None, 0, 0, 0, False, None, None, 0, 0)
"""The block of a range that was skipped."""


class LayerStateUpdater:
    """Updates a layer's state with encoded blocks: stores them, clears their rows (mode store), decodes, and counts."""

    def __init__(self, config: RuntimeConfig, decoder: BlockDecoder, timings: OperationLatencies) -> None:
        self._config = config
        self._decoder = decoder
        self._timings = timings
        self._is_store_mode = config.mode == "store"
        self.queue_peak = 0
        """Maximum number of blocks of a layer and open tasks at one time."""
        self.last_compress_ns = 0

    def apply_result(
        self,
        state: EmulatedLayerState,
        result: RangeEncodeResult,
        event: CallEvent,
        *,
        watermark: int | None,
        num_open: int,
    ) -> None:
        """Add the result of one encoding to the state of its layer."""
        block_range, block = result.block_range, result.block or _SKIPPED_BLOCK
        is_skipped = result.block is None
        from_dropped = self._is_store_mode and any(
            old.is_dropped and old.start < block_range.end and block_range.start < old.end for old in state.blocks
        )
        state.num_backpressure_skips += is_skipped
        state.fallbacks += block.fallback
        state.compress_ns += result.nanoseconds
        if not is_skipped:
            self.last_compress_ns = result.nanoseconds
            state.timings.compress.add(result.nanoseconds)
        is_dropped = is_cached = None
        num_trimmed = 0
        if block.is_stored:
            if state.rows is None or block_range.end > state.rows.capacity:
                state.fallbacks += 1
                return
            stored_block = StoredBlock(block_range.start, block_range.count, block, is_decoded=self._is_store_mode)
            state.blocks.append(stored_block)
            if self._is_store_mode:
                is_cached, is_dropped = self._drop_rows(state, stored_block)
            elif self._config.decode_cache_blocks:  # the oldest blocks beyond the size of the cache go
                num_trimmed = max(0, len(state.blocks) - self._config.decode_cache_blocks)
                del state.blocks[:num_trimmed]
        if not self._is_store_mode:
            next_block = next((block for block in state.blocks if not block.is_decoded), None)
            if next_block is not None:
                self.decode_once(state, next_block, event)
        if not from_dropped:
            state.raw_bytes += block.raw_bytes
            state.compressed_bytes += block.compressed_bytes
        if watermark is not None:
            state.record_scheduled(watermark, event.token_step)
        queue = len(state.blocks) + num_open
        self.queue_peak = max(self.queue_peak, queue)
        event.applied_blocks.append(
            BlockAppliedEvent(
                layer=result.index,
                start=block_range.start,
                count=block_range.count,
                raw_bytes=block.raw_bytes,
                compressed_bytes=block.compressed_bytes,
                attempted_bytes=block.attempted_bytes,
                key_bytes=len(block.key_frame or b""),
                value_bytes=len(block.value_frame or b""),
                raw_hash=block.raw_hash,
                blob_hash=block.blob_hash,
                is_from_dropped=from_dropped,
                is_counted=not from_dropped,
                is_fallback=block.fallback,
                is_skipped=is_skipped,
                is_dropped=is_dropped,
                is_cached=is_cached,
                num_trimmed=num_trimmed,
                is_scheduled=watermark is not None,
                queue_length=queue,
            )
        )

    def _drop_rows(self, state: EmulatedLayerState, stored_block: StoredBlock) -> tuple[bool | None, bool]:
        """Cache the raw rows and clear them in the layer; return whether each of the two was done."""
        assert state.rows is not None
        is_cached = None
        if self._config.decode_cache_blocks:
            pair = state.rows.gather(stored_block.start, stored_block.count)
            is_cached = pair is not None and pair[0].nbytes + pair[1].nbytes == stored_block.block.raw_bytes
            if pair is not None and is_cached:
                self._decoder.seed(state, stored_block, pair)
        stored_block.is_dropped = state.rows.zero(stored_block.start, stored_block.count)
        state.fallbacks += not stored_block.is_dropped
        return is_cached, stored_block.is_dropped

    def decode_once(self, state: EmulatedLayerState, stored_block: StoredBlock, event: CallEvent) -> None:
        """Decode a block of mode probe or full for the statistics; nothing is written back."""
        stored_block.is_decoded = True
        start_ns = time.perf_counter_ns()
        hit_kind, pair = self._decoder.decode(state, stored_block)
        if hit_kind == "miss":
            elapsed = time.perf_counter_ns() - start_ns
            state.decompress_ns += elapsed
            state.timings.decompress.add(elapsed)
            self._timings.decompress.add(elapsed)
        raw_bytes = stored_block.block.raw_bytes
        event.decodes.append(DecodeEvent(stored_block.start, stored_block.count, raw_bytes, hit_kind, pair is not None))
        if pair is None:
            state.fallbacks += 1
        else:
            state.decompressed_bytes += raw_bytes


@dataclass
class EmulationReport:
    """The engine's shared figures; a call that does not refresh a figure leaves it unchanged."""

    raw_bytes: int = 0
    compressed_bytes: int = 0
    decompressed_bytes: int = 0
    compress_us: int = 0
    decompress_us: int = 0
    fallbacks: int = 0
    num_backpressure_skips: int = 0
    queue_depth_peak: int = 0
    async_queue_peak: int = 0
    hits: int = 0
    misses: int = 0
    ratio: float = 1.0
    codec_us: int = 0

    def refresh(self, states: Sequence[EmulatedLayerState], scope: CompressionScope) -> None:
        """Sum the figures of updated layers in scope; of all updated layers if none is in scope."""
        updated_layers = [index for index, state in enumerate(states) if state.updates > 0]
        reported_states = [states[index] for index in updated_layers if scope.covers(index)] or [
            states[index] for index in updated_layers
        ]
        raw_bytes = sum(state.raw_bytes for state in reported_states)
        compressed_bytes = sum(state.compressed_bytes for state in reported_states)
        self.num_backpressure_skips = sum(state.num_backpressure_skips for state in reported_states)
        if raw_bytes <= 0 or compressed_bytes <= 0:
            return
        self.raw_bytes, self.compressed_bytes = raw_bytes, compressed_bytes
        self.decompressed_bytes = sum(state.decompressed_bytes for state in reported_states)
        self.compress_us = sum(state.compress_ns for state in reported_states) // NS_PER_US
        self.decompress_us = sum(state.decompress_ns for state in reported_states) // NS_PER_US
        self.fallbacks = sum(state.fallbacks for state in reported_states)
        self.ratio = float(np.float32(raw_bytes / compressed_bytes))

    @property
    def trace_values(self) -> tuple[int, ...]:
        """The figures of a trace, in the trace's order."""
        return (
            self.raw_bytes,
            self.compressed_bytes,
            self.decompressed_bytes,
            self.fallbacks,
            self.num_backpressure_skips,
            self.queue_depth_peak,
            self.async_queue_peak,
            self.hits,
            self.misses,
        )
