"""The tables of ``llm_bench``: Markdown between other lines."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_RULE_REGEX = re.compile(r"[-:]+")


@dataclass(frozen=True, kw_only=True)
class BenchTable:
    """What the lines of one log that begin with a bar hold.

    Attributes
    ----------
    header
        Names of the columns; empty where there is no table.
    rows
        Cells by column, in order; a header line that comes again is one of them, as the fork's parser has it.
    repeated_headers
        Places among `rows` of such header lines.
    num_dropped
        Lines with another number of cells than the header.
    """

    header: tuple[str, ...] = ()
    rows: list[dict[str, str]] = field(default_factory=list)
    repeated_headers: list[int] = field(default_factory=list)
    num_dropped: int = 0


def read_table(text: str) -> BenchTable:
    """The table in a log: the first line with a bar is its header, the second is left out whatever it says."""
    lines = [line.strip() for line in text.splitlines()]
    lines = [line for line in lines if line.startswith("|")]
    if len(lines) < 3:
        return BenchTable(header=tuple(_split_cells(lines[0])) if lines else ())
    header = _split_cells(lines[0])
    table = BenchTable(header=tuple(header))
    num_dropped = 0
    for line in lines[2:]:
        cells = _split_cells(line)
        if len(cells) != len(header):
            num_dropped += 1
        elif not all(_RULE_REGEX.fullmatch(cell) for cell in cells):
            if cells == header:
                table.repeated_headers.append(len(table.rows))
            table.rows.append(dict(zip(header, cells, strict=True)))
    return BenchTable(
        header=table.header, rows=table.rows, repeated_headers=table.repeated_headers, num_dropped=num_dropped
    )


def _split_cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]
