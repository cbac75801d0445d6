"""What a prefix store would find of a recorded trace of requests, without its contents."""

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
