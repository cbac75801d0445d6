"""Before a call: the engine writes the stored blocks of an index back into the layer that runs."""

from __future__ import annotations

import time

import numpy as np

from ...dtypes import KVPair
from ..latencies import Latencies
from .decoding import Decoder
from .events import CallEvent, RestoreEvent, ScatterEvent
from .rows import Rows
from .state import LayerState
from .stored_block import StoredBlock

MICROSECOND = 1000

Chunk = tuple[int, int, KVPair]
"""Start, count, and K and V, flat."""


def restore(state: LayerState, rows: Rows, decoder: Decoder, event: CallEvent, times: Latencies) -> None:
    """Look up or decode every stored block of `state` and write it into `rows`; the list is empty afterwards.

    What cannot be decoded is counted as a fallback and stays zero. Neighbouring chunks are joined end to end, which
    mixes up heads where there are several (docs/runtime.md).
    """
    decoder.clear_if_off(state)
    chunks: list[Chunk] = []
    for stored in state.blocks:
        if not stored.dropped:
            event.erased += 1
            continue
        chunk = _decoded(state, stored, decoder, event, times)
        if chunk is not None:
            chunks.append(chunk)
    state.blocks = []
    for start, count, (keys, values) in _merged(chunks):
        began = time.perf_counter_ns()
        ok = rows.scatter(start, count, keys, values)
        state.decompress_ns += max(MICROSECOND, time.perf_counter_ns() - began)
        event.scatters.append(ScatterEvent(start, count, keys.nbytes + values.nbytes, ok))
        if ok:
            state.decompressed_bytes += keys.nbytes + values.nbytes
        else:
            state.fallbacks += 1


def _decoded(
    state: LayerState, stored: StoredBlock, decoder: Decoder, event: CallEvent, times: Latencies
) -> Chunk | None:
    began = time.perf_counter_ns()
    how, pair = decoder.decode(state, stored)
    block = stored.block
    event.restores.append(
        RestoreEvent(stored.start, stored.count, block.raw_bytes, block.compressed_bytes, how, pair is not None)
    )
    if pair is None:
        state.fallbacks += 1
        return None
    elapsed = max(MICROSECOND, time.perf_counter_ns() - began)
    state.decompress_ns += elapsed
    state.timings.decompress.add(elapsed)
    times.add(elapsed)
    return stored.start, stored.count, pair


def _merged(chunks: list[Chunk]) -> list[Chunk]:
    merged: list[Chunk] = []
    for start, count, pair in sorted(chunks, key=lambda chunk: chunk[0]):
        if merged and merged[-1][0] + merged[-1][1] == start:
            first, before, (keys, values) = merged.pop()
            joined = np.concatenate([keys, pair[0]]), np.concatenate([values, pair[1]])
            merged.append((first, before + count, joined))
        else:
            merged.append((start, count, pair))
    return merged
