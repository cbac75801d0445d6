"""Codecs measured in turns on the same data."""

from __future__ import annotations

import platform
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

import numpy as np

from ..arrays.named_array import Chunk, LazyArray
from ..arrays.source import Source
from ..bundle.dense_pieces import DensePlan
from ..errors import KvmnnError
from ..frames import encode, inspect
from ..threads.pipeline import Progress
from ..threads.pool import cpu_count
from . import rivals
from .dense_codec import count_dense_bytes, explain_no_dense, make_dense_codec, make_dense_plans
from .results import ArrayBenchReport, BenchReport, CodecBenchResult, MachineInfo, Timing
from .rivals import BenchCodec

DEFAULT_SAMPLE_BYTES = 64 << 20
"""Bytes of an array that are measured unless said otherwise."""
MAX_EFFORT_SAMPLE_BYTES = 1 << 20
"""Bytes of them on which effort max is measured unless all of them are asked for: it is that slow."""
SHORT_SAMPLE_SUFFIX = ", first MiB"
"""What the names of codecs end in that are measured on these."""


def compare(
    source: Source,
    *,
    max_bytes: int = DEFAULT_SAMPLE_BYTES,
    repeats: int = 5,
    threads: int = 1,
    with_max: bool = False,
    progress: Progress | None = None,
) -> BenchReport:
    """Measure kvmnn's efforts, its dense streams and every rival that is installed on the arrays of a source.

    Parameters
    ----------
    source
        The data: `kvmnn.open`.
    max_bytes
        Bytes of each array, from its beginning, to measure; 0 for all.
    repeats
        Turns of each codec, of which the medians are taken.
    threads
        Threads for each codec.
    with_max
        Measure effort max on all of that, and not on its first MiB only.
    progress
        Called with 1 after each turn of a codec; there are `count_runs` of them.

    Raises
    ------
    SourceError
        When an array turns out to be damaged. A codec that fails or does not restore the data is a line of the result.
    """
    plans = make_dense_plans(source)
    reports = [
        measure(
            array,
            max_bytes=max_bytes,
            repeats=repeats,
            threads=threads,
            with_max=with_max,
            dense=plans.get(array.name),
            progress=progress,
        )
        for array in source.arrays
    ]
    return BenchReport(machine=_describe_machine(), threads=threads, arrays=tuple(reports))


def count_runs(
    source: Source, repeats: int, threads: int, max_bytes: int = DEFAULT_SAMPLE_BYTES, *, with_max: bool = False
) -> int:
    """How often `compare` will call its `progress`."""
    plans = make_dense_plans(source, with_rope_search=False)

    def count_codecs(array: LazyArray) -> int:
        sample_bytes = min(array.nbytes, max_bytes or array.nbytes)
        num_dense_bytes = count_dense_bytes(plans.get(array.name), sample_bytes)
        has_short_sample = not with_max and (num_dense_bytes or sample_bytes) > MAX_EFFORT_SAMPLE_BYTES
        return 4 + has_short_sample + len(rivals.find_installed_codecs(array.dtype, threads)[0]) + bool(num_dense_bytes)

    return sum((repeats + 1) * count_codecs(array) for array in source.arrays)


