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
from ...text import count, escape_csv
from .columns import BENCH, DEMO, FIGURES, LOG_FILE, RUNTIME, SPEED, ordered
from .demo_records import is_records, printed_sums, read_records
from .log_files import log_files, read_log
from .tables import Table, read_table

_NO_FIGURE = re.compile(r"\s*(?:-\s*[\d.]|[-+]?(?:nan|inf))", re.IGNORECASE)

Kind = Literal["llm_bench", "llm_demo"]


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

    kind: Kind
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
        return f"{count(len(self.rows), 'row')} of {self.kind} from {count(len(self.files), 'log')}"


def parse(paths: Iterable[str | os.PathLike[str]], *, strict: bool = False) -> ParsedLogs:
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
    files = log_files(paths, (".log", ".jsonl"))
    if not files:
        raise SourceError("No log files found.")
    texts = {file: read_log(file) for file in files}
    records = [file for file, text in texts.items() if is_records(file.name, text)]
    if records and len(records) < len(files):
        other = next(file for file in files if file not in records)
        raise SourceError(f"{records[0]} has records of llm_demo, {other} has none: expected logs of one program")
    made = _of_records(texts) if records else _of_tables(texts)
    if strict and made.notes:
        raise SourceError(made.notes[0])
    return made


def _of_records(texts: dict[Path, str]) -> ParsedLogs:
    rows = [
        {key: _cell(value) for key, value in record.items()} | {LOG_FILE: str(file)}
        for file, text in texts.items()
        for record in read_records(text, str(file))
    ]
    if not rows:
        raise SourceError(f"{next(iter(texts))}: holds no records of llm_demo")
    keys = list(dict.fromkeys(key for row in rows for key in row if key != LOG_FILE))
    if not set(DEMO).intersection(keys):
        raise SourceError(
            f"{next(iter(texts))}: has no key of llm_demo: found {', '.join(keys)[:120]}, expected prompt_tokens, "
            "prefill_us and others (another engine's records?)"
        )
    columns = ordered(DEMO, rows)
    by_file: dict[str, list[dict[str, str]]] = {}
    for row in rows:
        by_file.setdefault(row[LOG_FILE], []).append(row)
    notes = [note for file, mine in by_file.items() for note in _impossible(file, mine, DEMO[:-1])]
    return ParsedLogs(
        kind="llm_demo", files=_names(texts), columns=tuple(columns), rows=tuple(rows), notes=tuple(notes)
    )


def _of_tables(texts: dict[Path, str]) -> ParsedLogs:
    tables = {file: read_table(text) for file, text in texts.items()}
    rows = [row | {LOG_FILE: str(file)} for file, table in tables.items() for row in table.rows]
    if not rows:
        sums = _of_sums(texts)
        if sums is not None:
            return sums
        more = f" (and {count(len(texts) - 1, 'other log')})" if len(texts) > 1 else ""
        raise SourceError(f"{next(iter(texts))}{more}: No markdown table rows found in logs.")
    first = next(str(file) for file, table in tables.items() if table.rows)
    check_columns((name for table in tables.values() for name in table.header), first)
    return ParsedLogs(
        kind="llm_bench",
        files=_names(texts),
        columns=tuple(ordered(BENCH, rows)),
        rows=tuple(rows),
        notes=tuple(_notes(tables)),
    )


def check_columns(names: Iterable[str], where: str) -> None:
    """`SourceError` for a table that has no column of ``llm_bench``; `where` begins its message."""
    found = list(dict.fromkeys(names))
    if not {SPEED, *FIGURES}.intersection(found):
        raise SourceError(
            f"{where}: has no column of llm_bench: found {', '.join(found)[:120]}, expected {SPEED} and h2o_ columns "
            "(another engine's table?)"
        )


def _of_sums(texts: dict[Path, str]) -> ParsedLogs | None:
    """What ``llm_demo`` printed, of logs that hold no table: times in microseconds, as its records have them."""
    rows = []
    for file, text in texts.items():
        sums = printed_sums(text)
        if not sums:
            continue
        row = {LOG_FILE: str(file)}
        row |= {name: f"{sums[name]:.0f}" for name in ("prompt_tokens", "decode_tokens") if name in sums}
        row |= {f"{part}_us": f"{1e6 * sums[f'{part}_s']:.0f}" for part in ("prefill", "decode") if f"{part}_s" in sums}
        rows.append(row)
    if not rows:
        return None
    notes = [
        f"{file}: holds neither a table nor sums of llm_demo" for file, text in texts.items() if not printed_sums(text)
    ]
    columns = ordered(DEMO, rows)
    return ParsedLogs(
        kind="llm_demo", files=_names(texts), columns=tuple(columns), rows=tuple(rows), notes=tuple(notes)
    )


def _notes(tables: dict[Path, Table]) -> Iterator[str]:
    for file, table in tables.items():
        if not table.rows:
            yield f"{file}: holds no table rows"
        if table.repeats:
            yield (
                f"{file}: its header comes again ({count(len(table.repeats), 'time')}): a row of names, which read as 0"
            )
        if table.dropped:
            found = "lines have" if table.dropped > 1 else "line has"
            yield f"{file}: {table.dropped:,} {found} another number of cells than the header's {len(table.header)}"
        yield from _impossible(file, [dict(row) for row in table.rows], (SPEED, *FIGURES))
    yield from _versions({file: table for file, table in tables.items() if table.rows})


def _impossible(file: str | Path, rows: Sequence[Mapping[str, Any]], names: Sequence[str]) -> Iterator[str]:
    """The first figure of a log that nothing can have: below 0, or no number at all."""
    cells = [(place, name, str(row.get(name, ""))) for place, row in enumerate(rows, start=1) for name in names]
    found = [cell for cell in cells if any(map(_NO_FIGURE.match, cell[2].split("<br>")))]
    if found:
        place, name, text = found[0]
        more = f" (and {len(found) - 1:,} more)" if len(found) > 1 else ""
        yield f"{file}: row {place}: {name}: found {text[:40]}, expected a number of at least 0{more}"


def _versions(tables: dict[Path, Table]) -> Iterator[str]:
    """Logs whose columns differ from those of most."""
    if len({table.header for table in tables.values()}) < 2:
        return
    usual = set(Counter(table.header for table in tables.values()).most_common(1)[0][0])
    for file, table in tables.items():
        lacking, more = sorted(usual - set(table.header)), sorted(set(table.header) - usual)
        if lacking:
            yield f"{file}: lacks {_few(lacking)} of the other logs: another version? Such cells read as 0"
        elif more:
            yield f"{file}: has {_few(more)} more than the other logs: another version? Their cells read as 0"


def missing_columns(columns: Sequence[str]) -> list[str]:
    """Runtime columns that a table lacks."""
    return [name for name in RUNTIME if name not in columns]


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _names(texts: dict[Path, str]) -> tuple[str, ...]:
    return tuple(map(str, texts))


def _cell(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)
