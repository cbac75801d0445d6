"""Results of an evaluation as text: Markdown, CSV, and a table that fits a terminal.

All three take an `EvaluationResult` of `kvmnn.evaluation`. A value that nobody measured is ``-``; a column in which
nobody measured anything is left out.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence

from ..h2o.figures import H2OFigures
from ..text import count, escape_cell, escape_csv, escape_markdown
from .columns import COLUMNS, Column, filled, plain, project_table, range_text, scalars
from .h2o_table import H2O_TITLE, h2o_table, rows_with_figures
from .pivot import pivot_table
from .pivot import title as pivot_title
from .results import Refusal, Results
from .rows import Row
from .runtime_figures import RuntimeFigures
from .runtime_table import RUNTIME_COLUMNS, rows_with_runtime, runtime_table, runtime_title
from .text_table import as_text, wrapped

_ALL = "a wider terminal, -v, --csv, --json"
"""Where everything is that a table of an evaluation leaves out in a narrow terminal."""

PROJECTS = {"E1": "l2_compress / KnormPress", "E2": "StreamingLLM + H2O"}
"""Whose definitions the table of a preset follows, by `ProjectNumbers.evaluation`."""


def markdown(results: Results) -> str:
    """Markdown: the table, that of presets by their projects' definitions if any, and what was measured on what.

    Returns
    -------
    str
        Ends with a newline.
    """
    parts = [_as_markdown(*filled(results, COLUMNS))]
    project = project_table(results.rows)
    if project:
        parts += [project_title(results.rows), _as_markdown(*project)]
    planned = h2o_table(rows_with_figures(results.rows))
    if planned:
        parts += [H2O_TITLE, _as_markdown(*planned)]
    pivot = pivot_table(results.rows)
    if pivot:
        parts += [pivot_title(results.rows), _as_markdown(*pivot)]
    stored = runtime_table(rows_with_runtime(results.rows))
    if stored:
        parts += [runtime_title(len(results.documents)), _as_markdown(*stored)]
    parts.append("\n".join(notes(results)))
    return escape_markdown("\n\n".join(parts)) + "\n"


def terminal(results: Results, width: int) -> str:
    """The tables for a terminal of `width` columns: labels are shortened, what does not fit is named below them."""
    parts = [as_text(*filled(results, COLUMNS), width, _ALL)]
    project = project_table(results.rows)
    if project:
        parts += [wrapped([project_title(results.rows)], width), as_text(*project, width, _ALL)]
    planned = h2o_table(rows_with_figures(results.rows))
    if planned:
        parts += [wrapped([H2O_TITLE], width), as_text(*planned, width, _ALL)]
    pivot = pivot_table(results.rows)
    if pivot:
        parts += [wrapped([pivot_title(results.rows)], width), as_text(*pivot, width, _ALL)]
    stored = runtime_table(rows_with_runtime(results.rows))
    if stored:
        parts += [wrapped([runtime_title(len(results.documents))], width), as_text(*stored, width, _ALL)]
    return "\n\n".join([*parts, wrapped(notes(results), width)]) + "\n"


def h2o_text(figures: H2OFigures, width: int) -> str:
    """What the engine's planner did in one run, for a terminal of `width` columns."""
    table = h2o_table([("", figures)])
    return wrapped([H2O_TITLE], width) + "\n\n" + as_text(*table, width) if table else ""


def runtime_text(figures: Sequence[tuple[str, RuntimeFigures]], width: int) -> str:
    """What the lossless runtime did in runs with their labels, for a terminal of `width` columns."""
    table = runtime_table(figures)
    if not table:
        return ""
    return "\n\n".join([wrapped([runtime_title()], width), as_text(*table, width), wrapped([RUNTIME_COLUMNS], width)])


