"""Texts in files that hold many: a JSON object a line, or the rows of a Parquet file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import SourceError
from ..optional import package

LINES, ROWS = (".jsonl", ".ndjson"), (".parquet",)
"""Suffixes of the two kinds."""

MAX_BYTES = 64 << 20
"""Of one line or row."""

_BATCH = 64


class Record(NamedTuple):
    """One text: its line or row, from 1, and its text, empty where the record has none."""

    number: int
    text: str


def holds_records(path: Path) -> bool:
    """Whether a file holds many texts, by its suffix."""
    return path.suffix.lower() in (*LINES, *ROWS)


def records(path: Path, field: str) -> Iterator[Record]:
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
    return _rows(path, field) if path.suffix.lower() in ROWS else _lines(path, field)


# -- JSON lines --------------------------------------------------------------------------------------------------------


def _lines(path: Path, field: str) -> Iterator[Record]:
    try:
        with open(path, "rb") as file:
            number = 0
            while line := file.readline(MAX_BYTES + 1):
                number += 1
                where = f"{path}, line {number}"
                if len(line) > MAX_BYTES:
                    raise SourceError(f"{where}: has more than {MAX_BYTES:,} bytes")
                if line.strip():
                    yield Record(number, _text_of(_object(line, where, first=number == 1), field, where))
    except OSError as exc:
        raise SourceError(f"{path}: cannot be read: {exc.strerror or exc}") from exc


def _object(line: bytes, where: str, *, first: bool) -> dict[str, Any]:
    try:
        value = json.loads(line.decode("utf-8-sig" if first else "utf-8"))
    except UnicodeDecodeError as exc:
        raise SourceError(f"{where}: is not UTF-8: byte {exc.start} is 0x{exc.object[exc.start]:02x}") from None
    except (ValueError, RecursionError) as exc:
        raise SourceError(f"{where}: is not JSON: {' '.join(str(exc).split())[:200]}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{where}: found a {type(value).__name__}, expected a JSON object with a text")
    return value


def _text_of(record: dict[str, Any], field: str, where: str) -> str:
    if field not in record:
        raise SourceError(f"{where}: has no key {field!r}; {_names(list(record))}: name the key of the texts (--field)")
    value = record[field]
    if value is not None and not isinstance(value, str):
        raise SourceError(f"{where}: {field!r} is a {type(value).__name__}: expected text")
    return _checked(value or "", where)


# -- Parquet -----------------------------------------------------------------------------------------------------------


def _rows(path: Path, field: str) -> Iterator[Record]:
    parquet, arrow = package("pyarrow.parquet"), package("pyarrow")
    damaged = (OSError, ValueError, arrow.ArrowException)
    try:
        file = parquet.ParquetFile(path, memory_map=True)
    except damaged as exc:
        raise _broken(path, exc) from exc
    with file:
        _check_column(path, file.schema_arrow, field, arrow)
        batches = file.iter_batches(batch_size=_BATCH, columns=[field], use_threads=False)
        number = 0
        while True:
            try:
                batch = next(batches, None)
                values = [] if batch is None else batch.column(0).to_pylist()
            except damaged as exc:
                raise _broken(path, exc) from exc
            if batch is None:
                return
            for value in values:
                number += 1
                text = _checked(value or "", f"{path}, row {number}")
                if len(text) > MAX_BYTES:
                    raise SourceError(f"{path}, row {number}: has more than {MAX_BYTES:,} characters")
                yield Record(number, text)


def _check_column(path: Path, schema: Any, field: str, arrow: Any) -> None:
    if field not in schema.names:
        raise SourceError(
            f"{path}: has no column {field!r}; {_names(schema.names)}: name the column of the texts (--field)"
        )
    kind = schema.field(field).type
    held = kind.value_type if arrow.types.is_dictionary(kind) else kind
    if not (arrow.types.is_string(held) or arrow.types.is_large_string(held)):
        raise SourceError(f"{path}: column {field!r} holds {kind}: expected text")


def _broken(path: Path, error: Exception) -> SourceError:
    if isinstance(error, OSError) and error.strerror:
        return SourceError(f"{path}: cannot be read: {error.strerror}")
    return SourceError(f"{path}: is not a Parquet file: {' '.join(str(error).split())[:200]}")


# -- both --------------------------------------------------------------------------------------------------------------


def _checked(text: str, where: str) -> str:
    """Text that UTF-8 can hold; empty where it is blank."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise SourceError(f"{where}: character {exc.start} is half of a surrogate pair") from None
    return "" if text.isspace() else text


def _names(names: list[str]) -> str:
    shown = ", ".join(repr(name) for name in names[:8]) + (" ..." if len(names) > 8 else "")
    return f"it has {shown}" if names else "it has none at all"
