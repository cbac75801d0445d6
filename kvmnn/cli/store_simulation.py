"""``kvmnn store simulate``: options and run."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING, Any

from . import input_sources, layer_stream_options, shared_options
from .break_even_options import add_speed_option
from .console import UsageError

if TYPE_CHECKING:
    from ..arrays.layer_cache import LayerCache
    from ..store.simulation import MeasuredRatio, ModelShape, SimulationReport

SIMULATION_OPTIONS = ("model_shape", "sizes", "policies", "ratio", "prefill_speed", "load_speed", "codec", "threads")
_POLICIES = ("lru", "benefit", "belady")


def _parse_sizes(text: str) -> tuple[int, ...]:
    return tuple(map(shared_options.parse_byte_count, text.split(",")))


def _parse_policies(text: str) -> tuple[str, ...]:
    policies = tuple(dict.fromkeys(text.split(",")))
    if not set(policies) <= set(_POLICIES):
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected some of {','.join(_POLICIES)} (simulate), or lru or benefit (put, import)"
        )
    return policies


def _parse_ratio(text: str) -> float | str:
    if text == "measured":
        return text
    if not re.fullmatch(r"\d{1,2}(\.\d{1,9})?", text) or float(text) < 0.5:
        raise argparse.ArgumentTypeError(f"{text!r} is no ratio: expected a number such as 1.38, or measured")
    return float(text)


def add_simulation_options(parser: Any) -> None:
    """Add the options of ``store simulate``."""
    group = parser.add_argument_group(
        "simulate",
        "TRACE stands where the other actions have STORE; each IN is a cache of one text whose ratio is measured.",
    )
    group.add_argument(
        "--model-shape", metavar="SHAPE", help="LAYERSxKV_HEADSxHEAD_DIM[,DTYPE] of the model, such as 32x8x128,fp16"
    )
    group.add_argument(
        "--size",
        dest="sizes",
        type=_parse_sizes,
        metavar="SIZE,...",
        help="limits, such as 4G,16G; K, M, G, T are powers of 1024",
    )
    group.add_argument(
        "--policy",
        dest="policies",
        type=_parse_policies,
        metavar="NAME,...",
        help="some of lru, benefit and belady, which knows the future (default: all); put, import: of a new store, lru "
        "(default) or benefit, seconds saved per byte",
    )
    group.add_argument(
        "--ratio",
        type=_parse_ratio,
        metavar="R",
        help="raw over stored bytes; measured: of the caches IN together (default: 1)",
    )
    add_speed_option(group, "for the seconds saved; stat: for break-even")


def run_simulation(arguments: argparse.Namespace) -> SimulationReport:
    """Replay a trace; write the picture if an output is specified."""
    from ..store.simulation import MeasuredRatio, TierSpeed, parse_model_shape, read_trace, simulate

    if arguments.model_shape is None or arguments.sizes is None:
        raise UsageError("store simulate needs --model-shape SHAPE and --size SIZE,...")
    if (arguments.ratio == "measured") != bool(arguments.inputs):
        raise UsageError("store simulate takes --ratio measured and caches together: TRACE CACHE... --ratio measured")
    if isinstance(arguments.prefill_speed, str):
        raise UsageError("store simulate takes --speed prefill= as tokens a second, no file")
    if arguments.load_speed is not None and arguments.prefill_speed is None:
        raise UsageError("--speed load= needs prefill=, too")
    shape = parse_model_shape(arguments.model_shape)
    speed = None
    if arguments.prefill_speed is not None:
        speed = TierSpeed(prefill=arguments.prefill_speed, load=arguments.load_speed)
    trace = read_trace(arguments.store)
    if arguments.inputs:
        ratios = _measure_ratios(arguments, shape)
    else:
        ratios = [MeasuredRatio("", float(arguments.ratio or 1.0))]
    policies = arguments.policies or _POLICIES
    measured_on = ", ".join(arguments.inputs)
    report = simulate(
        trace, shape, sizes=arguments.sizes, policies=policies, ratios=ratios, speed=speed, measured_on=measured_on
    )
    if arguments.output is not None:
        report.plot(arguments.output, force=arguments.force)
    return report


def _measure_ratios(arguments: argparse.Namespace, shape: ModelShape) -> list[MeasuredRatio]:
    from ..store import read_layer_caches
    from ..store.simulation import measure_store_ratios

    caches: list[tuple[range, list[LayerCache]]] = []
    num_tokens = 0
    for path in arguments.inputs:
        source = input_sources.load([path], arguments, with_frames=True)
        input_sources.report_skipped(source, arguments)
        layers = read_layer_caches(source)
        shape.check_layers(layers, path)
        caches.append((range(num_tokens, num_tokens + layers[0].tokens), layers))  # texts that share nothing
        num_tokens += layers[0].tokens
    if arguments.codec is None:
        return measure_store_ratios(caches, threads=arguments.threads)
    codec, profile, options = "frames" if arguments.codec == "mnn" else arguments.codec, None, None
    if layer_stream_options.is_layer_codec(arguments.codec):
        codec, profile, options = layer_stream_options.split_codec(arguments.codec)
    return measure_store_ratios(
        caches, codecs=(codec,), profile=profile, codec_options=options, threads=arguments.threads
    )
