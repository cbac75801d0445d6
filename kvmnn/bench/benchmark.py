"""What `kvmnn bench` measures: speed, ratio, what was reachable, and when compressing pays."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from ..arrays.named_array import NamedArray, Piece
from ..errors import KvmnnError
from ..frames import encoding, inspection
from . import rivals
from .rivals import Codec

MAX_SAMPLE = 1 << 20
"""Bytes of the sample on which effort max is measured unless all of it is asked for: it is that slow."""


@dataclass(frozen=True)
class Timing:
    """Median seconds of one call: on the clock, and of processor time summed over threads."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Result:
    """One codec on one array.

    Parameters
    ----------
    codec, version
        What was measured.
    raw_bytes, stored_bytes
        Before and after.
    encode, decode
        Timings; None where the codec failed.
    error
        Why there is no result.
    """

    codec: str
    version: str
    raw_bytes: int
    stored_bytes: int
    encode: Timing | None
    decode: Timing | None
    error: str | None = None

    @property
    def ratio(self) -> float | None:
        """Raw over stored bytes."""
        return self.raw_bytes / self.stored_bytes if self.stored_bytes else None

    @property
    def break_even(self) -> float | None:
        """Link speed (bytes per second) below which compress + send + decompress beats sending raw; None if none does.

        With n raw bytes, ratio r, encode and decode speeds E and D (bytes per second, wall clock) and a link of B bytes
        per second, one after the other: ``n/E + n/(r B) + n/D < n/B``, so ``B < (1 - 1/r) / (1/E + 1/D)``. Work that
        overlaps the transfer pays up to higher speeds.
        """
        if not self.ratio or self.ratio <= 1 or self.encode is None or self.decode is None:
            return None
        seconds_per_byte = (self.encode.wall + self.decode.wall) / self.raw_bytes
        return (1 - 1 / self.ratio) / seconds_per_byte

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON, derived figures included; speeds in bytes per second."""

        def speed(timing: Timing | None, kind: str) -> float | None:
            return None if timing is None else self.raw_bytes / max(getattr(timing, kind), 1e-9)

        return {
            **asdict(self),
            "ratio": self.ratio,
            "encode_bytes_per_s_cpu": speed(self.encode, "cpu"),
            "encode_bytes_per_s_wall": speed(self.encode, "wall"),
            "decode_bytes_per_s_cpu": speed(self.decode, "cpu"),
            "decode_bytes_per_s_wall": speed(self.decode, "wall"),
            "break_even_bytes_per_s": self.break_even,
        }


@dataclass(frozen=True)
class Report:
    """All codecs on one array.

    Parameters
    ----------
    entropy_ratio
        The ratio at the order-0 entropy of the byte-split streams: what a coder without context could reach. None for
        data without entropy.
    sample_bytes
        How much of the array (its beginning) was measured.
    missing
        Packages that are not installed.
    """

    name: str
    dtype: str
    array_bytes: int
    sample_bytes: int
    entropy_ratio: float | None
    rounds: int
    results: tuple[Result, ...]
    missing: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The same for JSON."""
        return {**vars(self), "results": [result.to_dict() for result in self.results], "missing": list(self.missing)}


def measure(
    array: NamedArray,
    *,
    max_bytes: int,
    rounds: int,
    threads: int | None,
    with_max: bool = False,
    progress: Callable[[int], object] | None = None,
) -> Report:
    """Measure every codec on the beginning of an array.

    The codecs take turns, so that what disturbs the machine disturbs all of them; medians of `rounds` turns follow one
    turn that is not counted, in which each round trip is compared with its input.

    Parameters
    ----------
    max_bytes
        Most bytes of the array to measure.
    with_max
        Measure effort max on the whole sample, and not on its first MiB only.
    progress
        Called with 1 after every turn of a codec.
    """
    sample = next(array.pieces(max_bytes))
    codecs = rivals.kvmnn_codecs(array.dtype, threads)
    slowest = rivals.kvmnn_codecs(array.dtype, threads, with_max=True)[-1]
    others, missing = rivals.installed(array.dtype, threads)
    part = sample if with_max else sample[: MAX_SAMPLE // array.word_bytes * array.word_bytes]
    runs = [_Run(codec, sample) for codec in codecs] + [_Run(slowest, part)] + [_Run(codec, sample) for codec in others]
    for turn in range(rounds + 1):
        for run in runs:
            run.turn(counted=turn > 0)
            if progress:
                progress(1)
    info = inspection.inspect(encoding.encode(sample, dtype=array.dtype, effort="fast", threads=threads))
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
    )


def turns(rounds: int, dtype: str, threads: int | None) -> int:
    """How often `measure` will call its `progress`."""
    return (rounds + 1) * (3 + len(rivals.installed(dtype, threads)[0]))


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
            made, encoding = _timed(self._codec.encode, self._sample)
            back, decoding = _timed(self._codec.decode, made)
            if not counted and not _same(back, self._sample):
                raise KvmnnError("the round trip changed the data")
        except KeyboardInterrupt:
            raise
        except Exception as exc:
            self._error = f"{type(exc).__name__}: {exc}"[:200]
            return
        self._stored = len(made)
        if counted:
            self._encodes.append(encoding)
            self._decodes.append(decoding)

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
