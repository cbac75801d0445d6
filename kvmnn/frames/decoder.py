"""Decode MNN frames, accepted and rejected as by MNN's own decoder (docs/format.md); find concatenated frames."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from .._util.named_tuple import NamedTuple
from .._util.parallel import parallel_map, resolve_threads
from ..dtypes import BF16, FP16, FP32, Bytes, DType, Elements, parse_dtype
from ..errors import FrameError, KvmnnError, LimitError
from . import _decoder, tuning
from .buffers import BF16Frame, ShapedFrame, as_elements, as_raw_bytes, as_writable_rows
from .options import CODECS, to_codec_bits

_ELEMENT_COUNT = struct.Struct("<I")
_LANE_HEADER = struct.Struct("<2xII")  # mode and codec are left to the decoder


class FrameSpan(NamedTuple):
    """The position of a frame among concatenated ones, and its number of elements."""

    offset: int
    nbytes: int
    num_elements: int


def iter_frames(data: Bytes, element_type: DType, allowed_codecs: int) -> Iterator[FrameSpan]:
    """Yield the span of each concatenated frame, with a validated header; `FrameError` at the first invalid one."""
    offset = 0
    while offset < data.size or offset == 0:
        end, num_elements = _find_frame_end(data.data, offset, element_type.itemsize)
        _decoder.ParsedFrame(data[offset:end], element_type.itemsize, allowed_codecs)
        yield FrameSpan(offset, end - offset, num_elements)
        offset = end


def _find_frame_end(data: memoryview, offset: int, num_lanes: int) -> tuple[int, int]:
    """Return the end of the frame at `offset` by its headers, at most the end of the data, and its elements."""
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


def decode(
    frame: Any,
    *,
    dtype: str | None = None,
    codecs: Iterable[str] = CODECS,
    out: Any = None,
    max_bytes: int | None = None,
    threads: int | None = None,
) -> npt.NDArray[Any]:
    """Decode a frame to a 1-D array; one that `encode` returned with `keep_shape` to an array of that shape.

    Parameters
    ----------
    frame
        Bytes-like; exactly one frame.
    dtype
        Required element type. Default: the container of the frame, fp16 or fp32. bf16 is stored in the fp16 container:
        a frame that `encode` returned for bf16 decodes as bf16, one that was read from a file requires ``"bf16"``.
    codecs
        ``("rle",)`` accepts and rejects as an engine without libzstd.
    out
        A writable buffer of exactly the raw size to decode into: C-contiguous, or an array whose items along the first
        axis are (``cache[:, 128:256]`` of a ``[kv_head, token, head_dim]``). It is unchanged if the frame is rejected.
    max_bytes
        Reject a frame that claims more raw bytes, before any memory is allocated.
    threads
        Maximum number of threads; None for all processors. Frames below 1 MiB are decoded on one.

    Returns
    -------
    numpy.ndarray
        float16, uint16 (bf16) or float32; `out` itself if it is an array.

    Raises
    ------
    FrameError
        If and only if MNN's decoder rejects the frame; the message contains the stream and the reason.
    LimitError
        If the frame exceeds `max_bytes`.
    """
    if codecs is not CODECS:
        # Read twice, so not an iterator; `to_codec_bits` rejects a string.
        codecs = codecs if isinstance(codecs, str) else tuple(codecs)
    try:
        element_type, parsed_frame = open_frame(frame, dtype, codecs)
    except FrameError as error:
        raise _explain_multiple_frames(frame, dtype, codecs, error) from None
    raw_bytes = parsed_frame.num_elements * element_type.itemsize
    if max_bytes is not None and raw_bytes > max_bytes:
        raise LimitError(f"frame holds {raw_bytes} bytes: max_bytes is {max_bytes}")
    _decode_lanes(parsed_frame, threads)
    target = np.empty(parsed_frame.num_elements, element_type.numpy_dtype) if out is None else out
    if out is None and isinstance(frame, ShapedFrame):
        target = target.reshape(frame.shape)
    if isinstance(target, np.ndarray) and not target.dtype.hasobject and parsed_frame.join_contiguous(target):
        parsed_frame.close()
        return target
    rows = as_writable_rows(target, raw_bytes)
    parsed_frame.join(rows)
    parsed_frame.close()
    return target if isinstance(target, np.ndarray) else rows[0].view(element_type.numpy_dtype)


class FrameDecoder:
    """Decodes many small frames of one dtype on this thread, with little overhead for each.

    Parameters
    ----------
    dtype, codecs
        As for `decode`.
    """

    def __init__(self, dtype: str, codecs: Iterable[str] = CODECS) -> None:
        self._itemsize, self._allowed_codecs = parse_dtype(dtype).itemsize, to_codec_bits(codecs)

    def decode_into(self, frames: tuple[bytes, ...], out: Elements, frames_checksum: int | None = None) -> None:
        """Decode frame i into ``out[i]``, ``[row, token, element]``, each row of which is contiguous.

        Nothing is written unless all frames decode. `frames_checksum` is the `integrity_checksum` of all frames, each
        the seed of the next; it is compared at the end, when `out` has been written.
        """
        _decoder.decode_into(frames, self._itemsize, self._allowed_codecs, frames_checksum, out.view(np.uint8))

    def decode_verified(self, frame: Bytes | bytes, frame_checksum: int, rows_checksum: int, out: Elements) -> None:
        """Decode a frame into ``out``, ``[row, ...]``, each row of which is contiguous, and compare its checksums."""
        if not out[0].flags.c_contiguous:  # `reshape` would copy, and `out` would remain unchanged
            raise KvmnnError("out: expected rows that are each contiguous")
        rows = out.reshape(len(out), -1).view(np.uint8)
        _decoder.decode_verified(frame, self._itemsize, self._allowed_codecs, frame_checksum, rows_checksum, rows)


def verify_roundtrip(
    frame: Any, values: Any, *, dtype: str | None = None, codecs: Iterable[str] = CODECS, threads: int | None = None
) -> bool:
    """Return whether a frame decodes to exactly the elements of `values`.

    Uses as much scratch memory as `values` has bytes. `FrameError` if the frame does not decode.
    """
    element_type, data = as_elements(values, dtype)
    _, parsed_frame = open_frame(frame, element_type.name, codecs)
    if parsed_frame.num_elements * element_type.itemsize != data.size:
        return False
    _decode_lanes(parsed_frame, threads)
    is_equal = parsed_frame.equals(data)
    parsed_frame.close()
    return is_equal


def _explain_multiple_frames(frame: Any, dtype: str | None, codecs: Iterable[str], error: FrameError) -> FrameError:
    """Return the error to raise: `error`, with a hint if the bytes are several concatenated frames."""
    data = as_raw_bytes(frame, "frame")
    for element_type in (FP16, FP32) if dtype is None else (parse_dtype(dtype),):
        with suppress(FrameError):
            num_frames = sum(1 for _ in iter_frames(data, element_type, to_codec_bits(codecs)))
            if num_frames > 1:
                return FrameError(f"{error}; it is {num_frames} frames one after another, which decode_all takes")
    return error


def _decode_lanes(parsed_frame: _decoder.ParsedFrame, threads: int | None) -> None:
    is_small = parsed_frame.num_elements * parsed_frame.itemsize < tuning.MIN_PARALLEL_BYTES
    is_single = is_small if threads is None else type(threads) is int and threads == 1
    num_threads = 1 if is_single else resolve_threads(threads)
    if is_small or num_threads == 1:
        parsed_frame.decode()
    else:
        parsed_frame.reserve()
        parallel_map(parsed_frame.decode_lane, reversed(range(parsed_frame.itemsize)), num_threads)


_DENSE_MAGIC = b"KVMD"
"""The first bytes of dense streams, and of frames of 1,145,919,051 elements."""


def open_frame(frame: Any, dtype: str | None, codecs: Iterable[str]) -> tuple[DType, _decoder.ParsedFrame]:
    """Return the dtype of a frame, and the frame with validated headers and nothing decoded; errors as `decode`."""
    data = frame if isinstance(frame, bytes) else as_raw_bytes(frame, "frame")
    if dtype is None and isinstance(frame, BF16Frame | ShapedFrame):
        dtype = BF16.name if isinstance(frame, BF16Frame) else frame.dtype
    try:
        return _parse_frame(data, dtype, to_codec_bits(codecs))
    except FrameError:
        if bytes(data[:4]) == _DENSE_MAGIC:
            raise FrameError("is a dense stream, not a frame: kvmnn.dense reads it") from None
        raise


def _parse_frame(data: Bytes | bytes, dtype: str | None, allowed_codecs: int) -> tuple[DType, _decoder.ParsedFrame]:
    if dtype is None:
        parsed_frame = _decoder.ParsedFrame(data, 0, allowed_codecs)
        return (FP16 if parsed_frame.itemsize == 2 else FP32), parsed_frame
    element_type = parse_dtype(dtype)
    try:
        return element_type, _decoder.ParsedFrame(data, element_type.itemsize, allowed_codecs)
    except FrameError:
        try:
            itemsize = _decoder.ParsedFrame(data, 0, allowed_codecs).itemsize
        except FrameError:
            itemsize = element_type.itemsize
        if itemsize == element_type.itemsize:
            raise
        raise FrameError(
            f"frame has {itemsize} streams: expected the {element_type.itemsize} of {element_type.name}"
        ) from None
