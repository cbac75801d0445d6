"""Lines that are longer than a terminal is wide, broken between words."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from .side_by_side import count_columns

_CONTINUATION_INDENT = 4


def wrap_text(text: str, width: int) -> str:
    """Lines of at most `width` columns where their words allow it; what goes on is indented beneath its line."""
    return "\n".join(_wrap_line(line, width) for line in text.split("\n"))


def wrap_lines(lines: Iterable[str], width: int) -> list[str]:
    """`wrap_text` of each of them, as lines."""
    return [row for line in lines for row in wrap_text(line, width).split("\n")]


def _wrap_line(line: str, width: int) -> str:
    if count_columns(line) <= width:
        return line
    indent = len(line) - len(line.lstrip(" ")) + _CONTINUATION_INDENT
    rows, row = [], ""
    for word in _split_words(line, width - indent):
        if row.strip() and count_columns(row + word) > width:
            rows.append(row)
            row = " " * indent + word.lstrip(" ")
        else:
            row += word
    return "\n".join([*rows, row])


def _split_words(line: str, width: int) -> Iterator[str]:
    """Words with the blanks before them; lists that are too long for a line are cut behind their commas."""
    for word in re.findall(r" *[^ ]+", line):
        yield from [word] if count_columns(word.lstrip(" ")) <= width else re.findall(r" *[^ ,]*,?", word)[:-1]
