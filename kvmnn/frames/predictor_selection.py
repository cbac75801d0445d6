"""The predictors of each lane that effort "balanced" takes: one, but for arrays full of repeats."""

from __future__ import annotations

from ..dtypes import Bytes
from . import _encoder, _fast_encoder, zstd
from .options import LaneOptions
from .segments import supports_fast_path

TRIAL_ELEMENTS = 1 << 18
"""From the middle of an array: predictors that samples speak for are tried on so many."""

REPETITIVE_MIN_RATIO = 4
"""What becomes so many times smaller is full of repeats, which no text shows: all predictors are tried on all of it,
where libzstd takes little time."""

_RAW_MODE_BIT = 1


def select_predictors(data: Bytes, options: LaneOptions) -> tuple[int, ...]:
    """For each lane a bit set with its predictor, or with those of which the smallest is to be taken.

    Samples tell by their entropy, which says nothing of repeats: runs and phrases are smaller without the predictor
    that makes most bytes of them zero. So where samples speak for a predictor a trial decides.
    """
    modes = _encoder.select_modes(data, options.itemsize, options.modes)
    if all(bits == _RAW_MODE_BIT for bits in modes) or not supports_fast_path(options, data.size):
        return tuple(modes)
    fast_modes, alternatives = _fast_encoder.select_modes(data, options.itemsize, options.modes)
    trial_bytes = TRIAL_ELEMENTS * options.itemsize
    begin = max(0, data.size - trial_bytes) // 2 // options.itemsize * options.itemsize
    sample = data[begin : begin + trial_bytes]
    mode_sets = [
        mode | fast_mode | alternative_modes
        for mode, fast_mode, alternative_modes in zip(modes, fast_modes, alternatives, strict=True)
    ]
    return tuple(_select_smallest(sample, options, lane, bits) for lane, bits in enumerate(mode_sets))


def _select_smallest(sample: Bytes, options: LaneOptions, lane: int, bits: int) -> int:
    """Of a bit set of predictors the one by which a lane becomes smallest, the first at equality; or all of them."""
    if is_single_predictor(bits):
        return bits
    best, min_bytes = bits, (1 << 62) - 1
    for mode in range(bits.bit_length()):
        if bits >> mode & 1:
            candidate = _encoder.encode_candidate(
                sample, options.itemsize, lane, mode, options.allowed_codecs, zstd.DEFAULT_LEVEL, True, min_bytes
            )
            if candidate is not None:
                best, min_bytes = 1 << mode, candidate[0]
    return bits if min_bytes * REPETITIVE_MIN_RATIO < sample.size // options.itemsize else best


def is_single_predictor(bits: int) -> bool:
    """Whether a bit set has one predictor."""
    return bits & (bits - 1) == 0
