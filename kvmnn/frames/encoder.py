"""MNN frames from arrays (docs/format.md is the normative description).

A frame holds one array's words, split into byte lanes (two for 16-bit, four for 32-bit words); each lane is a stream
with the predictor and the codec that made it smallest. Everything here is lossless whatever the options.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any

from .._util.parallel import Progress, resolve_threads
from ..dtypes import BF16, Bytes
from . import _encoder, zstd
from .buffers import BF16Frame, as_elements
from .options import CODECS, MIN_PARALLEL_BYTES, CodecOptions, LaneOptions
from .predictor_selection import is_single_predictor, select_predictors
from .sampling import UnalignedRepeats, estimate_zero_fraction
from .search import search_all_levels, search_default_level
from .segments import encode_balanced, encode_fast, is_segmented, supports_fast_path

EXACT_RETRY_MIN_RATIO = 10
"""An array that becomes so many times smaller is tried by effort "exact" as well, which takes little time there: what
libzstd makes of many repeats depends on the predictor, and no sample says how; ..."""
EXACT_RETRY_MAX_ZERO_FRACTION = 0.5
"""... but not if so many words are zeros, as in a cache that is hardly used. And ..."""
SMALL_INPUT_BYTES = 2 << 10
"""... so is an array of so few bytes: beside these every header counts."""


def encode(
    values: Any,
    *,
    dtype: str | None = None,
    predictors: str | Iterable[str] | None = None,
    hi_predictors: str | Iterable[str] | None = None,
    codecs: Iterable[str] = CODECS,
    effort: str = "exact",
    threads: int | None = None,
    progress: Progress | None = None,
) -> bytes:
    """The frame that MNN would store for an array.

    Parameters
    ----------
    values
        A numpy array of any shape (words in C order; big-endian words are stored little-endian), or raw little-endian
        bytes: any bytes-like object or a uint8 array, which then need `dtype`. Never changed.
    dtype
        ``"fp16"``, ``"bf16"`` (both two-byte words, the same frame) or ``"fp32"``; by default the array's own type:
        float16, float32, uint16 for bf16. With `dtype` any array of that word size and of kind f, i, u or V will do.
    predictors
        What the encoder may try: a spec string, read exactly as the engine reads it, or names out of ``raw``,
        ``delta_seq``, ``xor_seq``. Default: the three.
    hi_predictors
        Another set for the high bytes of two-byte words; the engine has no such option, so None is its behaviour.
    codecs
        ``("rle",)`` for an engine without libzstd.
    effort
        ``"exact"``: the engine's bytes. ``"balanced"``: the predictor is guessed from samples, or, where these speak
        for one, as those of K and V hardly do, tried on 256 Ki words, and each stream compressed once, in pieces above
        4 MiB. ``"fast"``: zstd frames of kvmnn's own writer (docs/format.md), one for every 4 MiB or less, with a
        predictor only where samples show that it pays, as K and V do not; as ``"balanced"`` where `predictors` has no
        raw or `codecs` no zstd, and above 4 MiB where words repeat at odd distances. What these two make 10 times
        smaller, unless half of it is zeros, and 2 KiB or less, is tried by ``"exact"`` as well. ``"max"``: the
        smallest frame found with all zstd levels. MNN decodes all four.
    threads
        At most this number; None for all processors. Frames below 1 MiB are worked on by one.
    progress
        Called with raw bytes that have been dealt with since the last call, by effort ``"max"`` many times; on any
        thread, one call after another. The sum is the size of `values`.

    Returns
    -------
    bytes
        At least 28 bytes; may be longer than the input (a frame has no "stored" form). Of bf16 words a `BF16Frame`,
        which are the same bytes and tell `decode` that they are of bf16.

    Raises
    ------
    TypeError
        For values that hold no words of the dtype, and for raw bytes without a dtype.
    KvmnnError
        For empty input, a size that is not a multiple of the word size, and options that do not exist.
    """
    element_type, data = as_elements(values, dtype)
    options = CodecOptions(predictors=predictors, hi_predictors=hi_predictors, codecs=codecs, effort=effort)
    frame = encode_elements(data, options.to_lane_options(element_type), resolve_threads(threads), progress)
    return BF16Frame(frame) if element_type is BF16 else frame


def encode_for_file(
    elements: Bytes, dtype: str, options: CodecOptions, threads: int | None = None, progress: Progress | None = None
) -> bytes:
    """Encode little-endian words as `encode` does, without the copy of bf16 frames: the file states the dtype."""
    element_type, data = as_elements(elements, dtype)
    return encode_elements(data, options.to_lane_options(element_type), resolve_threads(threads), progress)


def encode_elements(data: Bytes, options: LaneOptions, threads: int, progress: Progress | None = None) -> bytes:
    """The frame of little-endian words, all options resolved."""
    if options.effort == "max":
        return search_all_levels(options, data, threads, progress)
    frame = _encode_default_level(data, options, threads)
    if options.effort != "exact" and (data.size <= SMALL_INPUT_BYTES or _is_highly_repetitive(frame, data, options)):
        frame = min(frame, _encode_default_level(data, options._replace(effort="exact"), threads), key=len)
    if progress:
        progress(data.size)
    return frame


def _is_highly_repetitive(frame: bytes, data: Bytes, options: LaneOptions) -> bool:
    return (
        len(frame) * EXACT_RETRY_MIN_RATIO < data.size
        and estimate_zero_fraction(data, options.itemsize) < EXACT_RETRY_MAX_ZERO_FRACTION
    )


def with_selected_predictors(data: Bytes, options: LaneOptions) -> LaneOptions:
    """The options for words like `data`: by effort ``"balanced"`` with the predictors that `select_predictors` chooses.

    Looking at samples is a tenth of that effort's work on short frames.
    """
    if options.effort != "balanced" or all(map(is_single_predictor, options.modes)):
        return options
    return options._replace(modes=select_predictors(data, options))


def _encode_default_level(data: Bytes, options: LaneOptions, threads: int) -> bytes:
    if options.effort == "fast":
        if supports_fast_path(options, data.size):
            with suppress(UnalignedRepeats):
                return encode_fast(data, options, threads)
        options = options._replace(effort="balanced")
    if options.effort == "balanced" and is_segmented(data, options):
        return encode_balanced(data, with_selected_predictors(data, options), threads)
    options = with_selected_predictors(data, options)
    if threads == 1 or data.size < MIN_PARALLEL_BYTES or data.size % options.itemsize:
        return _encoder.encode(data, options.itemsize, options.modes, options.allowed_codecs, zstd.DEFAULT_LEVEL)
    return search_default_level(options, data, threads)
