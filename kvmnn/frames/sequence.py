"""Frames one after another: found by their headers, as nothing else says where one ends."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import numpy.typing as npt

from ..dtypes import FP16, FP32, Bytes, DType, by_name
from ..errors import FrameError, LimitError
from ..text import count
from . import _decoder
from .decoding import open_frame
from .many import decode_many
from .options import CODECS, codec_bits
from .words import raw_bytes_of

MAX_FRAMES = 1 << 20
"""Frames in a sequence; more are refused."""

_WORDS = struct.Struct("<I")
_LANE = struct.Struct("<2xII")  # mode and codec are left to the decoder


class Located(NamedTuple):
    """Where a frame of a sequence lies, and how many words it holds."""

    offset: int
    bytes: int
    words: int


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
            for frame in _walk(data, kind, codec_bits(codecs)):
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


def _walk(data: Bytes, kind: DType, allow: int) -> Iterator[Located]:
    at = 0
    while at < data.size or at == 0:
        end, words = _end(data.data, at, kind.itemsize)
        _decoder.Frame(data[at:end], kind.itemsize, allow)
        yield Located(at, end - at, words)
        at = end


def _end(data: memoryview, at: int, lanes: int) -> tuple[int, int]:
    """Where the frame at `at` ends as its headers say, or the data if they lead beyond; and its words."""
    end, size = at + _WORDS.size, len(data)
    words = _WORDS.unpack_from(data, at)[0] if end <= size else 0
    for _ in range(lanes):
        if end + _LANE.size > size:
            return size, words
        raw_len, payload_len = _LANE.unpack_from(data, end)
        if raw_len != words:
            return size, words
        end += _LANE.size + payload_len
    return min(end, size), words
