"""Encode and decode many frames: lists of arrays on all processors, and frames concatenated in one buffer."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy.typing as npt

from .._util.parallel import parallel_map, resolve_threads
from .._util.text import pluralize
from ..dtypes import BF16, FP16, FP32, Bytes, DType, parse_dtype
from ..errors import FrameError, KvmnnError, LimitError
from .buffers import BF16Frame, as_elements, as_raw_bytes
from .decoder import FrameSpan, decode, iter_frames, open_frame
from .encoder import encode_elements
from .options import CODECS, CodecOptions, Effort, LaneOptions, to_codec_bits

T = TypeVar("T")
R = TypeVar("R")


def encode_many(
    arrays: Iterable[Any],
    *,
    dtype: str | None = None,
    predictors: str | Iterable[str] | None = None,
    hi_predictors: str | Iterable[str] | None = None,
    codecs: Iterable[str] = CODECS,
    effort: Effort = "exact",
    threads: int | None = None,
) -> list[bytes]:
    """Encode many arrays in one call, on all processors; options and errors as for `encode`.

    An error contains the index of its array, and no frame is returned then.
    """
    options = CodecOptions(
        predictors=_materialize(predictors),
        hi_predictors=_materialize(hi_predictors),
        codecs=tuple(codecs),
        effort=effort,
    )

    def prepare(values: Any) -> tuple[Bytes, LaneOptions, bool]:
        element_type, data = as_elements(values, dtype)
        return data, options.to_lane_options(element_type), element_type is BF16

    def encode_job(job: tuple[Bytes, LaneOptions, bool], num_threads: int) -> bytes:
        data, lane_options, is_bf16 = job
        frame = encode_elements(data, lane_options, num_threads)
        return BF16Frame(frame) if is_bf16 else frame

    jobs = [_call_for_item(index, prepare, values) for index, values in enumerate(arrays)]
    return _map_frames(encode_job, jobs, resolve_threads(threads))


def decode_many(
    frames: Iterable[Any],
    *,
    dtype: str | None = None,
    codecs: Iterable[str] = CODECS,
    out: Sequence[Any] | None = None,
    max_bytes: int | None = None,
    threads: int | None = None,
) -> list[npt.NDArray[Any]]:
    """Decode many frames in one call, on all processors; options and errors as for `decode`.

    `out` has one buffer for each frame; `max_bytes` applies to each frame. An error contains the index of its frame.
    """
    frames, codecs = list(frames), tuple(codecs)
    if out is not None and len(out) != len(frames):
        raise KvmnnError(f"out has {len(out)} buffers for {len(frames)} frames")
    jobs = list(zip(frames, out if out is not None else [None] * len(frames), strict=True))

    def decode_job(job: tuple[Any, Any], num_threads: int) -> npt.NDArray[Any]:
        return decode(job[0], dtype=dtype, codecs=codecs, out=job[1], max_bytes=max_bytes, threads=num_threads)

    return _map_frames(decode_job, jobs, resolve_threads(threads))


def _materialize(predictors: str | Iterable[str] | None) -> str | tuple[str, ...] | None:
    return predictors if predictors is None or isinstance(predictors, str) else tuple(predictors)


def _map_frames(function: Callable[[T, int], R], jobs: list[T], threads: int) -> list[R]:
    """Run one frame on each thread; fewer frames than threads one after another, each on all threads."""
    if len(jobs) < threads:
        return [_call_for_item(index, function, job, threads) for index, job in enumerate(jobs)]
    return parallel_map(lambda entry: _call_for_item(entry[0], function, entry[1], 1), list(enumerate(jobs)), threads)


def _call_for_item(index: int, function: Callable[..., R], *arguments: Any) -> R:
    try:
        return function(*arguments)
    except (KvmnnError, TypeError) as error:
        raise type(error)(f"item {index}: {error}") from None


MAX_FRAMES = 1 << 20
"""Limit of concatenated frames: input of four bytes a frame must not fill the memory."""


def decode_all(
    data: Any,
    *,
    dtype: str | None = None,
    codecs: Iterable[str] = CODECS,
    max_bytes: int | None = None,
    threads: int | None = None,
) -> list[npt.NDArray[Any]]:
    """Decode concatenated frames, such as the frame file of an array that was split.

    Parameters
    ----------
    data
        Bytes-like: one or more frames of one container, and nothing else.
    dtype, codecs, threads
        As for `decode`.
    max_bytes
        Reject frames that together claim more raw bytes, before any memory is allocated.

    Returns
    -------
    list of numpy.ndarray
        The elements of each frame, 1-D; frames contain no names or shapes. Concatenated, they are the elements of an
        array that was split, in memory order.

    Raises
    ------
    FrameError
        If MNN's decoder rejects a frame, or the bytes are not a frame.
    LimitError
        Above `max_bytes`, or for more than 2**20 frames.
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
    """Return the dtype and the spans of concatenated frames, with validated headers; errors as `decode_all`."""
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
    # The first half of an FP32 frame looks like an FP16 frame.
    if not best_count or (best_count == 1 and dtype is None):
        open_frame(data, dtype, codecs)  # raises the error of the only frame
    raise best_error
