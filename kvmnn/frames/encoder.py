"""Encode arrays as MNN frames (docs/format.md is the normative description).

A frame contains the elements of one array, split into byte lanes: two for 16-bit and four for 32-bit elements. Each
lane is a stream with its own predictor and codec. An effort chooses these; every frame is lossless and decodes in MNN.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

from .._util.parallel import Progress, resolve_threads
from ..dtypes import BF16, Bytes
from . import _encoder, tuning, zstd
from .buffers import BF16Frame, ShapedFrame, as_elements
from .options import CODECS, CodecOptions, Effort, LaneOptions
from .sampling import estimate_zero_fraction, select_predictors
from .search import search_all_levels, search_default_level
from .segments import encode_balanced_segments, encode_fast_frame, is_segmented


def encode(
    values: Any,
    *,
    dtype: str | None = None,
    predictors: str | Iterable[str] | None = None,
    hi_predictors: str | Iterable[str] | None = None,
    codecs: Iterable[str] = CODECS,
    effort: Effort = "exact",
    keep_shape: bool = False,
    threads: int | None = None,
    progress: Progress | None = None,
) -> bytes:
    """Encode an array as a frame, losslessly; by default as the frame that MNN would store for it.

    Parameters
    ----------
    values
        A numpy array of any shape, never changed: its elements in C order, stored little-endian. Or raw little-endian
        bytes (any bytes-like object or a uint8 array), which require `dtype`.
    dtype : {"fp16", "bf16", "fp32"}, optional
        Default: the array's own type (float16, float32, or uint16 for bf16). With `dtype`, arrays of any type of kind
        f, i, u or V with that element size are accepted. fp16 and bf16 give the same frame.
    predictors
        Predictors that the encoder may use: a spec string, read as the engine reads it, or names out of ``raw``,
        ``delta_seq``, ``xor_seq``. Default: all three.
    hi_predictors
        Another set for the high bytes of two-byte elements. Default: `predictors`, as in the engine, which has no such
        option.
    codecs
        ``("rle",)`` for an engine without libzstd.
    effort : {"exact", "balanced", "fast", "max"}
        Trade-off between speed and size:

        * ``"exact"``: byte-identical to MNN.
        * ``"balanced"``: one predictor for each lane, chosen from samples; lanes above 4 MiB are compressed in
          segments, on several threads.
        * ``"fast"``: kvmnn's own zstd writer (docs/format.md), in segments of at most 4 MiB, with predictors only where
          samples show a gain, which those of K and V do not. The same as ``"balanced"`` if `predictors` excludes raw or
          `codecs` excludes zstd, and for arrays above 4 MiB that repeat at unaligned distances.
        * ``"max"``: the smallest frame at any zstd level.

        "balanced" and "fast" also encode with "exact", and return the smaller frame, if the array has at most 2 KiB, or
        a ratio above 10 and less than half zeros.
    keep_shape
        Return a `ShapedFrame`: the same bytes, which `decode` returns in the shape of `values`. Frames cannot contain a
        shape, so in a file it is lost: use ``decode(frame).reshape(shape)``, or `kvmnn.bundle.encode`, whose manifest
        has it.
    threads
        Maximum number of threads; None for all processors. Frames below 1 MiB are encoded on one.
    progress
        Called with the number of raw bytes processed since the last call; with "max" many times. Calls come from any
        thread, one at a time, and sum to the size of `values`.

    Returns
    -------
    bytes
        At least 28 bytes; may be longer than the input, since a frame has no uncompressed form. For bf16 a `BF16Frame`:
        the same bytes, which `decode` returns as bf16.

    Raises
    ------
    TypeError
        If `values` has no elements of the dtype, or is raw bytes without a dtype.
    KvmnnError
        If the input is empty, its size is not a multiple of the element size, or an option does not exist.
    """
    element_type, data = as_elements(values, dtype)
    options = CodecOptions(predictors=predictors, hi_predictors=hi_predictors, codecs=codecs, effort=effort)
    frame = encode_elements(data, options.to_lane_options(element_type), resolve_threads(threads), progress)
    if keep_shape:
        is_raw = getattr(values, "dtype", "uint8") == "uint8"
        return ShapedFrame(frame, (-1,) if is_raw else values.shape, element_type.name)
    return BF16Frame(frame) if element_type is BF16 else frame


def encode_for_file(
    elements: Bytes, dtype: str, options: CodecOptions, threads: int | None = None, progress: Progress | None = None
) -> bytes:
    """Encode little-endian elements as `encode` does, but return plain bytes for bf16: the file states the dtype."""
    element_type, data = as_elements(elements, dtype)
    return encode_elements(data, options.to_lane_options(element_type), resolve_threads(threads), progress)


def encode_elements(data: Bytes, options: LaneOptions, threads: int, progress: Progress | None = None) -> bytes:
    """Encode little-endian elements with all options resolved."""
    return STRATEGIES[options.effort](data, options, threads, progress)


# -- the efforts ------------------------------------------------------------------------------------------------------


def encode_exact(data: Bytes, options: LaneOptions, threads: int, progress: Progress | None) -> bytes:
    """Encode each lane with every predictor at the engine's level; the smallest stream is used, as in MNN."""
    return _return_with_progress(_encode_lanes(data, options, threads), data, progress)


