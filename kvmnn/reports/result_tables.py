"""The table of any result as a file: LaTeX, CSV or Markdown by its suffix (``--table FILE``)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from typing import Any, Literal

from .._util.text import escape_markdown
from ..files.result_rows import Row, list_columns, list_rows
from .table import Column, Table, format_csv_lines
from .tables import choose_format

TableFormat = Literal["latex", "csv", "markdown"]
TABLE_FORMAT_BY_SUFFIX: dict[str, TableFormat] = {".tex": "latex", ".csv": "csv", ".md": "markdown"}
MAX_COLUMNS = 12
"""Columns of a table that has no columns of its own: of several rows, more are in CSV alone; a single row is turned."""


def list_result_tables(result: Any) -> list[Table]:
    """List the tables of a result: those of its ``to_tables``, or one of the rows of its document."""
    if hasattr(result, "to_tables"):
        return list(result.to_tables())
    rows = list_rows(result.to_dict(), getattr(result, "rows_path", ""))
    names = [name for name in list_columns(rows) if any(row.get(name) not in (None, "", []) for row in rows)]
    if len(rows) == 1 and len(names) > MAX_COLUMNS:
        columns = [Column("field", lambda name: name.replace("_", " "), is_left_aligned=True)]
        columns.append(Column("value", partial(_format_value, rows[0])))
        return [Table.from_items("", columns, names)]
    columns = [
        Column(name.replace("_", " "), partial(_format_value, name=name), is_left_aligned=_is_text(rows, name))
        for name in names[:MAX_COLUMNS]
    ]
    return [Table.from_items("", columns, rows)] if rows and columns else []


def format_result(result: Any, table_format: TableFormat) -> str:
    """Format the tables of a result; CSV has every scalar of its rows, as it is. Ends with a newline."""
    if table_format == "csv":
        rows = list_rows(result.to_dict(), getattr(result, "rows_path", ""))
        names = list_columns(rows)
        return format_csv_lines([names, *([_to_cell(row.get(name)) for name in names] for row in rows)])
    tables = list_result_tables(result)
    if table_format == "latex":
        return "\n\n".join(part for table in tables for part in table.iter_latex()) + "\n"
    parts = [text for table in tables for text in (table.title, table.to_markdown()) if text]
    return escape_markdown("\n\n".join(parts)) + "\n"


def infer_table_format(path: str | os.PathLike[str]) -> TableFormat:
    """Return the format for a file's suffix; raise `OptionError` for any other suffix."""
    return choose_format(path, TABLE_FORMAT_BY_SUFFIX, "markdown")


def _is_text(rows: Sequence[Row], name: str) -> bool:
    return any(isinstance(row.get(name), str) for row in rows)


def _format_value(row: Row, name: str) -> str | None:
    value = row.get(name)
    if value is None:
        return None
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    return f"{value:,}" if isinstance(value, int) else str(_to_cell(value))


def _to_cell(value: object) -> object:
    return " ".join(map(str, value)) if isinstance(value, list | tuple) else value
