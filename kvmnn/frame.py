"""MNN frames: arrays to bytes and back (docs/format.md is the normative description).

A frame holds one array's words, split into byte lanes (two for 16-bit, four for 32-bit words); each lane is a stream
with the predictor and the codec that made it smallest. Everything here is lossless whatever the options.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from . import _decoder, _encoder, _hashing, zstd
from .dtypes import BF16, FP16, FP32, DType, by_name, check_array, of_array
from .errors import FrameError, KvmnnError, LimitError
from .frame_info import FrameInfo, StreamInfo
from .parallel import map_pulled, resolve_threads
from .predictors import NAMES as PREDICTORS
from .predictors import mode_bits, resolve

CODECS = ("rle", "zstd")
"""Stream codecs by their number in the header."""

EFFORTS = ("exact", "fast", "max")

PARALLEL_FROM = 1 << 20
"""Raw bytes from which one frame's streams are shared out over threads."""

T = TypeVar("T")
R = TypeVar("R")

# -- encoding ---------------------------------------------------------------------------------------------------------


def encode(
    values: Any,
    *,
    dtype: str | None = None,
    predictors: str | Iterable[str] | None = None,
    hi_predictors: str | Iterable[str] | None = None,
    codecs: Iterable[str] = CODECS,
    effort: str = "exact",
    threads: int | None = None,
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
        ``"exact"``: the engine's bytes. ``"fast"``: the predictor is guessed from samples and each stream compressed
        once. ``"max"``: the smallest frame found with all zstd levels. MNN decodes all three.
    threads
        At most so many; None for all processors (used from 1 MiB on).

    Returns
    -------
    bytes
        At least 28 bytes; may be longer than the input (a frame has no "stored" form).

    Raises
    ------
    TypeError
        For values that hold no words of the dtype, and for raw bytes without a dtype.
    KvmnnError
        For empty input, a size that is no whole number of words, and options that do not exist.
    """
    kind, data = words_of(values, dtype)
    return _plan(kind, predictors, hi_predictors, codecs, effort).encode(data, resolve_threads(threads))


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
    codecs, predictors, hi_predictors = tuple(codecs), _kept(predictors), _kept(hi_predictors)

    def prepare(values: Any) -> tuple[_Plan, npt.NDArray[np.uint8]]:
        kind, data = words_of(values, dtype)
        return _plan(kind, predictors, hi_predictors, codecs, effort), data

    jobs = [_named(index, prepare, values) for index, values in enumerate(arrays)]
    return _map_frames(lambda job, n: job[0].encode(job[1], n), jobs, resolve_threads(threads))


class _Plan(NamedTuple):
    """Everything about encoding that does not depend on the data."""

    stride: int
    modes: tuple[int, ...]  # predictor bits for each lane
    allow: int  # codec bits
    effort: str

    def encode(self, data: npt.NDArray[np.uint8], threads: int) -> bytes:
        if self.effort == "max":
            return _encode_max(self, data, threads)
        fast = self.effort == "fast"
        if threads == 1 or data.size < PARALLEL_FROM or data.size % self.stride:
            return _encoder.encode(data, self.stride, self.modes, self.allow, zstd.LEVEL, fast)
        if fast:
            plan = self._replace(modes=tuple(_encoder.likely_modes(data, self.stride, self.modes)))
            return _encode_parallel(plan, data, threads)
        return _encode_parallel(self, data, threads)


def _plan(
    kind: DType,
    predictors: str | Iterable[str] | None,
    hi_predictors: str | Iterable[str] | None,
    codecs: Iterable[str],
    effort: str,
) -> _Plan:
    if effort not in EFFORTS:
        raise KvmnnError(f"unknown effort {effort!r}: expected {', '.join(EFFORTS)}")
    modes = [mode_bits(resolve(predictors))] * kind.itemsize
    if hi_predictors is not None:
        if kind.itemsize != 2:
            raise KvmnnError(f"hi_predictors is for two-byte words: {kind.name} frames have one predictor set")
        modes[1] = mode_bits(resolve(hi_predictors))
    return _Plan(kind.itemsize, tuple(modes), _codec_bits(codecs), effort)


class _Best:
    """The smallest candidate of each lane so far; at equal size the earlier predictor, then the lower level."""

    def __init__(self, plan: _Plan, data: npt.NDArray[np.uint8]) -> None:
        self.plan = plan
        self.data = data
        self.lanes: list[tuple[_Rank, bytes] | None] = [None] * plan.stride
        self.lock = threading.Lock()

    def offer(self, lane: int, mode: int, level: int, sized: bool) -> None:
        """Try one candidate; safe on several threads, with the same result in any order."""
        with self.lock:
            best = self.lanes[lane]
        way = (mode, not sized, level)
        limit = _NO_LIMIT if best is None else best[0][0] + (way < best[0][1:])
        found = _encoder.candidate(self.data, self.plan.stride, lane, mode, self.plan.allow, level, sized, limit)
        if found is not None:
            rank = (found[0], *way)
            with self.lock:
                best = self.lanes[lane]
                if best is None or rank < best[0]:
                    self.lanes[lane] = rank, found[3]

    def frame(self) -> bytes:
        streams = [best[1] for best in self.lanes if best is not None]
        return b"".join([(self.data.size // self.plan.stride).to_bytes(4, "little"), *streams])


_Rank = tuple[int, int, bool, int]
"""Size, mode, whether the content size is left out, zstd level."""

_NO_LIMIT = (1 << 62) - 1


def _encode_parallel(plan: _Plan, data: npt.NDArray[np.uint8], threads: int) -> bytes:
    best = _Best(plan, data)
    tasks = [
        (lane, mode)
        for mode in range(len(PREDICTORS))
        for lane in reversed(range(plan.stride))  # the high bytes take longest: first
        if plan.modes[lane] >> mode & 1
    ]
    map_pulled(lambda task: best.offer(*task, zstd.LEVEL, True), tasks, threads)
    return best.frame()


def _encode_max(plan: _Plan, data: npt.NDArray[np.uint8], threads: int) -> bytes:
    """All predictors at levels 1 and 3 first, then the high levels for those that came near the best."""
    best = _Best(plan, data)
    sizes: dict[tuple[int, int], int] = {}
    pairs = [
        (lane, mode) for mode in range(len(PREDICTORS)) for lane in range(plan.stride) if plan.modes[lane] >> mode & 1
    ]

    def first(task: tuple[int, int]) -> None:
        lane, mode = task
        best.offer(lane, mode, zstd.LEVEL, True)
        for level in (1, zstd.LEVEL):
            found = _encoder.candidate(data, plan.stride, lane, mode, plan.allow, level, False, _NO_LIMIT)
            assert found is not None
            sizes[task] = min(found[0], sizes.get(task, _NO_LIMIT))
            best.offer(lane, mode, level, False)

    def second(task: tuple[int, int, int]) -> None:
        best.offer(*task, False)

    map_pulled(first, pairs, threads)
    if plan.allow & _ZSTD_BIT:
        near = [
            (lane, mode)
            for lane, mode in pairs
            if sizes[lane, mode] <= 1.05 * min(size for (other, _), size in sizes.items() if other == lane)
        ]
        levels = (9, 13, 16, 19, 22) if data.size // plan.stride <= _ULTRA_UP_TO else (9, 13, 16, 19)
        map_pulled(second, [(lane, mode, level) for level in levels for lane, mode in near], threads)
    return best.frame()


_ULTRA_UP_TO = 16 << 20  # bytes of a stream; above, level 22 wants more than a gigabyte

# -- decoding ---------------------------------------------------------------------------------------------------------


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
        What the frame must hold. By default the container that its streams form: fp16 or fp32; bf16 is the fp16
        container and has to be asked for.
    codecs
        ``("rle",)`` gives the verdicts of an engine without libzstd.
    out
        A writable C-contiguous buffer of exactly the raw size to decode into. It is untouched if the frame is refused.
    max_bytes
        Refuse a frame that claims to hold more raw bytes, before any memory is taken.
    threads
        At most so many; None for all processors (used from 1 MiB on).

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
    kind, parsed = _open(frame, dtype, codecs)
    raw_bytes = parsed.words * kind.itemsize
    if max_bytes is not None and raw_bytes > max_bytes:
        raise LimitError(f"frame holds {raw_bytes} bytes: max_bytes is {max_bytes}")
    if out is not None:
        target = _writable_bytes(out, raw_bytes)
        _decode_lanes(parsed, resolve_threads(threads))
    else:
        _decode_lanes(parsed, resolve_threads(threads))
        out = np.empty(parsed.words, kind.numpy)
        target = out.view(np.uint8)
    parsed.join(target)
    parsed.close()
    return out if isinstance(out, np.ndarray) else target.view(kind.numpy)


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

    def one(job: tuple[Any, Any], n: int) -> npt.NDArray[Any]:
        return decode(job[0], dtype=dtype, codecs=codecs, out=job[1], max_bytes=max_bytes, threads=n)

    return _map_frames(one, jobs, resolve_threads(threads))


def matches(
    frame: Any, values: Any, *, dtype: str | None = None, codecs: Iterable[str] = CODECS, threads: int | None = None
) -> bool:
    """Whether a frame decodes to exactly the words of `values`, found without building an array.

    Takes as much scratch memory as `values` has bytes. `FrameError` if the frame does not decode at all.
    """
    kind, data = words_of(values, dtype)
    _, parsed = _open(frame, kind.name, codecs)
    if parsed.words * kind.itemsize != data.size:
        return False
    _decode_lanes(parsed, resolve_threads(threads))
    same = parsed.equals(data)
    parsed.close()
    return same


def _decode_lanes(parsed: _decoder.Frame, threads: int) -> None:
    if threads == 1 or parsed.words * parsed.stride < PARALLEL_FROM:
        parsed.decode()
    else:
        parsed.reserve()
        map_pulled(parsed.decode_lane, reversed(range(parsed.stride)), threads)


def _open(frame: Any, dtype: str | None, codecs: Iterable[str]) -> tuple[DType, _decoder.Frame]:
    data, allow = raw_bytes_of(frame, "frame"), _codec_bits(codecs)
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


# -- inspecting -------------------------------------------------------------------------------------------------------


def inspect(frame: Any, *, dtype: str | None = None, codecs: Iterable[str] = CODECS, entropy: bool = True) -> FrameInfo:
    """Account for every byte of a frame.

    The frame is decoded for it, both to be sure that it is one and for the order-0 entropy of its streams; with
    `entropy` False only its headers are read, and the entropies are None. Errors as `decode`.
    """
    kind, parsed = _open(frame, dtype, codecs)
    if entropy:
        parsed.decode()
    streams = []
    for lane in range(parsed.stride):
        mode, codec, raw_len, payload_len, offset = parsed.stream(lane)
        streams.append(
            StreamInfo(
                name=_decoder.lane_name(parsed.stride, lane),
                offset=offset - StreamInfo.HEADER_BYTES,
                payload_offset=offset,
                predictor=PREDICTORS[mode],
                codec=CODECS[codec],
                raw_bytes=raw_len,
                payload_bytes=payload_len,
                entropy=parsed.lane_entropy(lane) if entropy else None,
            )
        )
    parsed.close()
    container = "fp16" if parsed.stride == 2 else "fp32"
    return FrameInfo(container=container, dtype=kind.name, words=parsed.words, streams=tuple(streams))


# -- hash -------------------------------------------------------------------------------------------------------------


def fnv1a64(data: Any, seed: int = _hashing.SEED) -> int:
    """The engine's 64-bit hash of bytes (bytes-like, or an array's bytes in C order).

    FNV-1a's steps from the engine's own start value, which is *not* the standard basis (spec: codec, section 9). Pass
    the hash of one piece as `seed` of the next to hash their concatenation.
    """
    if not 0 <= seed < 1 << 64:
        raise KvmnnError(f"seed {seed}: expected an unsigned 64-bit number")
    return _hashing.fnv1a64(raw_bytes_of(data, "data"), seed)


# -- values and options -----------------------------------------------------------------------------------------------


def words_of(values: Any, dtype: str | None) -> tuple[DType, npt.NDArray[np.uint8]]:
    """What `encode` takes its words from: the dtype and a contiguous view (or copy) of the little-endian bytes."""
    kind = None if dtype is None else by_name(dtype)
    if isinstance(values, np.ndarray) and values.dtype != np.uint8:
        if kind is None:
            kind = of_array(values)
        check_array(values, kind)
        if values.dtype.byteorder == ">" or not values.dtype.isnative:
            values = values.astype(values.dtype.newbyteorder("<"))
        return kind, np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    data = raw_bytes_of(values, "values")
    if kind is None:
        raise TypeError(f"{type(values).__name__}: raw bytes need a dtype: fp16, bf16 or fp32")
    return kind, data


def raw_bytes_of(data: Any, what: str) -> npt.NDArray[np.uint8]:
    """A 1-D uint8 view (or copy, where it is not contiguous) of anything that has bytes."""
    if isinstance(data, np.ndarray):
        if data.dtype.hasobject:
            raise TypeError(f"{what}: numpy type {data.dtype} has no bytes of its own")
        return np.ascontiguousarray(data).reshape(-1).view(np.uint8)
    try:
        view = memoryview(data)
    except TypeError:
        raise TypeError(f"{what}: expected a numpy array or a bytes-like object, not {type(data).__name__}") from None
    return np.frombuffer(view if view.c_contiguous else view.tobytes(), np.uint8)


def _writable_bytes(out: Any, size: int) -> npt.NDArray[np.uint8]:
    if isinstance(out, np.ndarray):
        if not out.flags.c_contiguous or out.dtype.hasobject:
            raise KvmnnError("out: expected a C-contiguous array of plain numbers")
        target = out.reshape(-1).view(np.uint8)
    else:
        view = memoryview(out)
        if not view.c_contiguous:
            raise KvmnnError("out: expected a C-contiguous buffer")
        target = np.frombuffer(view, np.uint8)
    if not target.flags.writeable:
        raise KvmnnError("out: expected a writable buffer")
    if target.size != size:
        raise KvmnnError(f"out has {target.size} bytes: the frame holds {size}")
    return target


_RLE_BIT, _ZSTD_BIT = 1, 2


def _codec_bits(codecs: Iterable[str]) -> int:
    if isinstance(codecs, str):
        raise TypeError(f"codecs must be a tuple of names such as ({codecs!r},), not a string")
    bits = 0
    for name in codecs:
        if name not in CODECS:
            raise KvmnnError(f"unknown codec {name!r}: expected {' or '.join(CODECS)}")
        bits |= 1 << CODECS.index(name)
    if not bits:
        raise KvmnnError(f"no codec allowed: expected at least one of {', '.join(CODECS)}")
    return bits


def _kept(predictors: str | Iterable[str] | None) -> str | tuple[str, ...] | None:
    return predictors if predictors is None or isinstance(predictors, str) else tuple(predictors)


def _map_frames(function: Callable[[T, int], R], jobs: list[T], threads: int) -> list[R]:
    """Whole frames on each thread; where there are fewer frames than threads, one frame after the other on all."""
    if len(jobs) < threads:
        return [_named(index, function, job, threads) for index, job in enumerate(jobs)]
    return map_pulled(lambda entry: _named(entry[0], function, entry[1], 1), list(enumerate(jobs)), threads)


def _named(index: int, function: Callable[..., R], *arguments: Any) -> R:
    try:
        return function(*arguments)
    except (KvmnnError, TypeError) as error:
        raise type(error)(f"item {index}: {error}") from None


__all__ = [
    "BF16",
    "CODECS",
    "EFFORTS",
    "FP16",
    "FP32",
    "decode",
    "decode_many",
    "encode",
    "encode_many",
    "fnv1a64",
    "inspect",
    "matches",
]
