"""Rows of a result's document, as a notebook, pandas and tables for papers show them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from .._util.packages import import_optional
from ..errors import KvmnnError

MAX_HTML_ROWS = 20
MAX_HTML_COLUMNS = 12

Row = dict[str, object]


def iter_scalars(value: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested mappings and lists, with their names joined by dots."""
    for key, entry in value.items():
        name = f"{prefix}{key}"
        if isinstance(entry, (list, tuple)):
            entry = {str(index): element for index, element in enumerate(entry)}
        if isinstance(entry, Mapping):
            yield from iter_scalars(entry, name + ".")
        else:
            yield name, entry


def list_rows(document: Mapping[str, Any], path: str = "") -> list[Row]:
    """List the rows of a document.

    Parameters
    ----------
    path
        Keys of a list of objects, or of objects by name, joined by dots (``"arrays"``, ``"breakdown.layers"``). Rows of
        a list within a list begin with the scalars of the outer one. Default: the first list of objects, or else the
        scalars of the document as one row.

    Raises
    ------
    KvmnnError
        If the document has no such list.
    """
    keys = path.split(".") if path else _find_list(document)
    if not keys:
        return [_flatten(document)]
    entries: list[tuple[Row, Any]] = [({}, document)]
    for depth, key in enumerate(keys):
        is_last = depth + 1 == len(keys)
        entries = [pair for outer, entry in entries for pair in _open(outer, entry, key, depth, is_last)]
    return [{**outer, **_flatten(entry)} for outer, entry in entries]


def _find_list(document: Mapping[str, Any]) -> list[str]:
    for key, value in document.items():
        if isinstance(value, list) and value and all(isinstance(entry, Mapping) for entry in value):
            return [key]
    return []


def _open(outer: Row, entry: Mapping[str, Any], key: str, depth: int, is_last: bool) -> Iterator[tuple[Row, Any]]:
    """Yield the entries below a key, each with what its outer objects say."""
    value = entry.get(key)
    if is_last and isinstance(value, Mapping) and all(isinstance(inner, Mapping) for inner in value.values()):
        for name, inner in value.items():
            yield {**outer, key.removesuffix("s"): name}, inner
    elif isinstance(value, Mapping):
        yield outer, value
    elif isinstance(value, list):
        scalars = {name: inner for name, inner in entry.items() if not isinstance(inner, list | Mapping)}
        for inner in value:
            yield {**outer, **(scalars if depth else {})}, inner
    else:
        names = [name for name, inner in entry.items() if isinstance(inner, list | Mapping)]
        raise KvmnnError(f"{key!r} is no list of this result: it has {', '.join(names) or 'none'}")


def _flatten(entry: Any) -> Row:
    """Return the scalars of an object; lists of scalars stay lists, those of objects are left out."""
    if not isinstance(entry, Mapping):
        return {"value": entry}
    row: Row = {}
    for key, value in entry.items():
        if isinstance(value, Mapping):
            row |= {f"{key}.{inner_key}": inner for inner_key, inner in _flatten(value).items()}
        elif not (isinstance(value, list) and any(isinstance(inner, Mapping | list) for inner in value)):
            row[key] = value
    return row


def list_columns(rows: Iterable[Row]) -> list[str]:
    """List the keys of all rows, in the order of their first occurrence."""
    return list(dict.fromkeys(key for row in rows for key in row))


def to_dataframe(rows: Sequence[Row]) -> Any:
    """Convert rows to a ``pandas.DataFrame``; raise `MissingDependencyError` without pandas."""
    return import_optional("pandas").DataFrame(rows, columns=list_columns(rows))


def format_html(caption: str, rows: Sequence[Row]) -> str:
    """Format the first rows and columns as an HTML table, for notebooks."""
    columns = [name for name in list_columns(rows) if any(row.get(name) not in (None, "", []) for row in rows)]
    shown_columns = columns[:MAX_HTML_COLUMNS]
    lines = [[_format_cell(row.get(name)) for name in shown_columns] for row in rows[:MAX_HTML_ROWS]]
    hidden = [
        f"{len(rows) - MAX_HTML_ROWS:,} more rows" * (len(rows) > MAX_HTML_ROWS),
        f"{len(columns) - MAX_HTML_COLUMNS} more columns" * (len(columns) > MAX_HTML_COLUMNS),
    ]
    note = ", ".join(filter(None, hidden))
    return format_html_table(caption + (f" ({note}: to_dataframe())" if note else ""), shown_columns, lines)


def format_html_table(caption: str, headings: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    """Format an HTML table; every text is escaped."""
    import html  # only notebooks need it

    head = "".join(f"<th>{html.escape(text)}</th>" for text in headings)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(text)}</td>' for text in line)}</tr>" for line in lines)
    title = f"<caption>{html.escape(caption)}</caption>" if caption else ""
    return f"<table>{title}<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def _format_cell(value: object) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    text = str(value)
    return text if len(text) <= 60 else text[:57] + "..."
