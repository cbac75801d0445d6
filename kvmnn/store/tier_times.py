"""Times and sizes of a store's codecs on given K and V: what break-even is computed from."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from ..arrays.layer_cache import LayerCache
from ..errors import KvmnnError
from ..reports.break_even import BreakEvenReport, CodecTimes, EngineTimes, compute_break_even
from .store import PrefixStore
from .unit import LAYER_CODECS

if TYPE_CHECKING:
    from ..profiles.profile import Profile

TIMED_CODECS = ("dense", "frames")
"""Codecs that need nothing but K and V."""

MAX_TIMED_TOKENS = 2048
"""Tokens of a text that are timed: the beginning of longer ones."""

_SHORT_TOKENS = 64
_MIN_CALLS, _MAX_CALLS = 5, 20
_MAX_SECONDS = 1.0
"""Time for the calls of one kind, after the least number of them."""


def measure_codec_times(
    layers: Sequence[LayerCache],
    *,
    codecs: Sequence[str] = TIMED_CODECS,
    profile: Profile | None = None,
    codec_options: Mapping[str, float] | None = None,
    threads: int | None = None,
    clock: Callable[[], float] = time.perf_counter,
) -> list[CodecTimes]:
    """Put K and V into a temporary store of each codec, and get them again, several times.

    Parameters
    ----------
    layers
        K and V of the tokens of one text, ``[kv_head, token, head_dim]``; of more than `MAX_TIMED_TOKENS` the first.
    codecs
        ``"dense"``, ``"frames"``; with `profile` ``"profile"``, ``"transform"``.
    profile, codec_options
        As for `PrefixStore`, for the codecs that need a profile.
    threads
        Maximum number of threads; None for all processors.
    clock
        Returns seconds; `time.process_time` for the time of processors, on a machine that does other work as well.

    Raises
    ------
    KvmnnError
        If there are no tokens, or layers do not fit together.
    """
    tokens = min(max((cache.tokens for cache in layers), default=0), MAX_TIMED_TOKENS)
    if not tokens:
        raise KvmnnError("there is no K and V to be timed: expected at least one token")
    cut_layers = _cut_layers(layers, tokens)
    times = []
    for codec in codecs:
        with tempfile.TemporaryDirectory() as folder:
            store = PrefixStore(
                Path(folder) / "store",
                codec=codec,
                profile=profile if codec in LAYER_CODECS else None,
                codec_options=codec_options if codec in LAYER_CODECS else None,
                threads=threads,
            )
            with store:
                times.append(_time_store(store, cut_layers, tokens, clock))
    return times


def _time_store(
    store: PrefixStore, layers: Sequence[LayerCache], tokens: int, clock: Callable[[], float]
) -> CodecTimes:
    def time_call(call: Callable[[], object]) -> float:
        started = clock()
        call()
        return clock() - started

    short_tokens = min(_SHORT_TOKENS, tokens)
    long_ids, short_ids = range(1, tokens + 1), range(tokens + 1, tokens + 1 + short_tokens)
    store.put(short_ids, _cut_layers(layers, short_tokens), model="m")  # and the rotation and tables of the model
    put = store.put(long_ids, layers, model="m")

    def put_again() -> float:
        store.delete(long_ids, model="m")
        return time_call(lambda: store.put(long_ids, layers, model="m"))

    encode_seconds = _repeat(put_again)
    decode_seconds = _repeat(lambda: time_call(lambda: store.get(long_ids, model="m")))
    short_seconds = median(_repeat(lambda: time_call(lambda: store.get(short_ids, model="m"))))
    raw_bytes = sum(cache.nbytes for cache in layers)
    slope = (median(decode_seconds) - short_seconds) / (tokens - short_tokens) if tokens > short_tokens else 0.0
    return CodecTimes(
        codec=store.codec,
        raw_bytes=raw_bytes,
        stored_bytes=put.stored_bytes,
        encode_p50=median(encode_seconds),
        encode_p95=_compute_p95(encode_seconds),
        decode_p50=median(decode_seconds),
        decode_p95=_compute_p95(decode_seconds),
        # on a loaded machine the short text may take longer than the long one
        decode_base=min(max(short_seconds - short_tokens * max(slope, 0.0), 0.0), median(decode_seconds)),
    )


def measure_break_even(
    layers: Sequence[LayerCache],
    *,
    codecs: Sequence[str] = TIMED_CODECS,
    profile: Profile | None = None,
    codec_options: Mapping[str, float] | None = None,
    engine: EngineTimes | None = None,
    link: float | None = None,
    threads: int | None = None,
) -> BreakEvenReport:
    """Time a store's codecs on K and V, and return where they, and stored prefixes, pay.

    Parameters
    ----------
    layers, codecs, profile, codec_options, threads
        As for `measure_codec_times`.
    engine, link
        As for `kvmnn.reports.break_even.compute_break_even`.
    """
    times = measure_codec_times(layers, codecs=codecs, profile=profile, codec_options=codec_options, threads=threads)
    num_tokens = min(max(cache.tokens for cache in layers), MAX_TIMED_TOKENS)
    return compute_break_even(times, token_bytes=times[0].raw_bytes / num_tokens, engine=engine, link=link)


def _cut_layers(layers: Sequence[LayerCache], tokens: int) -> list[LayerCache]:
    return [
        LayerCache(layer=cache.layer, keys=cache.keys[:, :tokens], values=cache.values[:, :tokens]) for cache in layers
    ]


def _repeat(measure: Callable[[], float]) -> list[float]:
    started = time.perf_counter()
    seconds: list[float] = []
    while len(seconds) < _MIN_CALLS or (len(seconds) < _MAX_CALLS and time.perf_counter() - started < _MAX_SECONDS):
        seconds.append(measure())
    return seconds


def _compute_p95(seconds: Sequence[float]) -> float:
    return sorted(seconds)[ceil(0.95 * len(seconds)) - 1]
