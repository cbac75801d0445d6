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
from .codecs import BenchCodec, LossStats
from .layer_codecs import CacheSample, GetRope, join_layers

__all__ = [
    "ArrayBenchReport",
    "BenchCodec",
    "BenchReport",
    "CacheSample",
    "CodecBenchResult",
    "GetRope",
    "LossStats",
    "MachineInfo",
    "Timing",
    "compare",
    "compare_on_cache",
    "count_cache_runs",
    "count_runs",
    "join_layers",
    "measure",
]
