"""Lossy streams of K and V by a model's profile (docs/format-transform.md)."""

from .decoder import decode_layer, inspect_layer
from .encoder import LayerEncoding, encode_layer
from .profile_tables import get_tables
from .results import TransformInfo, TransformLayerResult, measure_errors
from .steps import StepPlan, TransformOptions, choose_exponents, plan_steps
from .tables import Metrics, build_tables

__all__ = [
    "LayerEncoding",
    "Metrics",
    "StepPlan",
    "TransformInfo",
    "TransformLayerResult",
    "TransformOptions",
    "build_tables",
    "choose_exponents",
    "decode_layer",
    "encode_layer",
    "get_tables",
    "inspect_layer",
    "measure_errors",
    "plan_steps",
]
