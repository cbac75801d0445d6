"""A report as one HTML page: no script is needed, nothing is loaded, and every text is escaped."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from ...text import visible
from . import charts
from .blocks import Block, Cell, Chart, Commands, Facts, Items, Section, Series, Table, Text, Verdict, thinned
from .look import CSS, SCRIPT, SCRIPT_HASH

_MARKS = {
    "o": '<circle cx="14" cy="7" r="3.6"/>',
    "s": '<path d="M10.6 3.6h6.8v6.8h-6.8z"/>',
    "^": '<path d="M14 2.8 18 10.6H10z"/>',
    "D": '<path d="M14 2.4 18.4 7 14 11.6 9.6 7z"/>',
    "v": '<path d="M14 11.2 10 3.4H18z"/>',
}
_WIDE = 28
"""Letters from which on a cell of text asks for room."""


def page(title: str, verdict: Verdict, sections: Sequence[Section], *, points: int, rows: int) -> str:
    """The whole page.

    Parameters
    ----------
    points
        Of a series that can be pointed at.
    rows
        Of the table behind a plot.
    """
    maker = _Maker(points, rows)
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{SCRIPT_HASH}'; base-uri 'none'; "
        "form-action 'none'"
    )
    body = "".join(maker.section(section) for section in sections)
    links = "".join(f'<li><a href="#{one.key}">{plain(one.title)}</a></li>' for one in sections)
    return (
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        f'<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n'
        f"<title>{plain(verdict.word)}: {plain(title)} - kvmnn report</title>\n<style>{CSS}</style>\n</head>\n<body>\n"
        f'<a class="skip" href="#content">To the figures</a>\n'
        f"<header>\n<h1>kvmnn report: <b>{plain(title)}</b></h1>\n{_head(verdict)}</header>\n"
        f'<nav aria-label="Sections"><ul>{links}</ul></nav>\n<main id="content">\n{body}</main>\n'
        f"<footer><p>Every figure is of the files under Sources. What nobody measured is said to be not measured."
        f"</p></footer>\n<script>{SCRIPT}</script>\n</body>\n</html>\n"
    )


def plain(text: str) -> str:
    """A text that HTML shows as it is, in one line, with control and direction marks visible."""
    return escape(visible(" ".join(text.split("\n")), lines=False))


def _head(verdict: Verdict) -> str:
    cases = "".join(
        f'<li class="case {card.tone}"><div class="case-head"><h3>{plain(card.name)}</h3>'
        f'<span class="chip {card.tone}">{plain(card.verdict)}</span></div>'
        + (f'<p class="said">{plain(card.said)}</p>' if card.said else "")
        + (f"<dl>{_pairs(card.misses)}</dl>" if card.misses else "")
        + "</li>"
        for card in verdict.cases
    )
    grid = f'<ul class="cards-grid" aria-label="Cases">{cases}</ul>\n' if cases else ""
    notes = "".join(f"<li>{plain(note)}</li>" for note in verdict.notes)
    return (
        f'<p class="banner {verdict.tone}"><strong class="{verdict.tone}">{plain(verdict.word)}</strong>'
        f"<span>{plain(verdict.said)}</span></p>\n{grid}"
        + (f'<ul class="notes">{notes}</ul>\n' if notes else "")
    )  # fmt: skip


def _pairs(pairs: Sequence[tuple[str, str]]) -> str:
    return "".join(f"<dt>{plain(name)}</dt><dd>{plain(value)}</dd>" for name, value in pairs)


class _Maker:
    """Writes sections; counts what needs names of its own."""

    def __init__(self, points: int, rows: int) -> None:
        self._points, self._rows = points, rows
        self._charts = 0

    def section(self, section: Section) -> str:
        """A section; plots that follow each other stand side by side."""
        parts, plots = list[str](), list[str]()
        for block in section.blocks:
            if isinstance(block, Chart):
                plots.append(self._chart(block))
                continue
            if len(plots) == 1 and isinstance(block, Table) and _is_small(block):
                parts.append(f'<div class="beside">{plots[0]}<div>{table_html(block)}</div></div>\n')
            else:
                parts += [*self._side_by_side(plots), self._block(block)]
            plots = []
        parts += self._side_by_side(plots)
        return (
            f'<section id="{section.key}" aria-labelledby="{section.key}-title">'
            f'<h2 id="{section.key}-title">{plain(section.title)}</h2>\n{"".join(parts)}</section>\n'
        )

    def _side_by_side(self, plots: list[str]) -> Iterator[str]:
        if plots:
            yield f'<div class="plots">{"".join(plots)}</div>\n'

    def _block(self, block: Block) -> str:
        if isinstance(block, Table):
            return table_html(block)
        if isinstance(block, Text):
            return f'<p class="{"missing" if block.tone == "unknown" else block.tone}">{plain(block.text)}</p>\n'
        if isinstance(block, Items):
            return f'<ul class="notes">{"".join(f"<li>{plain(item)}</li>" for item in block.items)}</ul>\n'
        if isinstance(block, Facts):
            return f'<dl class="facts">{_pairs(block.pairs)}</dl>\n'
        if isinstance(block, Commands):
            return "".join(f"<p>{plain(name)}</p><pre><code>{plain(line)}</code></pre>\n" for name, line in block.lines)
        raise TypeError(f"no HTML for {type(block).__name__}")

    def _chart(self, chart: Chart) -> str:
        self._charts += 1
        name = f"plot{self._charts}"
        drawn = charts.svg(chart, f"{name}-", self._points)
        keys = "".join(f"<li>{_sample(one)}<span>{plain(one.name)}</span></li>" for one in chart.series)
        keys += "".join(f"<li>{_RULER}<span>{plain(said)}</span></li>" for _, said in chart.limits)
        return (
            f'<figure aria-labelledby="{name}-name"><figcaption id="{name}-name">{plain(chart.title)}</figcaption>'
            f'<p>{plain(chart.said)}</p>{drawn}<ul class="key" aria-label="Key">{keys}</ul>'
            f"<details><summary>Values of this plot</summary>{self._values(chart)}</details></figure>\n"
        )

    def _values(self, chart: Chart) -> str:
        """The points of a plot as a table."""
        rows, left = [], 0
        bars = any(point.low is not None for one in chart.series for point in one.points)
        for one in chart.series:
            points = thinned(one.points, self._rows)
            left += len(one.points) - len(points)
            for point in points:
                x, y = (
                    Cell(charts.shown(point.x, chart.digits), point.x),
                    Cell(charts.shown(point.y, chart.digits), point.y),
                )
                name = point.name if point.name != one.name else ""
                cells = [Cell(one.name), Cell(name or "-"), *((x,) if chart.across else (x, y))]
                if bars:
                    ends = (point.low, point.high)
                    cells += [Cell("-") if end is None else Cell(charts.shown(end, chart.digits), end) for end in ends]
                rows.append(cells)
        columns = ["line", "point", chart.x, *(() if chart.across else (chart.y,)), *(("low", "high") if bars else ())]
        note = f"{left:,} points between these are drawn, and are in the files." if left else ""
        return table_html(Table(f"{chart.title}: values", columns, rows, frozenset({0, 1}), False, note))


def _is_small(table: Table) -> bool:
    return len(table.columns) <= 7 and len(table.rows) <= 20 and not table.cards


def table_html(table: Table) -> str:
    """A table in a frame that scrolls by itself where it is too wide."""
    roles = table.cards
    role = _role(roles, "columnheader")
    heads = "".join(
        f'<th scope="col"{role}{" class=left" if place in table.left else ""}>{plain(name)}</th>'
        for place, name in enumerate(table.columns)
    )
    rows = "".join(_row(table, row) for row in table.rows)
    kind = " ".join(["sortable", *(["cards"] if table.cards else []), *(["many"] if len(table.columns) > 9 else [])])
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{plain(table.caption)}">'
        f'<table class="{kind}"{_role(roles, "table")}><caption>{plain(table.caption)}</caption>'
        f"<thead{_role(roles, 'rowgroup')}><tr{_role(roles, 'row')}>{heads}</tr></thead>"
        f"<tbody{_role(roles, 'rowgroup')}>{rows}</tbody></table></div>\n"
        + (f'<p class="foot">{plain(table.note)}</p>\n' if table.note else "")
    )  # fmt: skip


def _role(there: bool, name: str) -> str:
    """Said where a narrow screen takes the table's form away, and its meaning with it."""
    return f' role="{name}"' if there else ""


