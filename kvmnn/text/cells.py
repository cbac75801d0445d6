"""Foreign text in tables that other programs open: CSV for spreadsheets, Markdown for web pages."""

from __future__ import annotations

import re

_NUMBER = re.compile(r"[+-]?(\d[\d,]*(\.\d*)?|\.\d+)([eE][+-]?\d+)?%?|[+-]?(inf|nan)", re.IGNORECASE)
_FORMULA = re.compile(r"[=+\-@\t\r]")
_UNESCAPED = re.compile(r"(?<!\\)((?:\\\\)*)(<(?=[A-Za-z/!?])|\[(?=[^\]]*\]\())")
"""Raw HTML, links and images, unless a backslash escapes them."""
_MENTION = re.compile(r"(?<![\w`])@(?=[A-Za-z0-9])")


def escape_csv(text: str) -> str:
    """Return a cell of CSV that no spreadsheet takes for a formula; numbers, negative ones too, stay as they are.

    A cell that begins with ``=``, ``+``, ``-``, ``@``, a tab or CR gets an apostrophe, as spreadsheets write texts.
    """
    return f"'{text}" if _is_formula(text.lstrip("'")) else text


def unescape_csv(text: str) -> str:
    """Return the text of which `escape_csv` made a cell."""
    return text[1:] if text.startswith("'") and _is_formula(text.lstrip("'")) else text


def _is_formula(text: str) -> bool:
    return len(text) > 1 and _FORMULA.match(text) is not None and _NUMBER.fullmatch(text) is None


def escape_markdown(text: str) -> str:
    """Return text for Markdown without raw HTML, links or images, and without names that a forge would notify."""
    escaped_html = _UNESCAPED.sub(r"\1\\\2", text)
    return _MENTION.sub("@&#8203;", escaped_html)  # a blank without width: a backslash before @ would not help


def escape_markdown_cell(text: str) -> str:
    """Return text for a cell of a Markdown table: as `escape_markdown`, and ``|`` ends no cell."""
    return escape_markdown(re.sub(r"(?<!\\)((?:\\\\)*)\|", r"\1\\|", text))
