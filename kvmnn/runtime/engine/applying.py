"""After an encoding: the engine takes its result into the layer's state."""

from __future__ import annotations

import time

from ...frames import Block
from ..config import RuntimeConfig
from ..metrics import Timings
from .decoding import Decoder
from .events import AppliedEvent, CallEvent, DecodeEvent
from .state import LayerState
from .stored_block import StoredBlock
from .tasks import Encoded

MICROSECOND = 1000
_NOTHING = Block(None, 0, 0, 0, False, None, None, 0, 0)
"""The block of a range that was skipped."""


class Applier:
    """Appends blocks, clears rows, decodes for probe and full, and counts.

    Attributes
    ----------
    queue_peak
        Most blocks of a layer and open tasks at one time.
    last_compress_ns
        How long the last encoding took.
    """

    def __init__(self, config: RuntimeConfig, decoder: Decoder, timings: Timings) -> None:
        self._config = config
        self._decoder = decoder
        self._timings = timings
        self.queue_peak = 0
        self.last_compress_ns = 0

    @property
    def _store(self) -> bool:
        return self._config.mode == "store"

    def apply(self, state: LayerState, result: Encoded, event: CallEvent, *, watermark: int | None, open: int) -> None:
        """Take in one result.

        Parameters
        ----------
        watermark
            Where the schedule goes on, for results that move it; None for those of workers.
        open
            Tasks not finished.
        """
        due, block = result.due, result.block or _NOTHING
        skipped = result.block is None
        from_dropped = self._store and any(
            old.dropped and old.start < due.end and due.start < old.end for old in state.blocks
        )
        state.skips += skipped
        state.fallbacks += block.fallback
        state.compress_ns += result.nanoseconds
        if not skipped:
            self.last_compress_ns = result.nanoseconds
            state.timings.compress.add(result.nanoseconds)
        dropped = seeded = None
        trimmed = 0
        if block.stored:
            if state.rows is None or due.end > state.rows.capacity:
                state.fallbacks += 1
                return
            stored = StoredBlock(due.start, due.count, block, decoded=self._store, from_dropped=from_dropped)
            state.blocks.append(stored)
            if self._store:
                seeded, dropped = self._drop_rows(state, stored)
            else:
                trimmed = self._trim(state)
        if not self._store:
            self._decode_next(state, event)
        if not from_dropped:
            state.raw_bytes += block.raw_bytes
            state.compressed_bytes += block.compressed_bytes
        if watermark is not None:
            state.advance(watermark, event.token_step)
        queue = len(state.blocks) + open
        self.queue_peak = max(self.queue_peak, queue)
        event.applied.append(
            AppliedEvent(
                layer=result.index,
                start=due.start,
                count=due.count,
                raw_bytes=block.raw_bytes,
                compressed_bytes=block.compressed_bytes,
                attempted_bytes=block.attempted_bytes,
                key_bytes=len(block.key_frame or b""),
                value_bytes=len(block.value_frame or b""),
                raw_hash=block.raw_hash,
                blob_hash=block.blob_hash,
                from_dropped=from_dropped,
                counted=not from_dropped,
                fallback=block.fallback,
                skipped=skipped,
                dropped=dropped,
                seeded=seeded,
                trimmed=trimmed,
                scheduled=watermark is not None,
                queue=queue,
            )
        )

    def _drop_rows(self, state: LayerState, stored: StoredBlock) -> tuple[bool | None, bool]:
        """Keep the raw rows in the layer's cache and clear them in the layer: whether either was done."""
        assert state.rows is not None
        seeded = None
        if self._config.decode_cache_blocks:
            pair = state.rows.gather(stored.start, stored.count)
            seeded = pair is not None and pair[0].nbytes + pair[1].nbytes == stored.block.raw_bytes
            if pair is not None and seeded:
                self._decoder.seed(state, stored, pair)
        stored.dropped = state.rows.zero(stored.start, stored.count)
        state.fallbacks += not stored.dropped
        return seeded, stored.dropped

    def _trim(self, state: LayerState) -> int:
        """Forget the oldest blocks beyond the size of the cache: how many went."""
        capacity = self._config.decode_cache_blocks
        excess = max(0, len(state.blocks) - capacity) if capacity else 0
        del state.blocks[:excess]
        return excess

    def _decode_next(self, state: LayerState, event: CallEvent) -> None:
        stored = next((block for block in state.blocks if not block.decoded), None)
        if stored is not None:
            self.decode_once(state, stored, event)

    def decode_once(self, state: LayerState, stored: StoredBlock, event: CallEvent) -> None:
        """Decode a block of probe or full, to count it; nothing is written back."""
        stored.decoded = True
        began = time.perf_counter_ns()
        how, pair = self._decoder.decode(state, stored)
        if how == "miss":
            elapsed = time.perf_counter_ns() - began
            state.decompress_ns += elapsed
            state.timings.decompress.add(elapsed)
            self._timings.decompress.add(elapsed)
        raw_bytes = stored.block.raw_bytes
        event.decodes.append(DecodeEvent(stored.start, stored.count, raw_bytes, how, pair is not None))
        if pair is None:
            state.fallbacks += 1
        else:
            state.decompressed_bytes += raw_bytes
