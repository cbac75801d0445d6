"""The engine's lossless runtime, call by call (docs/runtime.md): faithful, not safe."""

from __future__ import annotations

import time
from typing import Any

from ...dtypes import KVPair, Positions, Words, by_name
from ...errors import KvmnnError
from ...frames import encode_block
from ...h2o import LayerCall, Planner
from ...packed.kv_meta import erase_plan
from ..config import RuntimeConfig, check_layers
from ..metrics import LayerMetrics, RuntimeMetrics, Timings
from ..ratios import Ratios
from ..schedule import BlockRange, ColdRange, Scope, cold_range, due_range
from .applying import Applier
from .decoding import Decoder
from .events import BlockEvent, CallEvent, EditEvent, PlanEvent, ShrinkEvent
from .reporting import MICROSECOND, Reported
from .restoring import restore
from .rows import Rows
from .state import LayerState
from .tasks import TIMINGS, Encoded, Tasks, Timing


class EngineRuntime:
    """All layers of one conversation in the engine's hands.

    Parameters
    ----------
    config
        Options; `layer_nums` is the number of layers that the engine believes in.
    layers
        Layers that really run.
    kv_heads, head_dim, dtype
        Of K and V.
    timing
        When a worker finishes: see `Tasks`.
    planner
        Makes the eviction plans; None for one from `config.h2o`.
    on_invalid
        ``"raise"`` refuses a `layer_nums` that is not the number of layers; ``"engine"`` mixes layers up as the engine
        does.

    Raises
    ------
    KvmnnError
        For options that do not exist, and as `on_invalid` says.
    """

    def __init__(
        self,
        config: RuntimeConfig,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        timing: Timing = "eager",
        planner: Planner | None = None,
        on_invalid: str = "raise",
    ) -> None:
        if timing not in TIMINGS:
            raise KvmnnError(f"timing is {timing!r}: expected one of {', '.join(TIMINGS)}")
        if on_invalid not in ("raise", "engine"):
            raise KvmnnError(f"on_invalid is {on_invalid!r}: expected 'raise' or 'engine'")
        words = by_name(dtype)
        believed = check_layers(config, layers) if on_invalid == "raise" else config.layer_nums or layers
        self.config = config = config.for_layers(believed, 2 * kv_heads * head_dim * words.itemsize)
        self.planner = planner or Planner(config.h2o, on_invalid="engine")
        self._dtype = words
        self._scope = Scope(config)
        self._tasks = Tasks(timing)
        self._decoder = Decoder(config.decode_cache_blocks, config.strict_roundtrip_check)
        self._timings = Timings()
        self._applier = Applier(config, self._decoder, self._timings)
        self._rows = [Rows(kv_heads, head_dim, words) for _ in range(layers)]
        self._states = self._fresh_states()
        self._async_peak = self._appended_bytes = 0
        self._calls = self._position = self._add = 0
        self._decode = False
        self._open: CallEvent | None = None
        self.reported = Reported()

    # -- requests ------------------------------------------------------------------------------------------------------

    def start_request(self, *, keep: bool) -> None:
        """The next step is a prefill; without `keep` the cache is to be dropped then."""
        self._decode = False
        if not keep:
            self.reset()

    def reset(self) -> None:
        """Drop the cache at the next step, which is a prefill; what the engine makes of that, `begin` does."""
        self._decode = False
        meta = self.planner.meta
        meta.remove, meta.reserve = meta.previous, ()
        self.planner.metrics = type(self.planner.metrics)()
        self.reported = Reported()

    def erase(self, begin: int, end: int = 0) -> None:
        """Drop the tokens ``[begin, end)`` at the next step; a range that does not exist is ignored."""
        meta = self.planner.meta
        if begin < (end or meta.previous) <= meta.previous:
            meta.remove, meta.reserve = erase_plan(meta.previous, begin, end)

    # -- one call of one layer -----------------------------------------------------------------------------------------

    def begin(self, layer: int, keys: Words, values: Words) -> KVPair:
        """Restore, edit and append; returns K and V that the attention of this call reads."""
        if self._open is not None:
            raise KvmnnError(f"begin: the call of layer {self._open.layer} was not ended")
        rows, add = self._rows[layer], keys.shape[1]
        event = self._open = CallEvent(call=self._calls, layer=layer)
        self._calls += 1
        before = self.planner.clock.layer(len(self._states)) if self._decode else 0  # type: ignore[union-attr]
        if self.config.stores:
            restore(self._states[before], rows, self._decoder, event, self._timings.decompress)
        pending = self.planner.layers[before].pending
        found = self.planner.begin(rows.tokens, add, decode=self._decode)
        if pending is not None:
            event.plan = PlanEvent(before, pending.remove, pending.pairs, not found.stale)
        meta = self.planner.meta
        clear = meta.previous == meta.remove and not meta.reserve
        if clear or found.remove:
            event.edit = EditEvent(clear, meta.remove, found.reserve)
        if clear:
            rows.clear(add)
        else:
            rows.edit(found.remove, found.reserve, add)
        rows.append(keys, values, self._position)
        self._add = add
        self._appended_bytes += keys.nbytes + values.nbytes
        event.kv_len = rows.tokens
        return rows.live

    def end(self, *, sums: Any = None, rows: Any = None) -> CallEvent:
        """Plan, schedule, encode, drop; returns what the call did."""
        event, self._open = self._open, None
        if event is None:
            raise KvmnnError("end: no call was begun")
        call = self.planner.end(sums, rows=rows)
        event.index, event.planned, event.reset = call.layer, call.plan is not None, call.reset
        if call.reset:
            self._reset()
        self._states[call.layer].rows = self._rows[event.layer]
        if self._decode:
            self._compress(call, event)
        event.state, event.metrics = self.state_figures(call.layer), self.reported.traced
        event.ratio = self.reported.ratio
        return event

    def sync(self) -> None:
        """End a step of all layers."""
        self.planner.sync()
        self._position += self._add
        self._decode = True

    # -- what there is -------------------------------------------------------------------------------------------------

    def live(self, layer: int) -> KVPair:
        """K and V of a layer as they are now, cleared ranges included."""
        return self._rows[layer].live

    def positions(self, layer: int) -> Positions:
        """Where the tokens of a layer stand in the text, resets and erasures left out of account."""
        return self._rows[layer].positions.array()

    def state_figures(self, index: int) -> tuple[int, ...]:
        """The figures of a trace about one layer index, in its order."""
        state = self._states[index]
        return (
            state.last_step,
            state.watermark,
            state.updates,
            state.raw_bytes,
            state.compressed_bytes,
            state.decompressed_bytes,
            state.fallbacks,
            state.skips,
            len(state.blocks),
            len(state.cache),
            len(self._decoder.shared),
        )

    def metrics(self) -> RuntimeMetrics:
        """What the engine reports now."""
        reported, planned, found = self.reported, self.planner.metrics, self._ratios()
        return RuntimeMetrics(
            h2o_lossless_raw_bytes=reported.raw_bytes,
            h2o_lossless_compressed_bytes=reported.compressed_bytes,
            h2o_lossless_decompressed_bytes=reported.decompressed_bytes,
            h2o_lossless_compress_us=reported.compress_us,
            h2o_lossless_decompress_us=reported.decompress_us,
            h2o_lossless_ratio=reported.ratio,
            h2o_lossless_fallback_count=reported.fallbacks,
            h2o_lossless_backpressure_skip_count=reported.skips,
            h2o_lossless_queue_depth_peak=reported.queue_depth_peak,
            h2o_lossless_async_queue_peak=reported.async_queue_peak,
            h2o_lossless_async_wait_us=self._timings.wait.total_ns // MICROSECOND,
            h2o_lossless_decode_cache_hit=reported.hits,
            h2o_lossless_decode_cache_miss=reported.misses,
            h2o_codec_us=reported.codec_us,
            h2o_keep_ratio=planned.h2o_keep_ratio,
            h2o_lossy_ratio=planned.h2o_lossy_ratio,
            h2o_total_evict_tokens=planned.h2o_total_evict_tokens,
            lossy_ratio=found.lossy,
            lossless_ratio=found.lossless,
            total_ratio=found.total,
            mode=self.config.mode,
            held_bytes=found.held_bytes,
            **self._timings.summaries(),
            layers=tuple(self._layer_metrics(index) for index in range(len(self._states))),
        )

    def _ratios(self) -> Ratios:
        """Of this run: the buffers stay as large as they are, and frames and copies come on top."""
        live = sum(keys.nbytes + values.nbytes for keys, values in (rows.live for rows in self._rows))
        frames = sum(one.block.compressed_bytes for state in self._states for one in state.blocks)
        cached = [*(one for state in self._states for one in state.cache.entries), *self._decoder.shared.entries]
        copies = {id(one.keys): one.keys.nbytes + one.values.nbytes for one in cached}
        held = sum(rows.held_bytes for rows in self._rows) + frames + sum(copies.values())
        return Ratios(self._appended_bytes, live, held)

    def _layer_metrics(self, index: int) -> LayerMetrics:
        """Figures of one index; rows are those of the layer of this number, whatever the engine takes it for."""
        state, rows = self._states[index], self._rows[index] if index < len(self._rows) else None
        stored = [block for block in state.blocks if block.dropped]
        return LayerMetrics(
            layer=index,
            tokens=rows.tokens if rows is not None else 0,
            raw_bytes=state.raw_bytes,
            compressed_bytes=state.compressed_bytes,
            decompressed_bytes=state.decompressed_bytes,
            compress_us=state.compress_ns // MICROSECOND,
            decompress_us=state.decompress_ns // MICROSECOND,
            **state.timings.summaries(),
            updates=state.updates,
            fallbacks=state.fallbacks,
            skips=state.skips,
            blocks=len(state.blocks),
            stored_raw_bytes=sum(block.block.raw_bytes for block in stored),
            stored_bytes=sum(block.block.compressed_bytes for block in stored),
            held_bytes=rows.held_bytes if rows is not None else 0,
        )

    # -- the lossless part of a call -----------------------------------------------------------------------------------

    def _compress(self, call: LayerCall, event: CallEvent) -> None:
        index, last = call.layer, len(self._states) - 1
        event.token_step = self.planner.clock.token_step  # type: ignore[union-attr]
        event.token_end = index == last
        self._apply_finished(event, wait=event.token_end)
        budget = self._scope.budget(index, event.token_step, call.kv_len, call.final_keep)
        event.applies = budget is not None
        if budget is not None:
            cold = cold_range(self.config, budget)
            event.budget, event.cold = budget, (cold.begin, cold.end)
            self._schedule(index, cold, event)
        self._apply_finished(event, wait=event.token_end)
        self.reported.refresh(self._states, self._scope)
        self.reported.queue_depth_peak = self._applier.queue_peak
        self.reported.async_queue_peak = self._async_peak
        self.reported.hits, self.reported.misses = self._decoder.hits, self._decoder.misses
        self.reported.codec_us = self._applier.last_compress_ns // MICROSECOND

    def _schedule(self, index: int, cold: ColdRange, event: CallEvent) -> None:
        state = self._states[index]
        if cold.end < state.watermark:
            self._shrink(index, cold, event)
        store = self.config.mode == "store"
        pending = len(state.pending(store)) + self._tasks.open
        self._applier.queue_peak = max(self._applier.queue_peak, pending)
        self._async_peak = max(self._async_peak, self._tasks.open)
        due = due_range(self.config, cold, event.kv_len, event.token_step, state.progress)
        if due is None:
            return
        watermark = cold.end if due.bootstrap and self.config.mode == "probe" else due.end
        if pending >= self.config.max_queue:
            event.block = BlockEvent(due.start, due.count, due.bootstrap, pending, "skip")
            self._apply(Encoded(index, due, None), event, watermark)
        else:
            self._encode(index, due, pending, watermark, event)

    def _encode(self, index: int, due: BlockRange, pending: int, watermark: int, event: CallEvent) -> None:
        state, rows = self._states[index], self._rows[event.layer]
        asynchronous = self.config.async_threads > 0 and self.config.mode != "probe"
        if asynchronous:
            self._apply_finished(event, wait=False)
        pair = rows.gather(due.start, due.count)
        how = "async" if asynchronous else "sync"
        event.block = BlockEvent(due.start, due.count, due.bootstrap, pending, how, *(pair or (None, None)))
        if pair is None:
            state.fallbacks += 1
            state.advance(watermark, event.token_step)
        elif asynchronous:
            state.advance(watermark, event.token_step)
            submitted = self._tasks.submit(lambda: self._encoded(index, due, pair))
            self._async_peak = max(self._async_peak, submitted)
        else:
            self._apply(self._encoded(index, due, pair), event, watermark)

    def _encoded(self, index: int, due: BlockRange, pair: KVPair) -> Encoded:
        began = time.perf_counter_ns()
        block = encode_block(
            *pair,
            dtype=self._dtype.name,
            predictors_k=self.config.predictors_k,
            predictors_v=self.config.predictors_v,
            codecs=self.config.codecs,
            strict_roundtrip_check=self.config.strict_roundtrip_check,
            threads=1,
        )
        nanoseconds = time.perf_counter_ns() - began
        self._timings.compress.add(nanoseconds)
        return Encoded(index, due, block, nanoseconds)

    def _apply_finished(self, event: CallEvent, *, wait: bool) -> None:
        """Take in what workers have finished; with `wait`, all that is open."""
        for result in self._tasks.drain():
            self._apply(result, event, None)
        if wait and self._tasks.open:
            began = time.perf_counter_ns()
            self._tasks.finish()
            self._timings.wait.add(time.perf_counter_ns() - began)
            for result in self._tasks.drain():
                self._apply(result, event, None)

    def _apply(self, result: Encoded, event: CallEvent, watermark: int | None) -> None:
        self._applier.apply(self._states[result.index], result, event, watermark=watermark, open=self._tasks.open)

    def _shrink(self, index: int, cold: ColdRange, event: CallEvent) -> None:
        """The cold range became shorter: forget the blocks, and the eviction plan along with them."""
        state, planned = self._states[index], self.planner.layers[index]
        store = self.config.mode == "store"
        pending = state.pending(store)
        before, blocks, discarded = state.watermark, len(state.blocks), 0
        if not store:
            for stored in pending:
                self._applier.decode_once(state, stored, event)
            discarded = len(state.pending(store))
            state.fallbacks += discarded
        cleared = planned.pending is not None
        state.last_step, state.watermark = 0, cold.end
        state.blocks.clear()
        state.cache.entries.clear()
        planned.pending = None
        event.shrink = ShrinkEvent(before, cold.end, len(pending), blocks, discarded, cleared)

    def _reset(self) -> None:
        """A new request, as the engine notices it: everything but the shared cache and the rows of other layers."""
        self._tasks.clear()
        self._states = self._fresh_states()
        self._decoder.reset()
        self._applier.queue_peak = self._applier.last_compress_ns = self._async_peak = 0
        self._timings.clear()

    def _fresh_states(self) -> list[LayerState]:
        return [LayerState() for _ in range(self.config.h2o.layer_count)]