def notes(results: Results) -> list[str]:
    """What was measured on what, one sentence or two a line."""
    settings, rows = results.settings, results.rows
    scored = [row.tokens for row in rows if row.tokens is not None]
    deep = [row.deep.tokens for row in rows if row.deep is not None]
    lines = [
        _sentence(
            count(len(results.documents), "document"),
            f"{sum(text.tokens for text in results.documents):,} tokens" if results.documents else None,
            f"{range_text(scored)} scored by each row" if scored else None,
            f"a prompt of {count(settings.prompt, 'token')}" if settings.prompt else None,
            f"fed {count(settings.chunk, 'token')} at a time",
            f"deep: the {range_text(deep)} of them from token {settings.deep_from:,} on" if deep else None,
            f"seed {settings.seed}",
            count(settings.threads, "thread"),
        ),
        _sentence(f"Model: {plain(results.model.name)}", f"kvmnn {results.kvmnn}"),
    ]
    if any(row.ttft_seconds is not None for row in rows):
        lines.append(f"TTFT and TPOT: medians of {count(settings.repeats, 'run')} after a warm-up.")
    if any(row.attention_seconds is not None for row in rows):
        lines.append("Attention: scores, softmax and values of all layers in a step of one token, profiled apart.")
    lines += _explanations(rows)
    lines += [plain(note) for note in results.notes]
    lines += [plain(f"Not run: {said}") for said in refusals(results.refused)]
    return lines


def refusals(refused: Sequence[Refusal]) -> list[str]:
    """Return what could not be run: the labels that have one reason together."""
    labels: dict[str, list[str]] = {}
    for entry in refused:
        labels.setdefault(entry.reason, []).append(entry.label)
    return [f"{'; '.join(same)}: {reason}" for reason, same in labels.items()]


def _explanations(rows: Sequence[Row]) -> Iterator[str]:
    """What columns mean, of those that are there."""
    over = [
        row.versus_full.documents for row in rows if row.versus_full is not None and row.versus_full.low is not None
    ]
    if over:
        yield (
            "dNLL: difference to the full cache on the same tokens; in brackets its 95 % interval by a paired "
            f"bootstrap over the {over[0]:,} documents."
        )
    if not all(row.is_full for row in rows):
        yield "Change: relative to the full cache."
    if any(row.lossy_ratio is not None for row in rows):
        yield (
            "LOSSY ratio: bytes of the full cache over bytes kept; LOSSLESS ratio: bytes kept over bytes of their "
            "frames, decoded and compared."
        )
    if rows_with_runtime(rows):
        yield RUNTIME_COLUMNS
    if any(row.rounded_first for row in rows):
        kinds = sorted({str(row.lossless_dtype) for row in rows if row.rounded_first})
        yield f"The frames hold {' and '.join(kinds)}: the cache was rounded before, which is LOSSY."


def project_title(rows: Sequence[Row]) -> str:
    """Return what stands above the table of `project_table`."""
    names = dict.fromkeys(PROJECTS[row.project.evaluation] for row in rows if row.project is not None)
    return f"By the definitions of {' and of '.join(names)} (docs/lm.md says where they differ):"


def csv_text(results: Results) -> str:
    """CSV with every scalar: a line for each row, and below it one for each document of that row.

    Columns of nested values are joined by dots (``versus_full.low``, ``tokens_kept.0``). `document` is empty in the
    line that stands for all documents. Not measured is empty.
    """
    lines: list[dict[str, object]] = []
    for row in results.rows:
        found = row.to_dict()
        documents = found.pop("documents")
        lines.append({"document": "", **dict(scalars(found))})
        about = {key: found[key] for key in ("label", "policy", "budget", "keep_ratio", "preset", "kind")}
        for document in documents:
            name = document.pop("name")
            lines.append({"document": name, **about, **dict(scalars(document))})
    found_names = dict.fromkeys(["label", "document", *(key for line in lines for key in line)])
    groups = {name[: dot.start()] for name in found_names for dot in re.finditer(r"\.", name)}
    names = [name for name in found_names if name not in groups]  # a group that one row lacks is no column
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([[_cell(line.get(name)) for name in names] for line in lines])
    return sink.getvalue()


# -- text -------------------------------------------------------------------------------------------------------------


def _as_markdown(columns: Sequence[Column], lines: Sequence[Sequence[str]]) -> str:
    rules = [("---" if column.left else "---:") for column in columns]
    cells = [[column.heading for column in columns], rules, *lines]
    return "\n".join("| " + " | ".join(map(escape_cell, line)) + " |" for line in cells)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else escape_csv(str(value))


def _sentence(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part) + "."
