"""Aligned tables that fit a terminal: labels are shortened, and what matters least is left out and named."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from .columns import NO_EVICTION_MARK, Column

_MIN_LABEL_WIDTH, _MAX_LABEL_WIDTH = 16, 32
_COLUMN_GAP = 2
_ABBREVIATIONS = (
    (r"\bskip_layers=", "skip "),
    (r"\brecent_ratio=", "recent "),
    (r"\bstrategy=", ""),
    (r"(\w)=", r"\1 "),
)


def format_table(
    columns: Sequence[Column],
    lines: Sequence[Sequence[str]],
    width: int,
    elsewhere_text: str = "a wider terminal, --json",
) -> str:
    """The table in `width` columns of a terminal; what does not fit is named, with `elsewhere_text`, where it is shown.

    Columns of rank 0 are always there. Those of rank 1 are, where they leave room for a short label; others follow by
    their ranks. The first column holds the labels.
    """
    widths = _measure_widths(columns, lines)
    shown_indices, label = _choose_columns(columns, widths, width)
    names = [line[0] for line in lines]
    short = _shorten_names(names, label)
    widths[0] = max(len(text) for text in (columns[0].heading, *short))
    table = [
        _pad_cells([column.heading for column in columns], widths, columns, shown_indices),
        (" " * _COLUMN_GAP).join("-" * widths[i] for i in shown_indices),
        *(
            _pad_cells([name, *line[1:]], widths, columns, shown_indices)
            for name, line in zip(short, lines, strict=True)
        ),
    ]
    pairs = dict(zip(names, short, strict=True))
    shortened_texts = [
        f"{short_name} is {name}" for name, short_name in pairs.items() if short_name not in (name, _abbreviate(name))
    ]
    dropped_headings = [column.heading for i, column in enumerate(columns) if i not in shown_indices]
    notes = [f"Shortened: {'; '.join(shortened_texts)}."] if shortened_texts else []
    if dropped_headings:
        notes.append(f"Not shown in {width} columns ({elsewhere_text}): {', '.join(dropped_headings)}.")
    return "\n\n".join(["\n".join(table), *([wrap_sentences(notes, width)] if notes else [])])


def wrap_sentences(sentences: Sequence[str], width: int) -> str:
    """Sentences, each beginning a line, broken between words only."""
    return "\n".join(
        line
        for sentence in sentences
        for line in textwrap.wrap(sentence, max(width, 40), break_long_words=False, break_on_hyphens=False) or [""]
    )


def _choose_columns(columns: Sequence[Column], widths: Sequence[int], width: int) -> tuple[list[int], int]:
    """The columns that are shown, and how wide labels may be."""
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
    """Names of at most `width` columns, as different from each other as they were; unchanged where all fit.

    The mark at the end of a name stays.
    """
    if all(len(name) <= width for name in names):
        return list(names)
    short_by_name: dict[str, str] = {}
    for name in dict.fromkeys(names):
        mark_suffix = f" {NO_EVICTION_MARK}" if name.endswith(f" {NO_EVICTION_MARK}") else ""
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


def _measure_widths(columns: Sequence[Column], lines: Sequence[Sequence[str]]) -> list[int]:
    return [max([len(column.heading), *(len(line[i]) for line in lines)]) for i, column in enumerate(columns)]


def _pad_cells(
    line: Sequence[str], widths: Sequence[int], columns: Sequence[Column], shown_indices: Sequence[int]
) -> str:
    cells = [
        f"{line[i]:<{widths[i]}}" if columns[i].is_left_aligned else f"{line[i]:>{widths[i]}}" for i in shown_indices
    ]
    return (" " * _COLUMN_GAP).join(cells).rstrip()
