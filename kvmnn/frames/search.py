"""The smallest stream of every lane, searched for on all threads."""

from __future__ import annotations

import threading
from typing import NamedTuple

from .._util.parallel import Progress, parallel_map
from ..dtypes import Bytes
from . import _encoder, zstd
from .options import ZSTD_BIT, LaneOptions
from .predictors import PREDICTORS as PREDICTORS
from .segments import encode_fast_payloads, pack_stream_header, supports_fast_path

_UNLIMITED_BYTES = (1 << 62) - 1
_MAX_LEVEL_22_BYTES = 16 << 20
"""Bytes of a stream; for larger ones level 22 takes more than a gigabyte of memory."""
_LEVEL_PROGRESS_WEIGHT = {9: 5, 13: 25, 16: 80, 19: 130, 22: 130}
"""Of the high levels, in about a tenth of a second for a stream of 8 MiB: how far a candidate brings the progress."""
_FAST_LEVELS_PROGRESS_FRACTION = 1 / 32
"""Of the progress, for all candidates at low levels, where high levels follow."""


class Candidate(NamedTuple):
    """A stream made under one predictor at one level."""

    size: int
    mode: int
    has_content_size: bool
    """Whether zstd's header holds the content size."""
    level: int
    stream: bytes
    """Header and payload."""

    @property
    def rank(self) -> tuple[int, int, bool, int]:
        """The least is chosen: by size, then by the order of trial."""
        return self.size, *_get_trial_order(self.mode, self.has_content_size, self.level)


def search_default_level(options: LaneOptions, data: Bytes, threads: int) -> bytes:
    """The frame of the smallest streams at the engine's level."""
    best = _BestCandidates(options, data)
    lane_modes = [
        (lane, mode)
        for mode in range(len(PREDICTORS))
        for lane in reversed(range(options.itemsize))  # the high bytes take longest: first
        if options.modes[lane] >> mode & 1
    ]
    parallel_map(lambda task: best.try_candidate(*task, zstd.DEFAULT_LEVEL, True), lane_modes, threads)
    return best.build_frame()


def search_all_levels(options: LaneOptions, data: Bytes, threads: int, progress: Progress | None = None) -> bytes:
    """The frame of the smallest streams: all predictors at levels 1 and 3, high levels near the best, and fast ones.

    `progress` is called behind every candidate, on its thread, by turns, with its share of the bytes of `data`.
    """
    best = _BestCandidates(options, data)
    tracker = _ProgressTracker(progress, data.size)
    low_levels_fraction = _FAST_LEVELS_PROGRESS_FRACTION if options.allowed_codecs & ZSTD_BIT else 1
    min_sizes: dict[tuple[int, int], int] = {}
    lane_modes = [
        (lane, mode)
        for mode in range(len(PREDICTORS))
        for lane in range(options.itemsize)
        if options.modes[lane] >> mode & 1
    ]

    def try_low_levels(task: tuple[int, int]) -> None:
        lane, mode = task
        best.try_candidate(lane, mode, zstd.DEFAULT_LEVEL, True)
        for level in (1, zstd.DEFAULT_LEVEL):
            candidate = _encoder.encode_candidate(
                data, options.itemsize, lane, mode, options.allowed_codecs, level, False, _UNLIMITED_BYTES
            )
            assert candidate is not None
            size, *_ = candidate
            min_sizes[task] = min(size, min_sizes.get(task, _UNLIMITED_BYTES))
            best.try_candidate(lane, mode, level, False)
        tracker.add(low_levels_fraction / len(lane_modes))

    def try_high_level(task: tuple[int, int, int]) -> None:
        best.try_candidate(*task, False)
        tracker.add((1 - low_levels_fraction) * _LEVEL_PROGRESS_WEIGHT[task[-1]] / total_weight)

    parallel_map(try_low_levels, lane_modes, threads)
    if options.allowed_codecs & ZSTD_BIT:
        close_pairs = [
            (lane, mode)
            for lane, mode in lane_modes
            if min_sizes[lane, mode]
            <= 1.05 * min(size for (sized_lane, _), size in min_sizes.items() if sized_lane == lane)
        ]
        levels = [
            level
            for level in _LEVEL_PROGRESS_WEIGHT
            if level < 22 or data.size // options.itemsize <= _MAX_LEVEL_22_BYTES
        ]
        total_weight = len(close_pairs) * sum(_LEVEL_PROGRESS_WEIGHT[level] for level in levels)
        parallel_map(try_high_level, [(lane, mode, level) for level in levels for lane, mode in close_pairs], threads)
    if supports_fast_path(options, data.size):
        for lane, (mode, payload) in enumerate(encode_fast_payloads(data, options, threads)):
            best.try_payload(lane, mode, payload)
    tracker.finish()
    return best.build_frame()


class _ProgressTracker:
    """Shares of the work on some bytes, told as bytes; safe on several threads, and nothing without `progress`."""

    def __init__(self, progress: Progress | None, nbytes: int) -> None:
        self._progress = progress
        self._nbytes = nbytes
        self._fraction = 0.0
        self._reported_bytes = 0
        self._lock = threading.Lock()

    def add(self, fraction: float) -> None:
        """A share, from 0 to 1, has been done."""
        with self._lock:
            self._fraction += fraction
            self._report(min(int(self._fraction * self._nbytes), self._nbytes))

    def finish(self) -> None:
        """All has been done."""
        with self._lock:
            self._report(self._nbytes)

    def _report(self, done_bytes: int) -> None:
        if self._progress and done_bytes > self._reported_bytes:
            self._progress(done_bytes - self._reported_bytes)
            self._reported_bytes = done_bytes


class _BestCandidates:
    """The smallest candidate of each lane so far; at equal size the earlier predictor, then the lower level."""

    def __init__(self, options: LaneOptions, data: Bytes) -> None:
        self.options = options
        self.data = data
        self.lanes: list[Candidate | None] = [None] * options.itemsize
        self.lock = threading.Lock()

    def try_candidate(self, lane: int, mode: int, level: int, has_content_size: bool) -> None:
        """Try one candidate; safe on several threads, with the same result in any order."""
        with self.lock:
            best = self.lanes[lane]
        limit = _UNLIMITED_BYTES
        if best is not None:
            wins_ties = _get_trial_order(mode, has_content_size, level) < _get_trial_order(
                best.mode, best.has_content_size, best.level
            )
            limit = best.size + 1 if wins_ties else best.size
        result = _encoder.encode_candidate(
            self.data, self.options.itemsize, lane, mode, self.options.allowed_codecs, level, has_content_size, limit
        )
        if result is not None:
            size, _, _, stream = result
            candidate = Candidate(size, mode, has_content_size, level, stream)
            with self.lock:
                best = self.lanes[lane]
                if best is None or candidate.rank < best.rank:
                    self.lanes[lane] = candidate

    def try_payload(self, lane: int, mode: int, payload: bytes) -> None:
        """Try a zstd payload that was made elsewhere."""
        stream = pack_stream_header(self.data.size // self.options.itemsize, mode, len(payload)) + payload
        best = self.lanes[lane]
        if best is None or len(stream) < best.size:
            self.lanes[lane] = Candidate(len(stream), mode, True, 0, stream)

    def build_frame(self) -> bytes:
        streams = [best.stream for best in self.lanes if best is not None]
        return b"".join([(self.data.size // self.options.itemsize).to_bytes(4, "little"), *streams])


def _get_trial_order(mode: int, has_content_size: bool, level: int) -> tuple[int, bool, int]:
    """When a candidate is tried: by predictor, with the content size first, then by level."""
    return mode, not has_content_size, level
