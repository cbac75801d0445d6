"""One table, and its writers: a terminal, Markdown, LaTeX, CSV. A value that was not measured is ``-``."""

from __future__ import annotations

import csv
import io
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import field
from typing import Any

from .._util.dataclass import dataclass
from .._util.named_tuple import NamedTuple
from .._util.text import escape_csv, escape_markdown_cell, join_lines
from ..files.result_rows import format_html_table

ABSENT_TEXT = "-"
NO_EVICTION_MARK = "*"
"""Mark of rows whose policy evicted nothing before the last token was scored, or whose codec quantised nothing. It
stays at the end of a shortened label."""
PARTLY_EVICTED_MARK = "(*)"
"""Likewise of rows for which that holds in some texts and not in others."""


@dataclass(frozen=True)
class Column:
    """A table column: its heading with the unit, and a function for an item's text, None if not measured.

    `drop_rank` says what a narrow terminal goes without: the highest first, 0 never. With 1 labels are shortened for
    it.
    """

    heading: str
    format_cell: Callable[[Any], str | None] = field(compare=False)
    drop_rank: int = 0
    is_left_aligned: bool = False


class Table(NamedTuple):
    """A table: its title, its columns, and the text of every cell, line by line. The first column holds the labels."""

    title: str
    columns: Sequence[Column]
    lines: Sequence[Sequence[str]]

    @classmethod
    def from_items(cls, title: str, columns: Sequence[Column], items: Iterable[object]) -> Table:
        """Build the table with a line for each item."""
        lines = [[column.format_cell(item) for column in columns] for item in items]
        return cls(title, columns, [[ABSENT_TEXT if text is None else text for text in line] for line in lines])

    def to_html(self) -> str:
        """Format the table as HTML, its title as the caption."""
        return format_html_table(self.title, [column.heading for column in self.columns], self.lines)

    def to_markdown(self) -> str:
        """Format the table without its title as Markdown."""
        rules = [("---" if column.is_left_aligned else "---:") for column in self.columns]
        cells = [[column.heading for column in self.columns], rules, *self.lines]
        return "\n".join("| " + " | ".join(map(escape_markdown_cell, line)) + " |" for line in cells)

    def to_terminal(self, width: int, elsewhere_text: str = "a wider terminal, --json") -> str:
        """Format the table without its title in `width` terminal columns.

        Columns that do not fit are named in a line, with `elsewhere_text` for where to find them. Columns of rank 0 are
        always there. Those of rank 1 are, where they leave room for a short label; others follow by their ranks.
        """
        columns = self.columns
        widths = [
            max([len(column.heading), *(len(line[i]) for line in self.lines)]) for i, column in enumerate(columns)
        ]
        shown_indices, label_width = _choose_columns(columns, widths, width)
        names = [line[0] for line in self.lines]
        short = _shorten_names(names, label_width)
        widths[0] = max(len(text) for text in (columns[0].heading, *short))

        def pad_cells(line: Sequence[str]) -> str:
            cells = [f"{line[i]:{'<' if columns[i].is_left_aligned else '>'}{widths[i]}}" for i in shown_indices]
            return (" " * _COLUMN_GAP).join(cells).rstrip()

        table = [
            pad_cells([column.heading for column in columns]),
            (" " * _COLUMN_GAP).join("-" * widths[i] for i in shown_indices),
            *(pad_cells([name, *line[1:]]) for name, line in zip(short, self.lines, strict=True)),
        ]
        shortened_texts = [
            f"{short_name} is {name}"
            for name, short_name in dict(zip(names, short, strict=True)).items()
            if short_name not in (name, _abbreviate(name))
        ]
        dropped_headings = [column.heading for i, column in enumerate(columns) if i not in shown_indices]
        notes = [f"Shortened: {'; '.join(shortened_texts)}."] if shortened_texts else []
        if dropped_headings:
            notes.append(f"Not shown in {width} columns ({elsewhere_text}): {', '.join(dropped_headings)}.")
        return "\n\n".join(["\n".join(table), *([wrap_sentences(notes, width)] if notes else [])])

    def iter_latex(self) -> Iterator[str]:
        """Yield the title, if any, and the table in LaTeX: several tables with the same first column if it is wide."""
        if self.title:
            yield f"{escape_latex(self.title)}\\par"
        for columns, lines in self.split(_MAX_LATEX_COLUMNS):
            alignment = "".join("l" if column.is_left_aligned else "r" for column in columns)
            heading = _format_latex_row(column.heading for column in columns)
            rows = "\n".join(map(_format_latex_row, lines))
            begin, end = f"\\begin{{tabular}}{{{alignment}}}", "\\end{tabular}\\par"
            yield "\n".join([begin, "\\hline", heading, "\\hline", *([rows] if rows else []), "\\hline", end])

    def split(self, max_columns: int) -> Iterator[tuple[list[Column], list[list[str]]]]:
        """Yield parts with the first column and at most `max_columns` others, those of the lowest ranks first."""
        order = sorted(range(1, len(self.columns)), key=lambda i: self.columns[i].drop_rank)
        for begin in range(0, max(len(order), 1), max_columns):
            indices = [0, *sorted(order[begin : begin + max_columns])]
            yield [self.columns[i] for i in indices], [[line[i] for i in indices] for line in self.lines]


