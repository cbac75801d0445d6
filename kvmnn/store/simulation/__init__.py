"""Simulate a prefix store on a recorded trace of requests: hits and bytes by codec, limit and eviction policy."""

from .report import (
    MeasuredRatio,
    ModelShape,
    SimulationReport,
    SimulationRow,
    TierSpeed,
    measure_store_ratios,
    parse_model_shape,
    simulate,
)
from .trace import RequestTrace, read_trace

__all__ = [
    "MeasuredRatio",
    "ModelShape",
    "RequestTrace",
    "SimulationReport",
    "SimulationRow",
    "TierSpeed",
    "measure_store_ratios",
    "parse_model_shape",
    "read_trace",
    "simulate",
]
