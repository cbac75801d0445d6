"""Render the report page as HTML and as Markdown: no script is needed, nothing is loaded, and every text is escaped."""

from __future__ import annotations

import base64
import hashlib
import math
import re
from collections.abc import Iterator, Sequence
from html import escape
from importlib.resources import files

from ..._util.patterns import declare_pattern
from ..._util.text import escape_control, escape_markdown, join_lines
from . import charts
from .blocks import (
    Block,
    BulletList,
    Cell,
    ChartBlock,
    ChartSeries,
    CommandList,
    FactList,
    Paragraph,
    Section,
    TableBlock,
    VerdictBlock,
    thin_points,
)

LIGHT_COLOURS = {
    "paper": "#ffffff", "card": "#f6f7f9", "ink": "#1b1f24", "muted": "#545d68", "rule": "#d5dae0",
    "good": "#0f5d27", "good-paper": "#e3f4e7", "bad": "#9a0c22", "bad-paper": "#fdeaec",
    "unknown": "#6e4400", "unknown-paper": "#fff3d9", "link": "#0a56a8",
    "s0": "#0067b0", "s1": "#c14a00", "s2": "#00785a", "s3": "#a8427f", "s4": "#8a6a00", "s5": "#5b4bb5",
    "s6": "#7c1d45", "s7": "#4c6a1f",
}  # fmt: skip
DARK_COLOURS = {
    "paper": "#14171b", "card": "#1d2228", "ink": "#e9ecef", "muted": "#a9b3bd", "rule": "#3a424b",
    "good": "#7fe0a2", "good-paper": "#12301d", "bad": "#ff9ca5", "bad-paper": "#3b161a",
    "unknown": "#f4c56c", "unknown-paper": "#33280f", "link": "#7cbcff",
    "s0": "#62b5ff", "s1": "#ff9a57", "s2": "#4fd0a6", "s3": "#f29ccd", "s4": "#e0c050", "s5": "#b3a6ff",
    "s6": "#ff8fae", "s7": "#b3d67e",
}  # fmt: skip

TEXT_ON_BACKGROUND = (
    ("ink", "paper"), ("ink", "card"), ("muted", "paper"), ("muted", "card"), ("good", "good-paper"),
    ("bad", "bad-paper"), ("unknown", "unknown-paper"), ("link", "paper"), ("link", "card"), ("good", "paper"),
    ("bad", "paper"), ("unknown", "paper"), ("good", "card"), ("bad", "card"), ("unknown", "card"),
    ("ink", "good-paper"), ("ink", "bad-paper"), ("ink", "unknown-paper"),
)  # fmt: skip
"""Pairs of text and background colours."""


def _format_css_variables(colours: dict[str, str]) -> str:
    return "".join(f"--{name}:{value};" for name, value in colours.items())


CSS = f"""
:root{{color-scheme:light dark;{_format_css_variables(LIGHT_COLOURS)}}}
@media (prefers-color-scheme:dark){{:root{{{_format_css_variables(DARK_COLOURS)}}}}}
@media print{{:root{{color-scheme:light;{_format_css_variables(LIGHT_COLOURS)}}}}}

{(files(__package__) / "page.css").read_text("utf-8")}"""
SCRIPT = (files(__package__) / "page.js").read_text("utf-8")
SCRIPT_HASH = base64.b64encode(hashlib.sha256(SCRIPT.encode()).digest()).decode()
"""By which the page allows this script, and no other."""


_MARKER_SHAPES = {
    "o": '<circle cx="14" cy="7" r="3.6"/>',
    "s": '<path d="M10.6 3.6h6.8v6.8h-6.8z"/>',
    "^": '<path d="M14 2.8 18 10.6H10z"/>',
    "D": '<path d="M14 2.4 18.4 7 14 11.6 9.6 7z"/>',
    "v": '<path d="M14 11.2 10 3.4H18z"/>',
}
_WIDE_CELL_CHARS = 28
"""Letters from which a text cell gets a minimum width."""


def render_html_page(title: str, verdict: VerdictBlock, sections: Sequence[Section], *, points: int, rows: int) -> str:
    """Render the whole page."""
    renderer = _SectionRenderer(points, rows)
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{SCRIPT_HASH}'; base-uri 'none'; "
        "form-action 'none'"
    )
    body = "".join(renderer.render_section(section) for section in sections)
    links = "".join(
        f'<li><a href="#{link_section.key}">{escape_html(link_section.title)}</a></li>' for link_section in sections
    )
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n'
        f"<title>{escape_html(verdict.word)}: {escape_html(title)} - kvmnn "
        f"report</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#content">To the figures</a>\n'
        f"<header>\n<h1>kvmnn report: <b>{escape_html(title)}</b></h1>\n{_render_head(verdict)}</header>\n"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n<main id="content">\n{body}</main>\n'
        f"<footer><p>Every figure is of the files under Sources. What nobody measured is said to be not measured."
        f"</p></footer>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def escape_html(text: str) -> str:
    """Escape a text for HTML, on one line, with control and direction marks visible."""
    return escape(escape_control(" ".join(text.split("\n")), keep_line_ends=False))


