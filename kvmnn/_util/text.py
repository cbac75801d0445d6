"""Human-readable text: numbers, rates, tables, wrapped lines, and foreign text escaped for terminals, CSV and Markdown.

The labels that promise something (LOSSLESS, ...) are defined here. They apply only to data that was compared
completely.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator, Sequence
from itertools import zip_longest

from .patterns import declare_pattern


def escape_control(text: str, *, keep_line_ends: bool = True) -> str:
    """Return a text in which nothing is left that a terminal would act on or not show.

    Control characters (C0, C1, DEL), marks that change the direction of writing, other characters without a form of
    their own, and surrogates become escapes such as ``\x1b`` and ``\u202e``; a byte of a file name that is not UTF-8
    becomes ``\xff``.
    """
    if keep_line_ends:
        return "\n".join(escape_control(line, keep_line_ends=False) for line in text.split("\n"))
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escape_letter(letter) for letter in text)


def join_lines(text: str) -> str:
    """Return a message as one visible line: line ends and the blanks around them become one blank."""
    return escape_control(" ".join(filter(None, map(str.strip, text.split("\n")))), keep_line_ends=False)


def _escape_letter(letter: str) -> str:
    if unicodedata.category(letter) == "Zs":  # blanks of other widths do no harm
        return letter
    if "\udc80" <= letter <= "\udcff":
        return f"\\x{ord(letter) - 0xDC00:02x}"
    return letter.encode("unicode_escape").decode("ascii")


_MIN_SIDE_BY_SIDE_COLUMNS = 50
_TAB_COLUMNS = 4


def side_by_side_diff(left: tuple[str, str], right: tuple[str, str], width: int) -> str:
    """Format two texts with headings side by side in `width` columns; one below the other if that is too narrow.

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
    """Break a text into lines of at most `width` columns."""
    return [
        piece
        for line in text.split("\n")
        for piece in _break_line(escape_control(line.expandtabs(_TAB_COLUMNS)), width)
    ]


def count_columns(text: str) -> int:
    """Return the number of terminal columns of a text."""
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


_CONTINUATION_INDENT = 4


def wrap_text(text: str, width: int) -> str:
    """Wrap a text at blanks to lines of at most `width` columns if possible, and indent the continuation lines."""
    return "\n".join(_wrap_line(line, width) for line in text.split("\n"))


def wrap_lines(lines: Iterable[str], width: int) -> list[str]:
    """Wrap each of several texts as `wrap_text` does, and return the lines."""
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
    """Yield words with the blanks before them; a list that is too long for a line is split after its commas."""
    for word in re.findall(r" *[^ ]+", line):
        yield from [word] if count_columns(word.lstrip(" ")) <= width else re.findall(r" *[^ ,]*,?", word)[:-1]


def suggest(word: str, candidates: Iterable[str]) -> str:
    """Return ``" (did you mean 'streaming'?)"`` with the candidate nearest to a word; empty if none is near."""
    from difflib import get_close_matches  # only messages need it

    names_by_lower = {name.lower(): name for name in candidates}
    anagrams = [name for name in names_by_lower if sorted(name) == sorted(word.lower())]  # '.nyp' is '.npy', not '.npz'
    close_names = anagrams or get_close_matches(word.lower(), names_by_lower, n=1, cutoff=0.7)
    return f" (did you mean {names_by_lower[close_names[0]]!r}?)" if close_names else ""


LOSSLESS = "LOSSLESS"
"""Every byte of the decoded data was compared with the input."""

LOSSY = "LOSSY"
"""Tokens, or bits of their values, were dropped."""

SIMULATED = "SIMULATED"
"""A size was computed; there is no output to decode and compare."""

UNCHANGED = "UNCHANGED"
"""Nothing was changed."""


def compute_ratio(raw_bytes: int, stored_bytes: int) -> float:
    """Return raw bytes divided by stored bytes; 0 if nothing is stored."""
    return raw_bytes / stored_bytes if stored_bytes else 0.0


