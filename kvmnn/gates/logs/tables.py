"""The tables of ``llm_bench``: Markdown between other lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_RULE = re.compile(r"[-:]+")


@dataclass(frozen=True, kw_only=True)
class Table:
    """What the lines of one log that begin with a bar hold.

    Attributes
    ----------
    header
        Names of the columns; empty where there is no table.
    rows
        Cells by column, in order; a header line that comes again is one of them, as the fork's parser has it.
    repeats
        Places among `rows` of such header lines.
    dropped
        Lines with another number of cells than the header.
    """

    header: tuple[str, ...] = ()
    rows: list[dict[str, str]] = field(default_factory=list)
    repeats: list[int] = field(default_factory=list)
    dropped: int = 0


def read_table(text: str) -> Table:
    """The table in a log: the first line with a bar is its header, the second is left out whatever it says."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line.startswith("|")]
    if len(lines) < 3:
        return Table(header=tuple(_cells(lines[0])) if lines else ())
    header = _cells(lines[0])
    table = Table(header=tuple(header))
    dropped = 0
    for line in lines[2:]:
        cells = _cells(line)
        if len(cells) != len(header):
            dropped += 1
        elif not all(_RULE.fullmatch(cell) for cell in cells):
            if cells == header:
                table.repeats.append(len(table.rows))
            table.rows.append(dict(zip(header, cells, strict=True)))
    return Table(header=table.header, rows=table.rows, repeats=table.repeats, dropped=dropped)


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