def _render_head(verdict: VerdictBlock) -> str:
    cases = "".join(
        f'<li class="case {card.tone}"><div class="case-head"><h3>{escape_html(card.name)}</h3>'
        f'<span class="chip {card.tone}">{escape_html(card.verdict)}</span></div>'
        + (f'<p class="said">{escape_html(card.summary)}</p>' if card.summary else "")
        + (f"<dl>{_render_pairs(card.misses)}</dl>" if card.misses else "")
        + "</li>"
        for card in verdict.cases
    )
    grid = f'<ul class="cards-grid" aria-label="Cases">{cases}</ul>\n' if cases else ""
    notes = "".join(f"<li>{escape_html(note)}</li>" for note in verdict.notes)
    return (
        f'<p class="banner {verdict.tone}"><strong class="{verdict.tone}">{escape_html(verdict.word)}</strong>'
        f"<span>{escape_html(verdict.summary)}</span></p>\n{grid}"
        + (f'<ul class="notes">{notes}</ul>\n' if notes else "")
    )  # fmt: skip


def _render_pairs(pairs: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<dt>{escape_html(name)}</dt><dd>{escape_html(value)}</dd>" for name, value in pairs)


class _SectionRenderer:
    """Renders sections, and numbers elements that need unique ids."""

    def __init__(self, points: int, rows: int) -> None:
        self._max_points, self._max_rows = points, rows
        self._num_charts = 0

    def render_section(self, section: Section) -> str:
        """Render a section; adjacent plots are placed side by side."""
        parts, plots = list[str](), list[str]()
        for block in section.blocks:
            if isinstance(block, ChartBlock):
                plots.append(self._render_chart(block))
                continue
            if len(plots) == 1 and isinstance(block, TableBlock) and _is_small_table(block):
                parts.append(f'<div class="beside">{plots[0]}<div>{render_table(block)}</div></div>\n')
            else:
                parts += [*self._iter_plot_rows(plots), self._render_block(block)]
            plots = []
        parts += self._iter_plot_rows(plots)
        return (
            f'<section id="{section.key}" aria-labelledby="{section.key}-title">'
            f'<h2 id="{section.key}-title">{escape_html(section.title)}</h2>\n{"".join(parts)}</section>\n'
        )

    def _iter_plot_rows(self, plots: list[str]) -> Iterator[str]:
        if plots:
            yield f'<div class="plots">{"".join(plots)}</div>\n'

    def _render_block(self, block: Block) -> str:
        if isinstance(block, TableBlock):
            return render_table(block)
        if isinstance(block, Paragraph):
            return f'<p class="{"missing" if block.tone == "unknown" else block.tone}">{escape_html(block.text)}</p>\n'
        if isinstance(block, BulletList):
            return f'<ul class="notes">{"".join(f"<li>{escape_html(item)}</li>" for item in block.items)}</ul>\n'
        if isinstance(block, FactList):
            return f'<dl class="facts">{_render_pairs(block.pairs)}</dl>\n'
        if isinstance(block, CommandList):
            return "".join(
                f"<p>{escape_html(name)}</p><pre><code>{escape_html(line)}</code></pre>\n" for name, line in block.lines
            )
        raise TypeError(f"no HTML for {type(block).__name__}")

    def _render_chart(self, chart: ChartBlock) -> str:
        self._num_charts += 1
        name = f"plot{self._num_charts}"
        svg_text = charts.render_svg(chart, f"{name}-", self._max_points)
        keys = "".join(
            f"<li>{_render_line_sample(chart_series)}<span>{escape_html(chart_series.name)}</span></li>"
            for chart_series in chart.series
        )
        keys += "".join(
            f"<li>{_LIMIT_SAMPLE}<span>{escape_html(limit_name)}</span></li>" for _, limit_name in chart.limits
        )
        return (
            f'<figure aria-labelledby="{name}-name"><figcaption id="{name}-name">'
            f"{escape_html(chart.title)}</figcaption>"
            f'<p>{escape_html(chart.summary)}</p>{svg_text}<ul class="key" aria-label="Key">{keys}</ul>'
            f"<details><summary>Values of this plot</summary>{self._render_values(chart)}</details></figure>\n"
        )

    def _render_values(self, chart: ChartBlock) -> str:
        """Render the points of a plot as a table."""
        rows, num_hidden = [], 0
        has_intervals = any(point.low is not None for chart_series in chart.series for point in chart_series.points)
        for chart_series in chart.series:
            points = thin_points(chart_series.points, self._max_rows)
            num_hidden += len(chart_series.points) - len(points)
            for point in points:
                x, y = (
                    Cell(charts.format_value(point.x, chart.digits), point.x),
                    Cell(charts.format_value(point.y, chart.digits), point.y),
                )
                name = point.name if point.name != chart_series.name else ""
                cells = [Cell(chart_series.name), Cell(name or "-"), *((x,) if chart.row_names else (x, y))]
                if has_intervals:
                    ends = (point.low, point.high)
                    cells += [
                        Cell("-") if end is None else Cell(charts.format_value(end, chart.digits), end) for end in ends
                    ]
                rows.append(cells)
        columns = [
            "line",
            "point",
            chart.x,
            *(() if chart.row_names else (chart.y,)),
            *(("low", "high") if has_intervals else ()),
        ]
        note = f"{num_hidden:,} points between these are drawn, and are in the files." if num_hidden else ""
        return render_table(TableBlock(f"{chart.title}: values", columns, rows, frozenset({0, 1}), False, note))


def _is_small_table(table: TableBlock) -> bool:
    return len(table.columns) <= 7 and len(table.rows) <= 20 and not table.has_cards


def render_table(table: TableBlock) -> str:
    """Render a table that scrolls by itself if it is too wide."""
    roles = table.has_cards
    role = _format_role(roles, "columnheader")
    heads = "".join(
        f'<th scope="col"{role}{" class=left" if place in table.left_columns else ""}>{escape_html(name)}</th>'
        for place, name in enumerate(table.columns)
    )
    rows = "".join(_render_html_row(table, row) for row in table.rows)
    kind = " ".join(
        ["sortable", *(["cards"] if table.has_cards else []), *(["many"] if len(table.columns) > 9 else [])]
    )
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{escape_html(table.caption)}">'
        f'<table class="{kind}"{_format_role(roles, "table")}><caption>{escape_html(table.caption)}</caption>'
        f"<thead{_format_role(roles, 'rowgroup')}><tr{_format_role(roles, 'row')}>{heads}</tr></thead>"
        f"<tbody{_format_role(roles, 'rowgroup')}>{rows}</tbody></table></div>\n"
        + (f'<p class="foot">{escape_html(table.note)}</p>\n' if table.note else "")
    )  # fmt: skip


