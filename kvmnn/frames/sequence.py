"""Frames one after another: found by their headers, as nothing else says where one ends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy.typing as npt

from ..dtypes import FP16, FP32, Bytes, DType, parse_dtype
from ..errors import FrameError, LimitError
from ..text import pluralize
from .decoding import open_frame
from .many import decode_many
from .options import CODECS, to_codec_bits
from .walking import FrameSpan, iter_frames
from .words import as_raw_bytes

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
    view = as_raw_bytes(data, "data")
    element_type, spans = split_frames(view, dtype=dtype, codecs=codecs)
    raw_bytes = sum(span.num_elements for span in spans) * element_type.itemsize
    if max_bytes is not None and raw_bytes > max_bytes:
        raise LimitError(f"{len(spans)} frames hold {raw_bytes} bytes: max_bytes is {max_bytes}")
    frame_views = [view[span.offset : span.offset + span.nbytes] for span in spans]
    return decode_many(frame_views, dtype=element_type.name, codecs=codecs, threads=threads)


def split_frames(data: Bytes, *, dtype: str | None, codecs: Iterable[str]) -> tuple[DType, list[FrameSpan]]:
    """The frames of a sequence, their headers checked; errors as `decode_all`."""
    codecs = tuple(codecs)
    best_count, best_error = 0, FrameError("")
    for element_type in (FP16, FP32) if dtype is None else (parse_dtype(dtype),):
        spans: list[FrameSpan] = []
        try:
            for span in iter_frames(data, element_type, to_codec_bits(codecs)):
                spans.append(span)
                if len(spans) > MAX_FRAMES:
                    raise LimitError(f"more than {MAX_FRAMES:,} frames one after another")
            return element_type, spans
        except FrameError as error:
            if len(spans) > best_count:
                best_count, end = len(spans), spans[-1].offset + spans[-1].nbytes
                best_error = FrameError(
                    f"after {pluralize(best_count, f'whole {element_type.name} frame')}, at offset {end}: {error}"
                )
    if not best_count or (best_count == 1 and dtype is None):  # the first half of an FP32 frame looks like one, too
        open_frame(data, dtype, codecs)  # says what is wrong with the one frame that this should be
    raise best_error
