"""Restore stored rows: from the cache of decoded rows, from a thread that prefetched them, or by decoding now."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import field
from functools import partial

from ..._util.dataclass import dataclass
from ...dtypes import Elements
from ...errors import KvmnnError
from ..metrics import OperationLatencies, RuntimeLayerMetrics
from .codec import KVFrames, SegmentCodec
from .layer_storage import LayerStorage, TokenSegment
from .workers import WorkerPool

NS_PER_US = 1000


@dataclass
class RuntimeLayerCounters:
    """Counters of one layer since the request began."""

    raw_bytes: int = 0
    compressed_bytes: int = 0
    decompressed_bytes: int = 0
    updates: int = 0
    fallbacks: int = 0
    num_backpressure_skips: int = 0
    appended_bytes: int = 0
    evicted_tokens: int = 0
    timings: OperationLatencies = field(default_factory=OperationLatencies)

    def to_metrics(self, layer: int, rows: LayerStorage) -> RuntimeLayerMetrics:
        """Combine these counters and the current contents of the layer to its public metrics."""
        stored_segments = [segment for segment in rows.segments if segment.state == "stored"]
        token_bytes = rows.raw_bytes // rows.tokens if rows.tokens else 0
        return RuntimeLayerMetrics(
            layer=layer,
            tokens=rows.tokens,
            raw_bytes=self.raw_bytes,
            compressed_bytes=self.compressed_bytes,
            decompressed_bytes=self.decompressed_bytes,
            compress_us=self.timings.compress.total_ns // NS_PER_US,
            decompress_us=self.timings.decompress.total_ns // NS_PER_US,
            updates=self.updates,
            fallbacks=self.fallbacks,
            num_backpressure_skips=self.num_backpressure_skips,
            blocks=len(stored_segments),
            stored_raw_bytes=sum(segment.count for segment in stored_segments) * token_bytes,
            stored_bytes=sum(segment.resident_bytes for segment in stored_segments),
            held_bytes=rows.resident_bytes,
            **self.timings.summarize(),
        )


class DecodedRowCache:
    """A cache of decoded rows of stored segments.

    Every call of a layer reads all of its segments in order. An LRU cache would drop each segment just before it is
    read; this one keeps its entries and adds new ones while there is capacity.
    """

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._entries: dict[int, tuple[TokenSegment, Elements]] = {}
        self._max_entries, self._max_bytes = max_entries, max_bytes
        self.hits = self.misses = self.nbytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, segment: TokenSegment) -> Elements | None:
        """Return the cached rows of a segment, or None."""
        entry = self._entries.get(id(segment))
        if entry is None:
            self.misses += 1
            return None
        self.hits += 1
        return entry[1]

    def contains(self, segment: TokenSegment) -> bool:
        """Return whether the rows of a segment are cached."""
        return id(segment) in self._entries

    def insert(self, segment: TokenSegment, rows: Elements) -> None:
        """Cache the rows of a segment if there is capacity after dead segments are removed."""
        if id(segment) in self._entries or not self.has_capacity(rows.nbytes):
            return
        self._entries[id(segment)] = segment, rows
        self.nbytes += rows.nbytes

    def remove_dead(self) -> None:
        """Remove segments without live tokens."""
        self._entries = {key: entry for key, entry in self._entries.items() if entry[0].is_alive}
        self.nbytes = sum(rows.nbytes for _, rows in self._entries.values())

    def has_capacity(self, nbytes: int) -> bool:
        """Return whether rows of `nbytes` would fit in the cache."""
        if nbytes > self._max_bytes or not self._max_entries:
            return False
        if self._is_full(nbytes):
            self.remove_dead()
        return not self._is_full(nbytes)

    def _is_full(self, nbytes: int) -> bool:
        return len(self._entries) >= self._max_entries or self.nbytes + nbytes > self._max_bytes


PREFETCH_BATCH_SEGMENTS = 8
"""Decoded ahead by one job: handing over a job costs as much as decoding a small piece."""


@dataclass(frozen=True, eq=False)
class RestoreRequest:
    """A request to write the rows of a layer's stored segment to a destination."""

    layer: int
    segment: TokenSegment
    out: Elements
    counters: RuntimeLayerCounters


