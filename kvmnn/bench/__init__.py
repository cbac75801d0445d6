"""Codecs side by side on the same data: ratio, speed, and when compressing pays."""

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
