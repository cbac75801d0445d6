"""The strict lossless runtime, without the engine's defects (docs/runtime.md)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ..._util.validation import validate_int
from ...arrays import LayerCache
from ...dtypes import Elements, KVPair, Positions, parse_dtype
from ...errors import KvmnnError
from ...packed.compaction import INT32_MAX, ReservePair
from ...policies.h2o import H2OPlanner
from ..config import PROFILE_CODECS, RuntimeConfig, check_num_layers
from ..metrics import CompressionRatios, OperationLatencies, RuntimeMetrics, compute_float32_ratio
from .codec import RowCodec, SegmentCodec
from .encoder import AsyncEncoder, StrictLayer, invalidate_plan, validate_ranges
from .layer_storage import ReadRows, TokenSegment, WriteRows, allocate, to_read_only
from .restorer import NS_PER_US, DecodedRowCache, Restorer, RestoreRequest
from .step_guard import StepGuard, StrictCallResult
from .workers import WorkerPool


class StrictRuntime:
    """All layers of one conversation; its public interface is `LosslessRuntime`, which describes the arguments."""

    def __init__(
        self,
        config: RuntimeConfig,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        planner: H2OPlanner | None = None,
    ) -> None:
        check_num_layers(config, layers)
        validate_int(kv_heads, "kv_heads", 1, INT32_MAX)
        validate_int(head_dim, "head_dim", 1, INT32_MAX)
        self._dtype = parse_dtype(dtype)
        token_bytes = 2 * kv_heads * head_dim * self._dtype.itemsize
        self.config = config = config.with_num_layers(layers, token_bytes)
        self.planner = planner or H2OPlanner(config.h2o, cadence="tokens")
        if self.planner.cadence != "tokens" or len(self.planner.layers) != layers:
            raise KvmnnError(f"planner: expected one with cadence 'tokens' and {layers} layers")
        self._shape = (kv_heads, head_dim)
        self._timings = OperationLatencies()
        self._workers = WorkerPool(config.async_threads)
        self._codec: SegmentCodec
        if config.codec in PROFILE_CODECS:
            from .profile_codec import ProfileRowCodec  # which imports both codecs

            self._codec = ProfileRowCodec(config, self._dtype, kv_heads, head_dim)
        else:
            self._codec = RowCodec(config, self._dtype, kv_heads, head_dim)
        cache = DecodedRowCache(config.decode_cache_blocks, config.decode_cache_bytes)
        self._restorer = Restorer(self._codec, cache, self._workers, config.max_bytes_in_flight, token_bytes)
        evicting = range(layers) if planner is not None else config.h2o.evicting_layers if config.h2o.enable else ()
        self._has_planned_layers = len(evicting) > 0
        self._layers = [
            StrictLayer(
                layer_number,
                config,
                self._shape,
                self._dtype,
                is_planned=layer_number in evicting,
                total_latencies=self._timings,
            )
            for layer_number in range(layers)
        ]
        self._encoder = AsyncEncoder(config, self._codec, self._workers, self._layers, self._timings.wait)
        self._workspace: Elements = np.empty((2, kv_heads, 0, head_dim), self._dtype.numpy_dtype)
        self._step_guard = StepGuard(layers)

    # -- requests ------------------------------------------------------------------------------------------------------

    def start_request(self, *, keep_cache: bool) -> None:
        """Make the next step a prefill; without `keep_cache` drop the cache now."""
        self._step_guard.check_between_steps("start_request")
        if keep_cache:
            self._step_guard.is_decoding = False
        else:
            self.reset()

    def reset(self) -> None:
        """Drop every layer, every block and all figures, in any state of the runtime."""
        self._encoder.reset()
        for layer in self._layers:
            layer.clear()
        self._restorer.reset()
        self.planner.reset()
        self._workspace = self._workspace[:, :, :0].copy()
        self._step_guard = StepGuard(len(self._layers))
        self._timings.reset()

    def erase(self, begin: int, end: int = 0) -> None:
        """Drop the tokens at text positions ``[begin, end)`` in every layer at once."""
        self._step_guard.check_between_steps("erase")
        self._encoder.collect_finished()
        num_seen, erase_end = self._step_guard.position, end or self._step_guard.position
        if not 0 <= begin < erase_end <= num_seen:
            raise KvmnnError(
                f"cannot erase positions {begin} to {erase_end}: expected a range inside the {num_seen} seen"
            )
        selections = []
        for layer_number, layer in enumerate(self._layers):
            ranges = layer.rows.positions.exclude_positions(begin, erase_end)
            if ranges != layer.rows.all_ranges:
                selections.append((layer_number, ranges, layer.select(ranges, self._decode_all_rows(layer_number))))
        for layer_number, ranges, contents in selections:  # from here on nothing can fail
            layer = self._layers[layer_number]
            bytes_before = layer.rows.raw_bytes
            layer.replace_contents(contents, ranges)
            layer.counters.appended_bytes -= bytes_before - layer.rows.raw_bytes
            invalidate_plan(self.planner.layers[layer_number], ranges, self.config.h2o.effective_block_tokens)
        self._restorer.cache.remove_dead()
        if erase_end == num_seen:
            self._step_guard.position = begin

    def evict(self, layer: int, kept_ranges: Sequence[ReservePair]) -> None:
        """Keep only the tokens in `kept_ranges` of a layer, now."""
        self._step_guard.check_between_steps("evict")
        self._encoder.collect_finished()
        state = self._layers[validate_int(layer, "layer", 0, len(self._layers) - 1)]
        ranges = validate_ranges(layer, kept_ranges, tokens_before := state.rows.tokens)
        if ranges == state.rows.all_ranges:
            return
        state.replace_contents(state.select(ranges, self._decode_all_rows(layer)), ranges)
        self._restorer.cache.remove_dead()
        invalidate_plan(self.planner.layers[layer], ranges, self.config.h2o.effective_block_tokens)
        state.counters.evicted_tokens += tokens_before - state.rows.tokens

    # -- one call of one layer -----------------------------------------------------------------------------------------

    def begin_call(self, layer: int, keys: Elements, values: Elements, *, return_rows: bool = True) -> KVPair | None:
        """Evict, append, and return the rows that attention reads; None without `return_rows`."""
        guard, num_new = self._step_guard, keys.shape[1]
        guard.check_begin(layer, num_new)
        if self._encoder.jobs.jobs:
            self._encoder.collect_finished()
        state = self._layers[layer]
        rows, tokens_before = state.rows, state.rows.tokens
        has_pending_plan = state.is_planned and self.planner.layers[layer].pending_plan is not None
        read_rows = self._decode_all_rows(layer) if has_pending_plan else None
        workspace = None
        if return_rows and rows.segments and not has_pending_plan:
            workspace = self._get_workspace(tokens_before + num_new)
            rows.copy_to(workspace, self._create_row_writer(layer))
        rows.hot_buffer.reserve(num_new)
        edit = None
        if state.is_planned:
            edit = self.planner.begin_call(tokens_before, num_new, decode=guard.is_decoding, layer=layer)
        num_evicted = edit.kv_before - edit.kv_after if edit is not None else 0
        try:
            guard.record_begin(layer, num_new, num_evicted)
            if edit is not None and edit.remove:
                start = tokens_before - edit.remove
                ranges = [(0, start)] * (start > 0) + [(start + first, size) for first, size in edit.reserve]
                state.replace_contents(state.select(ranges, read_rows or self._create_row_reader(layer)), ranges)
                self._restorer.cache.remove_dead()
                state.counters.evicted_tokens += num_evicted
            rows.append(keys, values, guard.position)
            state.counters.appended_bytes += keys.nbytes + values.nbytes
            if not return_rows:
                return None
            if workspace is not None:
                workspace[0, :, tokens_before : tokens_before + num_new] = keys
                workspace[1, :, tokens_before : tokens_before + num_new] = values
            elif rows.segments:
                workspace = self._get_workspace(rows.tokens)
                read_rows = read_rows or self._create_row_reader(layer)
                rows.copy_to(workspace, partial(_copy_rows, read_rows))
        except BaseException as error:  # what fails there leaves the layer half done
            guard.poison(error)
            raise
        num_layers = len(self._layers)
        if self._workers.threads:
            for step in range(1, min(self.config.prefetch_layers, num_layers - 1) + 1):
                self._restorer.prefetch(self._layers[(layer + step) % num_layers].rows.segments)
        return rows.hot_buffer.to_read_only() if workspace is None else to_read_only(workspace[:, :, : rows.tokens])

    def end_call(self, *, sums: Any = None, rows: Any = None) -> StrictCallResult:
        """Plan, and submit the blocks that have become cold."""
        guard, encoder = self._step_guard, self._encoder
        layer_number, num_evicted = guard.check_end()
        layer = self._layers[layer_number]
        num_planned, has_pending_plan = 0, False
        if layer.is_planned:
            layer_plan = self.planner.end_call(sums, rows=rows).plan
            num_planned = layer_plan.num_evicted if layer_plan is not None else 0
            has_pending_plan = self.planner.layers[layer_number].pending_plan is not None
        guard.record_end()
        num_before = encoder.num_finished
        if encoder.jobs.jobs:
            encoder.collect_finished()
        num_submitted = 0
        if guard.is_decoding:
            num_submitted = encoder.schedule(layer_number, guard.token_step, has_pending_plan=has_pending_plan)
        num_finished, num_waiting = encoder.num_finished - num_before, len(layer.waiting_segments)
        return StrictCallResult(
            layer_number, layer.rows.tokens, num_evicted, num_planned, num_submitted, num_finished, num_waiting
        )

    def end_step(self) -> None:
        """End a step of all layers."""
        self._step_guard.end_step()
        if self._has_planned_layers:
            self.planner.end_step()

    # -- what there is -------------------------------------------------------------------------------------------------

    def get_live_rows(self, layer: int) -> KVPair:
        """Return copies of K and V of a layer."""
        (cache,) = self.read_layers([layer])
        return cache.keys, cache.values

    def read_layers(self, layers: Sequence[int]) -> list[LayerCache]:
        """Return copies of K and V of layers and text positions; this thread and the workers decode in parallel."""
        for layer in layers:
            validate_int(layer, "layer", 0, len(self._layers) - 1)
        self._step_guard.check_healthy()
        copies, requests = [], list[RestoreRequest]()
        for layer in layers:
            rows = self._layers[layer].rows
            out = np.empty((2, self._shape[0], rows.tokens, self._shape[1]), self._dtype.numpy_dtype)
            rows.copy_to(out, partial(self._copy_or_request, layer, requests))
            copies.append(out)
        for request in self._restorer.write_parallel(requests):
            self._create_row_writer(request.layer)(request.segment, request.out)
        return [self._build_layer_cache(layer, out) for layer, out in zip(layers, copies, strict=True)]

    def _copy_or_request(
        self, layer: int, requests: list[RestoreRequest], segment: TokenSegment, out: Elements
    ) -> None:
        if segment.rows is not None:
            out[...] = segment.rows
        else:
            requests.append(RestoreRequest(layer, segment, out, self._layers[layer].counters))

    def _build_layer_cache(self, layer: int, rows: Elements) -> LayerCache:
        positions = self._layers[layer].rows.positions
        num_seen = max(self._step_guard.position, positions.end)
        return LayerCache(
            layer=layer, keys=rows[0], values=rows[1], positions=positions.to_array(), tokens_seen=num_seen
        )

    def get_positions(self, layer: int) -> Positions:
        """Return the text positions of a layer's tokens."""
        validate_int(layer, "layer", 0, len(self._layers) - 1)
        return self._layers[layer].rows.positions.to_array()

    def flush(self) -> None:
        """Encode everything that is cold in the layers of the scope, and wait for it."""
        self._step_guard.check_between_steps("flush")
        self._encoder.flush()

    def wait(self) -> None:
        """Wait for open encodings and store their results."""
        self._encoder.collect_finished(wait=True)

    def close(self) -> None:
        """End the threads. The cache stays readable."""
        self.wait()
        self._workers.close()

    @property
    def resident_bytes(self) -> int:
        """Number of bytes of all current rows, frames and decoded copies."""
        return sum(layer.rows.resident_bytes for layer in self._layers) + self._restorer.cache.nbytes

    def collect_metrics(self) -> RuntimeMetrics:
        """Return the figures of the request so far."""
        layers = tuple(
            layer.counters.to_metrics(layer_number, layer.rows) for layer_number, layer in enumerate(self._layers)
        )
        raw_bytes = sum(layer_metrics.raw_bytes for layer_metrics in layers)
        compressed_bytes = sum(layer_metrics.compressed_bytes for layer_metrics in layers)
        cache, planner_metrics = self._restorer.cache, self.planner.metrics
        ratios = CompressionRatios(
            sum(layer.counters.appended_bytes for layer in self._layers),
            sum(layer.rows.raw_bytes for layer in self._layers),
            self.resident_bytes,
            is_lossy=self.config.is_lossy,
            has_encoded=raw_bytes > 0,
        )
        return RuntimeMetrics(
            h2o_lossless_raw_bytes=raw_bytes,
            h2o_lossless_compressed_bytes=compressed_bytes,
            h2o_lossless_decompressed_bytes=sum(layer_metrics.decompressed_bytes for layer_metrics in layers),
            h2o_lossless_compress_us=sum(layer_metrics.compress_us for layer_metrics in layers),
            h2o_lossless_decompress_us=sum(layer_metrics.decompress_us for layer_metrics in layers),
            h2o_lossless_ratio=None if self.config.is_lossy else compute_float32_ratio(raw_bytes, compressed_bytes),
            h2o_lossless_fallback_count=sum(layer_metrics.fallbacks for layer_metrics in layers),
            h2o_lossless_backpressure_skip_count=sum(layer_metrics.num_backpressure_skips for layer_metrics in layers),
            h2o_lossless_queue_depth_peak=self._encoder.jobs.peak_jobs,
            h2o_lossless_async_queue_peak=self._encoder.jobs.peak_async_jobs,
            h2o_lossless_async_wait_us=self._timings.wait.total_ns // NS_PER_US,
            h2o_lossless_decode_cache_hit=cache.hits,
            h2o_lossless_decode_cache_miss=cache.misses,
            h2o_codec_us=self._encoder.last_compress_ns // NS_PER_US,
            h2o_keep_ratio=planner_metrics.h2o_keep_ratio,
            h2o_lossy_ratio=planner_metrics.h2o_lossy_ratio,
            h2o_total_evict_tokens=sum(layer.counters.evicted_tokens for layer in self._layers),
            mode=self.config.mode,
            codec=self.config.codec,
            **ratios.to_metrics(),
            **self._timings.summarize(),
            restores_ahead=self._restorer.prefetch_hits,
            restores_late=self._restorer.prefetch_misses,
            waiting_blocks_peak=self._encoder.peak_waiting,
            layers=layers,
        )

    # -- restoring -----------------------------------------------------------------------------------------------------

    def _create_row_reader(self, layer_number: int) -> ReadRows:
        """Create a function that returns the rows of a layer's segment, decoding them on each call."""
        layer = self._layers[layer_number]

        def read_rows(segment: TokenSegment) -> Elements:
            if segment.rows is not None:
                return segment.rows
            try:
                return self._restorer.read_rows(segment, layer.counters)
            except Exception as error:
                raise layer.build_restore_error(layer_number, segment, error) from error

        return read_rows

    def _create_row_writer(self, layer_number: int) -> WriteRows:
        """Create a function that decodes the rows of a layer's segment into an array."""
        layer = self._layers[layer_number]

        def write_rows(segment: TokenSegment, out: Elements) -> None:
            if segment.rows is not None:
                out[...] = segment.rows
                return
            try:
                self._restorer.write_rows(segment, out, layer.counters)
            except Exception as error:
                raise layer.build_restore_error(layer_number, segment, error) from error

        return write_rows

    def _decode_all_rows(self, layer_number: int) -> ReadRows:
        """Decode all segments of a layer now; return a reader of their rows that cannot fail."""
        read_rows = self._create_row_reader(layer_number)
        rows = {id(segment): read_rows(segment) for segment in self._layers[layer_number].rows.segments}
        return lambda segment: segment.rows if segment.rows is not None else rows[id(segment)]

    def _get_workspace(self, tokens: int) -> Elements:
        """Return the array in which rows are assembled, shared by all layers."""
        if self._workspace.shape[2] < tokens:
            heads, head_dim = self._shape
            self._workspace = allocate((2, heads, tokens + tokens // 8 + 64, head_dim), self._dtype.numpy_dtype)
        return self._workspace


def _copy_rows(read_rows: ReadRows, segment: TokenSegment, out: Elements) -> None:
    out[...] = read_rows(segment)
