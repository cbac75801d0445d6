"""Frames one after another: found by their headers, as nothing else says where one ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

from ..dtypes import FP16, FP32, Bytes, DType, by_name
from ..errors import FrameError, LimitError
from ..text import count
from .decoding import open_frame
from .many import decode_many
from .options import CODECS, codec_bits
from .walking import Located, walk
from .words import raw_bytes_of

MAX_FRAMES = 1 << 20
"""Frames in a sequence; more are refused."""


def decode_all(
    data: Any,
    *,
    dtype: str | None = None,
    codecs: Iterable[str] = CODECS,
    max_bytes: int | None = None,
    threads: int | None = None,
) -> list[npt.NDArray[Any]]:
    """Decode frames that lie one after another, such as a frame file of an array that was cut.

    Parameters
    ----------
    data
        Bytes-like: one frame or more of one container, and nothing else.
    dtype, codecs, threads
        As for `decode`.
    max_bytes
        Refuse frames that claim to hold more raw bytes together, before any memory is taken.

    Returns
    -------
    list of numpy.ndarray
        The words of each frame, 1-D; names and shapes are unknown. Of an array that was cut, joined they are its words
        in memory order.

    Raises
    ------
    FrameError
        Where MNN's decoder rejects a frame, and for bytes that are no frame.
    LimitError
        Above `max_bytes`, and for more than 2**20 frames.
    """
    codecs = tuple(codecs)
    view = raw_bytes_of(data, "data")
    kind, found = split(view, dtype=dtype, codecs=codecs)
    raw_bytes = sum(frame.words for frame in found) * kind.itemsize
    if max_bytes is not None and raw_bytes > max_bytes:
        raise LimitError(f"{len(found)} frames hold {raw_bytes} bytes: max_bytes is {max_bytes}")
    pieces = [view[frame.offset : frame.offset + frame.bytes] for frame in found]
    return decode_many(pieces, dtype=kind.name, codecs=codecs, threads=threads)


def split(data: Bytes, *, dtype: str | None, codecs: Iterable[str]) -> tuple[DType, list[Located]]:
    """The frames of a sequence, their headers checked; errors as `decode_all`."""
    codecs = tuple(codecs)
    furthest, wrong = 0, FrameError("")
    for kind in (FP16, FP32) if dtype is None else (by_name(dtype),):
        found: list[Located] = []
        try:
            for frame in walk(data, kind, codec_bits(codecs)):
                found.append(frame)
                if len(found) > MAX_FRAMES:
                    raise LimitError(f"more than {MAX_FRAMES:,} frames one after another")
            return kind, found
        except FrameError as error:
            if len(found) > furthest:
                furthest, end = len(found), found[-1].offset + found[-1].bytes
                wrong = FrameError(f"after {count(furthest, f'whole {kind.name} frame')}, at offset {end}: {error}")
    if not furthest or (furthest == 1 and dtype is None):  # the first half of an FP32 frame looks like one, too
        open_frame(data, dtype, codecs)  # says what is wrong with the one frame that this should be
    raise wrong
