"""The predictors of each lane that effort "balanced" takes: one, but for arrays full of repeats."""

from __future__ import annotations

from ..dtypes import Bytes
from . import _encoder, _fast, zstd
from .fast import has_fast_form
from .options import LaneOptions

TRIED_WORDS = 1 << 18
"""From the middle of an array: predictors that samples speak for are tried on so many."""

MUCH = 4
"""What becomes so many times smaller is full of repeats, which no text shows: all predictors are tried on all of it,
where libzstd takes little time."""

_RAW_BIT = 1


def likely_modes(data: Bytes, options: LaneOptions) -> tuple[int, ...]:
    """For each lane a bit set with its predictor, or with those of which the smallest is to be taken.

    Samples tell by their entropy, which says nothing of repeats: runs and phrases are smaller without the predictor
    that makes most bytes of them zero. So where samples speak for a predictor a trial decides.
    """
    modes = _encoder.likely_modes(data, options.stride, options.modes)
    if all(bits == _RAW_BIT for bits in modes) or not has_fast_form(options, data.size):
        return tuple(modes)
    found, rivals = _fast.likely_modes(data, options.stride, options.modes)
    size = TRIED_WORDS * options.stride
    begin = max(0, data.size - size) // 2 // options.stride * options.stride
    text = data[begin : begin + size]
    sets = [mode | one | others for mode, one, others in zip(modes, found, rivals, strict=True)]
    return tuple(_smallest(text, options, lane, bits) for lane, bits in enumerate(sets))


def _smallest(text: Bytes, options: LaneOptions, lane: int, bits: int) -> int:
    """Of a bit set of predictors the one by which a lane becomes smallest, the first at equality; or all of them."""
    if is_one(bits):
        return bits
    best, limit = bits, (1 << 62) - 1
    for mode in range(bits.bit_length()):
        if bits >> mode & 1:
            made = _encoder.candidate(text, options.stride, lane, mode, options.allow, zstd.LEVEL, True, limit)
            if made is not None:
                best, limit = 1 << mode, made[0]
    return bits if limit * MUCH < text.size // options.stride else best


def is_one(bits: int) -> bool:
    """Whether a bit set has one predictor."""
    return bits & (bits - 1) == 0