def measure(
    array: LazyArray,
    *,
    max_bytes: int,
    repeats: int,
    threads: int | None,
    with_max: bool = False,
    dense: DensePlan | None = None,
    progress: Progress | None = None,
) -> ArrayBenchReport:
    """Measure every codec on the beginning of an array: of what becomes dense streams, on as much as makes whole ones.

    The codecs take turns, so that what disturbs the machine disturbs all of them; medians of `repeats` turns follow one
    turn that is not counted, in which each round trip is compared with its input.

    Parameters
    ----------
    max_bytes
        Most bytes of the array to measure; 0 for all.
    repeats
        Turns of each codec.
    threads
        Threads for each codec; None for all processors.
    with_max
        Measure effort max on all of the sample, and not on its first MiB only.
    dense
        How the array becomes dense streams, of whole layers (or whole tokens of the first); None where it cannot.
    progress
        Called with 1 after every turn of a codec.
    """
    chunks = array.iter_chunks(max_bytes)
    sample = next(chunks)
    if sample.size == array.nbytes:
        deque(chunks, maxlen=0)  # checksums and hashes are compared behind the last byte
    own_codecs = rivals.make_kvmnn_codecs(array.dtype, threads)
    max_codec = rivals.make_kvmnn_codecs(array.dtype, threads, with_max=True)[-1]
    third_party_codecs, not_installed = rivals.find_installed_codecs(array.dtype, threads)
    num_dense_bytes = count_dense_bytes(dense, sample.size)
    sample = sample[: num_dense_bytes or sample.size]
    short_sample = (
        sample if with_max else sample[: MAX_EFFORT_SAMPLE_BYTES // array.coded_itemsize * array.coded_itemsize]
    )
    runs = [_CodecRun(codec, sample) for codec in own_codecs]
    if short_sample.size < sample.size:  # exact beside it, so that the two can be compared
        runs += [
            _CodecRun(replace(codec, name=f"{codec.name}{SHORT_SAMPLE_SUFFIX}"), short_sample)
            for codec in (own_codecs[0], max_codec)
        ]
    else:
        runs.append(_CodecRun(max_codec, sample))
    if dense is not None and num_dense_bytes:
        runs.append(_CodecRun(make_dense_codec(dense, threads), sample))
    runs += [_CodecRun(codec, sample) for codec in third_party_codecs]
    for repeat in range(repeats + 1):
        for run in runs:
            run.run_once(is_timed=repeat > 0)
            if progress:
                progress(1)
    info = inspect(encode(sample, dtype=array.dtype, effort="balanced", threads=threads))
    entropy_ratio = info.entropy_ratio
    return ArrayBenchReport(
        name=array.name,
        dtype=array.dtype,
        array_bytes=array.nbytes,
        sample_bytes=sample.size,
        entropy_ratio=None if entropy_ratio == float("inf") else entropy_ratio,
        rounds=repeats,
        results=tuple(run.to_result() for run in runs),
        missing=tuple(not_installed),
        note=explain_no_dense(dense, sample.size),
    )


def _describe_machine() -> MachineInfo:
    return MachineInfo(platform.processor() or platform.machine(), cpu_count(), platform.system())


class _CodecRun:
    """One codec's turns."""

    def __init__(self, codec: BenchCodec, sample: Chunk) -> None:
        self._codec = codec
        self._sample = sample
        self._stored_bytes = 0
        self._error: str | None = None
        self._encode_timings: list[Timing] = []
        self._decode_timings: list[Timing] = []

    def run_once(self, *, is_timed: bool) -> None:
        if self._error:
            return
        try:
            payload, encode_time = _time_call(self._codec.encode, self._sample)
            output, decode_time = _time_call(self._codec.decode, payload)
            if not is_timed and not _is_same(output, self._sample):
                raise KvmnnError("the round trip changed the data")
        except Exception as exc:
            self._error = f"{type(exc).__name__}: {exc}"[:200]
            return
        self._stored_bytes = self._codec.count_bytes(payload)
        if is_timed:
            self._encode_timings.append(encode_time)
            self._decode_timings.append(decode_time)

    def to_result(self) -> CodecBenchResult:
        is_ok = self._error is None and self._encode_timings
        return CodecBenchResult(
            codec=self._codec.name,
            version=self._codec.version,
            raw_bytes=self._sample.size,
            stored_bytes=self._stored_bytes if is_ok else 0,
            encode=_compute_median(self._encode_timings) if is_ok else None,
            decode=_compute_median(self._decode_timings) if is_ok else None,
            error=self._error,
        )


def _time_call(function: Callable[[Any], Any], argument: Any) -> tuple[Any, Timing]:
    cpu, wall = time.process_time(), time.perf_counter()
    result = function(argument)
    return result, Timing(time.perf_counter() - wall, time.process_time() - cpu)


def _compute_median(timings: Sequence[Timing]) -> Timing:
    return Timing(median(timing.wall for timing in timings), median(timing.cpu for timing in timings))


def _is_same(output: Any, sample: Chunk) -> bool:
    output_bytes = (
        output.reshape(-1).view(np.uint8) if isinstance(output, np.ndarray) else np.frombuffer(output, np.uint8)
    )
    return np.array_equal(output_bytes, sample)
