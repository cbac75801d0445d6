"""Blocks on their way from rows to frames."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import cast

import numpy as np

from ...dtypes import Elements
from ...errors import KvmnnError
from ...frames import Block
from .codec import KVFrames, RowCodec
from .piece import TokenSegment

MAX_ENCODE_ATTEMPTS = 3
"""Failures after which a piece stays raw."""


@dataclass(frozen=True, eq=False)
class EncodeJob:
    """One encoding.

    Attributes
    ----------
    layer
        Whose rows.
    segment
        What the frames will stand for. In modes that only measure, a piece that no layer holds.
    generation
        The request that it belongs to; results of earlier ones are not looked at.
    """

    layer: int
    segment: TokenSegment
    generation: int


@dataclass(frozen=True, eq=False)
class SegmentEncodeResult:
    """What came of it.

    Attributes
    ----------
    frames
        Checked frames; None where they do not gain.
    compress_ns, verify_ns
        How long encoding and checking took.
    """

    block: Block
    frames: KVFrames | None
    compress_ns: int
    verify_ns: int


def encode_and_verify(codec: RowCodec, rows: Elements) -> SegmentEncodeResult:
    """Encode rows and check that the frames give them back; `KvmnnError` where they do not, or encoding fails."""
    start_ns = time.perf_counter_ns()
    rows = np.ascontiguousarray(rows)  # once; every step below would do it again for itself
    block = codec.encode(rows)
    if block.fallback:
        raise KvmnnError("the rows cannot be encoded")
    encoded_ns = time.perf_counter_ns()
    frames = codec.to_verified_frames(block, rows)
    return SegmentEncodeResult(block, frames, encoded_ns - start_ns, time.perf_counter_ns() - encoded_ns)


def get_result(future: Future[object]) -> SegmentEncodeResult | None:
    """What a job came to; None where it failed, was cancelled, or its worker ended."""
    if future.cancelled() or future.exception() is not None:
        return None
    return cast(SegmentEncodeResult, future.result())


def finalize_segment(segment: TokenSegment, result: SegmentEncodeResult | None, *, keep_rows: bool) -> None:
    """Replace the rows of a piece by its frames; leave them where that gains nothing, or failed."""
    if result is None:
        segment.attempts += 1
        segment.state = "due" if segment.attempts < MAX_ENCODE_ATTEMPTS else "settled"
    elif result.frames is None or keep_rows:
        segment.state = "settled"
    else:
        segment.frames, segment.rows, segment.state = result.frames, None, "stored"
    if segment.state == "settled" and not keep_rows:
        segment.own_rows()
