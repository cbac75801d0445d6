"""Logs of the engine to one table, with the columns that the fork's parser gives."""

from __future__ import annotations

import csv
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ...errors import SourceError
from ...text import escape_csv, pluralize
from .columns import (
    BENCH_COLUMNS,
    DEMO_COLUMNS,
    LOG_FILE_COLUMN,
    METRIC_COLUMNS,
    RUNTIME_COLUMNS,
    SPEED_COLUMN,
    order_columns,
)
from .demo_records import has_records, parse_printed_values, read_json_records
from .log_files import find_log_files, read_log
from .tables import BenchTable, read_table

_INVALID_METRIC_REGEX = re.compile(r"\s*(?:-\s*[\d.]|[-+]?(?:nan|inf))", re.IGNORECASE)

LogKind = Literal["llm_bench", "llm_demo"]


@dataclass(frozen=True, kw_only=True)
class ParsedLogs:
    """Rows of logs.

    Attributes
    ----------
    kind
        Which program wrote them.
    files
        Those that were read, each once.
    columns
        Known ones in their order, then the others sorted.
    rows
        Cells by column, as text.
    notes
        What a reader must know: lines left out, header lines among the rows, versions that differ.
    """

    kind: LogKind
    files: tuple[str, ...]
    columns: tuple[str, ...]
    rows: tuple[dict[str, str], ...]
    notes: tuple[str, ...] = ()

    def to_csv(self) -> str:
        """A header line and a line for each row, which end in CR and LF."""
        sink = io.StringIO()
        writer = csv.writer(sink, lineterminator="\r\n")
        writer.writerow(map(escape_csv, self.columns))
        writer.writerows([escape_csv(row.get(name, "")) for name in self.columns] for row in self.rows)
        return sink.getvalue()

    def to_dict(self) -> dict[str, Any]:
        """As JSON has it: cells are text, as in the CSV."""
        return {
            "kind": self.kind,
            "files": list(self.files),
            "columns": list(self.columns),
            "rows": [{name: row.get(name, "") for name in self.columns} for row in self.rows],
            "notes": list(self.notes),
        }

    def __str__(self) -> str:
        return f"{pluralize(len(self.rows), 'row')} of {self.kind} from {pluralize(len(self.files), 'log')}"


def parse_logs(paths: Iterable[str | os.PathLike[str]], *, strict: bool = False) -> ParsedLogs:
    """The rows of logs: tables of ``llm_bench``, or JSON lines (and printed sums) of ``llm_demo``.

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
        {key: _format_cell(value) for key, value in record.items()} | {LOG_FILE_COLUMN: str(file)}
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
    """`SourceError` for a table that has no column of ``llm_bench``; `where` begins its message."""
    distinct_names = list(dict.fromkeys(names))
    if not {SPEED_COLUMN, *METRIC_COLUMNS}.intersection(distinct_names):
        raise SourceError(
            f"{where}: has no column of llm_bench: found {', '.join(distinct_names)[:120]}, expected {SPEED_COLUMN} "
            f"and h2o_ columns "
            "(another engine's table?)"
        )


def _parse_printed_logs(texts: dict[Path, str]) -> ParsedLogs | None:
    """What ``llm_demo`` printed, of logs that hold no table: times in microseconds, as its records have them."""
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
    """The first figure of a log that nothing can have: below 0, or no number at all."""
    cells = [
        (row_number, name, str(row.get(name, ""))) for row_number, row in enumerate(rows, start=1) for name in names
    ]
    impossible_cells = [cell for cell in cells if any(map(_INVALID_METRIC_REGEX.match, cell[2].split("<br>")))]
    if impossible_cells:
        row_number, name, text = impossible_cells[0]
        more_text = f" (and {len(impossible_cells) - 1:,} more)" if len(impossible_cells) > 1 else ""
        yield f"{file}: row {row_number}: {name}: found {text[:40]}, expected a number of at least 0{more_text}"


def _find_version_differences(tables: dict[Path, BenchTable]) -> Iterator[str]:
    """Logs whose columns differ from those of most."""
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
    """Runtime columns that a table lacks."""
    return [name for name in RUNTIME_COLUMNS if name not in columns]


def _join_few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _list_names(texts: dict[Path, str]) -> tuple[str, ...]:
    return tuple(map(str, texts))


def _format_cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
