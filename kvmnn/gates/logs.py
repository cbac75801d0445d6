"""Parse logs of ``llm_bench`` and ``llm_demo`` into one table with the columns of the MNN fork's parser."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from .._util.dataclass import dataclass
from .._util.patterns import declare_pattern
from .._util.text import pluralize
from ..errors import MissingFileError, SourceError, build_read_error
from ..files.schema import Record, loads_strict, read_bounded
from ..reports.table import format_csv_lines

SPEED_COLUMN = "speed(tok/s)"
LOG_FILE_COLUMN = "log_file"

RUNTIME_COLUMNS = (
    "h2o_lossless_decomp_us",
    "h2o_lossless_queue_peak",
    "h2o_lossless_fallback",
    "h2o_lossless_backpressure_skip",
    "h2o_lossless_async_queue_peak",
    "h2o_lossless_async_wait_us",
    "h2o_lossless_decode_cache_hit",
    "h2o_lossless_decode_cache_miss",
)
"""Columns that a strict check requires; an ``llm_bench`` from before the fork's v6 prints fewer."""

METRIC_COLUMNS = (
    *("h2o_keep", "h2o_lossy", "h2o_lossless"),
    *("h2o_target_keep_effective", "h2o_floor_keep", "h2o_quantized_keep"),
    *("h2o_evict_us", "h2o_codec_us"),
    *("h2o_lossless_raw_mb", "h2o_lossless_comp_mb", "h2o_lossless_comp_us"),
    *RUNTIME_COLUMNS,
)
"""Columns of ``llm_bench`` that contain a mean and a deviation."""

BENCH_COLUMNS = ("model", "modelSize", "backend", "threads", "llm_demo", SPEED_COLUMN, *METRIC_COLUMNS, LOG_FILE_COLUMN)
"""Columns of ``llm_bench``; others follow, sorted."""

DECOMPRESSED_COLUMN = "h2o_lossless_decompressed_bytes"
"""Optional column; ``llm_bench`` does not print it."""

DEMO_COLUMNS = (
    *("prompt_index", "prompt_tokens", "decode_tokens", "prefill_us", "decode_us", "sample_us"),
    *("h2o_keep_ratio", "h2o_lossy_ratio", "h2o_lossless_ratio"),
    *("h2o_lossless_raw_bytes", "h2o_lossless_compressed_bytes", "h2o_lossless_decompressed_bytes"),
    *("h2o_lossless_compress_us", "h2o_lossless_decompress_us"),
    *("h2o_lossless_queue_depth_peak", "h2o_lossless_fallback_count", "h2o_lossless_backpressure_skip"),
    *("h2o_lossless_async_queue_peak", "h2o_lossless_async_wait_us"),
    *("h2o_lossless_decode_cache_hit", "h2o_lossless_decode_cache_miss"),
    *("h2o_last_evict_tokens", "h2o_total_evict_tokens", LOG_FILE_COLUMN),
)
"""Keys of a record of ``llm_demo``; others follow, sorted."""


def order_columns(preferred_order: tuple[str, ...], rows: list[dict[str, str]]) -> list[str]:
    """Order the columns that any row has: known ones first in their order, then the others sorted."""
    present_columns = {name for row in rows for name in row}
    return [name for name in preferred_order if name in present_columns] + sorted(
        present_columns - set(preferred_order)
    )


_NUMBER_REGEX = declare_pattern(r"[-+]?[0-9]*\.?[0-9]+")
_DECODE_REGEX = declare_pattern(r"<br>\s*([0-9]+(?:\.[0-9]+)?)")


def parse_first_number(cell: object) -> float:
    """Parse the first number in a cell such as ``3.114 ± 0.009``; 0 if there is none.

    An exponent is not read: ``1e-05`` is 1. A cell that is ``nan`` or ``inf`` and nothing else is that.
    """
    if isinstance(cell, bool | int | float):
        return _to_float(cell)
    if not isinstance(cell, str):
        return 0.0
    match = _NUMBER_REGEX.search(cell)
    return _to_float(match[0] if match else cell)


def parse_decode_speed(cell: str | None) -> float:
    """Parse the decode speed in tokens per second, which follows ``<br>``; 0 if it is missing."""
    match = _DECODE_REGEX.search(cell or "")
    return float(match[1]) if match else 0.0


def _to_float(value: str | float) -> float:
    try:
        return float(value)
    except (ValueError, OverflowError):
        return 0.0


_RULE_REGEX = declare_pattern(r"[-:]+")


