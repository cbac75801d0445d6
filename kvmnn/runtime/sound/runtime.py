"""The lossless runtime as it should be (docs/runtime.md)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

from ...arrays import LayerCache
from ...checks import whole
from ...dtypes import KVPair, Positions, Words, by_name
from ...errors import KvmnnError
from ...h2o import Planner
from ...packed.reserve import INT32_MAX, Pair
from ..config import RuntimeConfig, check_layers
from ..metrics import RuntimeMetrics, Timings
from ..ratios import float32_ratio
from ..schedule import Scope, cold_range
from .codec import RowCodec
from .decoded_rows import DecodedRows
from .encoding import Encoded, Job, encode_and_verify, result_of, settle
from .figures import MICROSECOND, ratios
from .forgetting import check_kept, forget_plan
from .layer import Layer
from .layer_rows import RowsOf, WriteRows
from .memory import empty
from .piece import Piece
from .report import SoundCall
from .restoring import Restorer
from .steps import Steps
from .workers import OpenJobs, Workers

MAX_PATIENCE_STEPS = 64
"""Steps that a layer whose plan is about to be carried out waits for; one that plans at every step must not wait for
ever."""


class SoundRuntime:
    """All layers of one conversation; the public face is `LosslessRuntime`, where the arguments are described."""

    def __init__(
        self,
        config: RuntimeConfig,
        *,
        layers: int,
        kv_heads: int,
        head_dim: int,
        dtype: str,
        planner: Planner | None = None,
    ) -> None:
        check_layers(config, layers)
        whole(kv_heads, "kv_heads", 1, INT32_MAX)
        whole(head_dim, "head_dim", 1, INT32_MAX)
        self._dtype = by_name(dtype)
        token_bytes = 2 * kv_heads * head_dim * self._dtype.itemsize
        self.config = config = config.for_layers(layers, token_bytes)
        self.planner = planner or Planner(config.h2o, cadence="tokens")
        if self.planner.cadence != "tokens" or len(self.planner.layers) != layers:
            raise KvmnnError(f"planner: expected one with cadence 'tokens' and {layers} layers")
        self._shape = (kv_heads, head_dim)
        self._scope = Scope(config)
        self._workers = Workers(config.async_threads)
        self._jobs: OpenJobs[Job] = OpenJobs(self._workers, config.max_queue, config.max_bytes_in_flight)
        self._codec = RowCodec(config, self._dtype, kv_heads, head_dim)
        cache = DecodedRows(config.decode_cache_blocks, config.decode_cache_bytes)
        self._restorer = Restorer(self._codec, cache, self._workers, config.max_bytes_in_flight, token_bytes)
        self._layers = [Layer(config, kv_heads, head_dim, self._dtype) for _ in range(layers)]
        self._workspace: Words = np.empty((2, kv_heads, 0, head_dim), self._dtype.numpy)
        self._generation = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._steps = Steps(len(self._layers))
        self._timings = Timings()
        self._last_compress_ns = self._queue_peak = self._taken = 0

    # -- requests ------------------------------------------------------------------------------------------------------

    def start_request(self, *, keep: bool) -> None:
        """The next step is a prefill; without `keep` the cache is dropped now."""
        self._steps.check_between("start_request")
        if keep:
            self._steps.decode = False
        else:
            self.reset()

    def reset(self) -> None:
        """Drop every layer, every block and all figures, whatever state the runtime is in."""
        self._generation += 1
        self._jobs.forget()
        self._jobs.peak = 0
        for layer in self._layers:
            layer.clear()
        self._restorer.reset()
        self.planner.reset()
        self._workspace = self._workspace[:, :, :0].copy()
        self._begin_anew()

    def erase(self, begin: int, end: int = 0) -> None:
        """Drop the tokens that stand at positions ``[begin, end)`` of the text, in every layer, now."""
        self._steps.check_between("erase")
        self._take_finished()
        seen, stop = self._steps.position, end or self._steps.position
        if not 0 <= begin < stop <= seen:
            raise KvmnnError(f"cannot erase positions {begin} to {stop}: expected a range inside the {seen} seen")
        found = []
        for number, layer in enumerate(self._layers):
            pairs = layer.rows.positions.outside(begin, stop)
            found.append((pairs, layer.kept(pairs, self._restored(number)) if pairs != layer.rows.all else None))
        for number, (layer, (pairs, contents)) in enumerate(zip(self._layers, found, strict=True)):
            if contents is not None:
                before = layer.rows.raw_bytes
                layer.swap(contents, pairs)
                layer.figures.appended_bytes -= before - layer.rows.raw_bytes
                forget_plan(self.planner.layers[number], pairs, self.config.h2o.block)
        self._restorer.cache.sweep()
        if stop == seen:
            self._steps.position = begin

    def evict(self, layer: int, kept: Sequence[Pair]) -> None:
        """Keep only the tokens in `kept` of a layer, now."""
        self._steps.check_between("evict")
        self._take_finished()
        state = self._layers[whole(layer, "layer", 0, len(self._layers) - 1)]
        pairs = check_kept(layer, kept, before := state.rows.tokens)
        if pairs == state.rows.all:
            return
        state.swap(state.kept(pairs, self._restored(layer)), pairs)
        self._restorer.cache.sweep()
        forget_plan(self.planner.layers[layer], pairs, self.config.h2o.block)
        state.figures.evicted_tokens += before - state.rows.tokens

    # -- one call of one layer -----------------------------------------------------------------------------------------

    def begin(self, layer: int, keys: Words, values: Words, *, read: bool = True) -> KVPair | None:
        """Evict, append, and give out what attention reads; None without `read`."""
        add = keys.shape[1]
        self._steps.check_begin(layer, add)
        self._take_finished()
        state = self._layers[layer]
        rows, before = state.rows, state.rows.tokens
        pending = self.planner.layers[layer].pending is not None
        assembled = None
        rows_of = self._restored(layer) if pending else self._rows_of(layer)
        if read and rows.pieces and not pending:
            assembled = self._space(before + add)
            rows.copy_to(assembled, self._write(layer))
        rows.tail.reserve(add)
        found = self.planner.begin(before, add, decode=self._steps.decode, layer=layer)
        with self._steps.breaking():  # what fails from here on leaves the layer half done
            self._steps.begun(layer, add, found.kv_before - found.kv_after)
            if found.remove:
                start = before - found.remove
                pairs = [(0, start)] * (start > 0) + [(start + first, size) for first, size in found.reserve]
                state.swap(state.kept(pairs, rows_of), pairs)
                self._restorer.cache.sweep()
                state.figures.evicted_tokens += found.kv_before - found.kv_after
            rows.append(keys, values, self._steps.position)
            state.figures.appended_bytes += keys.nbytes + values.nbytes
            if not read:
                return None
            if assembled is not None:
                assembled[0, :, before : before + add] = keys
                assembled[1, :, before : before + add] = values
            elif rows.pieces:
                assembled = self._space(rows.tokens)
                rows.copy_to(assembled, lambda piece, out: np.copyto(out, rows_of(piece)))
        self._prefetch(layer)
        return read_only((assembled if assembled is not None else rows.tail.rows)[:, :, : rows.tokens])

    def end(self, *, sums: Any = None, rows: Any = None) -> SoundCall:
        """Plan, and hand in the blocks that have become cold."""
        number, evicted = self._steps.check_end()
        call = self.planner.end(sums, rows=rows)
        self._steps.ended()
        layer = self._layers[number]
        before = self._taken
        self._take_finished()
        submitted = self._schedule(number) if self._steps.decode else 0
        planned = call.plan.evicted if call.plan is not None else 0
        return SoundCall(
            layer=number,
            tokens=layer.rows.tokens,
            evicted=evicted,
            planned=planned,
            submitted=submitted,
            finished=self._taken - before,
            waiting=len(layer.waiting),
        )

    def sync(self) -> None:
        """End a step of all layers."""
        self._steps.sync()
        self.planner.sync()

    # -- what there is -------------------------------------------------------------------------------------------------

    def live(self, layer: int) -> KVPair:
        """Copies of K and V of a layer."""
        cache = self.read(layer)
        return cache.keys, cache.values

    def read(self, layer: int) -> LayerCache:
        """Copies of K and V of a layer and where its tokens stand."""
        whole(layer, "layer", 0, len(self._layers) - 1)
        self._steps.check_sound()
        rows = self._layers[layer].rows
        out = np.empty((2, self._shape[0], rows.tokens, self._shape[1]), self._dtype.numpy)
        rows.copy_to(out, self._write(layer))
        seen = max(self._steps.position, rows.positions.end)
        return LayerCache(layer=layer, keys=out[0], values=out[1], positions=rows.positions.array(), tokens_seen=seen)

    def positions(self, layer: int) -> Positions:
        """Where the tokens of a layer stand in the text."""
        whole(layer, "layer", 0, len(self._layers) - 1)
        return self._layers[layer].rows.positions.array()

    def flush(self) -> None:
        """Encode everything that is cold in the layers of the scope, and wait for it."""
        self._steps.check_between("flush")
        for number, layer in enumerate(self._layers):
            if self._scope.budget(number, 1, layer.rows.tokens, layer.rows.tokens) is None:
                continue
            layer.take_due(cold_range(self.config, layer.rows.tokens))
            while layer.next_due() is not None:
                self._submit(number)
                self._take_finished(wait=True)
        self._take_finished(wait=True)

    def wait(self) -> None:
        """Wait for the encodings that are open, and take them in."""
        self._take_finished(wait=True)

    def close(self) -> None:
        """End the threads. The cache stays readable."""
        self.wait()
        self._workers.close()

    @property
    def held_bytes(self) -> int:
        """Of all rows, frames and decoded copies that are there now."""
        return sum(layer.rows.held_bytes for layer in self._layers) + self._restorer.cache.nbytes

    def metrics(self) -> RuntimeMetrics:
        """Figures of the request so far."""
        layers = tuple(layer.figures.metrics(number, layer.rows) for number, layer in enumerate(self._layers))
        raw, compressed = sum(one.raw_bytes for one in layers), sum(one.compressed_bytes for one in layers)
        cache, planned = self._restorer.cache, self.planner.metrics
        found = ratios([one.rows for one in self._layers], [one.figures for one in self._layers], cache.nbytes)
        return RuntimeMetrics(
            h2o_lossless_raw_bytes=raw,
            h2o_lossless_compressed_bytes=compressed,
            h2o_lossless_decompressed_bytes=sum(one.decompressed_bytes for one in layers),
            h2o_lossless_compress_us=sum(one.compress_us for one in layers),
            h2o_lossless_decompress_us=sum(one.decompress_us for one in layers),
            h2o_lossless_ratio=float32_ratio(raw, compressed),
            h2o_lossless_fallback_count=sum(one.fallbacks for one in layers),
            h2o_lossless_backpressure_skip_count=sum(one.skips for one in layers),
            h2o_lossless_queue_depth_peak=self._queue_peak,
            h2o_lossless_async_queue_peak=self._jobs.peak,
            h2o_lossless_async_wait_us=self._timings.wait.total_ns // MICROSECOND,
            h2o_lossless_decode_cache_hit=cache.hits,
            h2o_lossless_decode_cache_miss=cache.misses,
            h2o_codec_us=self._last_compress_ns // MICROSECOND,
            h2o_keep_ratio=planned.h2o_keep_ratio,
            h2o_lossy_ratio=planned.h2o_lossy_ratio,
            h2o_total_evict_tokens=sum(one.figures.evicted_tokens for one in self._layers),
            lossy_ratio=found.lossy,
            lossless_ratio=found.lossless,
            total_ratio=found.total,
            held_bytes=found.held_bytes,
            compress=self._timings.compress.summary(),
            decompress=self._timings.decompress.summary(),
            wait=self._timings.wait.summary(),
            verify=self._timings.verify.summary(),
            restores_ahead=self._restorer.ahead,
            restores_late=self._restorer.late,
            layers=layers,
        )

    # -- restoring -----------------------------------------------------------------------------------------------------

    def _rows_of(self, number: int) -> RowsOf:
        """Rows of the pieces of a layer, decoded when they are asked for."""
        layer = self._layers[number]

        def rows_of(piece: Piece) -> Words:
            if piece.rows is not None:
                return piece.rows
            try:
                return self._restorer.rows(piece, layer.figures, self._timings)
            except Exception as error:
                raise layer.restore_error(number, piece, error) from error

        return rows_of

    def _write(self, number: int) -> WriteRows:
        """As `_rows_of`, into an array."""
        layer = self._layers[number]

        def write(piece: Piece, out: Words) -> None:
            if piece.rows is not None:
                out[...] = piece.rows
                return
            try:
                self._restorer.write(piece, out, layer.figures, self._timings)
            except Exception as error:
                raise layer.restore_error(number, piece, error) from error

        return write

    def _restored(self, number: int) -> RowsOf:
        """As `_rows_of`, with everything decoded now, so that nothing can fail later."""
        rows_of = self._rows_of(number)
        rows = {id(piece): rows_of(piece) for piece in self._layers[number].rows.pieces}
        return lambda piece: piece.rows if piece.rows is not None else rows[id(piece)]

    def _prefetch(self, number: int) -> None:
        count = len(self._layers)
        for step in range(1, min(self.config.prefetch_layers, count - 1) + 1):
            self._restorer.prefetch(self._layers[(number + step) % count].rows.pieces)

    def _space(self, tokens: int) -> Words:
        """The array that rows are assembled in: one for all layers."""
        if self._workspace.shape[2] < tokens:
            heads, head_dim = self._shape
            self._workspace = empty((2, heads, tokens + tokens // 8 + 64, head_dim), self._dtype.numpy)
        return self._workspace

    # -- encoding ------------------------------------------------------------------------------------------------------

    def _schedule(self, number: int) -> int:
        """Hand in what is cold; returns how many blocks."""
        layer, config, step = self._layers[number], self.config, self._steps.token_step
        tokens = layer.rows.tokens
        layer.triggered |= tokens >= config.h2o.trigger_tokens
        patient = step - (layer.last_step or 0) < MAX_PATIENCE_STEPS
        if self.planner.layers[number].pending is not None and patient:
            return 0  # blocks made now would be cut
        if not layer.triggered or self._scope.budget(number, step, tokens, tokens) is None:
            return 0
        if layer.last_step is None or step - layer.last_step >= config.h2o.interval:
            layer.take_due(cold_range(config, tokens))
            layer.last_step = step
        return self._submit(number)

    def _submit(self, number: int) -> int:
        layer, submitted = self._layers[number], 0
        self._queue_peak = max(self._queue_peak, len(layer.waiting) + len(self._jobs))
        while (piece := layer.next_due()) is not None and piece.rows is not None:
            rows = piece.rows
            if not self._jobs.has_room(rows.nbytes):
                layer.figures.skips += 1
                break
            job = Job(number, piece, self._generation)
            self._jobs.submit(job, rows.nbytes, partial(encode_and_verify, self._codec, rows))
            layer.waiting.popleft()
            piece.state = "queued"
            submitted += 1
            if not self._workers.threads:
                self._take_finished()
        return submitted

    def _take_finished(self, *, wait: bool = False) -> None:
        """Take in the encodings that are done."""
        if wait and len(self._jobs):
            with self._timings.wait.measured():
                done = self._jobs.finished(wait=True)
        else:
            done = self._jobs.finished()
        for job, future in done:
            if job.generation == self._generation and job.piece.alive:
                self._apply(job, result_of(future))
        self._taken += len(done)

    def _apply(self, job: Job, result: Encoded | None) -> None:
        layer, piece = self._layers[job.layer], job.piece
        figures, raw = layer.figures, piece.held_bytes
        settle(piece, result, keeps_rows=self.config.mode != "store")
        figures.fallbacks += result is None
        if result is None:
            if piece.state == "due":
                layer.waiting.append(piece)
            return
        self._timings.compress.add(result.compress_ns)
        self._timings.verify.add(result.verify_ns)
        self._last_compress_ns = result.compress_ns
        figures.updates += 1
        figures.compress_ns += result.compress_ns
        figures.raw_bytes += raw
        figures.compressed_bytes += result.frames.nbytes if result.frames is not None else raw


def read_only(both: Words) -> KVPair:
    """K and V of ``[2, ...]`` as views that cannot be written to."""
    keys, values = both[0], both[1]
    keys.flags.writeable = values.flags.writeable = False
    return keys, values