def encode_balanced(data: Bytes, options: LaneOptions, threads: int, progress: Progress | None) -> bytes:
    """Encode each lane with the predictor that samples favor, long lanes in segments."""
    frame = _encode_selected(data, options, threads)
    return _return_with_progress(_retry_with_exact_effort(frame, data, options, threads), data, progress)


def encode_fast(data: Bytes, options: LaneOptions, threads: int, progress: Progress | None) -> bytes:
    """Encode with kvmnn's own zstd writer, or as effort "balanced" does if that writer cannot encode the array well."""
    frame = encode_fast_frame(data, options, threads) if options.supports_fast_path(data.size) else None
    if frame is None:
        frame = _encode_selected(data, options, threads)
    return _return_with_progress(_retry_with_exact_effort(frame, data, options, threads), data, progress)


def encode_max(data: Bytes, options: LaneOptions, threads: int, progress: Progress | None) -> bytes:
    """Encode each lane at every zstd level that may be the smallest."""
    return search_all_levels(data, options, threads, progress)


Strategy: TypeAlias = Callable[[Bytes, LaneOptions, int, Progress | None], bytes]

STRATEGIES: dict[str, Strategy] = {
    "exact": encode_exact,
    "balanced": encode_balanced,
    "fast": encode_fast,
    "max": encode_max,
}
"""The function of each effort."""


# -- their parts ------------------------------------------------------------------------------------------------------


def _encode_lanes(data: Bytes, options: LaneOptions, threads: int) -> bytes:
    """Encode each lane as one stream, the smallest by the predictors that `options` permit."""
    if threads == 1 or data.size < tuning.MIN_PARALLEL_BYTES or data.size % options.itemsize:
        return _encoder.encode(data, options.itemsize, options.modes, options.allowed_codecs, zstd.DEFAULT_LEVEL)
    return search_default_level(data, options, threads)


def _encode_selected(data: Bytes, options: LaneOptions, threads: int) -> bytes:
    """Encode with the predictors that samples favor."""
    options = options._replace(modes=select_predictors(data, options))
    return (encode_balanced_segments if is_segmented(data, options) else _encode_lanes)(data, options, threads)


def with_selected_predictors(data: Bytes, options: LaneOptions) -> LaneOptions:
    """Return the options for elements like `data`, which effort "balanced" then encodes without looking at samples.

    Samples take a tenth of the time of that effort for short frames.
    """
    return options._replace(modes=select_predictors(data, options)) if options.effort == "balanced" else options


def _retry_with_exact_effort(frame: bytes, data: Bytes, options: LaneOptions, threads: int) -> bytes:
    """Return `frame`, or for small and repetitive data the frame of effort "exact" if it is smaller."""
    is_tried = data.size <= tuning.SMALL_INPUT_BYTES or (
        len(frame) * tuning.EXACT_RETRY_MIN_RATIO < data.size
        and estimate_zero_fraction(data, options.itemsize) < tuning.EXACT_RETRY_MAX_ZERO_FRACTION
    )
    return min(frame, _encode_lanes(data, options, threads), key=len) if is_tried else frame


def _return_with_progress(frame: bytes, data: Bytes, progress: Progress | None) -> bytes:
    """Return the frame, all of whose raw bytes are processed."""
    if progress:
        progress(data.size)
    return frame
