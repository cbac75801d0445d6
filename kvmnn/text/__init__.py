"""How results are written for people: labels, numbers, rates."""

from .cells import escape_csv, escape_markdown, escape_markdown_cell, unescape_csv
from .labels import LOSSLESS, LOSSY, SIMULATED, UNCHANGED
from .names import shorten_names
from .numbers import compute_ratio, format_mb_per_second, format_range, format_rate, pluralize
from .suggestion import suggest
from .visible import escape_control, join_lines

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
