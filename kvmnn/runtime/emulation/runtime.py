"""An emulation of the engine's lossless runtime, call by call, with its defects (docs/runtime.md).

``index`` counts decode calls modulo ``layer_nums``, 0 in every prefill. One call does this:

1. Store: every block of ``index`` is decoded (or found in a cache) and written into the layer that runs; the list is
   emptied.
2. The eviction plan of ``index`` is applied if it fits; new rows are appended.
3. A prefill without older tokens resets all state. Every prefill ends here.
4. Attention; the planner plans.
5. Finished encodings are applied; the last index waits for all.
6. Cold range ``[sink, budget - recent)``. If it ends before the watermark, all blocks go ("shrink").
7. If enough tokens became cold, one block is encoded, the first from the end of the cold range. A full queue skips it;
   the watermark moves on.
8. Apply: store copies the rows raw into a cache and zeroes them; probe and full decode one block.
9. Step 5 again; figures are summed over layers in scope.
"""

from __future__ import annotations

import time
from typing import Any

from ...dtypes import Elements, KVPair, Positions, parse_dtype
from ...errors import KvmnnError
from ...frames import encode_block
from ...packed.compaction import plan_erase
from ...policies.h2o import H2OPlanner, LayerCallResult
from ..config import RuntimeConfig, check_num_layers
from ..metrics import CompressionRatios, OperationLatencies, RuntimeLayerMetrics, RuntimeMetrics
from ..schedule import BlockRange, ColdRange, CompressionScope, compute_cold_range, compute_due_range
from .block_store import (
    NS_PER_US,
    WORKER_TIMINGS,
    EmulatedTaskQueue,
    EmulationReport,
    LayerStateUpdater,
    RangeEncodeResult,
    WorkerTiming,
)
from .decoder import BlockDecoder, restore_blocks
from .events import BlockEvent, CallEvent, EditEvent, PlanEvent, ShrinkEvent
from .layer_state import EmulatedLayerState, EngineRowBuffer


