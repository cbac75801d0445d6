"""Two texts beside each other in a terminal, as sdiff has them: ``|`` between lines that differ."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterator
from itertools import zip_longest

from .visible import visible

_NARROW = 50
_TAB = 4


def side_by_side(left: tuple[str, str], right: tuple[str, str], width: int) -> str:
    """Two texts with their headings in `width` columns; one below the other where that is too narrow.

    Nothing in them reaches the terminal as a command: control characters are shown as ``\\x1b`` and the like.
    """
    if width < _NARROW:
        parts = [f"-- {heading} --\n" + "\n".join(wrapped(text, width)) for heading, text in (left, right)]
        return "\n\n".join(parts)
    column = (width - 3) // 2
    rows = [(_cut(left[0], column), _cut(right[0], column), " "), ("-" * column, "-" * column, " ")]
    lines = zip_longest(wrapped(left[1], column), wrapped(right[1], column), fillvalue="")
    rows += [(one, other, " " if one == other else "|") for one, other in lines]
    return "\n".join(f"{one}{' ' * (column - columns(one))} {mark} {other}".rstrip() for one, other, mark in rows)


def wrapped(text: str, width: int) -> list[str]:
    """Lines of at most `width` columns; what was longer goes on in the next."""
    return [piece for line in text.split("\n") for piece in _pieces(visible(line.expandtabs(_TAB)), width)]


def columns(text: str) -> int:
    """Columns that a terminal gives to a text."""
    return sum(_columns(letter) for letter in text)


def _pieces(line: str, width: int) -> Iterator[str]:
    piece, used = "", 0
    for letter in line:
        wide = _columns(letter)
        if used + wide > width:
            yield piece
            piece, used = "", 0
        piece, used = piece + letter, used + wide
    yield piece


def _columns(letter: str) -> int:
    if unicodedata.combining(letter):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def _cut(text: str, width: int) -> str:
    return wrapped(text, width)[0]
