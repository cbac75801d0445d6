"""A report as Markdown, for pull requests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ...text import escape_markdown, one_line
from .blocks import Block, Cell, Chart, Commands, Facts, Items, Section, Table, Text, Verdict

_SPECIAL = re.compile(r"([\\`*_\[\]<>|~#])")
_MOST_ROWS = 40


def page(title: str, verdict: Verdict, sections: Sequence[Section]) -> str:
    """The whole report; ends with a newline."""
    lines = [f"# kvmnn report: {plain(title)}", "", f"**{verdict.word}**: {plain(verdict.said)}", ""]
    if verdict.cases:
        lines += ["| case | verdict | what it missed |", "| --- | --- | --- |"]
        for card in verdict.cases:
            missed = "; ".join(f"{plain(name)}: {plain(said)}" for name, said in card.misses) or "-"
            lines.append(f"| {plain(card.name)} | {plain(card.verdict)} | {missed} |")
        lines.append("")
    lines += [f"- {plain(note)}" for note in verdict.notes]
    for section in sections:
        found = [line for block in section.blocks for line in _block(block)]
        lines += ["", f"## {plain(section.title)}", "", *found]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


def plain(text: str) -> str:
    """A text in one line that Markdown and HTML leave as it is."""
    return escape_markdown(_SPECIAL.sub(r"\\\1", one_line(text)).replace("&", "&amp;"))


def _block(block: Block) -> Iterator[str]:
    if isinstance(block, Text):
        yield from (plain(block.text), "")
    elif isinstance(block, Items):
        yield from (*(f"- {plain(item)}" for item in block.items), "")
    elif isinstance(block, Facts):
        yield from (*(f"- {plain(name)}: {plain(value)}" for name, value in block.pairs), "")
    elif isinstance(block, Commands):
        for name, line in block.lines:
            fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 3)
            yield from (f"{plain(name)}:", "", f"{fence}sh", one_line(line), fence, "")
    elif isinstance(block, Table):
        yield from _table(block)
    elif isinstance(block, Chart):
        yield from (f"*{plain(block.title)}*: {plain(block.said)} The page has the plot.", "")


def _table(table: Table) -> Iterator[str]:
    yield from (f"**{plain(table.caption)}**", "")
    rules = ["---" if place in table.left else "---:" for place in range(len(table.columns))]
    yield f"| {' | '.join(map(plain, table.columns))} |"
    yield f"| {' | '.join(rules)} |"
    for row in table.rows[:_MOST_ROWS]:
        yield f"| {' | '.join(map(_cell, row))} |"
    yield ""
    if len(table.rows) > _MOST_ROWS:
        yield from (f"{len(table.rows) - _MOST_ROWS:,} more rows are on the page.", "")
    if table.note:
        yield from (plain(table.note), "")


def _cell(cell: Cell) -> str:
    return plain(f"{cell.text} ({cell.under})" if cell.under else cell.text)