class Restorer:
    """Decodes segments, each once while the cache has capacity.

    `prefetch_hits` counts the restores that a thread had finished before they were needed, `prefetch_misses` those that
    were awaited.
    """

    def __init__(
        self, codec: SegmentCodec, cache: DecodedRowCache, workers: WorkerPool, max_bytes: int, token_bytes: int
    ) -> None:
        self.codec = codec
        self.cache = cache
        self.prefetch_hits = self.prefetch_misses = 0
        self._workers = workers
        self._max_bytes, self._token_bytes = max_bytes, token_bytes
        self._prefetches: dict[int, tuple[TokenSegment, Future[dict[int, Elements]]]] = {}

    def read_rows(self, segment: TokenSegment, counters: RuntimeLayerCounters) -> Elements:
        """Return the rows of a stored segment; errors of the decoder are raised."""
        cached_rows = self.cache.find(segment)
        if cached_rows is not None:
            return cached_rows
        start_ns = time.perf_counter_ns()
        rows = self._take_prefetched(segment, counters)
        if rows is None:
            rows = self.codec.decode(_require_frames(segment), segment.count)
        self.cache.insert(segment, rows)
        self._count_decode(time.perf_counter_ns() - start_ns, rows.nbytes, counters)
        return rows

    def write_rows(self, segment: TokenSegment, out: Elements, counters: RuntimeLayerCounters) -> None:
        """Write the rows of a stored segment to `out`; raise the errors of `read_rows`.

        Rows that do not fit into the cache are decoded directly into `out`.
        """
        if self._can_cache(segment, out):
            out[...] = self.read_rows(segment, counters)
            return
        self.cache.misses += 1
        start_ns = time.perf_counter_ns()
        self.codec.decode_into(_require_frames(segment), out)
        self._count_decode(time.perf_counter_ns() - start_ns, out.nbytes, counters)

    def _can_cache(self, segment: TokenSegment, out: Elements) -> bool:
        """Return whether the rows are in the cache, will be soon, or fit into it."""
        return self.cache.contains(segment) or id(segment) in self._prefetches or self.cache.has_capacity(out.nbytes)

    def write_parallel(self, requests: Sequence[RestoreRequest]) -> list[RestoreRequest]:
        """Write rows to their `out` on this thread and the pool; return the requests left for `write_rows`.

        These are segments that are or will be in the cache or fit into it, and those whose decoding failed.
        """
        remaining: list[RestoreRequest] = []
        direct: deque[RestoreRequest] = deque()
        for request in requests:
            is_direct = self._workers.threads and not self._can_cache(request.segment, request.out)
            (direct if is_direct else remaining).append(request)
        direct_requests = list(direct)
        helpers = [self._workers.submit(partial(self._write_queued, direct)) for _ in range(self._workers.threads)]
        elapsed_by_id = self._write_queued(direct)
        for helper in helpers:
            if not helper.cancel() and helper.exception() is None:
                elapsed_by_id |= helper.result()
        for request in direct_requests:
            if id(request) in elapsed_by_id:
                self.cache.misses += 1
                self._count_decode(elapsed_by_id[id(request)], request.out.nbytes, request.counters)
            else:
                remaining.append(request)
        return remaining

    def _write_queued(self, queue: deque[RestoreRequest]) -> dict[int, int]:
        """Decode the queued segments; return the nanoseconds by request, without failed ones."""
        elapsed_by_id = {}
        while queue:
            try:
                request = queue.popleft()
            except IndexError:  # another thread took the last one
                break
            start_ns = time.perf_counter_ns()
            with suppress(Exception):
                self.codec.decode_into(_require_frames(request.segment), request.out)
                elapsed_by_id[id(request)] = time.perf_counter_ns() - start_ns
        return elapsed_by_id

    def prefetch(self, segments: Iterable[TokenSegment]) -> None:
        """Let threads decode segments that will be needed soon, up to the byte limit."""
        if not self._workers.threads:
            return
        self._prefetches = {key: entry for key, entry in self._prefetches.items() if entry[0].is_alive}
        num_open = sum(segment.count for segment, _ in self._prefetches.values())
        remaining_bytes = self._max_bytes - num_open * self._token_bytes
        batch_segments = []
        for segment in segments:
            is_available = segment.rows is not None or id(segment) in self._prefetches or self.cache.contains(segment)
            if segment.frames is None or is_available:
                continue
            remaining_bytes -= segment.count * self._token_bytes
            if remaining_bytes < 0:
                break
            batch_segments.append(segment)
        for begin in range(0, len(batch_segments), PREFETCH_BATCH_SEGMENTS):
            batch = batch_segments[begin : begin + PREFETCH_BATCH_SEGMENTS]
            future = self._workers.submit(
                partial(self._decode_segments, [(segment, _require_frames(segment)) for segment in batch])
            )
            self._prefetches |= {id(segment): (segment, future) for segment in batch}

    def reset(self) -> None:
        """Drop all decoded rows and counts."""
        self.prefetch_hits = self.prefetch_misses = self.cache.hits = self.cache.misses = 0
        for _, future in self._prefetches.values():
            future.cancel()
        self._prefetches.clear()
        self.cache.remove_dead()

    def _decode_segments(self, segment_frames: Sequence[tuple[TokenSegment, KVFrames]]) -> dict[int, Elements]:
        return {id(segment): self.codec.decode(frames, segment.count) for segment, frames in segment_frames}

    def _take_prefetched(self, segment: TokenSegment, counters: RuntimeLayerCounters) -> Elements | None:
        """Return the rows that a thread decoded; None if it has not started or failed, and the caller must decode."""
        entry = self._prefetches.pop(id(segment), None)
        if entry is None or entry[1].cancel():
            return None
        future = entry[1]
        if future.done():
            self.prefetch_hits += 1
        else:
            self.prefetch_misses += 1
            start_ns = time.perf_counter_ns()
            future.exception()
            counters.timings.wait.add(time.perf_counter_ns() - start_ns)
        return None if future.exception() is not None else future.result()[id(segment)]

    @staticmethod
    def _count_decode(nanoseconds: int, nbytes: int, counters: RuntimeLayerCounters) -> None:
        counters.timings.decompress.add(nanoseconds)
        counters.decompressed_bytes += nbytes


def _require_frames(segment: TokenSegment) -> KVFrames:
    if segment.frames is None:
        raise KvmnnError("it has neither rows nor frames")
    return segment.frames


def describe_error(error: Exception) -> str:
    """Describe an error by its message, preceded by its type unless it is one of kvmnn's."""
    return str(error) if isinstance(error, KvmnnError) else f"{type(error).__name__}: {error}"
