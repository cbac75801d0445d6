"""The search for the smallest stream of every lane, shared out over threads."""

from __future__ import annotations

import threading
from typing import NamedTuple

from ..dtypes import Bytes
from ..threads.pool import map_pulled
from . import _encoder, zstd
from .options import ZSTD_BIT, LaneOptions
from .predictors import NAMES as PREDICTORS

_NO_LIMIT = (1 << 62) - 1
_LEVEL_22_UP_TO = 16 << 20  # bytes of a stream; above, level 22 wants more than a gigabyte


class Candidate(NamedTuple):
    """A stream under one predictor at one level; the least is chosen: size first, then the order of trial."""

    size: int
    mode: int
    unsized: bool
    """Whether zstd's header leaves the content size out."""
    level: int
    stream: bytes
    """Header and payload."""


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
        order = (mode, not sized, level)
        limit = _NO_LIMIT if best is None else best.size + (order < best[1:4])
        made = _encoder.candidate(self.data, self.options.stride, lane, mode, self.options.allow, level, sized, limit)
        if made is not None:
            size, _, _, stream = made
            found = Candidate(size, *order, stream)
            with self.lock:
                best = self.lanes[lane]
                if best is None or found[:4] < best[:4]:
                    self.lanes[lane] = found

    def frame(self) -> bytes:
        streams = [best.stream for best in self.lanes if best is not None]
        return b"".join([(self.data.size // self.options.stride).to_bytes(4, "little"), *streams])


def smallest_at_one_level(options: LaneOptions, data: Bytes, threads: int) -> bytes:
    best = _Best(options, data)
    tasks = [
        (lane, mode)
        for mode in range(len(PREDICTORS))
        for lane in reversed(range(options.stride))  # the high bytes take longest: first
        if options.modes[lane] >> mode & 1
    ]
    map_pulled(lambda task: best.offer(*task, zstd.LEVEL, True), tasks, threads)
    return best.frame()


def smallest_at_all_levels(options: LaneOptions, data: Bytes, threads: int) -> bytes:
    """All predictors at levels 1 and 3 first, then the high levels for those that came near the best."""
    best = _Best(options, data)
    sizes: dict[tuple[int, int], int] = {}
    pairs = [
        (lane, mode)
        for mode in range(len(PREDICTORS))
        for lane in range(options.stride)
        if options.modes[lane] >> mode & 1
    ]

    def first(task: tuple[int, int]) -> None:
        lane, mode = task
        best.offer(lane, mode, zstd.LEVEL, True)
        for level in (1, zstd.LEVEL):
            found = _encoder.candidate(data, options.stride, lane, mode, options.allow, level, False, _NO_LIMIT)
            assert found is not None
            size = found[0]
            sizes[task] = min(size, sizes.get(task, _NO_LIMIT))
            best.offer(lane, mode, level, False)

    def second(task: tuple[int, int, int]) -> None:
        best.offer(*task, False)

    map_pulled(first, pairs, threads)
    if options.allow & ZSTD_BIT:
        near = [
            (lane, mode)
            for lane, mode in pairs
            if sizes[lane, mode] <= 1.05 * min(size for (other, _), size in sizes.items() if other == lane)
        ]
        levels = (9, 13, 16, 19, 22) if data.size // options.stride <= _LEVEL_22_UP_TO else (9, 13, 16, 19)
        map_pulled(second, [(lane, mode, level) for level in levels for lane, mode in near], threads)
    return best.frame()
