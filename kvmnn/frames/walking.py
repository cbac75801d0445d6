"""Frames one after another, found by their headers: nothing else says where one ends."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ..dtypes import Bytes, DType
from . import _decoder

_WORDS = struct.Struct("<I")
_LANE = struct.Struct("<2xII")  # mode and codec are left to the decoder


class Located(NamedTuple):
    """Where a frame of a sequence lies, and how many words it holds."""

    offset: int
    bytes: int
    words: int


def walk(data: Bytes, kind: DType, allow: int) -> Iterator[Located]:
    """The frames in `data`, their headers checked; `FrameError` for the first that is none."""
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
