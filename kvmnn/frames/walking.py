"""Frames one after another, found by their headers: nothing else says where one ends."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ..dtypes import Bytes, DType
from . import _decoder

_ELEMENT_COUNT = struct.Struct("<I")
_LANE_HEADER = struct.Struct("<2xII")  # mode and codec are left to the decoder


class FrameSpan(NamedTuple):
    """Where a frame of a sequence lies, and how many words it holds."""

    offset: int
    nbytes: int
    num_elements: int


def iter_frames(data: Bytes, element_type: DType, allowed_codecs: int) -> Iterator[FrameSpan]:
    """The frames in `data`, their headers checked; `FrameError` for the first that is none."""
    offset = 0
    while offset < data.size or offset == 0:
        end, num_elements = _find_frame_end(data.data, offset, element_type.itemsize)
        _decoder.ParsedFrame(data[offset:end], element_type.itemsize, allowed_codecs)
        yield FrameSpan(offset, end - offset, num_elements)
        offset = end


def _find_frame_end(data: memoryview, offset: int, num_lanes: int) -> tuple[int, int]:
    """Where the frame at `offset` ends as its headers say, or the data if they lead beyond; and its words."""
    end, size = offset + _ELEMENT_COUNT.size, len(data)
    num_elements = _ELEMENT_COUNT.unpack_from(data, offset)[0] if end <= size else 0
    for _ in range(num_lanes):
        if end + _LANE_HEADER.size > size:
            return size, num_elements
        raw_len, payload_len = _LANE_HEADER.unpack_from(data, end)
        if raw_len != num_elements:
            return size, num_elements
        end += _LANE_HEADER.size + payload_len
    return min(end, size), num_elements
