"""Results of an evaluation that were saved as JSON, and the plots of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import KvmnnError, SourceError
from ..files.json_document import iter_values, parse_object, read_bounded
from ..files.records import Record
from ..reports.plot_files import DEFAULT_PLOT_OPTIONS, PlotOptions
from ..text import pluralize
from .result import EvaluationResult

_MAX_BYTES = 256 << 20
_MAX_ROWS = 1000
_MAX_TEXT_CHARACTERS = 1000
_MAX_NUMBER = 2**53


@dataclass(frozen=True, kw_only=True)
class PlotResult(Record):
    """What `plot_results` wrote.

    Attributes
    ----------
    results, directory : str
        What was drawn, and where.
    files : tuple of str
        The files.
    left_out : mapping
        Plots that the results hold nothing for, and the reasons.
    """

    results: str
    directory: str
    files: tuple[str, ...]
    left_out: Mapping[str, str]

    def __str__(self) -> str:
        lines = [f"{pluralize(len(self.files), 'plot file')} in {self.directory}"]
        return "\n".join([*lines, *(f"no {name}: {reason}" for name, reason in self.left_out.items())])


def plot_results(
    results: str | os.PathLike[str],
    directory: str | os.PathLike[str],
    *,
    overwrite: bool = False,
    options: PlotOptions = DEFAULT_PLOT_OPTIONS,
) -> PlotResult:
    """Draw saved results; the same files as those of `EvaluationResult.plot` of the run itself.

    Parameters
    ----------
    results
        JSON of `EvaluationResult.to_dict`, as ``kvmnn eval`` writes it.
    directory
        Where plots go; made where there is none.
    overwrite
        Replace files that exist.
    options
        Which kinds of files, and whether with titles.

    Raises
    ------
    SourceError
        For files that hold no such results, or numbers that cannot be drawn.
    MissingDependencyError, OutputError, KvmnnError
        As `kvmnn.reports.plots.write_all`.
    """
    result = read_results(results)
    left_out: dict[str, str] = {}
    try:
        files = result.plot(directory, overwrite=overwrite, options=options, left_out=left_out)
    except KvmnnError:
        raise
    except (ArithmeticError, LookupError, TypeError, ValueError) as exc:  # numbers that no evaluation gives
        raise SourceError(f"{results}: cannot be drawn: {exc}") from exc
    return PlotResult(
        results=os.fspath(results), directory=os.fspath(directory), files=tuple(map(str, files)), left_out=left_out
    )


def read_results(path: str | os.PathLike[str]) -> EvaluationResult:
    """The results in a JSON file.

    Raises
    ------
    SourceError
        For files that cannot be read, are larger than 256 MiB, or hold something else.
    """
    if Path(path).is_dir():
        raise SourceError(f"{path}: is a directory, expected the JSON that kvmnn eval -o RESULTS.json writes")
    try:
        text = read_bounded(Path(path), _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise SourceError(f"{path}: cannot be read: {exc.strerror}") from exc
    try:
        document = parse_object(text, str(path))
    except SourceError as exc:
        raise SourceError(f"{exc}; expected the JSON document that kvmnn eval -o RESULTS.json writes") from None
    if "rows" not in document or "numbers_version" not in (document.get("settings") or ()):
        raise SourceError(f"{path}: holds no results of an evaluation: expected the JSON that kvmnn eval writes")
    _check_size(document, str(path))
    return EvaluationResult.from_dict(document, str(path))


def _check_size(document: Mapping[str, object], location: str) -> None:
    """Refuse what is far beyond any evaluation, so that nothing is drawn for hours or larger than a page."""
    rows = document["rows"]
    if isinstance(rows, list) and len(rows) > _MAX_ROWS:
        raise SourceError(f"{location}: has {len(rows):,} rows: expected at most {_MAX_ROWS:,}")
    for value in iter_values(document):
        if isinstance(value, str) and len(value) > _MAX_TEXT_CHARACTERS:
            raise SourceError(
                f"{location}: holds a text of {len(value):,} characters: expected at most {_MAX_TEXT_CHARACTERS:,}"
            )
        if isinstance(value, int) and abs(value) > _MAX_NUMBER:
            raise SourceError(f"{location}: holds a number of {len(str(abs(value)))} digits")
