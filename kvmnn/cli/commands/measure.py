"""``kvmnn measure``: sizes of losslessly compressed KV dumps, simulated and stored."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from ...analysis.options import LANES, ArgumentsError, LanePredictors, MeasureOptions, Scope, parse_layer_ids
from .. import (
    batch,
    break_even_options,
    console,
    dense_options,
    input_sources,
    layer_stream_options,
    packed_options,
    shared_options,
)
from ..console import UsageError
from ..options import add_dataclass_options, collect_values

if TYPE_CHECKING:
    from ...analysis import DenseMeasureResult, DumpSelection, MeasureOptions, MeasureResult
    from ..command_parser import CommandParser


def add_measure_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options that determine the measured sizes."""
    add_dataclass_options(parser.add_argument_group("which dumps"), Scope)
    group = parser.add_argument_group("how they are cut up, and how sizes are simulated")
    add_dataclass_options(group, MeasureOptions)
    add_dataclass_options(group, LanePredictors)


def add_input_output_options(parser: CommandParser) -> None:
    """Declare the options of input, output and threads."""
    parser.add_argument("inputs", nargs="*", metavar="INPUT", help="a dump, or K and V of layers")
    parser.add_argument("--out-json", default="", metavar="FILE", help="write the evaluation's JSON document")
    parser.add_argument("--out-md", default="", metavar="FILE", help="write the evaluation's Markdown summary")
    shared_options.accept_table(parser)
    parser.add_argument(
        "--encode", dest="real", action="store_true", help="also encode frames, decode and compare them"
    )
    parser.add_argument(
        "--fp32", action="store_true", help="with --to-fp16: also simulate the fp32 words, in four byte lanes"
    )
    break_even_options.add_speed_option(parser, "also time the store's codecs, and say where they pay")
    parser.add_argument("--no-limits", action="store_true", help="do not compute the entropy of bytes (faster)")
    parser.accept("--threads")
    parser.add_argument(
        "--token-major", action="store_true", help="arrays of other inputs are [token, kv_head, head_dim]"
    )


def add_alternative_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options for dumps that do something other than measuring."""
    group = parser.add_argument_group("instead of measuring")
    group.add_argument("--analysis", metavar="DIR", help="entropies and split ratios of every dump and head")
    group.add_argument("--dense", action="store_true", help="bytes of dense streams next to those of MNN's frames")
    layer_stream_options.add_codec_option(
        group,
        "bytes of layer streams by a model's profile (docs/profile.md), as encode --codec makes them",
        action=shared_options.SingleValueAction,
    )
    dense_options.add_rope_option(group)
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
    """Build the options of a measurement.

    Raises
    ------
    OptionError
        With the message of the reference's tool.
    """
    scope_values = collect_values(Scope, arguments)
    if "layer_ids" in scope_values:
        scope_values["layer_ids"] = parse_layer_ids(scope_values["layer_ids"])
    return MeasureOptions(
        **collect_values(MeasureOptions, arguments),
        scope=Scope(**scope_values, to_fp16=getattr(arguments, "to_fp16", None) is not None),
        limits=not getattr(arguments, "no_limits", False),
        fp32=getattr(arguments, "fp32", False),
        predictors=LanePredictors(**collect_values(LanePredictors, arguments)),
    )


_CHUNK_OPTIONS = ("online_chunk_seq", "online_framing_bytes")
_SIMULATION_OPTIONS = (
    *(
        "entry_mode",
        *_CHUNK_OPTIONS,
        "aggregate_by_stage",
        "codec_mode",
        "adaptive_block_seq",
        "bitshuffle",
        *LANES,
    ),
    *("out_json", "out_md", "real", "fp32", "no_limits", "threads", "token_major"),
)
_SOURCE_OPTIONS = ("dtype", "tensor", "skip_unsupported", "token_major", *shared_options.AXES_OPTION_NAMES)
_SCOPE_OPTIONS = ("scope", "front_n", "layer_start", "layer_end", "layer_ids", "strict_fp16")
_ROUNDING_OPTIONS = ("strict_fp16", "to_fp16")
_FILTER_OPTIONS = ("stage", "min_seq_len", "max_seq_len")
_OPTIONS_BY_SCOPE = {"front_n": ("front_n",), "layer_range": ("layer_start", "layer_end"), "layer_ids": ("layer_ids",)}


def refuse_idle_measure_options(arguments: argparse.Namespace, options: MeasureOptions, *, are_all_dumps: bool) -> None:
    """Raise `UsageError` for options without effect; `are_all_dumps`: every input is a directory of dumps."""

    def refuse_names(names: Sequence[str], reason: str) -> None:
        shared_options.refuse_given(arguments, names, reason)

    if not arguments.analysis:
        refuse_names(["skip_head_metrics", "run_log"], "needs --analysis")
    if not arguments.to_fp16:
        refuse_names(["allow_fp16"], "needs --to-fp16 DIR")
    if arguments.codec:
        refuse_names(break_even_options.SPEED_NAMES, "is not for --codec (kvmnn bench times codecs of a profile)")
    if arguments.to_fp16 is not None or arguments.analysis:
        refuse_names(break_even_options.SPEED_NAMES, "is not for --analysis and --to-fp16")
    if not arguments.dense:
        refuse_names(["rope"], "needs --dense")
    if arguments.dense or arguments.codec:
        reason = f"is not for {'--dense' if arguments.dense else '--codec'}, which takes all layers as they are"
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
        refuse_names(["adaptive_block_seq", *LANES], "needs --codec-mode adaptive_v22")
    if are_all_dumps and not arguments.dense and not arguments.codec:
        refuse_names(_SOURCE_OPTIONS, "is for other inputs than KV dumps, which say it themselves")


def parse_measure_options(argv: Sequence[str]) -> MeasureOptions:
    """Parse a list of arguments as the reference's tool does, without inputs and outputs.

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