@dataclass(frozen=True, kw_only=True)
class BenchTable:
    """The table in one log of ``llm_bench``: the lines that begin with a bar."""

    #: Names of the columns; empty without a table.
    header: tuple[str, ...] = ()
    #: Cells by column, in order. As in the fork's parser, a repeated header line is a row.
    rows: list[dict[str, str]] = field(default_factory=list)
    #: Indices in `rows` of repeated header lines.
    repeated_headers: list[int] = field(default_factory=list)
    #: Lines with another number of cells than the header.
    num_dropped: int = 0


def read_table(text: str) -> BenchTable:
    """Read the table in a log: the first line with a bar is its header, the second is always skipped."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line.startswith("|")]
    if len(lines) < 3:
        return BenchTable(header=tuple(_split_cells(lines[0])) if lines else ())
    header = _split_cells(lines[0])
    table = BenchTable(header=tuple(header))
    num_dropped = 0
    for line in lines[2:]:
        cells = _split_cells(line)
        if len(cells) != len(header):
            num_dropped += 1
        elif not all(_RULE_REGEX.fullmatch(cell) for cell in cells):
            if cells == header:
                table.repeated_headers.append(len(table.rows))
            table.rows.append(dict(zip(header, cells, strict=True)))
    return BenchTable(
        header=table.header, rows=table.rows, repeated_headers=table.repeated_headers, num_dropped=num_dropped
    )


def _split_cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


MAX_LOG_BYTES = 64 << 20
"""Maximum size of one log."""


def find_log_files(paths: Iterable[str | os.PathLike[str]], suffixes: tuple[str, ...] = (".log",)) -> list[Path]:
    """List files, and the logs in folders by name; each file once, even if it is named twice."""
    path_by_real_path: dict[Path, Path] = {}
    for path in map(Path, paths):
        if not path.exists():
            raise MissingFileError(f"{path}: does not exist")
        for file in _list_folder_logs(path, suffixes) if path.is_dir() else [path]:
            path_by_real_path.setdefault(file.resolve(), file)
    return list(path_by_real_path.values())


def _list_folder_logs(folder: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    try:
        yield from sorted(path for path in folder.iterdir() if path.suffix in suffixes and path.is_file())
    except OSError as error:
        raise build_read_error(folder, error) from error


def read_log(path: Path) -> str:
    """Read the text of a log; bytes that are not UTF-8 are dropped, as logs contain model output."""
    try:
        return read_bounded(path, MAX_LOG_BYTES).decode("utf-8", "ignore")
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(f"{path}: does not exist") from None


_PRINTED_REGEXES = {
    "prompt_tokens": re.compile(r"prompt tokens num = (\d{1,18})"),
    "decode_tokens": re.compile(r"decode tokens num = (\d{1,18})"),
    "prefill_s": re.compile(r"prefill time = ([\d.]{1,40}) s"),
    "decode_s": re.compile(r"decode time = ([\d.]{1,40}) s"),
}


def parse_printed_values(text: str) -> dict[str, float]:
    """Parse the token counts and seconds that ``llm_demo`` prints at its end, as far as they are present."""
    value_by_name = {}
    for name, pattern in _PRINTED_REGEXES.items():
        match = pattern.search(text)
        if match and match[1].count(".") <= 1 and match[1] != ".":
            value_by_name[name] = float(match[1])
    return value_by_name


def has_records(name: str, text: str) -> bool:
    """Return whether a log consists of JSON lines, by its name or its first line."""
    first_line = text.lstrip().partition("\n")[0].rstrip()
    return name.endswith(".jsonl") or (first_line.startswith("{") and first_line.endswith("}"))


def read_json_records(text: str, where: str) -> list[dict[str, Any]]:
    """Read the objects of a file of JSON lines; the last one for each ``prompt_index``."""
    record_by_index: dict[object, dict[str, Any]] = {}
    for line_number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        record = parse_json_line(line, f"{where}: line {line_number}")
        index = record.get("prompt_index", 0)
        record_by_index[index if isinstance(index, int | float | str) else str(index)] = record
    return list(record_by_index.values())


def parse_json_line(line: str, where: str) -> dict[str, Any]:
    """Parse the object in a line; raise `SourceError`, prefixed with `where`, for anything else."""
    try:
        value = loads_strict(line)
    except json.JSONDecodeError as error:
        raise SourceError(f"{where}: is not JSON: {error.msg} (column {error.colno})") from None
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{where}: is not JSON: {' '.join(str(error).split())[:160]}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{where}: found a {type(value).__name__}, expected a JSON object")
    for key, entry in value.items():
        if isinstance(entry, float) and not math.isfinite(entry):
            raise SourceError(f"{where}: {key[:60]}: found {entry}, expected a finite number")
    return value


def get_number(record: Mapping[str, Any], key: str) -> float:
    """Return a number of a record; 0 if it is missing or not a number."""
    try:
        number = float(record.get(key, 0.0))
    except (TypeError, ValueError, OverflowError):
        return 0.0
    return number if math.isfinite(number) else 0.0


_INVALID_METRIC_REGEX = declare_pattern(r"\s*(?:-\s*[\d.]|[-+]?(?:nan|inf))", re.IGNORECASE)

LogKind = Literal["llm_bench", "llm_demo"]


@dataclass(frozen=True, kw_only=True)
class ParsedLogs(Record):
    """The rows parsed from logs."""

    json_keys = "kind files columns rows=_filled_rows notes"

    #: The program that wrote the logs.
    kind: LogKind
    #: The files that were read, without repetitions.
    files: tuple[str, ...]
    #: Known columns in their order, then the others sorted.
    columns: tuple[str, ...]
    #: Cells by column, as text.
    rows: tuple[dict[str, str], ...]
    #: Notes: skipped lines, header lines among the rows, versions that differ.
    notes: tuple[str, ...] = ()

    def to_csv(self) -> str:
        """Return a header line and a line for each row, which end in CR and LF."""
        lines = [[row.get(name, "") for name in self.columns] for row in self.rows]
        return format_csv_lines([self.columns, *lines], "\r\n")

    @property
    def _filled_rows(self) -> list[dict[str, str]]:
        return [{name: row.get(name, "") for name in self.columns} for row in self.rows]

    def __str__(self) -> str:
        return f"{pluralize(len(self.rows), 'row')} of {self.kind} from {pluralize(len(self.files), 'log')}"


def parse_logs(paths: Iterable[str | os.PathLike[str]], *, strict: bool = False) -> ParsedLogs:
    """Parse the rows of logs: tables of ``llm_bench``, or JSON lines (and printed sums) of ``llm_demo``.

    Parameters
    ----------
    paths
        Files, and folders whose ``*.log`` and ``*.jsonl`` are meant. A file that is named twice counts once.
    strict
        Refuse what the fork's parser passes over: header lines that come again, lines of another width, logs of
        different versions, logs without rows, figures below 0 or that are no numbers.

    Raises
    ------
    SourceError
        For a file that cannot be read, no file, no rows, logs of both programs or of another one, and with `strict` as
        said.
    """
    files = find_log_files(paths, (".log", ".jsonl"))
    if not files:
        raise SourceError("No log files found.")
    texts = {file: read_log(file) for file in files}
    records = [file for file, text in texts.items() if has_records(file.name, text)]
    if records and len(records) < len(files):
        other_file = next(file for file in files if file not in records)
        raise SourceError(f"{records[0]} has records of llm_demo, {other_file} has none: expected logs of one program")
    parsed_logs = _parse_records(texts) if records else _parse_tables(texts)
    if strict and parsed_logs.notes:
        raise SourceError(parsed_logs.notes[0])
    return parsed_logs


def _parse_records(texts: dict[Path, str]) -> ParsedLogs:
    rows = [
        {key: value if isinstance(value, str) else json.dumps(value) for key, value in record.items()}
        | {LOG_FILE_COLUMN: str(file)}
        for file, text in texts.items()
        for record in read_json_records(text, str(file))
    ]
    if not rows:
        raise SourceError(f"{next(iter(texts))}: holds no records of llm_demo")
    keys = list(dict.fromkeys(key for row in rows for key in row if key != LOG_FILE_COLUMN))
    if not set(DEMO_COLUMNS).intersection(keys):
        raise SourceError(
            f"{next(iter(texts))}: has no key of llm_demo: found {', '.join(keys)[:120]}, expected prompt_tokens, "
            "prefill_us and others (another engine's records?)"
        )
    columns = order_columns(DEMO_COLUMNS, rows)
    rows_by_file: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        rows_by_file.setdefault(row[LOG_FILE_COLUMN], []).append(row)
    notes = [
        note
        for file, file_rows in rows_by_file.items()
        for note in _find_impossible_values(file, file_rows, DEMO_COLUMNS[:-1])
    ]
    return ParsedLogs(
        kind="llm_demo", files=_list_names(texts), columns=tuple(columns), rows=tuple(rows), notes=tuple(notes)
    )


def _parse_tables(texts: dict[Path, str]) -> ParsedLogs:
    tables = {file: read_table(text) for file, text in texts.items()}
    rows = [row | {LOG_FILE_COLUMN: str(file)} for file, table in tables.items() for row in table.rows]
    if not rows:
        printed_logs = _parse_printed_logs(texts)
        if printed_logs is not None:
            return printed_logs
        more_text = f" (and {pluralize(len(texts) - 1, 'other log')})" if len(texts) > 1 else ""
        raise SourceError(f"{next(iter(texts))}{more_text}: No markdown table rows found in logs.")
    first_file = next(str(file) for file, table in tables.items() if table.rows)
    check_bench_columns((name for table in tables.values() for name in table.header), first_file)
    return ParsedLogs(
        kind="llm_bench",
        files=_list_names(texts),
        columns=tuple(order_columns(BENCH_COLUMNS, rows)),
        rows=tuple(rows),
        notes=tuple(_iter_notes(tables)),
    )


def check_bench_columns(names: Iterable[str], where: str) -> None:
    """Raise `SourceError`, prefixed with `where`, for a table without any column of ``llm_bench``."""
    distinct_names = list(dict.fromkeys(names))
    if not {SPEED_COLUMN, *METRIC_COLUMNS}.intersection(distinct_names):
        raise SourceError(
            f"{where}: has no column of llm_bench: found {', '.join(distinct_names)[:120]}, expected {SPEED_COLUMN} "
            "and h2o_ columns (another engine's table?)"
        )


def _parse_printed_logs(texts: dict[Path, str]) -> ParsedLogs | None:
    """Parse the printed output of ``llm_demo`` in logs without a table; times in microseconds, as in records."""
    rows = []
    for file, text in texts.items():
        printed_values = parse_printed_values(text)
        if not printed_values:
            continue
        row = {LOG_FILE_COLUMN: str(file)}
        row |= {
            name: f"{printed_values[name]:.0f}" for name in ("prompt_tokens", "decode_tokens") if name in printed_values
        }
        row |= {
            f"{part}_us": f"{1e6 * printed_values[f'{part}_s']:.0f}"
            for part in ("prefill", "decode")
            if f"{part}_s" in printed_values
        }
        rows.append(row)
    if not rows:
        return None
    notes = [
        f"{file}: holds neither a table nor sums of llm_demo"
        for file, text in texts.items()
        if not parse_printed_values(text)
    ]
    columns = order_columns(DEMO_COLUMNS, rows)
    return ParsedLogs(
        kind="llm_demo", files=_list_names(texts), columns=tuple(columns), rows=tuple(rows), notes=tuple(notes)
    )


def _iter_notes(tables: dict[Path, BenchTable]) -> Iterator[str]:
    for file, table in tables.items():
        if not table.rows:
            yield f"{file}: holds no table rows"
        if table.repeated_headers:
            yield (
                f"{file}: its header comes again ({pluralize(len(table.repeated_headers), 'time')}): a row of names, "
                f"which read as 0"
            )
        if table.num_dropped:
            lines_text = "lines have" if table.num_dropped > 1 else "line has"
            yield (
                f"{file}: {table.num_dropped:,} {lines_text} another number of cells than the header's "
                f"{len(table.header)}"
            )
        yield from _find_impossible_values(file, [dict(row) for row in table.rows], (SPEED_COLUMN, *METRIC_COLUMNS))
    yield from _find_version_differences({file: table for file, table in tables.items() if table.rows})


def _find_impossible_values(file: str | Path, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[str]:
    """Find the first impossible value of a log: negative, or not a number."""
    cells = [
        (row_number, name, str(row.get(name, ""))) for row_number, row in enumerate(rows, start=1) for name in names
    ]
    impossible_cells = [cell for cell in cells if any(map(_INVALID_METRIC_REGEX.match, cell[2].split("<br>")))]
    if impossible_cells:
        row_number, name, text = impossible_cells[0]
        more_text = f" (and {len(impossible_cells) - 1:,} more)" if len(impossible_cells) > 1 else ""
        yield f"{file}: row {row_number}: {name}: found {text[:40]}, expected a number of at least 0{more_text}"


def _find_version_differences(tables: dict[Path, BenchTable]) -> Iterator[str]:
    """Yield a note about each log whose columns differ from those of most."""
    if len({table.header for table in tables.values()}) < 2:
        return
    usual_columns = set(Counter(table.header for table in tables.values()).most_common(1)[0][0])
    for file, table in tables.items():
        missing_columns, extra_columns = (
            sorted(usual_columns - set(table.header)),
            sorted(set(table.header) - usual_columns),
        )
        if missing_columns:
            yield f"{file}: lacks {_join_few(missing_columns)} of the other logs: another version? Such cells read as 0"
        elif extra_columns:
            yield (
                f"{file}: has {_join_few(extra_columns)} more than the other logs: another version? Their cells read "
                f"as 0"
            )


def find_missing_columns(columns: Sequence[str]) -> list[str]:
    """Return the runtime columns that a table lacks."""
    return [name for name in RUNTIME_COLUMNS if name not in columns]


def _join_few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _list_names(texts: dict[Path, str]) -> tuple[str, ...]:
    return tuple(map(str, texts))
