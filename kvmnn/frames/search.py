"""The smallest stream of every lane, searched for on several threads."""

from __future__ import annotations

import threading

from .._util.named_tuple import NamedTuple
from .._util.parallel import Progress, parallel_map
from ..dtypes import Bytes
from . import _encoder, tuning, zstd
from .options import ZSTD_BIT, LaneOptions
from .segments import concat, encode_fast_lanes, list_lane_modes, pack_stream_header

_UNLIMITED_BYTES = (1 << 62) - 1


class Candidate(NamedTuple):
    """A stream under one predictor at one level."""

    size: int
    mode: int
    has_content_size: bool
    """Whether zstd's header contains the content size."""
    level: int
    stream: bytes
    """Header and payload."""

    @property
    def rank(self) -> tuple[int, int, bool, int]:
        """Return a sort key: the candidate of the lowest rank is used, the smallest, or the first tried on a tie."""
        return self.size, *_get_trial_order(self.mode, self.has_content_size, self.level)


def search_default_level(data: Bytes, options: LaneOptions, threads: int) -> bytes:
    """Return the frame of the smallest streams at the engine's level."""
    best = _BestCandidates(options, data)
    # By predictor, and the high bytes first, which take longest.
    lane_modes = sorted(list_lane_modes(options), key=lambda pair: (pair[1], -pair[0]))
    parallel_map(lambda pair: best.try_candidate(*pair, zstd.DEFAULT_LEVEL, True), lane_modes, threads)
    return best.build_frame()


def search_all_levels(data: Bytes, options: LaneOptions, threads: int, progress: Progress | None = None) -> bytes:
    """Return the frame of the smallest streams: every predictor at levels 1 and 3, high levels near the best, and fast.

    `progress` is called after every candidate, on its thread, one call at a time, with its share of the bytes of
    `data`; the shares sum to these bytes.
    """
    best = _BestCandidates(options, data)
    tracker = _ProgressTracker(progress, data.size)
    lane_modes = sorted(list_lane_modes(options), key=lambda pair: pair[1])
    levels: list[int] = []
    if options.allowed_codecs & ZSTD_BIT:
        is_short = data.size // options.itemsize <= tuning.MAX_LEVEL_22_LANE_BYTES
        levels = [level for level in tuning.HIGH_LEVEL_PROGRESS_WEIGHTS if level < 22 or is_short]
    low_levels_fraction = tuning.LOW_LEVELS_PROGRESS_FRACTION if levels else 1
    min_sizes: dict[tuple[int, int], int] = {}

    def try_low_levels(pair: tuple[int, int]) -> None:
        lane, mode = pair
        best.try_candidate(lane, mode, zstd.DEFAULT_LEVEL, True)
        for level in (1, zstd.DEFAULT_LEVEL):
            candidate = _encoder.encode_candidate(
                data, options.itemsize, lane, mode, options.allowed_codecs, level, False, _UNLIMITED_BYTES
            )
            assert candidate is not None
            min_sizes[pair] = min(candidate[0], min_sizes.get(pair, _UNLIMITED_BYTES))
            best.try_candidate(lane, mode, level, False)
        tracker.add(low_levels_fraction / len(lane_modes))

    parallel_map(try_low_levels, lane_modes, threads)
    min_lane_sizes = [
        min(size for (sized_lane, _), size in min_sizes.items() if sized_lane == lane)
        for lane in range(options.itemsize)
    ]
    trials = [
        (lane, mode, level)
        for level in levels
        for lane, mode in lane_modes
        if min_sizes[lane, mode] <= tuning.HIGH_LEVEL_TRIAL_MAX_RATIO * min_lane_sizes[lane]
    ]
    total_weight = sum(tuning.HIGH_LEVEL_PROGRESS_WEIGHTS[level] for *_, level in trials)

    def try_high_level(trial: tuple[int, int, int]) -> None:
        best.try_candidate(*trial, False)
        weight = tuning.HIGH_LEVEL_PROGRESS_WEIGHTS[trial[-1]]
        tracker.add((1 - low_levels_fraction) * weight / total_weight)

    parallel_map(try_high_level, trials, threads)
    if options.supports_fast_path(data.size):
        for lane_index, fast_lane in enumerate(encode_fast_lanes(data, options, threads)):
            best.try_payload(lane_index, fast_lane.mode, concat(fast_lane.fragments))
    tracker.finish()
    return best.build_frame()


class _ProgressTracker:
    """Reports shares of the work as bytes; thread-safe. Does nothing without `progress`."""

    def __init__(self, progress: Progress | None, nbytes: int) -> None:
        self._progress = progress
        self._nbytes = nbytes
        self._fraction = 0.0
        self._reported_bytes = 0
        self._lock = threading.Lock()

    def add(self, fraction: float) -> None:
        """Add a share of the work, from 0 to 1."""
        with self._lock:
            self._fraction += fraction
            self._report(min(int(self._fraction * self._nbytes), self._nbytes))

    def finish(self) -> None:
        """Report the rest."""
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
        """Encode a candidate and keep it if it is the best so far; thread-safe, the same result in any order."""
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
        """Keep a zstd payload if its stream is smaller than the best so far."""
        stream = pack_stream_header(self.data.size // self.options.itemsize, mode, len(payload)) + payload
        best = self.lanes[lane]
        if best is None or len(stream) < best.size:
            self.lanes[lane] = Candidate(len(stream), mode, True, 0, stream)

    def build_frame(self) -> bytes:
        streams = [best.stream for best in self.lanes if best is not None]
        return b"".join([(self.data.size // self.options.itemsize).to_bytes(4, "little"), *streams])


def _get_trial_order(mode: int, has_content_size: bool, level: int) -> tuple[int, bool, int]:
    """Return a key: by predictor, with the content size first, then by level."""
    return mode, not has_content_size, level