def to_single_line(text: object) -> str:
    """Join the words of a text to one line; return the absent mark for an empty text."""
    return " ".join(str(text).split()) or ABSENT_TEXT


def wrap_sentences(sentences: Sequence[str], width: int) -> str:
    """Wrap sentences, each at the start of a line, between words only."""
    return "\n".join(
        line
        for sentence in sentences
        for line in textwrap.wrap(sentence, max(width, 40), break_long_words=False, break_on_hyphens=False) or [""]
    )


_MIN_LABEL_WIDTH, _MAX_LABEL_WIDTH = 16, 32
_COLUMN_GAP = 2
_ABBREVIATIONS = (
    (r"\bskip_layers=", "skip "),
    (r"\brecent_ratio=", "recent "),
    (r"\bstrategy=", ""),
    (r"(\w)=", r"\1 "),
)


def _choose_columns(columns: Sequence[Column], widths: Sequence[int], width: int) -> tuple[list[int], int]:
    """Choose the columns to show and the width of labels."""
    order = sorted(range(1, len(columns)), key=lambda i: columns[i].drop_rank)
    shown_indices = {0, *(i for i in order if columns[i].drop_rank == 0)}

    def count_used_width() -> int:
        return sum(widths[i] + _COLUMN_GAP for i in shown_indices if i)

    for i in order:
        if (
            columns[i].drop_rank == 1
            and count_used_width() + widths[i] + _COLUMN_GAP + min(widths[0], _MIN_LABEL_WIDTH) <= width
        ):
            shown_indices.add(i)
    fits_completely = sum(widths) + _COLUMN_GAP * (len(widths) - 1) <= width
    max_label_width = widths[0] if fits_completely else min(widths[0], _MAX_LABEL_WIDTH)
    label_width = min(max_label_width, max(width - count_used_width(), _MIN_LABEL_WIDTH))
    for i in order:
        if i not in shown_indices:
            if label_width + count_used_width() + widths[i] + _COLUMN_GAP > width:
                break
            shown_indices.add(i)
    return sorted(shown_indices), label_width


def _shorten_names(names: Sequence[str], width: int) -> list[str]:
    """Shorten names to `width` columns but leave them distinct; return them unchanged if all fit.

    The mark at the end of a name stays.
    """
    if all(len(name) <= width for name in names):
        return list(names)
    short_by_name: dict[str, str] = {}
    for name in dict.fromkeys(names):
        marks = (f" {mark}" for mark in (NO_EVICTION_MARK, PARTLY_EVICTED_MARK))
        mark_suffix = next((mark for mark in marks if name.endswith(mark)), "")
        full_name = _abbreviate(name.removesuffix(mark_suffix))
        short = full_name if len(full_name + mark_suffix) <= width else full_name[: width - 2 - len(mark_suffix)] + ".."
        number = 1
        while short + mark_suffix in short_by_name.values():
            number += 1
            mark = f"..{number}"
            short = full_name[: width - len(mark) - len(mark_suffix)] + mark
        short_by_name[name] = short + mark_suffix
    return [short_by_name[name] for name in names]


def _abbreviate(name: str) -> str:
    for pattern, text in _ABBREVIATIONS:
        name = re.sub(pattern, text, name)
    return name


_MAX_LATEX_COLUMNS = 9
"""Columns of a table next to its first one: more are wider than a page, and are in further tables."""

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


def escape_latex(text: str) -> str:
    """Return a text as LaTeX prints it in one line; a command is never made of it."""
    return re.sub(".", lambda letter: _LATEX_ESCAPES.get(letter[0], letter[0]), join_lines(text))


def _format_latex_row(cells: Iterable[str]) -> str:
    """Format one line; braces prevent ``\\\\`` of the previous line from reading ``*`` or ``[`` as its argument."""
    return "{}" + " & ".join(escape_latex(cell) for cell in cells) + r" \\"


def format_csv_lines(lines: Iterable[Iterable[object]], line_end: str = "\n") -> str:
    """Format CSV: None is empty, a Boolean is a word of JSON, and no text is a formula to a spreadsheet."""
    sink = io.StringIO()
    csv.writer(sink, lineterminator=line_end).writerows(map(_format_csv_cell, line) for line in lines)
    return sink.getvalue()


def _format_csv_cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else escape_csv(str(value))
