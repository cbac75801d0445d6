"""Plots as files, each kind of them, complete or absent."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..files.output import DirectoryOutput
from ..optional import package
from . import plot_style

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = ("png", "svg")


def require(names: Iterable[str], directory: str | os.PathLike[str], force: bool = False) -> None:
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
        probe.check_names(f"{name}.{kind}" for name in names for kind in KINDS)


def write(plots: Iterable[tuple[str, Figure]], directory: str | os.PathLike[str], force: bool = False) -> list[Path]:
    """Write named figures; returns the files, and makes no directory where there is no figure. Errors as `require`."""
    package("matplotlib.figure")
    written: list[Path] = []
    with DirectoryOutput(directory, force=force) as output:
        for name, made in plots:
            for kind in KINDS:
                output.file(f"{name}.{kind}").write(plot_style.as_bytes(made, kind))
                written.append(Path(directory) / f"{name}.{kind}")
        if written:
            output.commit()
    return written
