"""Benchmark codecs on the same data: ratio, speed, and from which link speed compressing is worth it."""

from .benchmark import (
    ArrayBenchReport,
    BenchReport,
    CodecBenchResult,
    MachineInfo,
    Timing,
    compare,
    count_runs,
    measure,
)

__all__ = [
    "ArrayBenchReport",
    "BenchReport",
    "CodecBenchResult",
    "MachineInfo",
    "Timing",
    "compare",
    "count_runs",
    "measure",
]
