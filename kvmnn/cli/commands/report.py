"""``kvmnn report``: one page of measurements, or the plots of an evaluation."""

from __future__ import annotations

import argparse
import os
from pathlib import PurePath
from typing import TYPE_CHECKING, Any

from .. import console, eval_options, shared_options, streams
from ..console import UsageError

if TYPE_CHECKING:
    from ...reports.page import Report

_DESCRIPTION = """\
Make one page of results: the verdict of gates first, the cases with the figures of the MNN fork's report, ratios over
layers with the entropy of their bytes, memory over time, perplexity over budget, latencies, codecs, the trend over
rounds, machine and settings, and the exact commands. The page is one HTML file that loads nothing and needs no script.

IN is a folder, of which all results are taken (of gate run, eval, measure, mnn replay and bench; other JSON is
ignored, with a note), or a JSON file, which must be a result. The page names the parts that were not measured. Equal
inputs make equal pages. The exit code does not depend on the verdict.

With -o DIR/ (a slash, or a folder that exists) or an option about plots, report draws the plots of one evaluation, IN
(kvmnn eval -o RESULTS.json, or --json); no model is needed. memory_over_time and keep_map need results of kvmnn eval
--plot: other runs record no time series."""


def add_parser(subparsers: Any) -> None:
    """Add the parser of the command."""
    parser = shared_options.add_command(
        subparsers,
        "report",
        run,
        "one page of gates, evaluations and measurements",
        _DESCRIPTION,
        examples=(
            "kvmnn report round/ -o report.html",
            "kvmnn report round/ --markdown",
            "kvmnn report round/eval.json -o plots/ --plot-format pdf --no-titles",
        ),
        shown="--output --markdown --plot-format --no-titles",
    )
    parser.add_argument("inputs", nargs="+", metavar="IN", help="a folder of results, or a JSON file")
    shared_options.add_output_option(parser, "the page: .html, or .md; - is standard output. DIR/: folder for plots")
    shared_options.accept_table(parser)
    parser.add_argument(
        "--markdown", action="store_true", help="Markdown, for pull requests (default: to the terminal)"
    )
    eval_options.add_plot_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Run the command."""
    has_plot_options = arguments.plot_format is not None or arguments.no_titles
    if has_plot_options or (arguments.output and console.is_directory_output(arguments.output)):
        return _draw_plots(arguments)
    from ...files.atomic import FileOutput
    from ...reports.page import make_report
    from ...reports.tables import choose_format

    target = arguments.output
    as_markdown = arguments.markdown or _FORMAT_BY_SUFFIX.get(PurePath(target or "").suffix.lower()) == "markdown"
    _check_options(arguments, target, as_markdown)
    if target in (None, console.STDIO):
        report = _make_report(arguments, make_report)
        if arguments.json:
            console.show_result(arguments, "report", report)
        else:
            console.write_table(arguments, report)
            text = report.to_markdown() if as_markdown else report.to_html()
            console.Stdout().write(text.encode("utf-8", "backslashreplace"))
        return 0
    with FileOutput(target, force=arguments.force, exclude=arguments.inputs) as output:
        choose_format(
            target, _FORMAT_BY_SUFFIX if not arguments.markdown else {".txt": "", ".markdown": "", ".md": ""}, ""
        )
        report = _make_report(arguments, make_report)
        text = report.to_markdown() if as_markdown else report.to_html()
        output.file.write(text.encode("utf-8", "backslashreplace"))
        output.commit()
    console.show_result(arguments, "report", report, text=f"{target}: {report}")
    return 0


def _draw_plots(arguments: argparse.Namespace) -> int:
    from ...evaluation import plot_results

    target = arguments.output
    if target in (None, console.STDIO):
        raise UsageError("plots are files in a folder: use -o DIR/")
    if arguments.markdown or len(arguments.inputs) > 1 or os.path.isdir(arguments.inputs[0]):
        raise UsageError(
            f"{target}: is a directory, expected a file such as report.html; the plots of one evaluation go into one"
        )
    plot_result = plot_results(
        arguments.inputs[0],
        target,
        overwrite=arguments.force,
        options=eval_options.build_plot_options(arguments),
    )
    console.show_result(arguments, "plot", plot_result)
    return 0


_PLOT_SUFFIXES = (".png", ".svg", ".pdf")
_FORMAT_BY_SUFFIX = {".html": "html", ".htm": "html", ".markdown": "markdown", ".md": "markdown"}


def _check_options(arguments: argparse.Namespace, target: str | None, as_markdown: bool) -> None:
    if target is None and not as_markdown and not arguments.json:
        raise UsageError("no output given: use -o report.html, or --markdown")
    if target == console.STDIO and arguments.json:
        raise UsageError("--json and the page both want standard output: write the page to a file (-o FILE)")
    if target is None and as_markdown and arguments.json:
        raise UsageError("--json and --markdown both want standard output: write the page to a file (-o FILE)")
    if (suffix := PurePath(target or "").suffix.lower()) in _PLOT_SUFFIXES:
        raise UsageError(f"{target}: plots are several files: use -o DIR/ --plot-format {suffix[1:]}")
    if target == console.STDIO and not as_markdown and streams.is_terminal():
        raise UsageError("-o -: a terminal shows no HTML: use -o report.html, or --markdown")
    if arguments.markdown and (target or "").lower().endswith((".html", ".htm")):
        raise UsageError(f"{target}: --markdown writes no HTML: expected a name that ends in .md")


def _make_report(arguments: argparse.Namespace, build_report: Any) -> Report:
    report: Report = build_report(arguments.inputs)
    for name, reason in report.ignored_files[:5]:
        console.print_note(arguments, f"{name}: left out: {reason}")
    if len(report.ignored_files) > 5:
        console.print_note(arguments, f"{len(report.ignored_files) - 5:,} more files are left out")
    return report