class _MeasureParser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ArgumentsError(message)


_DESCRIPTION = """\
Measure how well KV dumps can be compressed without loss: the offline evaluation of the H2O work on MNN, number for
number. Sizes are simulated: zstd frames of byte lanes under predictors along the tokens, added up. --encode also makes
frames as MNN does, decodes and compares them, and reports their sizes.

INPUT is the directory of an MNN KV dump, or anything else that kvmnn reads as K and V of layers. --out-json and --out-
md write the evaluation's own two documents. --json prints them and the breakdown by layer, part and byte lane with the
order-0 entropy of its bytes. --jobs N measures each file below folders by itself.

fp32 is measured as fp32. --to-fp16 rounds it to fp16 first (LOSSY), as the evaluation does.

--analysis DIR writes entropies and split ratios of every dump and head instead (layer_metrics.csv, head_metrics.csv,
summary.md; grouped_summary.md with --run-log, a CSV file or JSON lines with run_id and prompt_tokens). --to-fp16 DIR
converts a tree of fp32 dumps (LOSSY) and measures nothing. --dense reports, layer by layer, the sizes of dense streams
and of MNN's frames: all are made, decoded and compared (docs/dense.md); --codec those of
streams by a model's profile, with what lossy ones cost (docs/profile.md). --speed also puts K and V into a temporary
store of each codec and gets them, several times: from what link and length on they pay (docs/prefix-store.md)."""


