"""Aligned tables that fit a terminal: labels are shortened, and what matters least is left out and named."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Sequence

from .columns import UNCUT_MARK, Column

_LEAST_LABEL, _MOST_LABEL = 16, 32
_GAP = 2
_SHORTER = ((r"\bskip_layers=", "skip "), (r"\brecent_ratio=", "recent "), (r"\bstrategy=", ""), (r"(\w)=", r"\1 "))


def as_text(
    columns: Sequence[Column], lines: Sequence[Sequence[str]], width: int, elsewhere: str = "a wider terminal, --json"
) -> str:
    """The table in `width` columns of a terminal; what does not fit is named, with `elsewhere`, where it is shown.

    Columns of rank 0 are always there. Those of rank 1 are, where they leave room for a short label; others follow by
    their ranks. The first column holds the labels.
    """
    widths = _widths(columns, lines)
    shown, label = _chosen(columns, widths, width)
    names = [line[0] for line in lines]
    short = _shortened(names, label)
    widths[0] = max(len(text) for text in (columns[0].heading, *short))
    table = [
        _padded([column.heading for column in columns], widths, columns, shown),
        (" " * _GAP).join("-" * widths[i] for i in shown),
        *(_padded([name, *line[1:]], widths, columns, shown) for name, line in zip(short, lines, strict=True)),
    ]
    pairs = dict(zip(names, short, strict=True))
    cut = [f"{one} is {name}" for name, one in pairs.items() if one not in (name, _respelt(name))]
    dropped = [column.heading for i, column in enumerate(columns) if i not in shown]
    said = [f"Shortened: {'; '.join(cut)}."] if cut else []
    if dropped:
        said.append(f"Not shown in {width} columns ({elsewhere}): {', '.join(dropped)}.")
    return "\n\n".join(["\n".join(table), *([wrapped(said, width)] if said else [])])


def wrapped(sentences: Sequence[str], width: int) -> str:
    """Sentences, each beginning a line, broken between words only."""
    return "\n".join(
        line
        for sentence in sentences
        for line in textwrap.wrap(sentence, max(width, 40), break_long_words=False, break_on_hyphens=False) or [""]
    )


def _chosen(columns: Sequence[Column], widths: Sequence[int], width: int) -> tuple[list[int], int]:
    """The columns that are shown, and how wide labels may be."""
    order = sorted(range(1, len(columns)), key=lambda i: columns[i].rank)
    shown = {0, *(i for i in order if columns[i].rank == 0)}

    def used() -> int:
        return sum(widths[i] + _GAP for i in shown if i)

    for i in order:
        if columns[i].rank == 1 and used() + widths[i] + _GAP + min(widths[0], _LEAST_LABEL) <= width:
            shown.add(i)
    everything = sum(widths) + _GAP * (len(widths) - 1) <= width
    most = widths[0] if everything else min(widths[0], _MOST_LABEL)
    label = min(most, max(width - used(), _LEAST_LABEL))
    for i in order:
        if i not in shown:
            if label + used() + widths[i] + _GAP > width:
                break
            shown.add(i)
    return sorted(shown), label


def _shortened(names: Sequence[str], width: int) -> list[str]:
    """Names of at most `width` columns, as different from each other as they were; unchanged where all fit.

    The mark at the end of a name stays.
    """
    if all(len(name) <= width for name in names):
        return list(names)
    found: dict[str, str] = {}
    for name in dict.fromkeys(names):
        end = f" {UNCUT_MARK}" if name.endswith(f" {UNCUT_MARK}") else ""
        whole = _respelt(name.removesuffix(end))
        short = whole if len(whole + end) <= width else whole[: width - 2 - len(end)] + ".."
        number = 1
        while short + end in found.values():
            number += 1
            mark = f"..{number}"
            short = whole[: width - len(mark) - len(end)] + mark
        found[name] = short + end
    return [found[name] for name in names]


def _respelt(name: str) -> str:
    for pattern, text in _SHORTER:
        name = re.sub(pattern, text, name)
    return name


def _widths(columns: Sequence[Column], lines: Sequence[Sequence[str]]) -> list[int]:
    return [max([len(column.heading), *(len(line[i]) for line in lines)]) for i, column in enumerate(columns)]


def _padded(line: Sequence[str], widths: Sequence[int], columns: Sequence[Column], shown: Sequence[int]) -> str:
    cells = [f"{line[i]:<{widths[i]}}" if columns[i].left else f"{line[i]:>{widths[i]}}" for i in shown]
    return (" " * _GAP).join(cells).rstrip()