def _row(table: Table, row: Sequence[Cell]) -> str:
    cells = []
    for place, cell in enumerate(row):
        value = "" if cell.number is None or math.isnan(cell.number) else f' data-v="{_plain_number(cell.number)}"'
        style = " ".join(name for name in (
            "left" if place in table.left else "",
            "none" if table.cards and place and cell.text == "-" and not cell.under else "",
            "wide" if place and place in table.left and len(cell.text) > _WIDE else "",
        ) if name)  # fmt: skip
        classes = f' class="{style}"' if style else ""
        text = plain(cell.text)
        if cell.tone:
            text = f'<span class="{"chip " if cell.tone != "muted" else ""}{cell.tone}">{text}</span>'
        if cell.under:
            text += f'<span class="under">{plain(cell.under)}</span>'
        if place == 0:
            cells.append(f'<th scope="row"{_role(table.cards, "rowheader")}{classes}{value}>{text}</th>')
        else:
            label = f' data-label="{plain(table.columns[place])}"' if table.cards else ""
            inner = f"<span>{text}</span>" if table.cards else text
            cells.append(f"<td{_role(table.cards, 'cell')}{classes}{value}{label}>{inner}</td>")
    return f"<tr{_role(table.cards, 'row')}>{''.join(cells)}</tr>"


def _plain_number(value: float) -> str:
    if math.isinf(value):
        return "1e999"
    return f"{value:.10g}"


_RULER = (
    '<svg viewBox="0 0 28 14" aria-hidden="true"><path d="M1 7H27" fill="none" stroke="var(--ink)" '
    'stroke-dasharray="5 2"/></svg>'
)


def _sample(series: Series) -> str:
    """A piece of the line, as it is drawn."""
    drawn = charts.look(series)
    colour = f"var(--s{series.look % charts.COLOURS})"
    parts = ""
    if series.line:
        dashes = drawn["linestyle"]
        dashing = (
            f' stroke-dasharray="{" ".join(f"{size:g}" for size in dashes[1])}"' if isinstance(dashes, tuple) else ""
        )
        parts += f'<path d="M1 7H27" fill="none" stroke="{colour}" stroke-width="1.8"{dashing}/>'
    if drawn["marker"] is not None:
        parts += _MARKS[drawn["marker"]]
    return f'<svg viewBox="0 0 28 14" aria-hidden="true" fill="{colour}">{parts}</svg>'
