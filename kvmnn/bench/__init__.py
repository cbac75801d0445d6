"""Codecs side by side on the same data: ratio, speed, and when compressing pays."""

from .benchmark import compare, count_runs, measure
from .results import ArrayBenchReport, BenchReport, CodecBenchResult, MachineInfo, Timing

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