def _format_role(is_needed: bool, name: str) -> str:
    """Format the ARIA role of a table cell, needed where narrow screens show rows as cards."""
    return f' role="{name}"' if is_needed else ""


def _render_html_row(table: TableBlock, row: Sequence[Cell]) -> str:
    cells = []
    for column_index, cell in enumerate(row):
        value = "" if cell.number is None or math.isnan(cell.number) else f' data-v="{_format_sort_value(cell.number)}"'
        style = " ".join(name for name in (
            "left" if column_index in table.left_columns else "",
            "none" if table.has_cards and column_index and cell.text == "-" and not cell.subtext else "",
            "wide" if column_index and column_index in table.left_columns and len(cell.text) > _WIDE_CELL_CHARS else "",
        ) if name)  # fmt: skip
        classes = f' class="{style}"' if style else ""
        text = escape_html(cell.text)
        if cell.tone:
            text = f'<span class="{"chip " if cell.tone != "muted" else ""}{cell.tone}">{text}</span>'
        if cell.subtext:
            text += f'<span class="under">{escape_html(cell.subtext)}</span>'
        if column_index == 0:
            cells.append(f'<th scope="row"{_format_role(table.has_cards, "rowheader")}{classes}{value}>{text}</th>')
        else:
            label = f' data-label="{escape_html(table.columns[column_index])}"' if table.has_cards else ""
            inner = f"<span>{text}</span>" if table.has_cards else text
            cells.append(f"<td{_format_role(table.has_cards, 'cell')}{classes}{value}{label}>{inner}</td>")
    return f"<tr{_format_role(table.has_cards, 'row')}>{''.join(cells)}</tr>"


def _format_sort_value(value: float) -> str:
    if math.isinf(value):
        return "1e999"
    return f"{value:.10g}"


_LIMIT_SAMPLE = (
    '<svg viewBox="0 0 28 14" aria-hidden="true"><path d="M1 7H27" fill="none" stroke="var(--ink)" '
    'stroke-dasharray="5 2"/></svg>'
)


def _render_line_sample(series: ChartSeries) -> str:
    """Render a sample of a line for the legend."""
    style = charts.make_series_style(series)
    colour = f"var(--s{series.style_number % charts.NUM_COLOURS})"
    parts = ""
    if series.has_line:
        dashes = style["linestyle"]
        dashing = (
            f' stroke-dasharray="{" ".join(f"{size:g}" for size in dashes[1])}"' if isinstance(dashes, tuple) else ""
        )
        parts += f'<path d="M1 7H27" fill="none" stroke="{colour}" stroke-width="1.8"{dashing}/>'
    if style["marker"] is not None:
        parts += _MARKER_SHAPES[style["marker"]]
    return f'<svg viewBox="0 0 28 14" aria-hidden="true" fill="{colour}">{parts}</svg>'


_MARKDOWN_SPECIAL_REGEX = declare_pattern(r"([\\`*_\[\]<>|~#])")
_MAX_MARKDOWN_ROWS = 40


def render_markdown_page(title: str, verdict: VerdictBlock, sections: Sequence[Section]) -> str:
    """Render the whole report as Markdown."""
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
    """Escape a text for Markdown and HTML, on one line."""
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
