"""Arrays from MNN frames, under the verdicts of MNN's own decoder (docs/format.md)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import numpy.typing as npt

from ..dtypes import BF16, FP16, FP32, Bytes, DType, Words, by_name
from ..errors import FrameError, KvmnnError, LimitError
from ..threads.pool import map_pulled, resolve_threads
from . import _decoder
from .options import CODECS, MIN_PARALLEL_BYTES, codec_bits
from .walking import walk
from .words import BF16Frame, raw_bytes_of, words_of, writable_rows


def decode(
    frame: Any,
    *,
    dtype: str | None = None,
    codecs: Iterable[str] = CODECS,
    out: Any = None,
    max_bytes: int | None = None,
    threads: int | None = None,
) -> npt.NDArray[Any]:
    """The words of a frame, as a 1-D array.

    Parameters
    ----------
    frame
        Bytes-like; exactly one frame.
    dtype
        What the frame must hold. By default the container that its streams form: fp16 or fp32. bf16 words are in the
        fp16 container: a frame that `encode` returned for them is decoded as bf16, one that was read from a file is
        not, and needs ``"bf16"`` here.
    codecs
        ``("rle",)`` gives the verdicts of an engine without libzstd.
    out
        A writable buffer of exactly the raw size to decode into: C-contiguous, or an array that is so behind its first
        axis (``cache[:, 128:256]`` of a ``[kv_head, token, head_dim]``). It is untouched if the frame is refused.
    max_bytes
        Refuse a frame that claims to hold more raw bytes, before any memory is taken.
    threads
        At most this number; None for all processors. Frames below 1 MiB are worked on by one.

    Returns
    -------
    numpy.ndarray
        float16, uint16 (bf16) or float32; `out` itself where it is an array.

    Raises
    ------
    FrameError
        Exactly where MNN's decoder rejects; the message says which stream and why.
    LimitError
        For a frame above `max_bytes`.
    """
    if codecs is not CODECS:
        codecs = (
            codecs if isinstance(codecs, str) else tuple(codecs)
        )  # read twice; a string is refused where it is read
    try:
        kind, parsed = open_frame(frame, dtype, codecs)
    except FrameError as error:
        raise _not_one(frame, dtype, codecs, error) from None
    raw_bytes = parsed.words * kind.itemsize
    if max_bytes is not None and raw_bytes > max_bytes:
        raise LimitError(f"frame holds {raw_bytes} bytes: max_bytes is {max_bytes}")
    _decode_lanes(parsed, threads)
    target = np.empty(parsed.words, kind.numpy) if out is None else out
    if isinstance(target, np.ndarray) and not target.dtype.hasobject and parsed.join_whole(target):
        parsed.close()
        return target
    rows = writable_rows(target, raw_bytes)
    parsed.join(rows)
    parsed.close()
    return target if isinstance(target, np.ndarray) else rows[0].view(kind.numpy)


class Decoder:
    """Decodes many small frames of one dtype, one after another on this thread, with the least work for each.

    Parameters
    ----------
    dtype, codecs
        As for `decode`.
    """

    def __init__(self, dtype: str, codecs: Iterable[str] = CODECS) -> None:
        self._itemsize, self._allow = by_name(dtype).itemsize, codec_bits(codecs)

    def into(self, frames: tuple[bytes, ...], out: Words, frames_sum: int | None = None) -> None:
        """Decode frame i into ``out[i]``, ``[row, token, word]``, contiguous behind its first axis.

        Nothing is written unless all frames decode. Where `frames_sum` is given, `hashing.checksum` that goes on from
        frame to frame, it is compared at the end; `out` is written then.

        Raises
        ------
        FrameError
            As `decode`, and for frames that do not match their checksum.
        KvmnnError
            For an `out` of another size than the frames hold.
        """
        _decoder.decode_into(frames, self._itemsize, self._allow, frames_sum, out.view(np.uint8))

    def checked(self, frame: Bytes | bytes, frame_sum: int, rows_sum: int, out: Words) -> None:
        """Decode a frame into ``out``, ``[row, ...]``, contiguous behind its first axis, and compare its checksums.

        Parameters
        ----------
        frame_sum
            `hashing.checksum` of the frame: where it differs `out` is not written.
        rows_sum
            `hashing.rows_checksum` of the words, which are in `out` where it differs.

        Raises
        ------
        FrameError
            As `decode`, for a frame that holds another number of words, and for what does not match its checksum.
        KvmnnError
            For an `out` that is not contiguous behind its first axis.
        """
        if not out[0].flags.c_contiguous:  # `reshape` would copy, and nothing came to `out`
            raise KvmnnError("out: expected rows that are each contiguous")
        rows = out.reshape(len(out), -1).view(np.uint8)
        _decoder.decode_checked(frame, self._itemsize, self._allow, frame_sum, rows_sum, rows)


def matches(
    frame: Any, values: Any, *, dtype: str | None = None, codecs: Iterable[str] = CODECS, threads: int | None = None
) -> bool:
    """Whether a frame decodes to exactly the words of `values`, found without building an array.

    Takes as much scratch memory as `values` has bytes. `FrameError` if the frame does not decode at all.
    """
    kind, data = words_of(values, dtype)
    _, parsed = open_frame(frame, kind.name, codecs)
    if parsed.words * kind.itemsize != data.size:
        return False
    _decode_lanes(parsed, threads)
    same = parsed.equals(data)
    parsed.close()
    return same


def _not_one(frame: Any, dtype: str | None, codecs: Iterable[str], found: FrameError) -> FrameError:
    """What to raise where no frame was `found`: several one after another are another function's."""
    data = raw_bytes_of(frame, "frame")
    for kind in (FP16, FP32) if dtype is None else (by_name(dtype),):
        with suppress(FrameError):
            number = sum(1 for _ in walk(data, kind, codec_bits(codecs)))
            if number > 1:
                return FrameError(f"{found}; it is {number} frames one after another, which decode_all takes")
    return found


