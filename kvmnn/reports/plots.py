"""All plots of an evaluation, as files. Needs matplotlib (extra ``plot``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import KvmnnError
from . import comparison_figure, figures, improvement_figure, plot_files, plot_style, trace_figures
from .figure_parts import NothingToShowError
from .plot_files import DEFAULT_PLOT_OPTIONS, PlotOptions
from .results import EvaluationResultsProtocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

DRAW_FUNCTIONS: dict[str, Callable[[EvaluationResultsProtocol], Figure]] = {
    draw.__name__: draw
    for draw in (
        figures.perplexity_over_budget,
        figures.accuracy_over_budget,
        figures.perplexity_accuracy_tradeoff,
        figures.keep_ratio_analysis,
        comparison_figure.strategy_comparison,
        improvement_figure.improvement_summary,
        trace_figures.memory_over_time,
        trace_figures.keep_map,
    )
}
"""Every plot by its name, which is its file's name."""


def check_can_plot(
    directory: str | os.PathLike[str], force: bool = False, options: PlotOptions = DEFAULT_PLOT_OPTIONS
) -> None:
    """Refuse to begin what could not end in plots.

    Raises
    ------
    MissingDependencyError
        Without matplotlib.
    OutputError
        Where files of plots exist in `directory` and are not to be replaced.
    """
    plot_files.check_can_write(DRAW_FUNCTIONS, directory, force, options)


def write_plots(
    results: EvaluationResultsProtocol,
    directory: str | os.PathLike[str],
    force: bool = False,
    *,
    options: PlotOptions = DEFAULT_PLOT_OPTIONS,
    skip_reasons: dict[str, str] | None = None,
) -> list[Path]:
    """Draw everything that the results hold.

    Parameters
    ----------
    results
        An `EvaluationResult` of `kvmnn.evaluation`.
    directory
        Made where there is none; all files appear together.
    force
        Replace files that exist.
    options
        Which kinds of files, and whether with titles.
    skip_reasons
        Takes the names of the plots that the results hold nothing for, and the reasons.

    Returns
    -------
    list of Path
        What was written: each kind of each plot. Equal results make equal bytes with the same matplotlib.

    Raises
    ------
    MissingDependencyError
        Without matplotlib.
    KvmnnError
        Where the results hold nothing for any plot.
    OutputError
        For files that exist and are not to be replaced, and for what cannot be written.
    """
    reasons: dict[str, str] = {} if skip_reasons is None else skip_reasons
    written_paths = plot_files.write_figures(_iter_figures(results, reasons), directory, force, options)
    if not written_paths:
        raise KvmnnError("there is nothing to plot: " + "; ".join(f"{n}: {reason}" for n, reason in reasons.items()))
    return written_paths


def _iter_figures(results: EvaluationResultsProtocol, skip_reasons: dict[str, str]) -> Iterator[tuple[str, Figure]]:
    for name, draw in DRAW_FUNCTIONS.items():
        with plot_style.use_style():
            try:
                figure = draw(results)
            except NothingToShowError as exc:
                skip_reasons[name] = str(exc)
                continue
        yield name, figure
