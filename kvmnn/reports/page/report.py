"""A report: inputs arranged in sections, rendered as one HTML page or as Markdown."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..._util.dataclass import dataclass
from ..._util.text import pluralize
from ...errors import KvmnnError, SourceError
from ...files.schema import Record
from . import page_sections, renderers, verdict
from .blocks import Section, VerdictBlock
from .inputs import ReportInputs, read_inputs

MAX_PAGE_BYTES = 1_000_000
"""Maximum size of a page."""

_DETAIL_LEVELS = ((100, 150), (40, 60), (20, 25), (8, 10), (2, 5))
"""Points of a series that can be pointed at, and rows of the table after a plot: less, until the page is small."""


@dataclass(frozen=True)
class Report(Record):
    """A report."""

    json_keys = (
        "title verdict=verdict.word said=verdict.summary cases=_case_documents notes=verdict.notes "
        "files=input_files left_out=_ignored_documents"
    )

    rows_path = "cases"

    title: str
    #: Content, in blocks of `kvmnn.reports.page.blocks`.
    verdict: VerdictBlock
    sections: tuple[Section, ...]
    #: Files that were read, and files that were skipped, with reasons.
    input_files: tuple[str, ...]
    ignored_files: tuple[tuple[str, str], ...]

    def to_html(self) -> str:
        """Render a self-contained page of at most `MAX_PAGE_BYTES` bytes of UTF-8.

        Raises
        ------
        MissingDependencyError
            Without matplotlib.
        KvmnnError
            Where the results are too many for a page.
        """
        for points, rows in _DETAIL_LEVELS:
            page_text = renderers.render_html_page(self.title, self.verdict, self.sections, points=points, rows=rows)
            if len(page_text.encode("utf-8", "replace")) <= MAX_PAGE_BYTES:
                return page_text
        raise KvmnnError(f"the page would be larger than {MAX_PAGE_BYTES:,} bytes: report fewer results at once")

    def to_markdown(self) -> str:
        """Render verdict, tables and notes as Markdown, for a pull request; plots become tables."""
        return renderers.render_markdown_page(self.title, self.verdict, self.sections)

    @property
    def _case_documents(self) -> dict[str, Any]:
        return {
            card.name: {"verdict": card.verdict, "misses": [": ".join(miss) for miss in card.misses]}
            for card in self.verdict.cases
        }

    @property
    def _ignored_documents(self) -> list[dict[str, str]]:
        return [{"file": name, "why": reason} for name, reason in self.ignored_files]

    def __str__(self) -> str:
        return f"{self.verdict.word}: {self.verdict.summary} ({pluralize(len(self.input_files), 'file')})"


def make_report(paths: Sequence[str | os.PathLike[str]]) -> Report:
    """Build a report from results of commands (``gate run``, ``eval``, ``measure``, ``mnn replay``, ``bench``).

    Parameters
    ----------
    paths
        Folders, of which every result is read, and JSON files, which must be results.

    Raises
    ------
    SourceError
        For what is not there, is damaged, is no result, or does not fit together.
    """
    inputs = read_inputs(paths)
    try:
        return _build_report(inputs, _make_title(paths))
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # numbers that no verb gives
        raise SourceError(f"{os.fspath(paths[0])}: cannot be reported: {error}") from error


def _build_report(inputs: ReportInputs, title: str) -> Report:
    gate_sections = (
        page_sections.build_cases_section(inputs),
        verdict.build_gates_section(inputs),
        page_sections.build_speed_section(inputs),
    )
    evaluation_sections = (page_sections.build_quality_section(inputs),)
    size_sections = (
        page_sections.build_latency_section(inputs),
        page_sections.build_layers_section(inputs),
        page_sections.build_memory_section(inputs),
    )
    has_gates_first = bool(verdict.list_case_verdicts(inputs)) or not inputs.evaluations
    sections = (
        *(
            (*gate_sections, *size_sections, *evaluation_sections)
            if has_gates_first
            else (*evaluation_sections, *gate_sections, *size_sections)
        ),
        page_sections.build_codecs_section(inputs),
        page_sections.build_trend_section(inputs),
        page_sections.build_environment_section(inputs),
        page_sections.build_commands_section(inputs),
        page_sections.build_sources_section(inputs),
    )
    files = tuple(source.name for source in inputs.sources)
    return Report(title, verdict.build_verdict_head(inputs), sections, files, tuple(inputs.ignored_files))


def _make_title(paths: Sequence[str | os.PathLike[str]]) -> str:
    """Return the name of the first input, without its path, which differs between machines."""
    path = Path(paths[0])
    return path.name or path.absolute().name or "results"
