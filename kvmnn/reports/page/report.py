"""A report: what was read, put into sections, as one HTML page or as Markdown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...errors import KvmnnError, SourceError
from ...text import count
from . import cases, html, markdown, origin, quality, sizes, verdict
from .blocks import Section, Verdict
from .material import Material, read

MOST_BYTES = 1_000_000
"""Of a page."""

_DETAIL = ((100, 150), (40, 60), (20, 25), (8, 10), (2, 5))
"""Points of a series that can be pointed at, and rows of the table behind a plot: less, until the page is small."""


@dataclass(frozen=True)
class Report:
    """A report.

    Attributes
    ----------
    title
        What it is about.
    verdict, sections
        Its content, as `kvmnn.reports.page.blocks` has it.
    files, left_out
        What was read; what was there and was not taken, with the reasons.
    """

    title: str
    verdict: Verdict
    sections: tuple[Section, ...]
    files: tuple[str, ...]
    left_out: tuple[tuple[str, str], ...]

    def to_html(self) -> str:
        """One page that needs nothing else, at most `MOST_BYTES` of UTF-8.

        Raises
        ------
        MissingDependencyError
            Without matplotlib.
        KvmnnError
            Where the results are too many for a page.
        """
        for points, rows in _DETAIL:
            made = html.page(self.title, self.verdict, self.sections, points=points, rows=rows)
            if len(made.encode("utf-8", "replace")) <= MOST_BYTES:
                return made
        raise KvmnnError(f"the page would be larger than {MOST_BYTES:,} bytes: report fewer results at once")

    def to_markdown(self) -> str:
        """For a pull request: verdict, tables and notes; plots are tables."""
        return markdown.page(self.title, self.verdict, self.sections)

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "title": self.title,
            "verdict": self.verdict.word,
            "said": self.verdict.said,
            "cases": {
                card.name: {"verdict": card.verdict, "misses": [": ".join(miss) for miss in card.misses]}
                for card in self.verdict.cases
            },
            "notes": list(self.verdict.notes),
            "files": list(self.files),
            "left_out": [{"file": name, "why": why} for name, why in self.left_out],
        }

    def __str__(self) -> str:
        return f"{self.verdict.word}: {self.verdict.said} ({count(len(self.files), 'file')})"


def make_report(paths: Sequence[str | os.PathLike[str]]) -> Report:
    """A report of folders and files that verbs left (``gate run``, ``eval``, ``measure``, ``replay``, ``bench``).

    Parameters
    ----------
    paths
        Folders, of which every result is read, and JSON files, which must be results.

    Raises
    ------
    SourceError
        For what is not there, is damaged, is no result, or does not fit together.
    """
    found = read(paths)
    try:
        return _made(found, _title(paths))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # numbers that no verb gives
        raise SourceError(f"{os.fspath(paths[0])}: cannot be reported: {error}") from error


def _made(found: Material, title: str) -> Report:
    of_gates = (cases.cases_section(found), verdict.gates_section(found), cases.speed_section(found))
    evaluated = (quality.quality_section(found),)
    of_sizes = (quality.latency_section(found), sizes.layers_section(found), sizes.memory_section(found))
    is_of_gates = bool(verdict.case_verdicts(found)) or not found.evaluations
    sections = (
        *((*of_gates, *of_sizes, *evaluated) if is_of_gates else (*evaluated, *of_gates, *of_sizes)),
        sizes.codecs_section(found),
        cases.trend_section(found),
        origin.environment_section(found),
        origin.commands_section(found),
        origin.sources_section(found),
    )
    files = tuple(source.name for source in found.sources)
    return Report(title, verdict.verdict(found), sections, files, tuple(found.left_out))


def _title(paths: Sequence[str | os.PathLike[str]]) -> str:
    """The name of the first input; an absolute path would differ from machine to machine."""
    path = Path(paths[0])
    return path.name or path.absolute().name or "results"
