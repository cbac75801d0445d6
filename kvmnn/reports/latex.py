"""Results of an evaluation as LaTeX: tables that a paper takes up by ``\\input``, without any package."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ..text import one_line
from .columns import COLUMNS, Column, filled, project_table
from .h2o_table import H2O_TITLE, h2o_table, rows_with_figures
from .pivot import pivot_table
from .pivot import title as pivot_title
from .results import Results
from .runtime_table import rows_with_runtime, runtime_table, runtime_title
from .tables import notes, project_title

_MAX_COLUMNS = 9
"""Columns of a table beside its first one: more are wider than a page, and are in further tables."""

_SPECIAL = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"{\char34}",
    "`": r"{\char96}",
    **{letter: f"\\{letter}" for letter in "&%$#_"},
}


def latex(results: Results) -> str:
    """Return the tables of `kvmnn.reports.tables.markdown` in LaTeX, and what was measured on what.

    It ends with a newline. A table of many columns becomes several, each with the policies in its first column.
    """
    rows = results.rows
    parts = [*_tables("", filled(results, COLUMNS))]
    parts += _tables(project_title(rows), project_table(rows))
    parts += _tables(H2O_TITLE, h2o_table(rows_with_figures(rows)))
    parts += _tables(pivot_title(rows), pivot_table(rows))
    parts += _tables(runtime_title(len(results.documents)), runtime_table(rows_with_runtime(rows)))
    parts.append("\n".join(f"{plain(note)}\\par" for note in notes(results)))
    return "\n\n".join(parts) + "\n"


def plain(text: str) -> str:
    """Return a text as LaTeX prints it in one line; a command is never made of it."""
    return re.sub(".", lambda letter: _SPECIAL.get(letter[0], letter[0]), one_line(text))


def _tables(title: str, table: tuple[Sequence[Column], Sequence[Sequence[str]]] | None) -> Iterator[str]:
    if table is None:
        return
    if title:
        yield f"{plain(title)}\\par"
    columns, lines = table
    order = sorted(range(1, len(columns)), key=lambda place: columns[place].rank)
    for begin in range(0, max(len(order), 1), _MAX_COLUMNS):
        places = [0, *sorted(order[begin : begin + _MAX_COLUMNS])]
        shape = "".join("l" if columns[place].left else "r" for place in places)
        rows = [_row(line[place] for place in places) for line in lines]
        heading = _row(columns[place].heading for place in places)
        yield "\n".join(
            [f"\\begin{{tabular}}{{{shape}}}", "\\hline", heading, "\\hline", *rows, "\\hline", "\\end{tabular}\\par"]
        )


def _row(cells: Iterable[str]) -> str:
    """One line; the braces keep ``\\\\`` of the line before from reading ``*`` or ``[`` as its own."""
    return "{}" + " & ".join(plain(cell) for cell in cells) + r" \\"
