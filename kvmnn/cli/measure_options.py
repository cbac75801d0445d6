"""The options of `kvmnn measure`: those of the reference's tool under their names, and what kvmnn adds."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn

from ..offline.options import (
    CODEC_MODES,
    DEFAULT_K_PREDICTORS,
    DEFAULT_V_PREDICTORS,
    ENTRY_MODES,
    LANES,
    SCOPES,
    STAGES,
    ArgumentsError,
    LanePredictors,
    MeasureOptions,
    Scope,
    parse_layer_ids,
)
from . import axes_options, dense_options, idle_options, shared_options


def add_measure_options(parser: argparse.ArgumentParser) -> None:
    """Declare everything that decides which sizes come out."""
    group = parser.add_argument_group("which dumps")
    group.add_argument("--stage", choices=STAGES, default="both", help="(default: both: any)")
    group.add_argument(
        "--scope", choices=SCOPES, help="how layers are chosen (default: all; the evaluation's: front_n)"
    )
    group.add_argument("--front-n", type=int, metavar="N", help="the first N layers (default: 2)")
    group.add_argument("--layer-start", type=int, metavar="N", help="first of layer_range (default: 2)")
    group.add_argument("--layer-end", type=int, metavar="N", help="last of layer_range (default: -1: any)")
    group.add_argument("--layer-ids", default="", metavar="N[,N...]", help="the layers of layer_ids")
    group.add_argument(
        "--min-seq-len", type=int, default=0, metavar="N", help="tokens of a dump at least (default: 0, any)"
    )
    group.add_argument(
        "--max-seq-len", type=int, default=0, metavar="N", help="tokens of a dump at most (default: 0, any)"
    )
    group.add_argument("--strict-fp16", action="store_true", help="leave fp32 out")
    group = parser.add_argument_group("how they are put together and cut up")
    group.add_argument("--entry-mode", choices=ENTRY_MODES, default="per_meta", help="(default: per_meta: not at all)")
    group.add_argument(
        "--online-chunk-seq", type=int, default=0, metavar="N", help="tokens of a piece (default: 0, one piece)"
    )
    group.add_argument(
        "--online-framing-bytes", type=int, default=16, metavar="N", help="added for each piece (default: 16)"
    )
    group.add_argument("--aggregate-by-stage", action="store_true", help="keep prefill and decode apart")
    group = parser.add_argument_group("how sizes are simulated")
    group.add_argument("--codec-mode", choices=CODEC_MODES, default="adaptive_v22", help="(default: adaptive_v22)")
    group.add_argument(
        "--adaptive-block-seq", type=int, default=64, metavar="N", help="tokens of a block (default: 64)"
    )
    group.add_argument("--bitshuffle", action="store_true", help="sort bits by plane before compressing")
    group.add_argument("--zstd-level", type=int, default=3, metavar="N", help="(default: 3)")
    for lane in LANES:
        names = DEFAULT_K_PREDICTORS if lane.startswith("k") else DEFAULT_V_PREDICTORS
        group.add_argument(
            f"--{lane.replace('_', '-')}-predictors",
            default=",".join(names),
            metavar="NAMES",
            help=f"what adaptive_v22 tries on the {lane[2:]} bytes of {lane[0].upper()} (default: {','.join(names)})",
        )


def add_input_output_options(parser: argparse.ArgumentParser) -> None:
    """Declare what is read and written, and how fast."""
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help="a dump, or K and V of layers")
    parser.add_argument("--dump-dir", action="append", default=[], metavar="DIR", help="an input")
    parser.add_argument("--out-json", default="", metavar="FILE", help="write the evaluation's JSON document")
    parser.add_argument("--out-md", default="", metavar="FILE", help="write the evaluation's Markdown summary")
    shared_options.add_force(parser)
    parser.add_argument("--overwrite", dest="force", action="store_true", help=argparse.SUPPRESS)  # the evaluation's
    parser.add_argument("--real", action="store_true", help="also encode frames, decode them and compare")
    parser.add_argument(
        "--fp32", action="store_true", help="with --to-fp16: also simulate the fp32 words, in four byte lanes"
    )
    parser.add_argument("--no-limits", action="store_true", help="do not compute the entropy of bytes (faster)")
    parser.add_argument(
        "--threads", type=shared_options.parse_positive, metavar="N", help="threads to use (default: all processors)"
    )
    parser.add_argument(
        "--token-major", action="store_true", help="arrays of other inputs are [token, kv_head, head_dim]"
    )


def add_alternative_options(parser: argparse.ArgumentParser) -> None:
    """Declare what can be done with dumps instead of measuring them."""
    group = parser.add_argument_group("instead of measuring")
    group.add_argument("--analysis", metavar="DIR", help="entropies and split ratios of every dump and head")
    group.add_argument("--dense", action="store_true", help="bytes of dense streams beside those of MNN's frames")
    dense_options.add_rope(group)
    group.add_argument("--skip-head-metrics", action="store_true", help="with --analysis: no head_metrics.csv")
    group.add_argument("--run-log", metavar="FILE", help="with --analysis: prompt tokens of each run")
    group.add_argument(
        "--to-fp16",
        nargs="?",
        const="",
        metavar="DIR",
        help="with DIR: convert a tree of fp32 dumps to fp16 (LOSSY); without: measure, fp32 rounded to fp16 (LOSSY)",
    )
    group.add_argument("--allow-fp16", action="store_true", help="with --to-fp16 DIR: take fp16 dumps over too")


def build_measure_options(arguments: argparse.Namespace) -> MeasureOptions:
    """What the arguments ask for.

    Raises
    ------
    OptionError
        With the message of the reference's tool.
    """
    return MeasureOptions(
        scope=Scope(
            stage=arguments.stage,
            scope=arguments.scope,
            front_n=arguments.front_n,
            layer_start=arguments.layer_start,
            layer_end=arguments.layer_end,
            layer_ids=parse_layer_ids(arguments.layer_ids),
            min_seq_len=arguments.min_seq_len,
            max_seq_len=arguments.max_seq_len,
            strict_fp16=arguments.strict_fp16,
            to_fp16=getattr(arguments, "to_fp16", None) is not None,
        ),
        entry_mode=arguments.entry_mode,
        online_chunk_seq=arguments.online_chunk_seq,
        online_framing_bytes=arguments.online_framing_bytes,
        aggregate_by_stage=arguments.aggregate_by_stage,
        codec_mode=arguments.codec_mode,
        adaptive_block_seq=arguments.adaptive_block_seq,
        bitshuffle=arguments.bitshuffle,
        zstd_level=arguments.zstd_level,
        limits=not getattr(arguments, "no_limits", False),
        fp32=getattr(arguments, "fp32", False),
        predictors=LanePredictors(**{lane: split_list(getattr(arguments, f"{lane}_predictors")) for lane in LANES}),
    )


_PREDICTOR_OPTIONS = tuple(f"{lane}_predictors" for lane in LANES)
_CHUNK_OPTIONS = ("online_chunk_seq", "online_framing_bytes")
_SIMULATION_OPTIONS = (
    *(
        "entry_mode",
        *_CHUNK_OPTIONS,
        "aggregate_by_stage",
        "codec_mode",
        "adaptive_block_seq",
        "bitshuffle",
        *_PREDICTOR_OPTIONS,
    ),
    *("out_json", "out_md", "real", "fp32", "no_limits", "threads", "token_major"),
)
_SOURCE_OPTIONS = ("dtype", "tensor", "skip_unsupported", "token_major", *axes_options.AXES_OPTION_NAMES)
_SCOPE_OPTIONS = ("scope", "front_n", "layer_start", "layer_end", "layer_ids", "strict_fp16")
_ROUNDING_OPTIONS = ("strict_fp16", "to_fp16")
_FILTER_OPTIONS = ("stage", "min_seq_len", "max_seq_len")
_OPTIONS_BY_SCOPE = {"front_n": ("front_n",), "layer_range": ("layer_start", "layer_end"), "layer_ids": ("layer_ids",)}


def refuse_idle_measure_options(arguments: argparse.Namespace, options: MeasureOptions, *, are_all_dumps: bool) -> None:
    """`UsageError` for options that would change nothing; `are_all_dumps`: every input is a directory of dumps."""

    def refuse_names(names: Sequence[str], reason: str) -> None:
        idle_options.refuse_given(arguments, names, reason)

    if not arguments.analysis:
        refuse_names(["skip_head_metrics", "run_log"], "needs --analysis")
    if not arguments.to_fp16:
        refuse_names(["allow_fp16"], "needs --to-fp16 DIR")
    if not arguments.dense:
        refuse_names(["rope"], "needs --dense")
    if arguments.dense:
        reason = "is not for --dense, which takes all layers as they are"
        refuse_names(
            [
                name
                for name in (*_SIMULATION_OPTIONS, *_SCOPE_OPTIONS, *_FILTER_OPTIONS)
                if name not in ("threads", "token_major")
            ],
            reason,
        )
        refuse_names(["zstd_level", "bitshuffle"], reason)
    elif arguments.to_fp16:
        refuse_names(
            [*_SIMULATION_OPTIONS, *_SOURCE_OPTIONS, *_SCOPE_OPTIONS, *_FILTER_OPTIONS, "zstd_level", "max_bytes"],
            "is not for --to-fp16",
        )
    elif arguments.analysis:
        refuse_names(
            [*_SIMULATION_OPTIONS, *_SOURCE_OPTIONS, *_SCOPE_OPTIONS],
            "is not for --analysis, which takes all layers of dumps",
        )
    for scope, names in _OPTIONS_BY_SCOPE.items():
        if options.scope.scope != scope:
            refuse_names(names, f"needs --scope {scope}")
    if not options.is_chunked:
        refuse_names(
            _CHUNK_OPTIONS, "needs --entry-mode chunked or chunked_grouped: nothing is cut into pieces otherwise"
        )
    if not options.is_grouped:
        refuse_names(["aggregate_by_stage"], "needs --entry-mode aggregate or chunked_grouped")
    if options.codec_mode != "adaptive_v22":
        refuse_names(["adaptive_block_seq", *_PREDICTOR_OPTIONS], "needs --codec-mode adaptive_v22")
    if are_all_dumps and not arguments.dense:
        refuse_names(_SOURCE_OPTIONS, "is for other inputs than KV dumps, which say it themselves")


def parse_measure_options(argv: Sequence[str]) -> MeasureOptions:
    """The options in a list of arguments as the reference's tool takes them, without inputs and outputs.

    Its default scope is ``front_n``, and it rounds fp32 to fp16.

    Raises
    ------
    OptionError
        For a value that is refused, and for unknown arguments.
    """
    parser = _MeasureParser(prog="measure", add_help=False)
    add_measure_options(parser)
    parser.set_defaults(scope="front_n", to_fp16="")
    return build_measure_options(parser.parse_args(list(argv)))


def split_list(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


class _MeasureParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentsError(message)
