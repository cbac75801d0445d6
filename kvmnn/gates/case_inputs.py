"""Inputs of a case: rows of ``llm_bench``, ratios of `kvmnn measure`, and log lines about wrong K or V."""

from __future__ import annotations

import csv
import io
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any

from .._util.dataclass import dataclass
from .._util.patterns import declare_pattern
from .._util.text import unescape_csv
from ..errors import SourceError
from ..files.schema import read_object
from .logs import (
    DECOMPRESSED_COLUMN,
    LOG_FILE_COLUMN,
    METRIC_COLUMNS,
    SPEED_COLUMN,
    check_bench_columns,
    find_log_files,
    parse_decode_speed,
    parse_first_number,
    parse_logs,
    read_log,
)

RATIO_COLUMN = "h2o_lossless"
NO_VALUE = "-"
"""The cell of that column in a run whose codec is LOSSY; its number is 1, the factor of the total."""


@dataclass(frozen=True, kw_only=True)
class MetricRow:
    """One row: its cells, the first number of each (0 for a missing one), and the decode speed in tokens per second."""

    cells: Mapping[str, str]
    numbers: Mapping[str, float]
    decode_speed: float

    @classmethod
    def from_cells(cls, cells: Mapping[str, str]) -> MetricRow:
        """Create a row by parsing the numbers in its cells."""
        names = (*METRIC_COLUMNS, DECOMPRESSED_COLUMN)
        numbers = {name: parse_first_number(cells.get(name, "0")) for name in names}
        return cls(cells=cells, numbers=numbers, decode_speed=parse_decode_speed(cells.get(SPEED_COLUMN)))

    @property
    def log_file(self) -> str:
        """Name of the file that the row comes from."""
        return self.cells.get(LOG_FILE_COLUMN) or ""

    @property
    def is_header(self) -> bool:
        """Return whether the row is the header of a second table, which the MNN fork's parser reads as a row."""
        return all(name == cell for name, cell in self.cells.items() if name != LOG_FILE_COLUMN)


@dataclass(frozen=True, kw_only=True)
class MetricRows:
    """The rows of one case."""

    #: Names of the columns.
    columns: tuple[str, ...]
    #: At least one.
    rows: tuple[MetricRow, ...]
    #: The files they were read from.
    files: tuple[str, ...] = ()
    #: Notes from reading.
    notes: tuple[str, ...] = field(default=())

    def max_value(self, column: str) -> float:
        """Return the largest value of a column."""
        return max(row.numbers[column] for row in self.rows)

    def mean_value(self, column: str) -> float:
        """Return the mean value of a column."""
        return sum(row.numbers[column] for row in self.rows) / len(self.rows)

    def format_mean_ratio(self) -> str:
        """Format the mean runtime lossless ratio; a dash if a codec of the runs is LOSSY."""
        if any(row.cells.get(RATIO_COLUMN) == NO_VALUE for row in self.rows):
            return NO_VALUE
        return f"{self.mean_value(RATIO_COLUMN):.4f}"

    @property
    def missing_columns(self) -> list[str]:
        """Metrics whose column the table lacks."""
        return [name for name in METRIC_COLUMNS if name not in self.columns]


def read_metric_rows(paths: Sequence[str | os.PathLike[str]]) -> MetricRows:
    """Read rows from CSV files (of `kvmnn gate parse` or the fork's parser) or from logs.

    Raises
    ------
    SourceError
        For files that cannot be read, contain no rows, or have nothing that ``llm_bench`` prints.
    """
    csv_paths = [str(path) for path in paths if str(path).lower().endswith(".csv")]
    if csv_paths and len(csv_paths) < len(paths):
        other_path = next(str(path) for path in paths if str(path) not in csv_paths)
        raise SourceError(f"{csv_paths[0]} is a CSV, {other_path} is not: expected CSV files or logs")
    if csv_paths:
        parts = [read_csv(path) for path in find_log_files(paths)]
        columns = dict.fromkeys(name for part in parts for name in part.columns)
        metric_rows = MetricRows(
            columns=tuple(columns),
            rows=tuple(row for part in parts for row in part.rows),
            files=tuple(name for part in parts for name in part.files),
        )
    else:
        parsed = parse_logs(paths)
        if parsed.kind == "llm_demo":
            raise SourceError(
                f"{parsed.files[0]}: has records of llm_demo: expected tables (`kvmnn gate demo` judges those)"
            )
        rows = tuple(MetricRow.from_cells(cells) for cells in parsed.rows)
        metric_rows = MetricRows(columns=parsed.columns, rows=rows, files=parsed.files, notes=parsed.notes)
    check_bench_columns(metric_rows.columns, metric_rows.files[0])
    return metric_rows


