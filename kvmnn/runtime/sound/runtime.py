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
from .codec import RowCodec
from .decoded_rows import DecodedRows
from .figures import MICROSECOND, ratios
from .forgetting import check_kept, forget_plan
from .layer import Layer
from .layer_rows import RowsOf, WriteRows
from .memory import empty, read_only
from .piece import Piece
from .report import SoundCall
from .restoring import Restore, Restorer
from .steps import Steps
from .storing import Storer
from .workers import Workers


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
        self._timings = Timings()
        self._workers = Workers(config.async_threads)
        self._codec = RowCodec(config, self._dtype, kv_heads, head_dim)
        cache = DecodedRows(config.decode_cache_blocks, config.decode_cache_bytes)
        self._restorer = Restorer(self._codec, cache, self._workers, config.max_bytes_in_flight, token_bytes)
        evicting = range(layers) if planner is not None else config.h2o.layer_range if config.h2o.enable else ()
        self._plans = len(evicting) > 0
        self._layers = [
            Layer(number, config, self._shape, self._dtype, plans=number in evicting, total=self._timings)
            for number in range(layers)
        ]
        self._storer = Storer(config, self._codec, self._workers, self._layers, self._timings.wait)
        self._workspace: Words = np.empty((2, kv_heads, 0, head_dim), self._dtype.numpy)
        self._steps = Steps(layers)

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
        self._storer.reset()
        for layer in self._layers:
            layer.clear()
        self._restorer.reset()
        self.planner.reset()
        self._workspace = self._workspace[:, :, :0].copy()
        self._steps = Steps(len(self._layers))
        self._timings.clear()

    def erase(self, begin: int, end: int = 0) -> None:
        """Drop the tokens that stand at positions ``[begin, end)`` of the text, in every layer, now."""
        self._steps.check_between("erase")
        self._storer.take_finished()
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
        self._storer.take_finished()
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
        steps, add = self._steps, keys.shape[1]
        steps.check_begin(layer, add)
        if self._storer.jobs.open:
            self._storer.take_finished()
        state = self._layers[layer]
        rows, before = state.rows, state.rows.tokens
        pending = state.plans and self.planner.layers[layer].pending is not None
        rows_of = self._restored(layer) if pending else None
        assembled = None
        if read and rows.pieces and not pending:
            assembled = self._space(before + add)
            rows.copy_to(assembled, self._write(layer))
        rows.tail.reserve(add)
        found = self.planner.begin(before, add, decode=steps.decode, layer=layer) if state.plans else None
        evicted = found.kv_before - found.kv_after if found is not None else 0
        try:
            steps.begun(layer, add, evicted)
            if found is not None and found.remove:
                start = before - found.remove
                pairs = [(0, start)] * (start > 0) + [(start + first, size) for first, size in found.reserve]
                state.swap(state.kept(pairs, rows_of or self._rows_of(layer)), pairs)
                self._restorer.cache.sweep()
                state.figures.evicted_tokens += evicted
            rows.append(keys, values, steps.position)
            state.figures.appended_bytes += keys.nbytes + values.nbytes
            if not read:
                return None
            if assembled is not None:
                assembled[0, :, before : before + add] = keys
                assembled[1, :, before : before + add] = values
            elif rows.pieces:
                assembled = self._space(rows.tokens)
                rows.copy_to(assembled, _copying(rows_of or self._rows_of(layer)))
        except BaseException as error:  # what fails there leaves the layer half done
            steps.broken(error)
            raise
        if self._workers.threads:
            self._prefetch(layer)
        return rows.tail.read() if assembled is None else read_only(assembled[:, :, : rows.tokens])

    def end(self, *, sums: Any = None, rows: Any = None) -> SoundCall:
        """Plan, and hand in the blocks that have become cold."""
        steps, storer = self._steps, self._storer
        number, evicted = steps.check_end()
        layer = self._layers[number]
        planned, pending = 0, False
        if layer.plans:
            made = self.planner.end(sums, rows=rows).plan
            planned = made.evicted if made is not None else 0
            pending = self.planner.layers[number].pending is not None
        steps.ended()
        before = storer.taken
        if storer.jobs.open:
            storer.take_finished()
        submitted = storer.schedule(number, steps.token_step, planned=pending) if steps.decode else 0
        finished = storer.taken - before
        return SoundCall(number, layer.rows.tokens, evicted, planned, submitted, finished, len(layer.waiting))

    def sync(self) -> None:
        """End a step of all layers."""
        self._steps.sync()
        if self._plans:
            self.planner.sync()

    # -- what there is -------------------------------------------------------------------------------------------------

    def live(self, layer: int) -> KVPair:
        """Copies of K and V of a layer."""
        (cache,) = self.read([layer])
        return cache.keys, cache.values

    def read(self, layers: Sequence[int]) -> list[LayerCache]:
        """Copies of K and V of layers and where their tokens stand; this call and the threads decode side by side."""
        for layer in layers:
            whole(layer, "layer", 0, len(self._layers) - 1)
        self._steps.check_sound()
        copies, restores = [], list[Restore]()
        for layer in layers:
            rows = self._layers[layer].rows
            out = np.empty((2, self._shape[0], rows.tokens, self._shape[1]), self._dtype.numpy)
            rows.copy_to(out, partial(self._copy_or_note, layer, restores))
            copies.append(out)
        for left in self._restorer.write_together(restores):
            self._write(left.layer)(left.piece, left.out)
        return [self._cache_of(layer, out) for layer, out in zip(layers, copies, strict=True)]

    def _copy_or_note(self, layer: int, restores: list[Restore], piece: Piece, out: Words) -> None:
        if piece.rows is not None:
            out[...] = piece.rows
        else:
            restores.append(Restore(layer, piece, out, self._layers[layer].figures))

    def _cache_of(self, layer: int, rows: Words) -> LayerCache:
        positions = self._layers[layer].rows.positions
        seen = max(self._steps.position, positions.end)
        return LayerCache(layer=layer, keys=rows[0], values=rows[1], positions=positions.array(), tokens_seen=seen)

    def positions(self, layer: int) -> Positions:
        """Where the tokens of a layer stand in the text."""
        whole(layer, "layer", 0, len(self._layers) - 1)
        return self._layers[layer].rows.positions.array()

    def flush(self) -> None:
        """Encode everything that is cold in the layers of the scope, and wait for it."""
        self._steps.check_between("flush")
        self._storer.flush()

    def wait(self) -> None:
        """Wait for the encodings that are open, and take them in."""
        self._storer.take_finished(wait=True)

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
            h2o_lossless_queue_depth_peak=self._storer.jobs.peak,
            h2o_lossless_async_queue_peak=self._storer.jobs.async_peak,
            h2o_lossless_async_wait_us=self._timings.wait.total_ns // MICROSECOND,
            h2o_lossless_decode_cache_hit=cache.hits,
            h2o_lossless_decode_cache_miss=cache.misses,
            h2o_codec_us=self._storer.last_compress_ns // MICROSECOND,
            h2o_keep_ratio=planned.h2o_keep_ratio,
            h2o_lossy_ratio=planned.h2o_lossy_ratio,
            h2o_total_evict_tokens=sum(one.figures.evicted_tokens for one in self._layers),
            lossy_ratio=found.lossy,
            lossless_ratio=found.lossless,
            total_ratio=found.total,
            mode=self.config.mode,
            held_bytes=found.held_bytes,
            **self._timings.summaries(),
            restores_ahead=self._restorer.ahead,
            restores_late=self._restorer.late,
            waiting_blocks_peak=self._storer.waiting_peak,
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
                return self._restorer.rows(piece, layer.figures)
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
                self._restorer.write(piece, out, layer.figures)
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


def _copying(rows_of: RowsOf) -> WriteRows:
    """Copies the rows of pieces to an array."""
    return lambda piece, out: np.copyto(out, rows_of(piece))