def add_parser(subparsers: Any) -> None:
    """Add the parser of the command."""
    parser = shared_options.add_command(
        subparsers,
        "measure",
        run,
        "what lossless compression of KV dumps would give",
        _DESCRIPTION,
        examples=(
            "kvmnn measure dump/",
            "kvmnn measure dump/ --encode --json",
            "kvmnn measure kv/ --codec transform:lm.kvmp,kl=0.002",
        ),
        shown="--encode --dense --codec --analysis --to-fp16 --front-n --stage --out-json --out-md --dtype "
        "--token-major --jobs",
    )
    add_input_output_options(parser)
    add_measure_options(parser)
    add_alternative_options(parser)
    parser.accept("--max-input-bytes")
    shared_options.add_source_options(parser, "element type, where the input does not have it")
    batch.add_batch_options(parser)
    packed_options.add_packed_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    if not arguments.inputs and arguments.to_fp16:
        # The one name on the command line is what is to be measured, although argparse takes it for --to-fp16's DIR.
        arguments.inputs, arguments.to_fp16 = [arguments.to_fp16], ""
    if not arguments.inputs:
        raise UsageError("expected an INPUT")
    if batch.is_batch(arguments):
        takes = ["arrays", "frames"]
        refused_reasons = {
            name: why for name, why in _REASONS_AGAINST_BATCH.items() if name != "to_fp16" or arguments.to_fp16
        }
        return batch.run_batch(
            arguments, "measure", arguments.inputs, accepted_kinds=takes, not_for_many=refused_reasons
        )
    if arguments.to_fp16 == "" and arguments.strict_fp16:
        raise UsageError("--to-fp16 and --strict-fp16 exclude each other: fp32 is rounded, or left out")
    if arguments.to_fp16 == "" and (arguments.analysis or arguments.dense or arguments.codec):
        raise UsageError(
            "--to-fp16 without DIR is for measuring: --analysis, --dense and --codec take words as they are"
        )
    if sum(map(bool, (arguments.analysis, arguments.to_fp16, arguments.dense, arguments.codec))) > 1:
        raise UsageError("--analysis, --to-fp16, --dense and --codec exclude each other")
    if arguments.to_fp16 and len(arguments.inputs) != 1:
        raise UsageError("--to-fp16 takes one INPUT")
    if console.STDIO in (arguments.out_json, arguments.out_md):
        raise UsageError("--out-json and --out-md write files; --json prints the documents on standard output")
    seen_paths: set[str] = set()
    for path in arguments.inputs:
        if (real_path := os.path.realpath(path)) in seen_paths:
            raise UsageError(f"{path}: is given twice, and would count twice")
        seen_paths.add(real_path)
    options = build_measure_options(arguments)
    dumps = _list_dumps(arguments)
    refuse_idle_measure_options(arguments, options, are_all_dumps=len(dumps) == len(arguments.inputs))
    packed_options.refuse_idle_packed_options(
        arguments, arguments.inputs, dense_options.SOURCE_TEXT_OPTIONS if arguments.dense else ()
    )
    if arguments.dense:
        _run_measure_dense(arguments)
    elif arguments.codec:
        _run_measure_layers(arguments)
    elif arguments.to_fp16:
        _run_conversion(arguments)
    elif arguments.analysis:
        _run_analysis(arguments, options)
    else:
        _run_measure(arguments, options, dumps)
    return 0


_ONE_OUTPUT_REASON = "it names one output, and each file has its own results, in its line"
_REASONS_AGAINST_BATCH = {
    "out_json": _ONE_OUTPUT_REASON,
    "out_md": _ONE_OUTPUT_REASON,
    "analysis": "it goes through whole trees of dumps by itself",
    "to_fp16": "it goes through whole trees of dumps by itself",
}


def _list_dumps(arguments: argparse.Namespace) -> list[str]:
    """List the inputs that are folders of KV dumps."""
    from ...analysis import is_dump_folder

    return [path for path in arguments.inputs if is_dump_folder(path) and not arguments.packed]


def _run_measure(arguments: argparse.Namespace, options: MeasureOptions, dumps: list[str]) -> None:
    from ...analysis import NothingSelectedError, count_work_bytes, measure_dumps

    selection = _select_entries(arguments, options, dumps)
    if not selection.entries:
        raise NothingSelectedError(f"No entries selected after filtering. Left out: {selection.describe_exclusions()}")
    with console.progress_bar(arguments, count_work_bytes(selection, options, arguments.real), "measuring") as progress:
        measure_result = measure_dumps(
            [os.path.abspath(path) for path in arguments.inputs],
            selection,
            options,
            real=arguments.real,
            threads=arguments.threads,
            out_json=arguments.out_json,
            out_md=arguments.out_md,
            force=arguments.force,
            progress=progress,
        )
    _show_sizes(arguments, measure_result)
    for path in filter(None, (arguments.out_json, arguments.out_md)):
        console.print_line(arguments, f"Wrote {path}")