def _decode_lanes(parsed: _decoder.Frame, threads: int | None) -> None:
    small = parsed.words * parsed.stride < MIN_PARALLEL_BYTES
    one = small if threads is None else type(threads) is int and threads == 1
    number = 1 if one else resolve_threads(threads)
    if small or number == 1:
        parsed.decode()
    else:
        parsed.reserve()
        map_pulled(parsed.decode_lane, reversed(range(parsed.stride)), number)


_DENSE = b"KVMD"
"""What dense streams begin with; a frame may, of 1,145,919,051 words."""


def open_frame(frame: Any, dtype: str | None, codecs: Iterable[str]) -> tuple[DType, _decoder.Frame]:
    """The dtype of a frame and the frame itself, its headers checked and nothing decoded; errors as `decode`."""
    data = frame if isinstance(frame, bytes) else raw_bytes_of(frame, "frame")
    if dtype is None and isinstance(frame, BF16Frame):
        dtype = BF16.name
    try:
        return _open_frame(data, dtype, codec_bits(codecs))
    except FrameError:
        if bytes(data[:4]) == _DENSE:
            raise FrameError("is a dense stream, not a frame: kvmnn.dense reads it") from None
        raise


def _open_frame(data: Bytes | bytes, dtype: str | None, allow: int) -> tuple[DType, _decoder.Frame]:
    if dtype is None:
        parsed = _decoder.Frame(data, 0, allow)
        return (FP16 if parsed.stride == 2 else FP32), parsed
    kind = by_name(dtype)
    try:
        return kind, _decoder.Frame(data, kind.itemsize, allow)
    except FrameError:
        try:
            stride = _decoder.Frame(data, 0, allow).stride
        except FrameError:
            stride = kind.itemsize
        if stride == kind.itemsize:
            raise
        raise FrameError(f"frame has {stride} streams: expected the {kind.itemsize} of {kind.name}") from None
