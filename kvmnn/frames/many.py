"""Many frames in one call, on all processors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import numpy.typing as npt

from ..dtypes import BF16, Bytes
from ..errors import KvmnnError
from ..threads.pool import parallel_map, resolve_threads
from .decoding import decode
from .encoding import encode_elements
from .options import CODECS, CodecOptions, LaneOptions
from .words import BF16Frame, as_elements

T = TypeVar("T")
R = TypeVar("R")


def encode_many(
    arrays: Iterable[Any],
    *,
    dtype: str | None = None,
    predictors: str | Iterable[str] | None = None,
    hi_predictors: str | Iterable[str] | None = None,
    codecs: Iterable[str] = CODECS,
    effort: str = "exact",
    threads: int | None = None,
) -> list[bytes]:
    """`encode` for many arrays in one call, on all processors; options and errors as there.

    An error names the item it belongs to, and no frame is returned then.
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
    """`decode` for many frames in one call, on all processors; options and errors as there.

    `out`, if given, has one buffer for each frame; `max_bytes` holds for each frame by itself. An error names the item
    it belongs to.
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
    """A frame to a thread; where there are fewer frames than threads, one frame after the other on all threads."""
    if len(jobs) < threads:
        return [_call_for_item(index, function, job, threads) for index, job in enumerate(jobs)]
    return parallel_map(lambda entry: _call_for_item(entry[0], function, entry[1], 1), list(enumerate(jobs)), threads)


def _call_for_item(index: int, function: Callable[..., R], *arguments: Any) -> R:
    try:
        return function(*arguments)
    except (KvmnnError, TypeError) as error:
        raise type(error)(f"item {index}: {error}") from None
