"""``kvmnn measure``: what lossless compression of KV dumps would give, simulated, and what it gives for real."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from .. import dense_options, loading, many_options, measure_options, packed_options, printing, shared_options
from ..printing import UsageError

if TYPE_CHECKING:
    from ...offline import DumpSelection, MeasureOptions

_DESCRIPTION = """\
Measure how well KV dumps can be compressed without loss: the offline evaluation of the H2O work on MNN,
number for number. Sizes are simulated: zstd frames of byte lanes under predictors along the tokens, added up. --real
also makes frames as MNN does, decodes and compares them, and says what they take.

INPUT is the directory of an MNN KV dump, or anything else that kvmnn reads as K and V of layers; --dump-dir is the
same. --out-json and --out-md write the evaluation's own two documents. --json prints them and the breakdown by layer,
part and byte lane with the order-0 entropy of its bytes. --jobs N measures each file below folders by itself
(--help-many).

fp32 is measured as fp32. --to-fp16 rounds it to fp16 first (LOSSY), as the evaluation does.

--analysis DIR writes entropies and split ratios of every dump and head instead (layer_metrics.csv, head_metrics.csv,
summary.md; grouped_summary.md with --run-log, a CSV file or JSON lines with run_id and prompt_tokens). --to-fp16 DIR
converts a tree of fp32 dumps (LOSSY) and measures nothing. --dense says, layer by layer, what dense streams take beside
the frames of MNN: all are made, decoded and compared (docs/dense.md)."""


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_command(
        subparsers, "measure", run, "what lossless compression of KV dumps would give", _DESCRIPTION
    )
    measure_options.add_input_output_options(parser)
    measure_options.add_measure_options(parser)
    measure_options.add_alternative_options(parser)
    shared_options.add_max_bytes(parser)
    shared_options.add_source(parser, "what the words are, where the input does not say")
    many_options.add_batch_options(parser)
    packed_options.add_packed_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    arguments.inputs = [*arguments.inputs, *arguments.dump_dir]
    if not arguments.inputs and arguments.to_fp16:
        # The one name on the command line is what is to be measured, although argparse takes it for --to-fp16's DIR.
        arguments.inputs, arguments.to_fp16 = [arguments.to_fp16], ""
    if not arguments.inputs:
        raise UsageError("expected an INPUT, or --dump-dir DIR")
    if many_options.is_batch(arguments):
        takes = ["arrays", "frames"]
        refused_reasons = {
            name: why for name, why in _REASONS_AGAINST_BATCH.items() if name != "to_fp16" or arguments.to_fp16
        }
        return many_options.run_batch(
            arguments, "measure", arguments.inputs, accepted_kinds=takes, not_for_many=refused_reasons
        )
    if arguments.to_fp16 == "" and arguments.strict_fp16:
        raise UsageError("--to-fp16 and --strict-fp16 exclude each other: fp32 is rounded, or left out")
    if arguments.to_fp16 == "" and (arguments.analysis or arguments.dense):
        raise UsageError("--to-fp16 without DIR is for measuring: --analysis and --dense take words as they are")
    if sum(map(bool, (arguments.analysis, arguments.to_fp16, arguments.dense))) > 1:
        raise UsageError("--analysis, --to-fp16 and --dense exclude each other")
    if arguments.to_fp16 and len(arguments.inputs) != 1:
        raise UsageError("--to-fp16 takes one INPUT")
    if printing.STDIO in (arguments.out_json, arguments.out_md):
        raise UsageError("--out-json and --out-md write files; --json prints the documents on standard output")
    seen_paths: set[str] = set()
    for path in arguments.inputs:
        if (real_path := os.path.realpath(path)) in seen_paths:
            raise UsageError(f"{path}: is given twice, and would count twice")
        seen_paths.add(real_path)
    options = measure_options.build_measure_options(arguments)
    dumps = _list_dumps(arguments)
    measure_options.refuse_idle_measure_options(arguments, options, are_all_dumps=len(dumps) == len(arguments.inputs))
    packed_options.refuse_idle_packed_options(
        arguments, arguments.inputs, dense_options.SOURCE_TEXT_OPTIONS if arguments.dense else ()
    )
    if arguments.dense:
        _run_measure_dense(arguments)
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
    """The inputs that are read by the evaluation's own walk."""
    from ...offline import is_dump_folder

    return [path for path in arguments.inputs if is_dump_folder(path) and not arguments.packed]


def _run_measure(arguments: argparse.Namespace, options: MeasureOptions, dumps: list[str]) -> None:
    from ...offline import NothingSelectedError, count_work_bytes, measure_dumps

    selection = _select_entries(arguments, options, dumps)
    if not selection.entries:
        raise NothingSelectedError(f"No entries selected after filtering. Left out: {selection.describe_exclusions()}")
    with printing.progress_bar(
        arguments, count_work_bytes(selection, options, arguments.real), "measuring"
    ) as progress:
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
    printing.show_result(arguments, "measure", measure_result)
    for path in filter(None, (arguments.out_json, arguments.out_md)):
        printing.print_line(arguments, f"Wrote {path}")


def _select_entries(arguments: argparse.Namespace, options: MeasureOptions, dumps: list[str]) -> DumpSelection:
    """KV dumps by the evaluation's own walk, everything else as a source."""
    from ...arrays.float8 import pair_codes
    from ...offline import add_source, select_dumps

    other_inputs = [path for path in arguments.inputs if path not in dumps]
    selection = select_dumps(dumps, options.scope)
    if other_inputs:
        codes = arguments.to_fp16 is None  # else their numbers are rounded
        source = pair_codes(loading.load(other_inputs, arguments, with_frames=True, any_heads=True, codes=codes))
        source.token_major |= arguments.token_major
        loading.report_skipped(source, arguments)
        add_source(selection, source, options.scope, other_inputs[0])
    selection.check_distinct_files()
    selection.check_size(arguments.max_bytes)
    return selection


def _run_measure_dense(arguments: argparse.Namespace) -> None:
    from ...offline import measure_dense

    source = loading.load(arguments.inputs, arguments, with_frames=True, used_options=dense_options.SOURCE_TEXT_OPTIONS)
    source.token_major |= arguments.token_major
    loading.report_skipped(source, arguments)
    options = dense_options.build_dense_options(arguments, source)
    with printing.progress_bar(arguments, source.nbytes, "measuring") as progress:
        dense_result = measure_dense(source, options, threads=arguments.threads, progress=progress)
    printing.show_result(arguments, "measure", dense_result)


def _run_analysis(arguments: argparse.Namespace, options: MeasureOptions) -> None:
    from ...offline import select_dumps, with_all_layers, write_entropy_report

    selection = select_dumps(arguments.inputs, with_all_layers(options.scope))
    selection.check_distinct_files()
    selection.check_size(arguments.max_bytes)
    total = sum(map(os.path.getsize, selection.list_files()))
    with printing.progress_bar(arguments, total, "analysing") as progress:
        report = write_entropy_report(
            selection,
            arguments.analysis,
            level=options.zstd_level,
            with_heads=not arguments.skip_head_metrics,
            run_log=arguments.run_log,
            force=arguments.force,
            progress=progress,
        )
    printing.show_result(arguments, "measure", report)


def _run_conversion(arguments: argparse.Namespace) -> None:
    from ...offline import convert_to_fp16

    convert_result = convert_to_fp16(
        arguments.inputs[0], arguments.to_fp16, allow_fp16=arguments.allow_fp16, overwrite=arguments.force
    )
    convert_result.require_dumps()
    printing.show_result(arguments, "measure", convert_result)
    convert_result.require_no_errors()
