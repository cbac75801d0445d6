"""Two texts beside each other in a terminal, as sdiff has them: ``|`` between lines that differ."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from itertools import zip_longest

from .visible import escape_control

_MIN_SIDE_BY_SIDE_COLUMNS = 50
_TAB_COLUMNS = 4


def side_by_side_diff(left: tuple[str, str], right: tuple[str, str], width: int) -> str:
    """Two texts with their headings in `width` columns; one below the other where that is too narrow.

    Nothing in them reaches the terminal as a command: control characters are shown as ``\\x1b`` and the like.
    """
    if width < _MIN_SIDE_BY_SIDE_COLUMNS:
        parts = [f"-- {heading} --\n" + "\n".join(break_lines(text, width)) for heading, text in (left, right)]
        return "\n\n".join(parts)
    column_width = (width - 3) // 2
    rows = [
        (_truncate(left[0], column_width), _truncate(right[0], column_width), " "),
        ("-" * column_width, "-" * column_width, " "),
    ]
    lines = zip_longest(break_lines(left[1], column_width), break_lines(right[1], column_width), fillvalue="")
    rows += [(left_line, right_line, " " if left_line == right_line else "|") for left_line, right_line in lines]
    return "\n".join(
        f"{left_line}{' ' * (column_width - count_columns(left_line))} {mark} {right_line}".rstrip()
        for left_line, right_line, mark in rows
    )


def break_lines(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns; what was longer goes on in the next."""
    return [
        piece
        for line in text.split("\n")
        for piece in _break_line(escape_control(line.expandtabs(_TAB_COLUMNS)), width)
    ]


def count_columns(text: str) -> int:
    """Columns that a terminal gives to a text."""
    return sum(_count_letter_columns(letter) for letter in text)


def _break_line(line: str, width: int) -> Iterator[str]:
    piece, num_columns = "", 0
    for letter in line:
        letter_columns = _count_letter_columns(letter)
        if num_columns + letter_columns > width:
            yield piece
            piece, num_columns = "", 0
        piece, num_columns = piece + letter, num_columns + letter_columns
    yield piece


def _count_letter_columns(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _truncate(text: str, width: int) -> str:
    return break_lines(text, width)[0]
