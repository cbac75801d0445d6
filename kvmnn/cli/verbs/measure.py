"""``kvmnn measure``: what lossless compression of KV dumps would give, as the seeds measure it, and for real."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ...text import LOSSLESS, LOSSY, count
from .. import loading, packed_options, printing, shared_options
from ..measure_options import add_options, options_of
from ..printing import UsageError

if TYPE_CHECKING:
    from ...offline.measuring import Measurement
    from ...offline.options import MeasureOptions
    from ...offline.selection import Selection

_TEXT = """Measure how well KV dumps can be compressed without loss: the offline evaluation of the H2O work on MNN,
number for number. Sizes are simulated: zstd frames of byte lanes under predictors along the tokens, added up. --real
also makes frames as MNN does, decodes and compares them, and says what they take.

INPUT is the directory of an MNN KV dump, or anything else that kvmnn reads as K and V of layers; --dump-dir is the
same. --out-json and --out-md write the evaluation's own two documents. --json prints them and the breakdown by layer,
part and byte lane with the order-0 entropy limit of each.

--analysis DIR writes entropies and split ratios of every dump and head instead (layer_metrics.csv, head_metrics.csv,
summary.md; grouped_summary.md with --run-log, a CSV file or JSON lines with run_id and prompt_tokens). --to-fp16 DIR
converts a tree of fp32 dumps (LOSSY)."""


def add_parser(verbs: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_verb(verbs, "measure", run, "what lossless compression of KV dumps would give", _TEXT)
    parser.add_argument("inputs", nargs="*", metavar="INPUT")
    parser.add_argument("--dump-dir", action="append", default=[], metavar="DIR", help="an input")
    parser.add_argument("--out-json", default="", metavar="FILE", help="write the evaluation's JSON document")
    parser.add_argument("--out-md", default="", metavar="FILE", help="write the evaluation's Markdown summary")
    parser.add_argument("--overwrite", "-f", "--force", action="store_true", help="replace files that exist")
    parser.add_argument("--real", action="store_true", help="also encode frames, decode them and compare")
    parser.add_argument("--no-limits", action="store_true", help="do not compute order-0 entropy limits (faster)")
    parser.add_argument(
        "--threads", type=shared_options.positive, metavar="N", help="threads to use (default: all processors)"
    )
    parser.add_argument(
        "--token-major", action="store_true", help="arrays of other inputs are [token, kv_head, head_dim]"
    )
    add_options(parser)
    group = parser.add_argument_group("instead of measuring")
    group.add_argument("--analysis", metavar="DIR", help="entropies and split ratios of every dump and head")
    group.add_argument("--skip-head-metrics", action="store_true", help="with --analysis: no head_metrics.csv")
    group.add_argument("--run-log", metavar="FILE", help="with --analysis: prompt tokens of each run")
    group.add_argument("--to-fp16", metavar="DIR", help="convert a tree of fp32 dumps to fp16 (LOSSY)")
    group.add_argument("--allow-fp16", action="store_true", help="with --to-fp16: take fp16 dumps over too")
    shared_options.add_source(parser, "what the words are, where the input does not say")
    packed_options.add_packed(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...offline.options import OptionError

    arguments.inputs = [*arguments.inputs, *arguments.dump_dir]
    if not arguments.inputs:
        raise UsageError("expected an INPUT, or --dump-dir DIR")
    if arguments.analysis and arguments.to_fp16:
        raise UsageError("--analysis and --to-fp16 exclude each other")
    try:
        options = options_of(arguments)
    except OptionError as exc:
        raise UsageError(str(exc)) from None
    if arguments.to_fp16:
        return _convert(arguments)
    if arguments.analysis:
        return _analyse(arguments, options)
    return _measure(arguments, options)


def _measure(arguments: argparse.Namespace, options: MeasureOptions) -> int:
    from dataclasses import replace

    from ...errors import OutputError
    from ...files.output import FileOutput, failures
    from ...offline.measuring import measure, work_bytes
    from ...offline.report import to_json, to_markdown

    options = replace(options, limits=not arguments.no_limits)
    wanted = [
        (Path(path), make) for path, make in ((arguments.out_json, to_json), (arguments.out_md, to_markdown)) if path
    ]
    for path, _ in wanted:
        if os.path.lexists(path) and not arguments.overwrite:
            raise OutputError(f"{path}: exists already (--overwrite replaces it)")
    if len(wanted) == 2 and os.path.realpath(arguments.out_json) == os.path.realpath(arguments.out_md):
        raise UsageError("--out-json and --out-md name the same file")
    selection = _select(arguments, options)
    selection.require_entries()
    with ExitStack() as stack:
        outputs = []
        for path, make in wanted:
            with failures(path):
                path.parent.mkdir(parents=True, exist_ok=True)
            protect = [*arguments.inputs, *_files(selection)]
            outputs.append((stack.enter_context(FileOutput(path, force=arguments.overwrite, protect=protect)), make))
        total = work_bytes(selection, options, arguments.real)
        with printing.progress(arguments, total, "measuring") as progress:
            inputs = [os.path.abspath(path) for path in arguments.inputs]
            measured = measure(
                inputs, selection, options, real=arguments.real, threads=arguments.threads, progress=progress
            )
        for output, make in outputs:
            output.file.write(make(measured).encode())
        for output, _ in outputs:
            output.commit()
    _report(arguments, measured)
    return 0


def _select(arguments: argparse.Namespace, options: MeasureOptions) -> Selection:
    """KV dumps by the evaluation's own walk, everything else as a source."""
    from ...offline.selection import Selection, add_dumps, is_dump, select_source

    found = Selection()
    others = []
    for path in arguments.inputs:
        if is_dump(path) and not arguments.packed:
            add_dumps(found, Path(os.path.abspath(path)), options.scope)
        else:
            others.append(path)
    if others:
        source = loading.load(others, arguments, frames=True)
        source.token_major |= arguments.token_major
        loading.report_skipped(source, arguments)
        select_source(found, source, options.scope, others[0])
    return found


