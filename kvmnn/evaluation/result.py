"""The result of an evaluation: rows, settings and notes, saved as JSON and read back."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Literal

from .._util.dataclass import dataclass
from .._util.text import pluralize
from ..errors import KvmnnError, SourceError, build_read_error
from ..files.schema import Record, iter_values, parse_object, read_bounded
from ..reports import plots, tables
from ..reports.plots import DEFAULT_PLOT_OPTIONS, PlotOptions
from ..reports.records import DocumentInfo, DocumentTrace, EvaluatedModelInfo, InitialCacheInfo, Refusal, ResultRow
from ..reports.table import Table
from ..reports.tables import choose_format
from .settings import EvaluationSettings
from .task_result import TaskEvaluation

ResultFormat = Literal["markdown", "csv", "json", "latex"]

_FORMAT_BY_SUFFIX: dict[str, ResultFormat] = {
    ".json": "json",
    ".csv": "csv",
    ".tex": "latex",
    ".txt": "markdown",
    ".markdown": "markdown",
    ".md": "markdown",
}
"""By the suffix of a file; one without a suffix is Markdown."""


@dataclass(frozen=True, kw_only=True)
class BootstrapInfo(Record):
    """How intervals were computed: number of resamples, confidence level, and what was resampled."""

    resamples: int
    level: float
    over: str


@dataclass(frozen=True, kw_only=True)
class EvaluationSettingsInfo(EvaluationSettings):
    """Settings, and everything else that the numbers depend on."""

    #: Number of parallel processes.
    jobs: int
    #: Version of the computation of all numbers.
    numbers_version: int
    bootstrap: BootstrapInfo
    #: Meaning of `ResultRow.process_peak_bytes`.
    process_peak: str
    #: Tokens of the timed prompt that are fed at once, and tokens fed one by one after it.
    timing_prompt_piece: int
    timing_decoded: int

    def __post_init__(self) -> None:
        requested_start = self.deep_from
        super().__post_init__()
        if requested_start >= 0:  # as it was measured: older versions let it lie in the prompt
            object.__setattr__(self, "deep_from", requested_start)


@dataclass(frozen=True, kw_only=True)
class EvaluationResult(Record):
    """The results of `evaluate`; ``str()`` is a table of the terminal's width.

    Attributes
    ----------
    kvmnn : str
        Version that measured.
    rows : tuple of Row
        One for each configuration, the full cache first.
    traces : tuple of Trace
        Time series of the first document under each configuration, if requested.
    notes : tuple of str
        Sentences that a reader of the numbers must know.
    refused : tuple of Refusal
        Configurations that the model cannot run; they have no row.
    start : StartFacts or None
        The initial cache of all rows but the first, if there is one.
    """

    rows_path = "rows"

    kvmnn: str
    model: EvaluatedModelInfo
    settings: EvaluationSettingsInfo
    documents: tuple[DocumentInfo, ...]
    rows: tuple[ResultRow, ...]
    traces: tuple[DocumentTrace, ...] = ()
    notes: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()
    start: InitialCacheInfo | None = field(default=None, metadata={"omit": True})
    #: Accuracy of tasks under the same configurations, if they were measured.
    tasks: TaskEvaluation | None = field(default=None, metadata={"omit": True})

    def __str__(self) -> str:
        return self.format_table(shutil.get_terminal_size((100, 24)).columns).rstrip("\n")

    def format_table(self, width: int | None = None) -> str:
        """Format the tables and notes: aligned for `width` columns, or as Markdown with all columns."""
        text = tables.format_markdown(self) if width is None else tables.format_terminal(self, width)
        return text if self.tasks is None else f"{text.rstrip()}\n\n{self.tasks.format_table(width)}\n"

    def to_tables(self) -> list[Table]:
        """Return the tables of the results."""
        return tables.list_tables(self)

    def to_csv(self) -> str:
        """Format every number as CSV: a line for each row, followed by one for each of its documents."""
        return tables.format_csv(self)

    def to_text(self, result_format: ResultFormat) -> str:
        """Format everything as Markdown, LaTeX, CSV (a line for each row and document) or JSON; ends with a newline."""
        if result_format == "json":
            return json.dumps(self.to_dict()) + "\n"
        if result_format == "latex":
            return tables.format_latex(self)
        return tables.format_csv(self) if result_format == "csv" else self.format_table()

    def plot(
        self,
        directory: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        options: PlotOptions = DEFAULT_PLOT_OPTIONS,
        left_out: dict[str, str] | None = None,
    ) -> list[Path]:
        """Draw all plots, by default as PNG and SVG; see `kvmnn.reports.plots.write_plots`."""
        return plots.write_plots(self, directory, overwrite, options=options, skip_reasons=left_out)


def infer_format(path: str | os.PathLike[str]) -> ResultFormat:
    """Return the format for a file's suffix; raise `OptionError` for any other suffix."""
    return choose_format(path, _FORMAT_BY_SUFFIX, "markdown")


_MAX_BYTES = 256 << 20
_MAX_ROWS = 1000
_MAX_TEXT_CHARACTERS = 1000
_MAX_NUMBER = 2**53


@dataclass(frozen=True, kw_only=True)
class PlotResult(Record):
    """Files that `plot_results` wrote.

    Attributes
    ----------
    results, directory : str
        Names of the plots, and their files.
    files : tuple of str
        The files.
    left_out : mapping
        Plots for which the results have no data, and the reasons.
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
    """Draw saved results; the files are the same as those of `EvaluationResult.plot`.

    Parameters
    ----------
    results
        JSON of `EvaluationResult.to_dict`, as ``kvmnn eval`` writes it.
    directory
        Directory of the plots; created if it does not exist.
    overwrite
        Replace files that exist.
    options
        File formats, and whether plots have titles.

    Raises
    ------
    SourceError
        For files that contain no such results, or numbers that cannot be drawn.
    MissingDependencyError, OutputError, KvmnnError
        As `kvmnn.reports.plots.write_plots`.
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
    """Read the results in a JSON file.

    Raises
    ------
    SourceError
        For files that cannot be read, are larger than 256 MiB, or contain something else.
    """
    if Path(path).is_dir():
        raise SourceError(f"{path}: is a directory, expected the JSON that kvmnn eval -o RESULTS.json writes")
    try:
        text = read_bounded(Path(path), _MAX_BYTES)
    except (FileNotFoundError, NotADirectoryError) as exc:
        raise build_read_error(path, exc) from exc
    try:
        document = parse_object(text, str(path))
    except SourceError as exc:
        raise SourceError(f"{exc}; expected the JSON document that kvmnn eval -o RESULTS.json writes") from None
    if "rows" not in document or "numbers_version" not in (document.get("settings") or ()):
        raise SourceError(f"{path}: holds no results of an evaluation: expected the JSON that kvmnn eval writes")
    _check_size(document, str(path))
    return EvaluationResult.from_dict(document, str(path))


def _check_size(document: Mapping[str, object], location: str) -> None:
    """Raise an error for results far larger than any evaluation, before hours of drawing."""
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
