"""``kvmnn plot``: the plots of an evaluation from its saved results."""

from __future__ import annotations

import argparse
from typing import Any

from .. import console, eval_options, shared_options

_DESCRIPTION = """\
Draw the plots of an evaluation from its results as JSON (kvmnn eval -o RESULTS.json, or --json). No model is
needed. memory_over_time and keep_map need results of kvmnn eval --plot: other runs record no course.

  kvmnn eval model/ --text texts/ --policy streaming --budget 256 \\
      --plot plots/ -o results.json
  kvmnn plot results.json -o paper/ --plot-format pdf --no-titles"""


def add_parser(subparsers: Any) -> None:
    """Declare the verb."""
    parser = shared_options.add_command(
        subparsers, "plot", run, "plots of an evaluation from its saved results", _DESCRIPTION
    )
    parser.add_argument("results", metavar="RESULTS.json", help="what eval -o RESULTS.json wrote")
    parser.add_argument("-o", "--output", required=True, metavar="DIR", help="folder for the plots")
    parser.add_argument("-f", "--force", action="store_true", help="replace files that exist")
    eval_options.add_plot_options(parser)


def run(arguments: argparse.Namespace) -> int:
    """Carry the verb out."""
    from ...evaluation import plot_results

    plot_result = plot_results(
        arguments.results,
        arguments.output,
        overwrite=arguments.force,
        options=eval_options.build_plot_options(arguments),
    )
    console.show_result(arguments, "plot", plot_result)
    return 0
