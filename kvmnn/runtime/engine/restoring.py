"""Before a call: the engine writes the stored blocks of an index back into the layer that runs."""

from __future__ import annotations

import time

import numpy as np

from ...dtypes import KVPair
from ..latencies import LatencyHistogram
from .decoding import BlockDecoder
from .events import CallEvent, RestoreEvent, ScatterEvent
from .rows import EngineRowBuffer
from .state import EmulatedLayerState
from .stored_block import StoredBlock

NS_PER_US = 1000

DecodedRange = tuple[int, int, KVPair]
"""Start, count, and K and V, flat."""


def restore_blocks(
    state: EmulatedLayerState,
    rows: EngineRowBuffer,
    decoder: BlockDecoder,
    event: CallEvent,
    latencies: LatencyHistogram,
) -> None:
    """Look up or decode every stored block of `state` and write it into `rows`; the list is empty afterwards.

    What cannot be decoded is counted as a fallback and stays zero. Neighbouring chunks are joined end to end, which
    mixes up heads where there are several (docs/runtime.md).
    """
    decoder.clear_if_disabled(state)
    chunks: list[DecodedRange] = []
    for stored_block in state.blocks:
        if not stored_block.is_dropped:
            event.num_erased += 1
            continue
        chunk = _decode_block(state, stored_block, decoder, event, latencies)
        if chunk is not None:
            chunks.append(chunk)
    state.blocks = []
    for start, count, (keys, values) in _merge_adjacent(chunks):
        start_ns = time.perf_counter_ns()
        is_written = rows.scatter(start, count, keys, values)
        state.decompress_ns += max(NS_PER_US, time.perf_counter_ns() - start_ns)
        event.scatters.append(ScatterEvent(start, count, keys.nbytes + values.nbytes, is_written))
        if is_written:
            state.decompressed_bytes += keys.nbytes + values.nbytes
        else:
            state.fallbacks += 1


def _decode_block(
    state: EmulatedLayerState,
    stored_block: StoredBlock,
    decoder: BlockDecoder,
    event: CallEvent,
    latencies: LatencyHistogram,
) -> DecodedRange | None:
    start_ns = time.perf_counter_ns()
    hit_kind, pair = decoder.decode(state, stored_block)
    block = stored_block.block
    event.restores.append(
        RestoreEvent(
            stored_block.start, stored_block.count, block.raw_bytes, block.compressed_bytes, hit_kind, pair is not None
        )
    )
    if pair is None:
        state.fallbacks += 1
        return None
    elapsed = max(NS_PER_US, time.perf_counter_ns() - start_ns)
    state.decompress_ns += elapsed
    state.timings.decompress.add(elapsed)
    latencies.add(elapsed)
    return stored_block.start, stored_block.count, pair


def _merge_adjacent(chunks: list[DecodedRange]) -> list[DecodedRange]:
    ranges: list[DecodedRange] = []
    for start, count, pair in sorted(chunks, key=lambda chunk: chunk[0]):
        if ranges and ranges[-1][0] + ranges[-1][1] == start:
            first, previous_count, (keys, values) = ranges.pop()
            joined_pair = np.concatenate([keys, pair[0]]), np.concatenate([values, pair[1]])
            ranges.append((first, previous_count + count, joined_pair))
        else:
            ranges.append((start, count, pair))
    return ranges
