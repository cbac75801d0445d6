"""How plots are written, for the verbs that draw evaluations."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..reports.plot_files import PlotOptions


def add_plot_options(parser: Any) -> None:
    """``--plot-format`` and ``--no-titles``."""
    parser.add_argument("--plot-format", metavar="KIND,...", help="of png, svg and pdf (default: png,svg)")
    parser.add_argument("--no-titles", action="store_true", help="plots without titles, for papers that have captions")


def build_plot_options(arguments: argparse.Namespace) -> PlotOptions:
    """The options; `OptionError` for kinds that there are not."""
    from ..reports.plot_files import PlotOptions

    formats = PlotOptions.kinds if arguments.plot_format is None else tuple(arguments.plot_format.split(","))
    return PlotOptions(kinds=formats, titles=not arguments.no_titles)
