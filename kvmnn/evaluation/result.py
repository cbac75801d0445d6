"""What an evaluation gives: rows, what they were measured on and how, and what a reader must know."""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..files.records import Record
from ..reports import plots, tables
from ..reports.forms import choose_format
from ..reports.latex import format_latex
from ..reports.plot_files import DEFAULT_PLOT_OPTIONS, PlotOptions
from ..reports.results import DocumentInfo, DocumentTrace, Refusal
from ..reports.rows import ResultRow
from ..reports.start import InitialCacheInfo
from .setup.settings import EvaluationSettings

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
class EvaluatedModelInfo(Record):
    """The model: where it is, the SHA-256 of its graph and weights, and its shape."""

    path: str
    name: str
    sha256: str
    layers: int
    kv_heads: int
    query_heads: int | None
    head_dim: int
    cache_dtype: str
    vocab: int
    max_positions: int | None


@dataclass(frozen=True, kw_only=True)
class BootstrapInfo(Record):
    """How intervals were made: resamples, the share of them within the bounds, and what was resampled."""

    resamples: int
    level: float
    over: str


@dataclass(frozen=True, kw_only=True)
class EvaluationSettingsInfo(EvaluationSettings):
    """Settings, and what else the numbers depend on.

    Attributes
    ----------
    jobs : int
        Processes at a time.
    numbers_version : int
        Of the way in which kvmnn computes them.
    process_peak : str
        What `ResultRow.process_peak_bytes` means.
    timing_prompt_piece, timing_decoded : int
        Tokens of the timed prompt that are fed at once, and tokens fed one by one after it.
    """

    jobs: int
    numbers_version: int
    bootstrap: BootstrapInfo
    process_peak: str
    timing_prompt_piece: int
    timing_decoded: int

    def __post_init__(self) -> None:
        requested_start = self.deep_from
        super().__post_init__()
        if requested_start >= 0:  # as it was measured: older versions let it lie in the prompt
            object.__setattr__(self, "deep_from", requested_start)


@dataclass(frozen=True, kw_only=True)
class EvaluationResult(Record):
    """The results of `evaluate`. As text it is a table as wide as the terminal.

    Attributes
    ----------
    kvmnn : str
        Version that measured.
    rows : tuple of Row
        One for each configuration, the full cache first.
    traces : tuple of Trace
        The first document's course under each configuration, if it was asked for.
    notes : tuple of str
        Sentences that a reader of the numbers must know.
    refused : tuple of Refusal
        Configurations that the model cannot run; they have no row.
    start : StartFacts or None
        What all rows but the first go on from, where that is K and V that were computed elsewhere.
    """

    kvmnn: str
    model: EvaluatedModelInfo
    settings: EvaluationSettingsInfo
    documents: tuple[DocumentInfo, ...]
    rows: tuple[ResultRow, ...]
    traces: tuple[DocumentTrace, ...] = ()
    notes: tuple[str, ...] = ()
    refused: tuple[Refusal, ...] = ()
    start: InitialCacheInfo | None = field(default=None, metadata={"omit": True})

    def __str__(self) -> str:
        return tables.format_terminal(self, shutil.get_terminal_size((100, 24)).columns).rstrip("\n")

    def format_table(self, width: int | None = None) -> str:
        """The tables and what a reader must know: aligned for `width` columns, or as Markdown with all columns."""
        return tables.format_markdown(self) if width is None else tables.format_terminal(self, width)

    def to_csv(self) -> str:
        """Every number: a line for each row, and below it one for each document."""
        return tables.format_csv(self)

    def to_text(self, result_format: ResultFormat) -> str:
        """Everything as Markdown, LaTeX, CSV (a line for each row and document) or JSON; ends with a newline."""
        if result_format == "json":
            return json.dumps(self.to_dict()) + "\n"
        if result_format == "latex":
            return format_latex(self)
        return tables.format_csv(self) if result_format == "csv" else tables.format_markdown(self)

    def plot(
        self,
        directory: str | os.PathLike[str],
        *,
        overwrite: bool = False,
        options: PlotOptions = DEFAULT_PLOT_OPTIONS,
        left_out: dict[str, str] | None = None,
    ) -> list[Path]:
        """Draw everything, as PNG and SVG by default; `kvmnn.reports.plots.write_all` says how."""
        return plots.write_plots(self, directory, overwrite, options=options, skip_reasons=left_out)


def infer_format(path: str | os.PathLike[str]) -> ResultFormat:
    """Return the form that a file's name asks for: `OptionError` for a suffix that stands for none."""
    return choose_format(path, _FORMAT_BY_SUFFIX, "markdown")
