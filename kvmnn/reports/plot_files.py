"""Plots as files, each kind of them, complete or absent."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import OptionError
from ..files.output import DirectoryOutput
from ..optional import package
from . import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("png", "svg", "pdf")


@dataclass(frozen=True, kw_only=True)
class PlotOptions:
    """How plots are written.

    Parameters
    ----------
    kinds
        Of files, some of `KINDS`, each once.
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
            if kind not in KINDS:
                raise OptionError(f"{kind!r} is no kind of plot: expected some of {', '.join(KINDS)}")
        if not self.kinds or len(set(self.kinds)) != len(self.kinds):
            raise OptionError(f"plots as {','.join(self.kinds)!r}: expected some of {', '.join(KINDS)}, each once")


PLAIN = PlotOptions()


def require(
    names: Iterable[str], directory: str | os.PathLike[str], force: bool = False, options: PlotOptions = PLAIN
) -> None:
    """Refuse to begin what could not end in plots of these names.

    Raises
    ------
    MissingDependencyError
        Without matplotlib.
    OutputError
        Where files of plots exist in `directory` and are not to be replaced.
    """
    package("matplotlib.figure")
    with DirectoryOutput(directory, force=force) as probe:
        probe.check_names(f"{name}.{kind}" for name in names for kind in options.kinds)


def write(
    plots: Iterable[tuple[str, Figure]],
    directory: str | os.PathLike[str],
    force: bool = False,
    options: PlotOptions = PLAIN,
) -> list[Path]:
    """Write named figures; returns the files, and makes no directory where there is no figure. Errors as `require`."""
    package("matplotlib.figure")
    written: list[Path] = []
    with DirectoryOutput(directory, force=force) as output:
        for name, made in plots:
            if not options.titles:
                plot_style.remove_titles(made)
            for kind in options.kinds:
                output.file(f"{name}.{kind}").write(plot_style.as_bytes(made, kind))
                written.append(Path(directory) / f"{name}.{kind}")
        if written:
            output.commit()
    return written
