"""The smallest stream of every lane, searched for on all threads."""

from __future__ import annotations

import threading
from typing import NamedTuple

from ..dtypes import Bytes
from ..threads.pipeline import Progress
from ..threads.pool import map_pulled
from . import _encoder, zstd
from .fast import fast_payloads, has_fast_form
from .options import ZSTD_BIT, LaneOptions
from .pieces import stream_header
from .predictors import NAMES as PREDICTORS

_NO_LIMIT = (1 << 62) - 1
_MAX_LEVEL_22_BYTES = 16 << 20
"""Bytes of a stream; for larger ones level 22 takes more than a gigabyte of memory."""
_COSTS = {9: 5, 13: 25, 16: 80, 19: 130, 22: 130}
"""Of the high levels, in about a tenth of a second for a stream of 8 MiB: how far a candidate brings the progress."""
_LOW_SHARE = 1 / 32
"""Of the progress, for all candidates at low levels, where high levels follow."""


class Candidate(NamedTuple):
    """A stream made under one predictor at one level."""

    size: int
    mode: int
    sized: bool
    """Whether zstd's header holds the content size."""
    level: int
    stream: bytes
    """Header and payload."""

    @property
    def rank(self) -> tuple[int, int, bool, int]:
        """The least is chosen: by size, then by the order of trial."""
        return self.size, *_order(self.mode, self.sized, self.level)


def smallest_at_one_level(options: LaneOptions, data: Bytes, threads: int) -> bytes:
    """The frame of the smallest streams at the engine's level."""
    best = _Best(options, data)
    tasks = [
        (lane, mode)
        for mode in range(len(PREDICTORS))
        for lane in reversed(range(options.stride))  # the high bytes take longest: first
        if options.modes[lane] >> mode & 1
    ]
    map_pulled(lambda task: best.offer(*task, zstd.LEVEL, True), tasks, threads)
    return best.frame()


def smallest_at_all_levels(options: LaneOptions, data: Bytes, threads: int, progress: Progress | None = None) -> bytes:
    """The frame of the smallest streams: all predictors at levels 1 and 3, high levels near the best, and fast ones.

    `progress` is called behind every candidate, on its thread, by turns, with its share of the bytes of `data`.
    """
    best = _Best(options, data)
    done = _Shares(progress, data.size)
    low_share = _LOW_SHARE if options.allow & ZSTD_BIT else 1
    sizes: dict[tuple[int, int], int] = {}
    pairs = [
        (lane, mode)
        for mode in range(len(PREDICTORS))
        for lane in range(options.stride)
        if options.modes[lane] >> mode & 1
    ]

    def at_low_levels(task: tuple[int, int]) -> None:
        lane, mode = task
        best.offer(lane, mode, zstd.LEVEL, True)
        for level in (1, zstd.LEVEL):
            found = _encoder.candidate(data, options.stride, lane, mode, options.allow, level, False, _NO_LIMIT)
            assert found is not None
            size, *_ = found
            sizes[task] = min(size, sizes.get(task, _NO_LIMIT))
            best.offer(lane, mode, level, False)
        done.add(low_share / len(pairs))

    def at_a_high_level(task: tuple[int, int, int]) -> None:
        best.offer(*task, False)
        done.add((1 - low_share) * _COSTS[task[-1]] / cost)

    map_pulled(at_low_levels, pairs, threads)
    if options.allow & ZSTD_BIT:
        near = [
            (lane, mode)
            for lane, mode in pairs
            if sizes[lane, mode] <= 1.05 * min(size for (other, _), size in sizes.items() if other == lane)
        ]
        levels = [level for level in _COSTS if level < 22 or data.size // options.stride <= _MAX_LEVEL_22_BYTES]
        cost = len(near) * sum(_COSTS[level] for level in levels)
        map_pulled(at_a_high_level, [(lane, mode, level) for level in levels for lane, mode in near], threads)
    if has_fast_form(options, data.size):
        for lane, (mode, payload) in enumerate(fast_payloads(data, options, threads)):
            best.offer_payload(lane, mode, payload)
    done.finish()
    return best.frame()


class _Shares:
    """Shares of the work on some bytes, told as bytes; safe on several threads, and nothing without `progress`."""

    def __init__(self, progress: Progress | None, nbytes: int) -> None:
        self._progress = progress
        self._nbytes = nbytes
        self._share = 0.0
        self._told = 0
        self._lock = threading.Lock()

    def add(self, share: float) -> None:
        """A share, from 0 to 1, has been done."""
        with self._lock:
            self._share += share
            self._tell(min(int(self._share * self._nbytes), self._nbytes))

    def finish(self) -> None:
        """All has been done."""
        with self._lock:
            self._tell(self._nbytes)

    def _tell(self, done: int) -> None:
        if self._progress and done > self._told:
            self._progress(done - self._told)
            self._told = done


class _Best:
    """The smallest candidate of each lane so far; at equal size the earlier predictor, then the lower level."""

    def __init__(self, options: LaneOptions, data: Bytes) -> None:
        self.options = options
        self.data = data
        self.lanes: list[Candidate | None] = [None] * options.stride
        self.lock = threading.Lock()

    def offer(self, lane: int, mode: int, level: int, sized: bool) -> None:
        """Try one candidate; safe on several threads, with the same result in any order."""
        with self.lock:
            best = self.lanes[lane]
        limit = _NO_LIMIT
        if best is not None:
            wins_ties = _order(mode, sized, level) < _order(best.mode, best.sized, best.level)
            limit = best.size + 1 if wins_ties else best.size
        made = _encoder.candidate(self.data, self.options.stride, lane, mode, self.options.allow, level, sized, limit)
        if made is not None:
            size, _, _, stream = made
            found = Candidate(size, mode, sized, level, stream)
            with self.lock:
                best = self.lanes[lane]
                if best is None or found.rank < best.rank:
                    self.lanes[lane] = found

    def offer_payload(self, lane: int, mode: int, payload: bytes) -> None:
        """Try a zstd payload that was made elsewhere."""
        stream = stream_header(self.data.size // self.options.stride, mode, len(payload)) + payload
        best = self.lanes[lane]
        if best is None or len(stream) < best.size:
            self.lanes[lane] = Candidate(len(stream), mode, True, 0, stream)

    def frame(self) -> bytes:
        streams = [best.stream for best in self.lanes if best is not None]
        return b"".join([(self.data.size // self.options.stride).to_bytes(4, "little"), *streams])


def _order(mode: int, sized: bool, level: int) -> tuple[int, bool, int]:
    """When a candidate is tried: by predictor, with the content size first, then by level."""
    return mode, not sized, level
