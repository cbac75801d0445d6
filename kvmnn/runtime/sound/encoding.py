"""Blocks on their way from rows to frames."""

from __future__ import annotations

import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import cast

import numpy as np

from ...dtypes import Words
from ...errors import KvmnnError
from ...frames import Block
from .codec import Frames, RowCodec
from .piece import Piece

MAX_ATTEMPTS = 3
"""Failures after which a piece stays raw."""


@dataclass(frozen=True, eq=False)
class Job:
    """One encoding.

    Attributes
    ----------
    layer
        Whose rows.
    piece
        What the frames will stand for. In modes that only measure, a piece that no layer holds.
    generation
        The request that it belongs to; results of earlier ones are not looked at.
    """

    layer: int
    piece: Piece
    generation: int


@dataclass(frozen=True, eq=False)
class Encoded:
    """What came of it.

    Attributes
    ----------
    frames
        Checked frames; None where they do not gain.
    compress_ns, verify_ns
        How long encoding and checking took.
    """

    block: Block
    frames: Frames | None
    compress_ns: int
    verify_ns: int


def encode_and_verify(codec: RowCodec, rows: Words) -> Encoded:
    """Encode rows and check that the frames give them back; `KvmnnError` where they do not, or encoding fails."""
    began = time.perf_counter_ns()
    rows = np.ascontiguousarray(rows)  # once; every step below would do it again for itself
    block = codec.encode(rows)
    if block.fallback:
        raise KvmnnError("the rows cannot be encoded")
    encoded = time.perf_counter_ns()
    frames = codec.verified(block, rows)
    return Encoded(block, frames, encoded - began, time.perf_counter_ns() - encoded)


def result_of(future: Future[object]) -> Encoded | None:
    """What a job came to; None where it failed, was cancelled, or its worker ended."""
    if future.cancelled() or future.exception() is not None:
        return None
    return cast(Encoded, future.result())


def settle(piece: Piece, result: Encoded | None, *, keeps_rows: bool) -> None:
    """Replace the rows of a piece by its frames; leave them where that gains nothing, or failed."""
    if result is None:
        piece.attempts += 1
        piece.state = "due" if piece.attempts < MAX_ATTEMPTS else "settled"
    elif result.frames is None or keeps_rows:
        piece.state = "settled"
    else:
        piece.frames, piece.rows, piece.state = result.frames, None, "stored"
    if piece.state == "settled" and not keeps_rows:
        piece.own_rows()
