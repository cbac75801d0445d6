"""Write all plots of an evaluation as files. Needs matplotlib (extra ``plot``)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from .._util.dataclass import dataclass
from .._util.packages import import_optional
from ..errors import KvmnnError, OptionError
from ..files.atomic import DirectoryOutput
from . import divergence_figure, figures, plot_style
from .figures import NothingToShowError
from .records import EvaluationResultsProtocol

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT_FORMATS = ("png", "svg", "pdf")


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """Formats and titles of plots."""

    #: File types, from `PLOT_FORMATS`, without duplicates.
    kinds: tuple[str, ...] = ("png", "svg")
    #: Whether figures have titles; False suits documents with their own captions.
    titles: bool = True

    def __post_init__(self) -> None:
        for kind in self.kinds:
            if kind not in PLOT_FORMATS:
                raise OptionError(f"{kind!r} is no kind of plot: expected some of {', '.join(PLOT_FORMATS)}")
        if not self.kinds or len(set(self.kinds)) != len(self.kinds):
            raise OptionError(
                f"plots as {','.join(self.kinds)!r}: expected some of {', '.join(PLOT_FORMATS)}, each once"
            )


DEFAULT_PLOT_OPTIONS = PlotOptions()


def check_can_write(
    names: Iterable[str],
    directory: str | os.PathLike[str],
    force: bool = False,
    options: PlotOptions = DEFAULT_PLOT_OPTIONS,
) -> None:
    """Raise an error if plots of these names cannot be written."""
    import_optional("matplotlib.figure")
    with DirectoryOutput(directory, force=force) as probe:
        probe.check_names(f"{name}.{kind}" for name in names for kind in options.kinds)


def write_figures(
    plots: Iterable[tuple[str, Figure]],
    directory: str | os.PathLike[str],
    force: bool = False,
    options: PlotOptions = DEFAULT_PLOT_OPTIONS,
) -> list[Path]:
    """Write named figures and return the files; no directory is created if there is no figure.

    Errors as `check_can_write`.
    """
    import_optional("matplotlib.figure")
    written_paths: list[Path] = []
    with DirectoryOutput(directory, force=force) as output:
        for name, figure in plots:
            if not options.titles:
                plot_style.remove_titles(figure)
            for kind in options.kinds:
                output.open_file(f"{name}.{kind}").write(plot_style.render_figure(figure, kind))
                written_paths.append(Path(directory) / f"{name}.{kind}")
        if written_paths:
            output.commit()
    return written_paths


DRAW_FUNCTIONS: dict[str, Callable[[EvaluationResultsProtocol], Figure]] = {
    draw.__name__: draw
    for draw in (
        figures.perplexity_over_budget,
        figures.accuracy_over_budget,
        figures.perplexity_accuracy_tradeoff,
        figures.keep_ratio_analysis,
        figures.strategy_comparison,
        figures.improvement_summary,
        figures.memory_over_time,
        figures.keep_map,
        divergence_figure.kl_over_bytes,
    )
}
"""Every plot by its name, which is its file's name."""


def check_can_plot(
    directory: str | os.PathLike[str], force: bool = False, options: PlotOptions = DEFAULT_PLOT_OPTIONS
) -> None:
    """Check before the work starts that its plots can be drawn and written; raise the error otherwise."""
    check_can_write(DRAW_FUNCTIONS, directory, force, options)


def write_plots(
    results: EvaluationResultsProtocol,
    directory: str | os.PathLike[str],
    force: bool = False,
    *,
    options: PlotOptions = DEFAULT_PLOT_OPTIONS,
    skip_reasons: dict[str, str] | None = None,
) -> list[Path]:
    """Draw all plots that the results permit."""
    reasons: dict[str, str] = {} if skip_reasons is None else skip_reasons
    written_paths = write_figures(_iter_figures(results, reasons), directory, force, options)
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