def _files(selection: Selection) -> list[str]:
    from ...offline.token_runs import FileTensor

    tensors = (tensor for entry in selection.entries for tensor in (entry.k, entry.v))
    return [str(tensor.path) for tensor in tensors if isinstance(tensor, FileTensor)]


def _report(arguments: argparse.Namespace, measured: Measurement) -> None:
    from ...offline.report import to_breakdown, to_document, to_table

    if arguments.json:
        lossless = LOSSY if measured.selection.converted else LOSSLESS
        document = {"verb": "measure", "label": lossless, "evaluation": to_document(measured)}
        printing.print_json(document | {"breakdown": to_breakdown(measured)})
    printing.say(arguments, to_table(measured))
    for name, number in sorted(measured.selection.skipped.items()):
        printing.say(arguments, f"skipped: {number:,} {name}")
    for path in (arguments.out_json, arguments.out_md):
        if path:
            printing.say(arguments, f"Wrote {path}")


def _analyse(arguments: argparse.Namespace, options: MeasureOptions) -> int:
    from dataclasses import replace

    from ...files.output import DirectoryOutput
    from ...offline.analyses import ALL_LAYERS, analyse
    from ...offline.analysis_report import read_run_log, summary, write
    from ...offline.selection import select

    prompts = read_run_log(arguments.run_log) if arguments.run_log else None
    scope = replace(
        ALL_LAYERS,
        stage=options.scope.stage,
        min_seq_len=options.scope.min_seq_len,
        max_seq_len=options.scope.max_seq_len,
    )
    selection = select(arguments.inputs, scope)
    selection.require_entries()
    with_heads = not arguments.skip_head_metrics
    with DirectoryOutput(arguments.analysis, force=arguments.overwrite) as output:
        total = sum(os.stat(path).st_size for path in _files(selection))
        with printing.progress(arguments, total, "analysing") as progress:
            found = analyse(selection, level=options.zstd_level, with_heads=with_heads, progress=progress)
        write(found, output, prompts, with_heads)
        output.commit()
    if arguments.json:
        printing.print_json(
            {
                "verb": "measure",
                "analysis": arguments.analysis,
                "tensors": len(found.layers),
                "failed": found.failed,
                "skipped": dict(selection.skipped),
            }
        )
    printing.say(arguments, summary(found) + f"\nWrote {arguments.analysis}")
    return 0


def _convert(arguments: argparse.Namespace) -> int:
    from ...errors import SourceError
    from ...offline.fp16_dumps import to_fp16

    if len(arguments.inputs) != 1:
        raise UsageError("--to-fp16 takes one INPUT")
    source = Path(arguments.inputs[0])
    if not source.is_dir():
        raise SourceError(f"{source}: is not a directory")
    found = to_fp16(source, Path(arguments.to_fp16), allow_fp16=arguments.allow_fp16, overwrite=arguments.overwrite)
    if found.status == 1:
        raise SourceError(f"{source}: has no meta_*.json file below it, so it is not an MNN KV dump")
    if arguments.json:
        counts = {"converted": found.converted, "copied": found.copied, "skipped": found.skipped}
        printing.print_json(
            {"verb": "measure", "to_fp16": arguments.to_fp16, "label": LOSSY, **counts, "errors": found.errors}
        )
    printing.say(
        arguments,
        f"{LOSSY}: {count(found.converted, 'dump')} rounded to fp16, {found.copied:,} copied, "
        f"{found.skipped:,} skipped",
    )
    if found.errors:
        raise SourceError(f"{count(len(found.errors), 'dump')} not converted, first: {found.errors[0]}")
    return 0
