"""How long operations took: sums and percentiles over all of them, in bounded memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

_BUCKETS_PER_OCTAVE = 8
_NUM_BUCKETS = 64 * _BUCKETS_PER_OCTAVE


@dataclass(frozen=True, kw_only=True)
class LatencySummary:
    """Durations in microseconds; percentiles are exact to 1/8 of an octave (9 %), and never below the true ones."""

    count: int
    total_us: float
    p50_us: float
    p95_us: float
    p99_us: float
    max_us: float

    def to_dict(self) -> dict[str, float | int]:
        """Name to figure."""
        return {
            "count": self.count,
            "total_us": self.total_us,
            "p50_us": self.p50_us,
            "p95_us": self.p95_us,
            "p99_us": self.p99_us,
            "max_us": self.max_us,
        }


class LatencyHistogram:
    """A histogram of durations with buckets that grow by an eighth of an octave.

    Parameters
    ----------
    total
        Where every duration is counted as well.
    """

    def __init__(self, total: LatencyHistogram | None = None) -> None:
        self._total = total
        self.reset()

    def reset(self) -> None:
        """Begin anew."""
        self._buckets: dict[int, int] = {}
        self.count = self.total_ns = self.max_ns = 0

    def add(self, nanoseconds: int) -> None:
        """Count one duration."""
        self.count += 1
        self.total_ns += nanoseconds
        self.max_ns = max(self.max_ns, nanoseconds)
        bucket = _find_bucket(nanoseconds)
        self._buckets[bucket] = self._buckets.get(bucket, 0) + 1
        if self._total is not None:
            self._total.add(nanoseconds)

    @contextmanager
    def measure(self) -> Iterator[None]:
        """Count how long the block takes."""
        start_ns = time.perf_counter_ns()
        try:
            yield
        finally:
            self.add(time.perf_counter_ns() - start_ns)

    def compute_percentile_us(self, fraction: float) -> float:
        """The duration that `fraction` of all do not exceed, in microseconds; 0 where there is none."""
        target_count, cumulative_count = fraction * self.count, 0
        for bucket in sorted(self._buckets):
            cumulative_count += self._buckets[bucket]
            if cumulative_count >= target_count:
                return min(_get_bucket_max_ns(bucket), self.max_ns) / 1e3
        return 0.0

    def summarize(self) -> LatencySummary:
        """The figures so far."""
        return LatencySummary(
            count=self.count,
            total_us=self.total_ns / 1e3,
            p50_us=self.compute_percentile_us(0.50),
            p95_us=self.compute_percentile_us(0.95),
            p99_us=self.compute_percentile_us(0.99),
            max_us=self.max_ns / 1e3,
        )


def _find_bucket(nanoseconds: int) -> int:
    """The number of the bucket that a duration falls into: its leading bits."""
    if nanoseconds < _BUCKETS_PER_OCTAVE:
        return max(0, nanoseconds)
    shift = nanoseconds.bit_length() - _BUCKETS_PER_OCTAVE.bit_length()
    return min(_NUM_BUCKETS, (shift + 1) * _BUCKETS_PER_OCTAVE + (nanoseconds >> shift) - _BUCKETS_PER_OCTAVE)


def _get_bucket_max_ns(bucket: int) -> int:
    """The longest duration of a bucket."""
    if bucket < _BUCKETS_PER_OCTAVE:
        return bucket
    shift, mantissa = divmod(bucket, _BUCKETS_PER_OCTAVE)
    return ((mantissa + _BUCKETS_PER_OCTAVE + 1) << (shift - 1)) - 1