class EmulatedRuntime:
    """An emulation of the engine for all layers of a conversation; `LosslessRuntime` describes the parameters.

    `config.layer_nums` is the number of layers that the engine believes in, `layers` the number that really run.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        timing: WorkerTiming = "eager",
        planner: H2OPlanner | None = None,
        on_invalid: str = "raise",
    ) -> None:
        if timing not in WORKER_TIMINGS:
            raise KvmnnError(f"timing is {timing!r}: expected one of {', '.join(WORKER_TIMINGS)}")
        if on_invalid not in ("raise", "engine"):
            raise KvmnnError(f"on_invalid is {on_invalid!r}: expected 'raise' or 'engine'")
        element_type = parse_dtype(dtype)
        num_layers = check_num_layers(config, layers) if on_invalid == "raise" else config.layer_nums or layers
        self.config = config = config.with_num_layers(num_layers, 2 * kv_heads * head_dim * element_type.itemsize)
        self.planner = planner or H2OPlanner(config.h2o, on_invalid="engine")
        self._dtype = element_type
        self._scope = CompressionScope(config)
        self._tasks = EmulatedTaskQueue(timing)
        self._decoder = BlockDecoder(config.decode_cache_blocks, config.strict_roundtrip_check)
        self._timings = OperationLatencies()
        self._state_updater = LayerStateUpdater(config, self._decoder, self._timings)
        self._rows = [EngineRowBuffer(kv_heads, head_dim, element_type) for _ in range(layers)]
        self._states = self._create_states()
        self._async_peak = self._appended_bytes = 0
        self._calls = self._position = self._num_new = 0
        self._is_decoding = False
        self._open_call: CallEvent | None = None
        self.report = EmulationReport()

    # -- requests ------------------------------------------------------------------------------------------------------

    def start_request(self, *, keep_cache: bool) -> None:
        """Make the next step a prefill; without `keep_cache` also mark the cache to be dropped then."""
        self._is_decoding = False
        if not keep_cache:
            self.reset()

    def reset(self) -> None:
        """Drop the cache at the next step, which is a prefill; `begin_call` does it as the engine would."""
        self._is_decoding = False
        meta = self.planner.meta
        meta.remove, meta.reserve = meta.previous, ()
        self.planner.metrics = type(self.planner.metrics)()
        self.report = EmulationReport()

    def erase(self, begin: int, end: int = 0) -> None:
        """Drop the tokens ``[begin, end)`` at the next step; a range that does not exist is ignored."""
        meta = self.planner.meta
        if begin < (end or meta.previous) <= meta.previous:
            meta.remove, meta.reserve = plan_erase(meta.previous, begin, end)

    # -- one call of one layer -----------------------------------------------------------------------------------------

    def begin_call(self, layer: int, keys: Elements, values: Elements) -> KVPair:
        """Restore, edit and append; return K and V that the attention of this call reads."""
        if self._open_call is not None:
            raise KvmnnError(f"begin: the call of layer {self._open_call.layer} was not ended")
        rows, num_new = self._rows[layer], keys.shape[1]
        event = self._open_call = CallEvent(call=self._calls, layer=layer)
        self._calls += 1
        layer_index = self.planner.clock.get_current_layer(len(self._states)) if self._is_decoding else 0  # type: ignore[union-attr]
        if self.config.replaces_rows:
            restore_blocks(self._states[layer_index], rows, self._decoder, event, self._timings.decompress)
        pending_plan = self.planner.layers[layer_index].pending_plan
        edit = self.planner.begin_call(rows.tokens, num_new, decode=self._is_decoding)
        if pending_plan is not None:
            event.plan = PlanEvent(layer_index, pending_plan.remove, not edit.is_stale, pending_plan.pairs)
        meta = self.planner.meta
        is_cleared = meta.previous == meta.remove and not meta.reserve
        if is_cleared or edit.remove:
            event.edit = EditEvent(is_cleared, meta.remove, edit.reserve)
        if is_cleared:
            rows.clear(num_new)
        else:
            rows.apply_edit(edit.remove, edit.reserve, num_new)
        rows.append(keys, values, self._position)
        self._num_new = num_new
        self._appended_bytes += keys.nbytes + values.nbytes
        event.kv_len = rows.tokens
        return rows.live_rows

    def end_call(self, *, sums: Any = None, rows: Any = None) -> CallEvent:
        """Plan, schedule, encode and drop; return the events of the call."""
        event, self._open_call = self._open_call, None
        if event is None:
            raise KvmnnError("end: no call was begun")
        call = self.planner.end_call(sums, rows=rows)
        event.index, event.is_planned, event.is_reset = call.layer, call.plan is not None, call.was_reset
        if call.was_reset:
            self._start_conversation()
        self._states[call.layer].rows = self._rows[event.layer]
        if self._is_decoding:
            self._compress_layer(call, event)
        event.state, event.metrics = self.list_state_values(call.layer), self.report.trace_values
        event.ratio = self.report.ratio
        return event

    def end_step(self) -> None:
        """End a step of all layers."""
        self.planner.end_step()
        self._position += self._num_new
        self._is_decoding = True

    # -- what there is -------------------------------------------------------------------------------------------------

    def get_live_rows(self, layer: int) -> KVPair:
        """Return the current K and V of a layer, with cleared ranges."""
        return self._rows[layer].live_rows

    def get_positions(self, layer: int) -> Positions:
        """Return the text positions of a layer's tokens; resets and erasures are not taken into account."""
        return self._rows[layer].positions.to_array()

    def list_state_values(self, index: int) -> tuple[int, ...]:
        """List the trace values of one layer index, in the order of the trace."""
        state = self._states[index]
        return (
            state.last_step,
            state.watermark,
            state.updates,
            state.raw_bytes,
            state.compressed_bytes,
            state.decompressed_bytes,
            state.fallbacks,
            state.num_backpressure_skips,
            len(state.blocks),
            len(state.cache),
            len(self._decoder.shared_cache),
        )

    def collect_metrics(self) -> RuntimeMetrics:
        """Return the metrics that the engine reports now."""
        report, planner_metrics = self.report, self.planner.metrics
        return RuntimeMetrics(
            h2o_lossless_raw_bytes=report.raw_bytes,
            h2o_lossless_compressed_bytes=report.compressed_bytes,
            h2o_lossless_decompressed_bytes=report.decompressed_bytes,
            h2o_lossless_compress_us=report.compress_us,
            h2o_lossless_decompress_us=report.decompress_us,
            h2o_lossless_ratio=report.ratio,
            h2o_lossless_fallback_count=report.fallbacks,
            h2o_lossless_backpressure_skip_count=report.num_backpressure_skips,
            h2o_lossless_queue_depth_peak=report.queue_depth_peak,
            h2o_lossless_async_queue_peak=report.async_queue_peak,
            h2o_lossless_async_wait_us=self._timings.wait.total_ns // NS_PER_US,
            h2o_lossless_decode_cache_hit=report.hits,
            h2o_lossless_decode_cache_miss=report.misses,
            h2o_codec_us=report.codec_us,
            h2o_keep_ratio=planner_metrics.h2o_keep_ratio,
            h2o_lossy_ratio=planner_metrics.h2o_lossy_ratio,
            h2o_total_evict_tokens=planner_metrics.h2o_total_evict_tokens,
            mode=self.config.mode,
            codec=self.config.codec,
            **self._compute_ratios().to_metrics(),
            **self._timings.summarize(),
            layers=tuple(self._collect_layer_metrics(index) for index in range(len(self._states))),
        )

    def _compute_ratios(self) -> CompressionRatios:
        """Compute the ratios of this run: full-size buffers, plus frames and decoded copies, are resident."""
        live_bytes = sum(keys.nbytes + values.nbytes for keys, values in (rows.live_rows for rows in self._rows))
        frame_bytes = sum(entry.block.compressed_bytes for state in self._states for entry in state.blocks)
        cached_blocks = [
            *(entry for state in self._states for entry in state.cache.entries),
            *self._decoder.shared_cache.entries,
        ]
        copy_bytes = {id(entry.keys): entry.keys.nbytes + entry.values.nbytes for entry in cached_blocks}
        resident_bytes = sum(rows.resident_bytes for rows in self._rows) + frame_bytes + sum(copy_bytes.values())
        return CompressionRatios(self._appended_bytes, live_bytes, resident_bytes)

    def _collect_layer_metrics(self, index: int) -> RuntimeLayerMetrics:
        """Return the metrics of one index; the rows are always those of the layer with this number."""
        state, rows = self._states[index], self._rows[index] if index < len(self._rows) else None
        stored_blocks = [block for block in state.blocks if block.is_dropped]
        return RuntimeLayerMetrics(
            layer=index,
            tokens=rows.tokens if rows is not None else 0,
            raw_bytes=state.raw_bytes,
            compressed_bytes=state.compressed_bytes,
            decompressed_bytes=state.decompressed_bytes,
            compress_us=state.compress_ns // NS_PER_US,
            decompress_us=state.decompress_ns // NS_PER_US,
            **state.timings.summarize(),
            updates=state.updates,
            fallbacks=state.fallbacks,
            num_backpressure_skips=state.num_backpressure_skips,
            blocks=len(state.blocks),
            stored_raw_bytes=sum(block.block.raw_bytes for block in stored_blocks),
            stored_bytes=sum(block.block.compressed_bytes for block in stored_blocks),
            held_bytes=rows.resident_bytes if rows is not None else 0,
        )

    # -- the lossless part of a call -----------------------------------------------------------------------------------

    def _compress_layer(self, call: LayerCallResult, event: CallEvent) -> None:
        index, last_index = call.layer, len(self._states) - 1
        event.token_step = self.planner.clock.token_step  # type: ignore[union-attr]
        event.is_token_end = index == last_index
        self._apply_finished(event, wait=event.is_token_end)
        budget = self._scope.compute_budget(index, event.token_step, call.kv_len, call.final_keep)
        event.is_in_scope = budget is not None
        if budget is not None:
            cold_tokens = compute_cold_range(self.config, budget)
            event.budget, event.cold_range = budget, (cold_tokens.begin, cold_tokens.end)
            self._schedule(index, cold_tokens, event)
        self._apply_finished(event, wait=event.is_token_end)
        self.report.refresh(self._states, self._scope)
        self.report.queue_depth_peak = self._state_updater.queue_peak
        self.report.async_queue_peak = self._async_peak
        self.report.hits, self.report.misses = self._decoder.hits, self._decoder.misses
        self.report.codec_us = self._state_updater.last_compress_ns // NS_PER_US

    def _schedule(self, index: int, cold_tokens: ColdRange, event: CallEvent) -> None:
        state = self._states[index]
        if cold_tokens.end < state.watermark:
            self._shrink(index, cold_tokens, event)
        is_store_mode = self.config.mode == "store"
        num_pending = len(state.list_pending(is_store_mode)) + self._tasks.num_open
        self._state_updater.queue_peak = max(self._state_updater.queue_peak, num_pending)
        self._async_peak = max(self._async_peak, self._tasks.num_open)
        block_range = compute_due_range(
            self.config,
            cold_tokens,
            event.kv_len,
            event.token_step,
            updates=state.updates,
            last_step=state.last_step,
            watermark=state.watermark,
        )
        if block_range is None:
            return
        watermark = cold_tokens.end if block_range.is_bootstrap and self.config.mode == "probe" else block_range.end
        if num_pending >= self.config.max_queue:
            event.block = BlockEvent(
                block_range.start, block_range.count, block_range.is_bootstrap, num_pending, "skip"
            )
            self._apply(RangeEncodeResult(index, block_range, None), event, watermark)
        else:
            self._encode(index, block_range, num_pending, watermark, event)

    def _encode(self, index: int, block_range: BlockRange, num_pending: int, watermark: int, event: CallEvent) -> None:
        state, rows = self._states[index], self._rows[event.layer]
        is_async = self.config.async_threads > 0 and self.config.mode != "probe"
        if is_async:
            self._apply_finished(event, wait=False)
        pair = rows.gather(block_range.start, block_range.count)
        outcome = "async" if is_async else "sync"
        event.block = BlockEvent(
            block_range.start,
            block_range.count,
            block_range.is_bootstrap,
            num_pending,
            outcome,
            *(pair or (None, None)),
        )
        if pair is None:
            state.fallbacks += 1
            state.record_scheduled(watermark, event.token_step)
        elif is_async:
            state.record_scheduled(watermark, event.token_step)
            num_open = self._tasks.submit(lambda: self._encode_range(index, block_range, pair))
            self._async_peak = max(self._async_peak, num_open)
        else:
            self._apply(self._encode_range(index, block_range, pair), event, watermark)

    def _encode_range(self, index: int, block_range: BlockRange, pair: KVPair) -> RangeEncodeResult:
        start_ns = time.perf_counter_ns()
        block = encode_block(
            *pair,
            dtype=self._dtype.name,
            predictors_k=self.config.predictors_k,
            predictors_v=self.config.predictors_v,
            codecs=self.config.codecs,
            strict_roundtrip_check=self.config.strict_roundtrip_check,
            threads=1,
        )
        nanoseconds = time.perf_counter_ns() - start_ns
        self._timings.compress.add(nanoseconds)
        return RangeEncodeResult(index, block_range, block, nanoseconds)

    def _apply_finished(self, event: CallEvent, *, wait: bool) -> None:
        """Apply the results that workers have finished; with `wait`, all open ones."""
        for result in self._tasks.take_results():
            self._apply(result, event, None)
        if wait and self._tasks.num_open:
            start_ns = time.perf_counter_ns()
            self._tasks.run_all()
            self._timings.wait.add(time.perf_counter_ns() - start_ns)
            for result in self._tasks.take_results():
                self._apply(result, event, None)

    def _apply(self, result: RangeEncodeResult, event: CallEvent, watermark: int | None) -> None:
        self._state_updater.apply_result(
            self._states[result.index], result, event, watermark=watermark, num_open=self._tasks.num_open
        )

    def _shrink(self, index: int, cold_tokens: ColdRange, event: CallEvent) -> None:
        """Drop the blocks and the eviction plan after the cold range became shorter."""
        state, planner_state = self._states[index], self.planner.layers[index]
        is_store_mode = self.config.mode == "store"
        pending_blocks = state.list_pending(is_store_mode)
        old_watermark, num_blocks, num_discarded = state.watermark, len(state.blocks), 0
        if not is_store_mode:
            for stored_block in pending_blocks:
                self._state_updater.decode_once(state, stored_block, event)
            num_discarded = len(state.list_pending(is_store_mode))
            state.fallbacks += num_discarded
        is_plan_cleared = planner_state.pending_plan is not None
        state.last_step, state.watermark = 0, cold_tokens.end
        state.blocks.clear()
        state.cache.entries.clear()
        planner_state.pending_plan = None
        event.shrink = ShrinkEvent(
            old_watermark, cold_tokens.end, len(pending_blocks), num_blocks, num_discarded, is_plan_cleared
        )

    def _start_conversation(self) -> None:
        """Reset for a new request as the engine does: the shared cache and other layers' rows remain."""
        self._tasks.clear()
        self._states = self._create_states()
        self._decoder.reset_counts()
        self._state_updater.queue_peak = self._state_updater.last_compress_ns = self._async_peak = 0
        self._timings.reset()

    def _create_states(self) -> list[EmulatedLayerState]:
        return [EmulatedLayerState() for _ in range(self.config.h2o.effective_layers)]
