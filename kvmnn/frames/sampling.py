"""Estimates from a few words of an array: the share of zeros, and repeats over long distances."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ..dtypes import Bytes
from ._content_hashes import count_duplicates, sample_hashes

ZERO_WINDOW_ELEMENTS, NUM_ZERO_WINDOWS = 64, 64
"""Words that are looked at together, and how often."""


def estimate_zero_fraction(data: Bytes, itemsize: int) -> float:
    """The share of zeros in an array of words of `itemsize` bytes, from 0 to 1, as far as they lie together."""
    elements = data[: data.size // itemsize * itemsize].view(f"u{itemsize}")
    if elements.size < ZERO_WINDOW_ELEMENTS:
        return float(not elements.any())
    starts = np.linspace(0, elements.size - ZERO_WINDOW_ELEMENTS, NUM_ZERO_WINDOWS).astype(np.intp)
    num_nonzero = np.count_nonzero(elements[starts[:, None] + np.arange(ZERO_WINDOW_ELEMENTS)].any(axis=1))
    return 1 - num_nonzero / NUM_ZERO_WINDOWS


SAMPLE_WINDOW_ELEMENTS = 32
"""Words that are looked at in one place."""
SAMPLE_ELEMENTS_PER_SQRT = 40
"""Times the square root of the number of words, those looked at, of which one in 8 is compared (`_content_hashes`).
If all words are there twice, then 70 pairs of them are expected, ..."""
MIN_DUPLICATE_HASHES = 8
"""... and so many are enough: 6 % of the words that are copies of others, which cost as much where they are missed."""
MIN_TRIAL_DUPLICATE_HASHES = 3
"""So many are enough where longer pieces are only tried."""
ALIGNED_DISTANCE_ELEMENTS = 8
"""Words: the search of effort "fast" sees repeats whose distance is a multiple."""


class RepeatInfo(NamedTuple):
    """How words of an array are there again."""

    across_segments: bool
    """In other pieces."""
    beyond_segment: bool
    """More than half a piece away, and most of them not nearer."""
    unaligned: bool
    """At distances that are no multiples of `ALIGNED_DISTANCE_ELEMENTS`."""


NO_REPEATS = RepeatInfo(False, False, False)


class UnalignedRepeats(Exception):
    """Words are there again where the search of effort "fast" does not look."""


def detect_long_range_repeats(data: Bytes, itemsize: int, segment_bytes: int) -> RepeatInfo:
    """How words of `itemsize` bytes are there again, in an array that is made in pieces of `segment_bytes` bytes.

    What is there many times counts once.
    """
    num_elements = data.size // itemsize
    if num_elements < SAMPLE_WINDOW_ELEMENTS * SAMPLE_WINDOW_ELEMENTS:
        return NO_REPEATS
    window_starts = _draw_window_starts(num_elements)
    max_hashes = window_starts.size * SAMPLE_WINDOW_ELEMENTS // 7
    hashes, positions = np.empty(max_hashes, np.uint64), np.empty(max_hashes, np.int64)
    num_hashes = sample_hashes(data, itemsize, window_starts, SAMPLE_WINDOW_ELEMENTS, hashes, positions)
    hashes, positions = hashes[:num_hashes], positions[:num_hashes]
    if count_duplicates(hashes) < MIN_TRIAL_DUPLICATE_HASHES:
        return NO_REPEATS
    order = np.lexsort((positions, hashes))
    hashes, positions = hashes[order], positions[order]
    distances, is_duplicate = np.diff(positions), hashes[1:] == hashes[:-1]
    is_beyond = 2 * distances * itemsize > segment_bytes
    num_across, num_beyond, num_within, num_unaligned = (
        np.unique(hashes[1:][is_duplicate & condition]).size
        for condition in (
            np.diff(positions * itemsize // segment_bytes) > 0,
            is_beyond,
            ~is_beyond,
            distances % ALIGNED_DISTANCE_ELEMENTS != 0,
        )
    )
    return RepeatInfo(
        num_across >= MIN_TRIAL_DUPLICATE_HASHES,
        num_beyond >= MIN_DUPLICATE_HASHES and num_beyond > num_within,
        num_unaligned >= MIN_DUPLICATE_HASHES,
    )


@lru_cache(8)
def _draw_window_starts(num_elements: int) -> npt.NDArray[np.int64]:
    """Where windows begin: at random places, of arrays of the same size at the same ones."""
    count = SAMPLE_ELEMENTS_PER_SQRT * math.isqrt(num_elements) // SAMPLE_WINDOW_ELEMENTS
    starts = (
        np.sort(np.random.default_rng(0).integers(num_elements // SAMPLE_WINDOW_ELEMENTS, size=count))
        * SAMPLE_WINDOW_ELEMENTS
    )
    return starts[np.diff(starts, prepend=-1) > 0]
