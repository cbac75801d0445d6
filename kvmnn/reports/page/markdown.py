"""A report as Markdown, for pull requests."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from ...text import escape_markdown, join_lines
from .blocks import (
    Block,
    BulletList,
    Cell,
    ChartBlock,
    CommandList,
    FactList,
    Paragraph,
    Section,
    TableBlock,
    VerdictBlock,
)

_MARKDOWN_SPECIAL_REGEX = re.compile(r"([\\`*_\[\]<>|~#])")
_MAX_MARKDOWN_ROWS = 40


def render_markdown_page(title: str, verdict: VerdictBlock, sections: Sequence[Section]) -> str:
    """The whole report; ends with a newline."""
    lines = [f"# kvmnn report: {escape_plain(title)}", "", f"**{verdict.word}**: {escape_plain(verdict.summary)}", ""]
    if verdict.cases:
        lines += ["| case | verdict | what it missed |", "| --- | --- | --- |"]
        for card in verdict.cases:
            misses_text = (
                "; ".join(f"{escape_plain(name)}: {escape_plain(miss_text)}" for name, miss_text in card.misses) or "-"
            )
            lines.append(f"| {escape_plain(card.name)} | {escape_plain(card.verdict)} | {misses_text} |")
        lines.append("")
    lines += [f"- {escape_plain(note)}" for note in verdict.notes]
    for section in sections:
        block_lines = [line for block in section.blocks for line in _iter_markdown_lines(block)]
        lines += ["", f"## {escape_plain(section.title)}", "", *block_lines]
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip("\n") + "\n"


def escape_plain(text: str) -> str:
    """A text in one line that Markdown and HTML leave as it is."""
    return escape_markdown(_MARKDOWN_SPECIAL_REGEX.sub(r"\\\1", join_lines(text)).replace("&", "&amp;"))


def _iter_markdown_lines(block: Block) -> Iterator[str]:
    if isinstance(block, Paragraph):
        yield from (escape_plain(block.text), "")
    elif isinstance(block, BulletList):
        yield from (*(f"- {escape_plain(item)}" for item in block.items), "")
    elif isinstance(block, FactList):
        yield from (*(f"- {escape_plain(name)}: {escape_plain(value)}" for name, value in block.pairs), "")
    elif isinstance(block, CommandList):
        for name, line in block.lines:
            fence = "`" * (max(map(len, re.findall("`+", line)), default=0) + 3)
            yield from (f"{escape_plain(name)}:", "", f"{fence}sh", join_lines(line), fence, "")
    elif isinstance(block, TableBlock):
        yield from _iter_markdown_table(block)
    elif isinstance(block, ChartBlock):
        yield from (f"*{escape_plain(block.title)}*: {escape_plain(block.summary)} The page has the plot.", "")


def _iter_markdown_table(table: TableBlock) -> Iterator[str]:
    yield from (f"**{escape_plain(table.caption)}**", "")
    rules = ["---" if place in table.left_columns else "---:" for place in range(len(table.columns))]
    yield f"| {' | '.join(map(escape_plain, table.columns))} |"
    yield f"| {' | '.join(rules)} |"
    for row in table.rows[:_MAX_MARKDOWN_ROWS]:
        yield f"| {' | '.join(map(_format_markdown_cell, row))} |"
    yield ""
    if len(table.rows) > _MAX_MARKDOWN_ROWS:
        yield from (f"{len(table.rows) - _MAX_MARKDOWN_ROWS:,} more rows are on the page.", "")
    if table.note:
        yield from (escape_plain(table.note), "")


def _format_markdown_cell(cell: Cell) -> str:
    return escape_plain(f"{cell.text} ({cell.subtext})" if cell.subtext else cell.text)
