"""What a page consists of, before it is HTML or Markdown. Texts are plain: whoever writes them out escapes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Tone = Literal["", "good", "bad", "unknown", "muted"]

NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class Cell:
    """A text in a table, the number by which it is sorted (None: by its text), and what stands below it, smaller."""

    text: str
    number: float | None = None
    tone: Tone = ""
    under: str = ""


@dataclass(frozen=True)
class Table:
    """A table. `left` says which columns are texts; with `cards`, a row becomes a card on a narrow screen."""

    caption: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    left: frozenset[int] = frozenset({0})
    cards: bool = False
    note: str = ""


@dataclass(frozen=True)
class Point:
    """A point of a plot, with the ends of its interval and what it is called; whether its marker is empty."""

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    name: str = ""
    is_hollow: bool = False


@dataclass(frozen=True)
class Series:
    """Points of one name; `look` is the number of its colour and marker."""

    name: str
    points: Sequence[Point]
    look: int
    line: bool = True
    dashed: bool = False
    marker: bool = True


@dataclass(frozen=True)
class Chart:
    """A plot.

    Attributes
    ----------
    title, said
        What it shows, and in a sentence what one sees (for those who do not).
    across
        Names on the axis of y, from the top: points are dots on lines of their own. Empty: x and y are numbers.
    limits
        Lines across the plot: value and name; vertical where `across`, else horizontal.
    """

    title: str
    said: str
    x: str
    y: str
    series: Sequence[Series]
    across: Sequence[str] = ()
    limits: Sequence[tuple[float, str]] = ()
    log_x: bool = False
    log_y: bool = False
    whole_x: bool = False
    from_zero: bool = True
    digits: int = 3


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str
    tone: Tone = ""


@dataclass(frozen=True)
class Items:
    """A list of sentences."""

    items: Sequence[str]


@dataclass(frozen=True)
class Facts:
    """Names and values."""

    pairs: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Commands:
    """Command lines, each with the file that it made."""

    lines: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class CaseCard:
    """A case: its verdict, and what it did not reach."""

    name: str
    verdict: str
    tone: Tone
    said: str
    misses: Sequence[tuple[str, str]]


@dataclass(frozen=True)
class Verdict:
    """The head of a page: the verdict, the sentence below it, and the cases."""

    word: str
    tone: Tone
    said: str
    cases: Sequence[CaseCard] = ()
    notes: Sequence[str] = ()


Block = Table | Chart | Text | Items | Facts | Commands | Verdict


@dataclass(frozen=True)
class Section:
    """A part of the page."""

    key: str
    title: str
    blocks: Sequence[Block]


def missing(what: str) -> Text:
    """Said where a part is not there."""
    return Text(what, "unknown")


def number(value: float | None, digits: int = 3, *, scale: float = 1.0, sign: bool = False) -> Cell:
    """A number in a table."""
    if value is None:
        return Cell("-", None, "muted")
    return Cell(format(value * scale, f"{'+' if sign else ''},.{digits}f"), value)


def thinned(found: Sequence[Point], most: int) -> list[Point]:
    """At most so many points, the first and the last among them."""
    if len(found) <= most:
        return list(found)
    step = (len(found) - 1) / (most - 1)
    return [found[round(place * step)] for place in range(most)]