def _select_entries(arguments: argparse.Namespace, options: MeasureOptions, dumps: list[str]) -> DumpSelection:
    """Select the entries of KV dumps, and of every other input as a source."""
    from ...analysis import add_source, select_dumps
    from ...arrays.float8 import pair_codes

    other_inputs = [path for path in arguments.inputs if path not in dumps]
    selection = select_dumps(dumps, options.scope)
    if other_inputs:
        codes = arguments.to_fp16 is None  # else their numbers are rounded
        source = pair_codes(input_sources.load(other_inputs, arguments, with_frames=True, any_heads=True, codes=codes))
        source.token_major |= arguments.token_major
        input_sources.report_skipped(source, arguments)
        add_source(selection, source, options.scope, other_inputs[0])
    selection.check_distinct_files()
    selection.check_size(arguments.max_bytes)
    return selection


def _run_measure_dense(arguments: argparse.Namespace) -> None:
    from ...analysis import measure_dense

    source = input_sources.load(
        arguments.inputs, arguments, with_frames=True, used_options=dense_options.SOURCE_TEXT_OPTIONS
    )
    source.token_major |= arguments.token_major
    input_sources.report_skipped(source, arguments)
    options = dense_options.build_dense_options(arguments, source)
    with console.progress_bar(arguments, source.nbytes, "measuring") as progress:
        dense_result = measure_dense(source, options, threads=arguments.threads, progress=progress)
    _show_sizes(arguments, dense_result)


def _run_measure_layers(arguments: argparse.Namespace) -> None:
    from ...formats.layer_streams.writer import measure_layers

    source = input_sources.load(arguments.inputs, arguments, with_frames=True)
    source.token_major |= arguments.token_major
    input_sources.report_skipped(source, arguments)
    options = layer_stream_options.parse_options(arguments.codec)
    with console.progress_bar(arguments, source.nbytes, "measuring") as progress:
        result = measure_layers(source, options, progress=progress)
    console.show_result(arguments, "measure", result)


def _show_sizes(arguments: argparse.Namespace, result: MeasureResult | DenseMeasureResult) -> None:
    """Print sizes; with ``--speed`` also from what link and length on stored K and V pay."""
    if break_even_options.has_speed(arguments):
        from dataclasses import replace

        from ...store import read_layer_caches
        from ...store.tier_times import measure_break_even

        engine = break_even_options.read_engine_times(arguments)
        used_options = dense_options.SOURCE_TEXT_OPTIONS if arguments.dense else ()
        source = input_sources.load(arguments.inputs, arguments, with_frames=True, used_options=used_options)
        layers = read_layer_caches(source, token_major=arguments.token_major)
        report = measure_break_even(layers, engine=engine, link=arguments.load_speed, threads=arguments.threads)
        result = replace(result, break_even=report)
    console.show_result(arguments, "measure", result)


def _run_analysis(arguments: argparse.Namespace, options: MeasureOptions) -> None:
    from ...analysis import select_dumps, with_all_layers, write_entropy_report

    selection = select_dumps(arguments.inputs, with_all_layers(options.scope))
    selection.check_distinct_files()
    selection.check_size(arguments.max_bytes)
    total = sum(map(os.path.getsize, selection.list_files()))
    with console.progress_bar(arguments, total, "analysing") as progress:
        report = write_entropy_report(
            selection,
            arguments.analysis,
            level=options.zstd_level,
            with_heads=not arguments.skip_head_metrics,
            run_log=arguments.run_log,
            force=arguments.force,
            progress=progress,
        )
    console.show_result(arguments, "measure", report)


def _run_conversion(arguments: argparse.Namespace) -> None:
    from ...analysis import convert_to_fp16

    convert_result = convert_to_fp16(
        arguments.inputs[0], arguments.to_fp16, allow_fp16=arguments.allow_fp16, overwrite=arguments.force
    )
    convert_result.require_dumps()
    console.show_result(arguments, "measure", convert_result)
    convert_result.require_no_errors()
