"""Lossy streams of K and V by a model's profile (docs/format-transform.md)."""

from .decoder import decode_layer, inspect_layer, is_stream_of_plan
from .encoder import LayerEncoding, encode_layer
from .heads import HeadMoments, split_heads
from .profile_tables import get_tables
from .results import TransformInfo, TransformLayerResult, measure_errors
from .steps import (
    MAX_KL,
    StepPlan,
    TransformOptions,
    choose_exponents,
    choose_layer_exponents,
    fit_level_shifts,
    measure_bits_factor,
    plan_steps,
)
from .tables import MODES, Metrics, build_tables
from .tables import Mode as TransformMode

__all__ = [
    "MAX_KL",
    "MODES",
    "HeadMoments",
    "LayerEncoding",
    "Metrics",
    "StepPlan",
    "TransformInfo",
    "TransformLayerResult",
    "TransformMode",
    "TransformOptions",
    "build_tables",
    "choose_exponents",
    "choose_layer_exponents",
    "decode_layer",
    "encode_layer",
    "fit_level_shifts",
    "get_tables",
    "inspect_layer",
    "is_stream_of_plan",
    "measure_bits_factor",
    "measure_errors",
    "plan_steps",
    "split_heads",
]
