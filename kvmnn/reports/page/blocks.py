"""Blocks of a page before they are rendered as HTML or Markdown. Their texts are plain; the renderer escapes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter
from typing import Any, Literal

from ..._util.dataclass import dataclass

Tone = Literal["", "good", "bad", "unknown", "muted"]

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Cell:
    """A table cell: its text, the number to sort by (None: by the text), and smaller text below."""

    text: str
    number: float | None = None
    tone: Tone = ""
    subtext: str = ""


@dataclass(frozen=True)
class TableBlock:
    """A table.

    `left_columns` are the columns of texts; with `has_cards`, a row becomes a card on a narrow screen.
    """

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    left_columns: frozenset[int] = frozenset({0})
    has_cards: bool = False
    note: str = ""


@dataclass(frozen=True)
class ChartPoint:
    """A point of a plot, its interval and its name; whether its marker is hollow."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    name: str = ""
    is_hollow: bool = False


@dataclass(frozen=True)
class ChartSeries:
    """The points of one series; `style_number` selects its colour and marker."""

    name: str
    points: Sequence[ChartPoint]
    style_number: int
    has_line: bool = True
    is_dashed: bool = False
    has_markers: bool = True


@dataclass(frozen=True)
class ChartBlock:
    """A plot."""

    #: Title, and a sentence that describes the plot for screen readers.
    title: str
    summary: str
    x: str
    y: str
    series: Sequence[ChartSeries]
    #: Names on the axis of y, from the top: points are dots on lines of their own. Empty: x and y are numbers.
    row_names: Sequence[str] = ()
    #: Lines across the plot: value and name; vertical where `row_names`, else horizontal.
    limits: Sequence[tuple[float, str]] = ()
    is_log_x: bool = False
    is_log_y: bool = False
    has_integer_x: bool = False
    starts_at_zero: bool = True
    digits: int = 3


@dataclass(frozen=True)
class Paragraph:
    """A paragraph."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class BulletList:
    """A list of sentences."""

    items: Sequence[str]


@dataclass(frozen=True)
class FactList:
    """A list of names and values."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class CommandList:
    """Command lines, each with the file that it wrote."""

    lines: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class CaseCard:
    """A case: its verdict, and the limits it missed."""

    name: str
    verdict: str
    tone: Tone
    summary: str
    misses: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class VerdictBlock:
    """The head of a page: the verdict, the sentence below it, and the cases."""

    word: str
    tone: Tone
    summary: str
    cases: Sequence[CaseCard] = ()
    notes: Sequence[str] = ()


Block = TableBlock | ChartBlock | Paragraph | BulletList | FactList | CommandList | VerdictBlock


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    key: str
    title: str
    blocks: Sequence[Block]


def make_missing_note(text: str) -> Paragraph:
    """Make the note that replaces a missing part."""
    return Paragraph(text, "unknown")


def build_section(key: str, title: str, blocks: Sequence[Block], missing_text: str) -> Section:
    """Build a section, with a note of `missing_text` where it has no blocks."""
    return Section(key, title, blocks or [make_missing_note(missing_text)])


@dataclass(frozen=True)
class TableColumn:
    """A column of a table: its heading, an item's value (a text, a number or a cell), and the digits of numbers.

    The value is that of an attribute, where `value` is its name, with dots between the names of nested ones.
    """

    heading: str
    value: str | Callable[[Any], Cell | str | float | None]
    digits: int = 3
    is_left_aligned: bool = False

    def make_cell(self, item: object) -> Cell:
        """Make the cell of an item."""
        value = attrgetter(self.value)(item) if isinstance(self.value, str) else self.value(item)
        if isinstance(value, Cell):
            return value
        return Cell(value) if isinstance(value, str) else make_number_cell(value, self.digits)


def build_table_block(
    caption: str, columns: Sequence[TableColumn], items: Iterable[object], *, has_cards: bool = False, note: str = ""
) -> TableBlock:
    """Build a table with a row for each item."""
    rows = [[column.make_cell(item) for column in columns] for item in items]
    left_columns = frozenset(i for i, column in enumerate(columns) if column.is_left_aligned)
    return TableBlock(caption, [column.heading for column in columns], rows, left_columns, has_cards, note)


def make_number_cell(value: float | None, digits: int = 3, *, scale: float = 1.0) -> Cell:
    """Make a table cell of a number."""
    return Cell("-", None, "muted") if value is None else Cell(format(value * scale, f",.{digits}f"), value)


def make_share_cell(value: float | None) -> Cell:
    """Make a table cell of a relative change."""
    return Cell("-", None, "muted") if value is None else Cell(f"{value:+.2%}", value)


def thin_points(points: Sequence[ChartPoint], max_points: int) -> list[ChartPoint]:
    """Select at most this many points, always with the first and the last."""
    if len(points) <= max_points:
        return list(points)
    step = (len(points) - 1) / (max_points - 1)
    return [points[round(place * step)] for place in range(max_points)]
