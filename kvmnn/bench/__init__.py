"""Benchmark codecs on the same data: ratio, speed, and from which link speed compressing is worth it."""

from .benchmark import (
    ArrayBenchReport,
    BenchReport,
    CodecBenchResult,
    MachineInfo,
    Timing,
    compare,
    compare_on_cache,
    count_cache_runs,
    count_runs,
    measure,
)
from .codecs import LossStats

__all__ = [
    "ArrayBenchReport",
    "BenchReport",
    "CodecBenchResult",
    "LossStats",
    "MachineInfo",
    "Timing",
    "compare",
    "compare_on_cache",
    "count_cache_runs",
    "count_runs",
    "measure",
]
