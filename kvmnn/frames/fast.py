"""Frames of effort "fast": every lane as zstd frames of its own writer, one for each piece of the array."""

from __future__ import annotations

from ..dtypes import Bytes
from ..threads.pool import map_pulled
from . import _fast
from .options import ZSTD_BIT, LaneOptions
from .pieces import frame_of

PIECE_BYTES = 4 << 20
"""Raw bytes of a piece: repeats are seen inside of one, and pieces are made on different threads."""

RAW, _RAW_BIT = 0, 1
_U32_MAX = (1 << 32) - 1


def has_fast_form(options: LaneOptions, nbytes: int) -> bool:
    """Whether the options leave effort "fast" what it makes: zstd, and streams that are not predicted."""
    words, rest = divmod(nbytes, options.stride)
    allowed = options.allow & ZSTD_BIT and all(modes & _RAW_BIT for modes in options.modes)
    return bool(allowed) and 0 < words <= _U32_MAX and not rest


def encode_fast(data: Bytes, options: LaneOptions, threads: int) -> bytes:
    """The frame of little-endian words, for which `has_fast_form` holds; its bytes do not depend on `threads`."""
    lanes = [(RAW, payload) for payload in fast_payloads(data, options, threads)]
    return frame_of(data.size // options.stride, lanes, threads)


def fast_payloads(data: Bytes, options: LaneOptions, threads: int) -> list[tuple[bytes, ...]]:
    """For every lane its zstd frames, one for each piece."""
    begins = range(0, data.size, PIECE_BYTES)
    pieces = map_pulled(
        lambda begin: _fast.payloads(data[begin : begin + PIECE_BYTES], options.stride, options.search), begins, threads
    )
    return list(zip(*pieces, strict=True))
