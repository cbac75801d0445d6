"""Estimates from a few elements of an array: the predictors to use, repeats over long distances, zeros."""

from __future__ import annotations

import math
import threading
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from .._util.named_tuple import NamedTuple
from ..dtypes import Bytes
from . import _encoder, _fast_encoder, tuning, zstd
from ._content_hashes import count_duplicates, sample_hashes
from .options import RAW_MODE_BIT, LaneOptions

# Efforts "balanced" and "fast" cut arrays. An array that repeats itself over a longer distance than a segment would
# become 2 to 39 times as large as by "exact", and so would one that repeats itself at an odd distance by "fast", whose
# search probes one position in eight. So words are chosen by content in windows at random positions, and duplicates
# among them are counted: 40 times the square root of the number of words are enough, in a hundredth of the time that
# encoding takes. Such an array is cut into longer segments, or left to libzstd. The sample is taken in parallel with
# the first segments and ends them where it finds repeats: before them it was 3 % of the time of two threads.
#
# Zeros say nothing about the rest: a cache that is partly empty is to be encoded like a full one. Samples leave zeros
# out; with them lanes seem cheap, and predictors and libzstd are tried on everything, 3 to 7 times the time.


def estimate_zero_fraction(data: Bytes, itemsize: int) -> float:
    """Estimate the fraction of elements that are zero, from 0 to 1; scattered zeros do not count."""
    window = tuning.ZERO_WINDOW_ELEMENTS
    elements = data[: data.size // itemsize * itemsize].view(f"u{itemsize}")
    if elements.size < window:
        return float(not elements.any())
    starts = np.linspace(0, elements.size - window, tuning.NUM_ZERO_WINDOWS).astype(np.intp)
    num_nonzero = np.count_nonzero(elements[starts[:, None] + np.arange(window)].any(axis=1))
    return 1 - num_nonzero / tuning.NUM_ZERO_WINDOWS


# -- predictors -------------------------------------------------------------------------------------------------------


def select_predictors(data: Bytes, options: LaneOptions) -> tuple[int, ...]:
    """Return a bit set for each lane: one predictor, or those of which the encoder has to keep the smallest result.

    The entropy of samples does not show repeats: runs and phrases are smaller without the predictor that turns most
    bytes of them into zeros. So if samples favor a predictor, a trial decides.
    """
    if all(map(_is_single_predictor, options.modes)):
        return options.modes
    modes = _encoder.select_modes(data, options.itemsize, options.modes)
    if all(bits == RAW_MODE_BIT for bits in modes) or not options.supports_fast_path(data.size):
        return tuple(modes)
    fast_modes, alternatives = _fast_encoder.select_modes(data, options.itemsize, options.modes)
    trial_bytes = tuning.PREDICTOR_TRIAL_ELEMENTS * options.itemsize
    begin = max(0, data.size - trial_bytes) // 2 // options.itemsize * options.itemsize
    sample = data[begin : begin + trial_bytes]
    return tuple(
        _select_smallest(sample, options, lane, mode | fast_mode | alternative_modes)
        for lane, (mode, fast_mode, alternative_modes) in enumerate(zip(modes, fast_modes, alternatives, strict=True))
    )


def _select_smallest(sample: Bytes, options: LaneOptions, lane: int, bits: int) -> int:
    """Return the first predictor of a bit set with the smallest lane; all of them if the lane is full of repeats."""
    if _is_single_predictor(bits):
        return bits
    best, min_bytes = bits, (1 << 62) - 1
    for mode in range(bits.bit_length()):
        if bits >> mode & 1:
            candidate = _encoder.encode_candidate(
                sample, options.itemsize, lane, mode, options.allowed_codecs, zstd.DEFAULT_LEVEL, True, min_bytes
            )
            if candidate is not None:
                best, min_bytes = 1 << mode, candidate[0]
    return bits if min_bytes * tuning.REPETITIVE_MIN_RATIO < sample.size // options.itemsize else best


def _is_single_predictor(bits: int) -> bool:
    return bits & (bits - 1) == 0


# -- repeats ----------------------------------------------------------------------------------------------------------


class RepeatInfo(NamedTuple):
    """Distances at which elements repeat, in an array that is encoded in segments."""

    across_segments: bool
    """In other segments."""
    beyond_segment: bool
    """More than half a segment away, and most of them not nearer."""
    unaligned: bool
    """At distances that are not multiples of `tuning.MATCH_POSITION_STRIDE_ELEMENTS`."""


_NO_REPEATS = RepeatInfo(False, False, False)


def detect_long_range_repeats(data: Bytes, itemsize: int, segment_bytes: int) -> RepeatInfo:
    """Detect at which distances elements repeat, for an array encoded in segments of `segment_bytes`.

    An element that occurs many times counts once.
    """
    num_elements = data.size // itemsize
    window = tuning.SAMPLE_WINDOW_ELEMENTS
    if num_elements < window * window:
        return _NO_REPEATS
    window_starts = _draw_window_starts(num_elements)
    max_hashes = window_starts.size * window // 7
    hashes, positions = np.empty(max_hashes, np.uint64), np.empty(max_hashes, np.int64)
    num_hashes = sample_hashes(data, itemsize, window_starts, window, hashes, positions)
    hashes, positions = hashes[:num_hashes], positions[:num_hashes]
    if count_duplicates(hashes) < tuning.MIN_TRIAL_DUPLICATE_HASHES:
        return _NO_REPEATS
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
            distances % tuning.MATCH_POSITION_STRIDE_ELEMENTS != 0,
        )
    )
    return RepeatInfo(
        num_across >= tuning.MIN_TRIAL_DUPLICATE_HASHES,
        num_beyond >= tuning.MIN_DUPLICATE_HASHES and num_beyond > num_within,
        num_unaligned >= tuning.MIN_DUPLICATE_HASHES,
    )


def check_repeats(
    data: Bytes,
    itemsize: int,
    visible_bytes: int,
    allow_unaligned: bool,
    results: list[RepeatInfo],
    stop: threading.Event,
) -> None:
    """Detect repeats while other jobs encode the first segments; set `stop` if such segments are unsuitable."""
    repeats = detect_long_range_repeats(data, itemsize, visible_bytes)
    results.append(repeats)
    if repeats.beyond_segment or (repeats.unaligned and not allow_unaligned):
        stop.set()


@lru_cache(8)
def _draw_window_starts(num_elements: int) -> npt.NDArray[np.int64]:
    """Return random starts of windows, sorted; the same for every array of that size."""
    window = tuning.SAMPLE_WINDOW_ELEMENTS
    count = tuning.SAMPLE_ELEMENTS_PER_SQRT * math.isqrt(num_elements) // window
    starts = np.sort(np.random.default_rng(0).integers(num_elements // window, size=count)) * window
    return starts[np.diff(starts, prepend=-1) > 0]
