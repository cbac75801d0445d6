"""Plots as files, each kind of them, complete or absent."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import OptionError
from ..files.output import DirectoryOutput
from ..optional import import_optional
from . import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PLOT_FORMATS = ("png", "svg", "pdf")


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """How plots are written.

    Parameters
    ----------
    kinds
        Of files, some of `PLOT_FORMATS`, each once.
    titles
        Whether figures have titles; without, for a text that says them itself.

    Raises
    ------
    OptionError
        For other kinds, and for none.
    """

    kinds: tuple[str, ...] = ("png", "svg")
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
    """Refuse to begin what could not end in plots of these names.

    Raises
    ------
    MissingDependencyError
        Without matplotlib.
    OutputError
        Where files of plots exist in `directory` and are not to be replaced.
    """
    import_optional("matplotlib.figure")
    with DirectoryOutput(directory, force=force) as probe:
        probe.check_names(f"{name}.{kind}" for name in names for kind in options.kinds)


def write_figures(
    plots: Iterable[tuple[str, Figure]],
    directory: str | os.PathLike[str],
    force: bool = False,
    options: PlotOptions = DEFAULT_PLOT_OPTIONS,
) -> list[Path]:
    """Write named figures; returns the files, and makes no directory where there is no figure.

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
