"""Names and texts that others made, on their way to a terminal."""

from __future__ import annotations

import unicodedata


def escape_control(text: str, *, keep_line_ends: bool = True) -> str:
    """A text in which nothing is left that a terminal would act on or not show.

    Control characters (C0, C1, DEL), marks that change the direction of writing, other characters without a form of
    their own, and surrogates become escapes such as ``\\x1b`` and ``\\u202e``; a byte of a file name that is not UTF-8
    becomes ``\\xff``.

    Parameters
    ----------
    keep_line_ends
        Line ends of the text are its own, and stay; otherwise they are escaped as well, as names need it.
    """
    if keep_line_ends:
        return "\n".join(escape_control(line, keep_line_ends=False) for line in text.split("\n"))
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escape_letter(letter) for letter in text)


def join_lines(text: str) -> str:
    """A message as one visible line: line ends and the blanks around them become one blank."""
    return escape_control(" ".join(filter(None, map(str.strip, text.split("\n")))), keep_line_ends=False)


def _escape_letter(letter: str) -> str:
    if unicodedata.category(letter) == "Zs":  # blanks of other widths do no harm
        return letter
    if "\udc80" <= letter <= "\udcff":
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode("ascii")
