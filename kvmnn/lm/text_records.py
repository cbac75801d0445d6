"""Texts in files that hold many: a JSON object a line, or the rows of a Parquet file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import SourceError
from ..optional import import_optional

LINE_SUFFIXES, ROW_SUFFIXES = (".jsonl", ".ndjson"), (".parquet",)
"""Suffixes of the two kinds."""

MAX_RECORD_BYTES = 64 << 20
"""Of one line or row."""

_BATCH_ROWS = 64


class TextRecord(NamedTuple):
    """One text: its line or row, from 1, and its text, empty where the record has none."""

    number: int
    text: str


def has_records(path: Path) -> bool:
    """Whether a file holds many texts, by its suffix."""
    return path.suffix.lower() in (*LINE_SUFFIXES, *ROW_SUFFIXES)


def iter_records(path: Path, field: str) -> Iterator[TextRecord]:
    """The texts of a file, read as they are asked for.

    Parameters
    ----------
    path
        ``.jsonl`` or ``.ndjson``: UTF-8, a JSON object in each line that is not blank. ``.parquet``: a column of texts.
    field
        Key of the objects, or name of the column.

    Raises
    ------
    MissingDependencyError
        For Parquet where pyarrow is not installed.
    SourceError
        For a file that cannot be read, and for a line or row that is no such record; the message names it.
    """
    return _iter_rows(path, field) if path.suffix.lower() in ROW_SUFFIXES else _iter_lines(path, field)


# -- JSON lines --------------------------------------------------------------------------------------------------------


def _iter_lines(path: Path, field: str) -> Iterator[TextRecord]:
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_RECORD_BYTES + 1):
                number += 1
                location = f"{path}, line {number}"
                if len(line) > MAX_RECORD_BYTES:
                    raise SourceError(f"{location}: has more than {MAX_RECORD_BYTES:,} bytes")
                if line.strip():
                    yield TextRecord(
                        number, _get_text(_parse_object(line, location, first=number == 1), field, location)
                    )
    except OSError as exc:
        raise SourceError(f"{path}: cannot be read: {exc.strerror or exc}") from exc


def _parse_object(line: bytes, location: str, *, first: bool) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as exc:
        raise SourceError(f"{location}: is not UTF-8: byte {exc.start} is 0x{exc.object[exc.start]:02x}") from None
    except (ValueError, RecursionError) as exc:
        raise SourceError(f"{location}: is not JSON: {' '.join(str(exc).split())[:200]}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{location}: found a {type(value).__name__}, expected a JSON object with a text")
    return value


def _get_text(record: dict[str, Any], field: str, location: str) -> str:
    if field not in record:
        raise SourceError(
            f"{location}: has no key {field!r}; {_format_names(list(record))}: name the key of the texts (--field)"
        )
    value = record[field]
    if value is not None and not isinstance(value, str):
        raise SourceError(f"{location}: {field!r} is a {type(value).__name__}: expected text")
    return _validate_text(value or "", location)


# -- Parquet -----------------------------------------------------------------------------------------------------------


def _iter_rows(path: Path, field: str) -> Iterator[TextRecord]:
    parquet, arrow = import_optional("pyarrow.parquet"), import_optional("pyarrow")
    read_errors = (OSError, ValueError, arrow.ArrowException)
    try:
        file = parquet.ParquetFile(path, memory_map=True)
    except read_errors as exc:
        raise _build_read_error(path, exc) from exc
    with file:
        _check_column(path, file.schema_arrow, field, arrow)
        batches = file.iter_batches(batch_size=_BATCH_ROWS, columns=[field], use_threads=False)
        number = 0
        while True:
            try:
                batch = next(batches, None)
                values = [] if batch is None else batch.column(0).to_pylist()
            except read_errors as exc:
                raise _build_read_error(path, exc) from exc
            if batch is None:
                return
            for value in values:
                number += 1
                text = _validate_text(value or "", f"{path}, row {number}")
                if len(text) > MAX_RECORD_BYTES:
                    raise SourceError(f"{path}, row {number}: has more than {MAX_RECORD_BYTES:,} characters")
                yield TextRecord(number, text)


def _check_column(path: Path, schema: Any, field: str, arrow: Any) -> None:
    if field not in schema.names:
        raise SourceError(
            f"{path}: has no column {field!r}; {_format_names(schema.names)}: name the column of the texts (--field)"
        )
    column_type = schema.field(field).type
    value_type = column_type.value_type if arrow.types.is_dictionary(column_type) else column_type
    if not (arrow.types.is_string(value_type) or arrow.types.is_large_string(value_type)):
        raise SourceError(f"{path}: column {field!r} holds {column_type}: expected text")


def _build_read_error(path: Path, error: Exception) -> SourceError:
    if isinstance(error, OSError) and error.strerror:
        return SourceError(f"{path}: cannot be read: {error.strerror}")
    return SourceError(f"{path}: is not a Parquet file: {' '.join(str(error).split())[:200]}")


# -- both --------------------------------------------------------------------------------------------------------------


def _validate_text(text: str, location: str) -> str:
    """Text that UTF-8 can hold; empty where it is blank."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise SourceError(f"{location}: character {exc.start} is half of a surrogate pair") from None
    return "" if text.isspace() else text


def _format_names(names: list[str]) -> str:
    names_text = ", ".join(repr(name) for name in names[:8]) + (" ..." if len(names) > 8 else "")
    return f"it has {names_text}" if names else "it has none at all"
