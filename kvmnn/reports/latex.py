"""Results of an evaluation as LaTeX: tables that a paper takes up by ``\\input``, without any package."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ..text import join_lines
from .columns import COLUMNS, Column, build_project_table, build_table
from .h2o_table import H2O_TITLE, build_h2o_table, collect_h2o_stats
from .pivot import build_pivot_table
from .pivot import format_pivot_title as pivot_title
from .results import EvaluationResultsProtocol
from .runtime_table import build_runtime_table, collect_runtime_stats, format_runtime_title
from .tables import build_notes, format_project_title

_MAX_LATEX_COLUMNS = 9
"""Columns of a table beside its first one: more are wider than a page, and are in further tables."""

_LATEX_ESCAPES = {
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


def format_latex(results: EvaluationResultsProtocol) -> str:
    """Return the tables of `kvmnn.reports.tables.markdown` in LaTeX, and what was measured on what.

    It ends with a newline. A table of many columns becomes several, each with the policies in its first column.
    """
    rows = results.rows
    parts = [*_iter_latex_tables("", build_table(results, COLUMNS))]
    parts += _iter_latex_tables(format_project_title(rows), build_project_table(rows))
    parts += _iter_latex_tables(H2O_TITLE, build_h2o_table(collect_h2o_stats(rows)))
    parts += _iter_latex_tables(pivot_title(rows), build_pivot_table(rows))
    parts += _iter_latex_tables(
        format_runtime_title(len(results.documents)), build_runtime_table(collect_runtime_stats(rows))
    )
    parts.append("\n".join(f"{escape_latex(note)}\\par" for note in build_notes(results)))
    return "\n\n".join(parts) + "\n"


def escape_latex(text: str) -> str:
    """Return a text as LaTeX prints it in one line; a command is never made of it."""
    return re.sub(".", lambda letter: _LATEX_ESCAPES.get(letter[0], letter[0]), join_lines(text))


def _iter_latex_tables(title: str, table: tuple[Sequence[Column], Sequence[Sequence[str]]] | None) -> Iterator[str]:
    if table is None:
        return
    if title:
        yield f"{escape_latex(title)}\\par"
    columns, lines = table
    order = sorted(range(1, len(columns)), key=lambda column_index: columns[column_index].drop_rank)
    for begin in range(0, max(len(order), 1), _MAX_LATEX_COLUMNS):
        column_indices = [0, *sorted(order[begin : begin + _MAX_LATEX_COLUMNS])]
        alignment = "".join("l" if columns[column_index].is_left_aligned else "r" for column_index in column_indices)
        rows = [_format_latex_row(line[column_index] for column_index in column_indices) for line in lines]
        heading = _format_latex_row(columns[column_index].heading for column_index in column_indices)
        yield "\n".join(
            [
                f"\\begin{{tabular}}{{{alignment}}}",
                "\\hline",
                heading,
                "\\hline",
                *rows,
                "\\hline",
                "\\end{tabular}\\par",
            ]
        )


def _format_latex_row(cells: Iterable[str]) -> str:
    """One line; the braces keep ``\\\\`` of the line before from reading ``*`` or ``[`` as its own."""
    return "{}" + " & ".join(escape_latex(cell) for cell in cells) + r" \\"