def pluralize(number: int, noun: str) -> str:
    """Return a number with its noun: ``1 frame``, ``2 frames``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


MIN_RATE_BYTES = 1 << 20
"""Bytes below which no rate is printed: it would measure the start-up time."""


def format_rate(nbytes: int, seconds: float) -> str:
    """Return ``, 187 MB/s`` (10^6 bytes per second) to append to other facts; empty below `MIN_RATE_BYTES`."""
    return f", {format_mb_per_second(nbytes, seconds)} MB/s" if nbytes >= MIN_RATE_BYTES else ""


def format_mb_per_second(nbytes: int, seconds: float) -> str:
    """Return a rate in 10^6 bytes per second: a whole number from 1 on, below that one significant digit."""
    mb_per_second = nbytes / 1e6 / max(seconds, 1e-9)
    return f"{mb_per_second:.0f}" if mb_per_second >= 0.95 else f"{mb_per_second:.1g}"


def format_range(numbers: Sequence[int]) -> str:
    """Return ``7`` or ``7 to 12``: the least and the greatest of ascending numbers."""
    return f"{numbers[0]:,}" if len(numbers) == 1 else f"{numbers[0]:,} to {numbers[-1]:,}"


def group_consecutive(numbers: Sequence[int]) -> list[list[int]]:
    """Group numbers into runs of consecutive ones."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return runs


def format_layers(layers: Sequence[int]) -> str:
    """Return numbers of layers in words: ``"layers 0 to 4, 6"``."""
    return f"layer{'s' if len(layers) > 1 else ''} {', '.join(format_range(run) for run in group_consecutive(layers))}"


_HASH_PATTERN = declare_pattern(r"\b[0-9a-f]{32,}\b")
_HASH_DIGIT_COUNTS = (16, 32)


def shorten_names(names: Iterable[str]) -> dict[str, str]:
    """Map names to short forms: hashes to the first digits that keep them distinct, other names to themselves."""
    all_names = set(names)
    for digits in _HASH_DIGIT_COUNTS:
        short_forms = {name: _shorten_name(name, digits) for name in all_names}
        if len(set(short_forms.values())) == len(short_forms):
            return short_forms
    return {name: escape_control(name) for name in all_names}


def _shorten_name(name: str, digits: int) -> str:
    return escape_control(_HASH_PATTERN.sub(lambda match: match[0][:digits], name))


_NUMBER = declare_pattern(r"[+-]?(\d[\d,]*(\.\d*)?|\.\d+)([eE][+-]?\d+)?%?|[+-]?(inf|nan)", re.IGNORECASE)
_FORMULA = declare_pattern(r"[=+\-@\t\r]")
_UNESCAPED = declare_pattern(r"(?<!\\)((?:\\\\)*)(<(?=[A-Za-z/!?])|\[(?=[^\]]*\]\())")
"""Matches raw HTML, links and images that no backslash escapes."""
_MENTION = declare_pattern(r"(?<![\w`])@(?=[A-Za-z0-9])")


def escape_csv(text: str) -> str:
    """Return a CSV cell that no spreadsheet interprets as a formula; numbers, also negative ones, are unchanged.

    A cell that begins with ``=``, ``+``, ``-``, ``@``, a tab or CR gets an apostrophe, as spreadsheets write texts.
    """
    return f"'{text}" if _is_formula(text.lstrip("'")) else text


def unescape_csv(text: str) -> str:
    """Return the text that `escape_csv` turned into a cell; the inverse of it."""
    return text[1:] if text.startswith("'") and _is_formula(text.lstrip("'")) else text


def _is_formula(text: str) -> bool:
    return len(text) > 1 and _FORMULA.match(text) is not None and _NUMBER.fullmatch(text) is None


def escape_markdown(text: str) -> str:
    """Return text for Markdown without raw HTML, links or images, and without names that a forge would notify."""
    escaped_html = _UNESCAPED.sub(r"\1\\\2", text)
    return _MENTION.sub("@&#8203;", escaped_html)  # a blank without width: a backslash before @ would not help


def escape_markdown_cell(text: str) -> str:
    """Return text for a cell of a Markdown table: as `escape_markdown`, with ``|`` escaped too."""
    return escape_markdown(re.sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", text))


__all__ = [
    "LOSSLESS",
    "LOSSY",
    "SIMULATED",
    "UNCHANGED",
    "compute_ratio",
    "escape_control",
    "escape_csv",
    "escape_markdown",
    "escape_markdown_cell",
    "format_mb_per_second",
    "format_range",
    "format_rate",
    "join_lines",
    "pluralize",
    "shorten_names",
    "suggest",
    "unescape_csv",
]