def read_csv(path: str | os.PathLike[str]) -> MetricRows:
    """Read the rows of one CSV file."""
    text = read_log(Path(path)).removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}")
    try:
        reader = csv.reader(io.StringIO(text, newline=None))
        lines = [[unescape_csv(cell) for cell in line] for line in reader if line]
    except csv.Error as error:
        raise SourceError(f"{path}: is no CSV: {error}") from None
    header = tuple(lines[0]) if lines else ()
    rows = tuple(MetricRow.from_cells(dict(zip(header, line, strict=False))) for line in lines[1:])
    if not rows:
        raise SourceError(f"{path}: No rows found in CSV.")
    return MetricRows(columns=header, rows=rows, files=(str(path),))


@dataclass(frozen=True, kw_only=True)
class OfflineRatio:
    """The ratio of an offline evaluation, the specified path, and values to repeat in the report."""

    path: str
    ratio: float
    num_entries: int
    layers: Any
    raw_bytes: float
    compressed_bytes: float


def read_offline_ratio(path: str | os.PathLike[str]) -> OfflineRatio:
    """Read the ratio in a document: ``weighted_lossless_ratio``, or ``lossless_ratio`` if that is missing."""
    where = os.fspath(path)
    try:
        document = read_object(Path(path))
    except (FileNotFoundError, NotADirectoryError):
        raise SourceError(f"offline lossless json not found: {where}") from None
    ratio = parse_first_number(document.get("weighted_lossless_ratio", document.get("lossless_ratio", 0.0)))
    num_entries, raw_bytes, compressed_bytes = (
        parse_first_number(document.get(key, 0)) for key in ("selected_entries", "raw_bytes", "compressed_bytes")
    )
    if not ratio > 0 or not all(map(math.isfinite, (ratio, num_entries, raw_bytes, compressed_bytes))):
        raise SourceError(f"invalid lossless ratio in {where}: found {ratio}, expected a finite number above 0")
    return OfflineRatio(
        path=where,
        ratio=ratio,
        num_entries=int(num_entries),
        layers=document.get("selected_layers", []),
        raw_bytes=raw_bytes,
        compressed_bytes=compressed_bytes,
    )


_DAMAGE_REGEX = declare_pattern(
    "|".join(
        (
            "Invalid KV realloc",
            "Invalid KV reserve range",
            "KV length/meta previous mismatch",
            "Drop stale per-layer pending plan",
            "corrupted size",
            "double free",
            "Segmentation fault",
            "munmap_chunk",
        )
    ),
    re.IGNORECASE,
)
_ENCODING_MARK = "[H2O-LOSSLESS]"
_MAX_EXAMPLES, _MAX_EXAMPLE_LETTERS, _MAX_LINE_LETTERS = 5, 220, 400


@dataclass(frozen=True, kw_only=True)
class LogScan:
    """The damage and the encodings that log lines report."""

    #: Number of logs that were read.
    num_files: int = 0
    #: Number of lines that report damage.
    num_invalid: int = 0
    #: The first of these lines, with their files.
    examples: tuple[str, ...] = ()
    #: Lines in which the engine reports an encoding (``[H2O-LOSSLESS]``).
    encoding_lines: tuple[str, ...] = ()


def scan_logs(paths: Iterable[str | os.PathLike[str]]) -> LogScan:
    """Read log files, and the ``*.log`` of folders; missing ones are ignored, as the fork does."""
    files = find_log_files(path for path in paths if Path(path).exists())
    num_invalid = 0
    examples: list[str] = []
    encoding_lines: list[str] = []
    for file in files:
        for line in io.StringIO(read_log(file), newline=None):
            text = line.strip()
            if _ENCODING_MARK in text:
                encoding_lines.append(text[:_MAX_LINE_LETTERS])
            if _DAMAGE_REGEX.search(text):
                num_invalid += 1
                if len(examples) < _MAX_EXAMPLES:
                    examples.append(f"{file}: {text[:_MAX_EXAMPLE_LETTERS]}")
    return LogScan(
        num_files=len(files), num_invalid=num_invalid, examples=tuple(examples), encoding_lines=tuple(encoding_lines)
    )
