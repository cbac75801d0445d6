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

from ..arrays.named_array import NamedArray, Piece
from ..arrays.source import Source
from ..bundle.dense_pieces import DensePlan
from ..errors import KvmnnError
from ..frames import encode, inspect
from ..threads.pipeline import Progress
from ..threads.pool import cpu_count
from . import rivals
from .dense_codec import dense_bytes, dense_codec, dense_plans, why_not
from .results import Comparison, Machine, Report, Result, Timing
from .rivals import Codec

MAX_BYTES = 64 << 20
"""Bytes of an array that are measured unless said otherwise."""
MAX_SAMPLE = 1 << 20
"""Bytes of them on which effort max is measured unless all of them are asked for: it is that slow."""
PART = ", first MiB"
"""What the names of codecs end in that are measured on these."""


def compare(
    source: Source,
    *,
    max_bytes: int = MAX_BYTES,
    rounds: int = 5,
    threads: int = 1,
    with_max: bool = False,
    progress: Progress | None = None,
) -> Comparison:
    """Measure kvmnn's efforts, its dense streams and every rival that is installed on the arrays of a source.

    Parameters
    ----------
    source
        The data: `kvmnn.open`.
    max_bytes
        Bytes of each array, from its beginning, to measure; 0 for all.
    rounds
        Turns of each codec, of which the medians are taken.
    threads
        Threads for each codec.
    with_max
        Measure effort max on all of that, and not on its first MiB only.
    progress
        Called with 1 after each turn of a codec; there are `turns` of them.

    Raises
    ------
    SourceError
        When an array turns out to be damaged. A codec that fails or does not restore the data is a line of the result.
    """
    plans = dense_plans(source)
    reports = [
        measure(
            array,
            max_bytes=max_bytes,
            rounds=rounds,
            threads=threads,
            with_max=with_max,
            dense=plans.get(array.name),
            progress=progress,
        )
        for array in source.arrays
    ]
    return Comparison(machine=_machine(), threads=threads, arrays=tuple(reports))


def turns(source: Source, rounds: int, threads: int, max_bytes: int = MAX_BYTES, *, with_max: bool = False) -> int:
    """How often `compare` will call its `progress`."""
    plans = dense_plans(source, trial=False)

    def codecs(array: NamedArray) -> int:
        size = min(array.nbytes, max_bytes or array.nbytes)
        with_dense = dense_bytes(plans.get(array.name), size)
        parts = not with_max and (with_dense or size) > MAX_SAMPLE
        return 4 + parts + len(rivals.installed(array.dtype, threads)[0]) + bool(with_dense)

    return sum((rounds + 1) * codecs(array) for array in source.arrays)


def measure(
    array: NamedArray,
    *,
    max_bytes: int,
    rounds: int,
    threads: int | None,
    with_max: bool = False,
    dense: DensePlan | None = None,
    progress: Progress | None = None,
) -> Report:
    """Measure every codec on the beginning of an array: of what becomes dense streams, on as much as makes whole ones.

    The codecs take turns, so that what disturbs the machine disturbs all of them; medians of `rounds` turns follow one
    turn that is not counted, in which each round trip is compared with its input.

    Parameters
    ----------
    max_bytes
        Most bytes of the array to measure; 0 for all.
    rounds
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
    pieces = array.pieces(max_bytes)
    sample = next(pieces)
    if sample.size == array.nbytes:
        deque(pieces, maxlen=0)  # checksums and hashes are compared behind the last byte
    codecs = rivals.kvmnn_codecs(array.dtype, threads)
    slowest = rivals.kvmnn_codecs(array.dtype, threads, with_max=True)[-1]
    others, missing = rivals.installed(array.dtype, threads)
    with_dense = dense_bytes(dense, sample.size)
    sample = sample[: with_dense or sample.size]
    beginning = sample if with_max else sample[: MAX_SAMPLE // array.word_bytes * array.word_bytes]
    runs = [_Run(codec, sample) for codec in codecs]
    if beginning.size < sample.size:  # exact beside it, so that the two can be compared
        runs += [_Run(replace(codec, name=f"{codec.name}{PART}"), beginning) for codec in (codecs[0], slowest)]
    else:
        runs.append(_Run(slowest, sample))
    if dense is not None and with_dense:
        runs.append(_Run(dense_codec(dense, threads), sample))
    runs += [_Run(codec, sample) for codec in others]
    for turn in range(rounds + 1):
        for run in runs:
            run.turn(counted=turn > 0)
            if progress:
                progress(1)
    info = inspect(encode(sample, dtype=array.dtype, effort="balanced", threads=threads))
    limit = info.entropy_ratio
    return Report(
        name=array.name,
        dtype=array.dtype,
        array_bytes=array.nbytes,
        sample_bytes=sample.size,
        entropy_ratio=None if limit == float("inf") else limit,
        rounds=rounds,
        results=tuple(run.result() for run in runs),
        missing=tuple(missing),
        note=why_not(dense, sample.size),
    )


def _machine() -> Machine:
    return Machine(platform.processor() or platform.machine(), cpu_count(), platform.system())


class _Run:
    """One codec's turns."""

    def __init__(self, codec: Codec, sample: Piece) -> None:
        self._codec = codec
        self._sample = sample
        self._stored = 0
        self._error: str | None = None
        self._encodes: list[Timing] = []
        self._decodes: list[Timing] = []

    def turn(self, *, counted: bool) -> None:
        if self._error:
            return
        try:
            made, encode_time = _timed(self._codec.encode, self._sample)
            back, decode_time = _timed(self._codec.decode, made)
            if not counted and not _same(back, self._sample):
                raise KvmnnError("the round trip changed the data")
        except Exception as exc:
            self._error = f"{type(exc).__name__}: {exc}"[:200]
            return
        self._stored = self._codec.stored(made)
        if counted:
            self._encodes.append(encode_time)
            self._decodes.append(decode_time)

    def result(self) -> Result:
        ok = self._error is None and self._encodes
        return Result(
            codec=self._codec.name,
            version=self._codec.version,
            raw_bytes=self._sample.size,
            stored_bytes=self._stored if ok else 0,
            encode=_median(self._encodes) if ok else None,
            decode=_median(self._decodes) if ok else None,
            error=self._error,
        )


def _timed(function: Callable[[Any], Any], argument: Any) -> tuple[Any, Timing]:
    cpu, wall = time.process_time(), time.perf_counter()
    result = function(argument)
    return result, Timing(time.perf_counter() - wall, time.process_time() - cpu)


def _median(timings: Sequence[Timing]) -> Timing:
    return Timing(median(t.wall for t in timings), median(t.cpu for t in timings))


def _same(back: Any, sample: Piece) -> bool:
    found = back.reshape(-1).view(np.uint8) if isinstance(back, np.ndarray) else np.frombuffer(back, np.uint8)
    return np.array_equal(found, sample)
