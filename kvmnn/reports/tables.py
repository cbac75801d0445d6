"""Results of an evaluation as text: Markdown, CSV, and a table that fits a terminal.

All three take an `EvaluationResult` of `kvmnn.evaluation`. A value that nobody measured is ``-``; a column in which
nobody measured anything is left out.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence

from ..h2o.figures import H2OStats
from ..text import escape_csv, escape_markdown, escape_markdown_cell, pluralize
from .columns import COLUMNS, Column, build_project_table, build_table, format_min_max, iter_scalars, to_single_line
from .h2o_table import H2O_TITLE, build_h2o_table, collect_h2o_stats
from .pivot import build_pivot_table
from .pivot import format_pivot_title as pivot_title
from .results import EvaluationResultsProtocol, Refusal
from .rows import ResultRow
from .runtime_figures import RuntimeStats
from .runtime_table import RUNTIME_COLUMNS_NOTE, build_runtime_table, collect_runtime_stats, format_runtime_title
from .text_table import format_table, wrap_sentences

_ELSEWHERE_TEXT = "a wider terminal, -v, --csv, --json"
"""Where everything is that a table of an evaluation leaves out in a narrow terminal."""

PROJECT_NAMES = {"E1": "l2_compress / KnormPress", "E2": "StreamingLLM + H2O"}
"""Whose definitions the table of a preset follows, by `ProjectStats.evaluation`."""


def format_markdown(results: EvaluationResultsProtocol) -> str:
    """Markdown: the table, that of presets by their projects' definitions if any, and what was measured on what.

    Returns
    -------
    str
        Ends with a newline.
    """
    parts = [_format_markdown_table(*build_table(results, COLUMNS))]
    project = build_project_table(results.rows)
    if project:
        parts += [format_project_title(results.rows), _format_markdown_table(*project)]
    h2o = build_h2o_table(collect_h2o_stats(results.rows))
    if h2o:
        parts += [H2O_TITLE, _format_markdown_table(*h2o)]
    pivot = build_pivot_table(results.rows)
    if pivot:
        parts += [pivot_title(results.rows), _format_markdown_table(*pivot)]
    runtime = build_runtime_table(collect_runtime_stats(results.rows))
    if runtime:
        parts += [format_runtime_title(len(results.documents)), _format_markdown_table(*runtime)]
    parts.append("\n".join(build_notes(results)))
    return escape_markdown("\n\n".join(parts)) + "\n"


def format_terminal(results: EvaluationResultsProtocol, width: int) -> str:
    """The tables for a terminal of `width` columns: labels are shortened, what does not fit is named below them."""
    parts = [format_table(*build_table(results, COLUMNS), width, _ELSEWHERE_TEXT)]
    project = build_project_table(results.rows)
    if project:
        parts += [
            wrap_sentences([format_project_title(results.rows)], width),
            format_table(*project, width, _ELSEWHERE_TEXT),
        ]
    h2o = build_h2o_table(collect_h2o_stats(results.rows))
    if h2o:
        parts += [wrap_sentences([H2O_TITLE], width), format_table(*h2o, width, _ELSEWHERE_TEXT)]
    pivot = build_pivot_table(results.rows)
    if pivot:
        parts += [wrap_sentences([pivot_title(results.rows)], width), format_table(*pivot, width, _ELSEWHERE_TEXT)]
    runtime = build_runtime_table(collect_runtime_stats(results.rows))
    if runtime:
        parts += [
            wrap_sentences([format_runtime_title(len(results.documents))], width),
            format_table(*runtime, width, _ELSEWHERE_TEXT),
        ]
    return "\n\n".join([*parts, wrap_sentences(build_notes(results), width)]) + "\n"


def format_h2o_text(stats: H2OStats, width: int) -> str:
    """What the engine's planner did in one run, for a terminal of `width` columns."""
    table = build_h2o_table([("", stats)])
    return wrap_sentences([H2O_TITLE], width) + "\n\n" + format_table(*table, width) if table else ""


def format_runtime_text(stats_by_label: Sequence[tuple[str, RuntimeStats]], width: int) -> str:
    """What the lossless runtime did in runs with their labels, for a terminal of `width` columns."""
    table = build_runtime_table(stats_by_label)
    if not table:
        return ""
    return "\n\n".join(
        [
            wrap_sentences([format_runtime_title()], width),
            format_table(*table, width),
            wrap_sentences([RUNTIME_COLUMNS_NOTE], width),
        ]
    )


def build_notes(results: EvaluationResultsProtocol) -> list[str]:
    """What was measured on what, one sentence or two a line."""
    settings, rows = results.settings, results.rows
    scored_tokens = [row.tokens for row in rows if row.tokens is not None]
    deep_tokens = [row.deep.tokens for row in rows if row.deep is not None]
    lines = [
        _join_parts(
            pluralize(len(results.documents), "document"),
            f"{sum(text.tokens for text in results.documents):,} tokens" if results.documents else None,
            f"{format_min_max(scored_tokens)} scored by each row" if scored_tokens else None,
            f"a prompt of {pluralize(settings.prompt, 'token')}" if settings.prompt else None,
            f"fed {pluralize(settings.chunk, 'token')} at a time",
            f"deep: the {format_min_max(deep_tokens)} of them from token {settings.deep_from:,} on"
            if deep_tokens
            else None,
            f"seed {settings.seed}",
            pluralize(settings.threads, "thread"),
        ),
        _join_parts(f"Model: {to_single_line(results.model.name)}", f"kvmnn {results.kvmnn}"),
    ]
    if any(row.ttft_seconds is not None for row in rows):
        lines.append(f"TTFT and TPOT: medians of {pluralize(settings.repeats, 'run')} after a warm-up.")
    if any(row.attention_seconds is not None for row in rows):
        lines.append("Attention: scores, softmax and values of all layers in a step of one token, profiled apart.")
    lines += _iter_explanations(rows)
    lines += [to_single_line(note) for note in results.notes]
    lines += [to_single_line(f"Not run: {refusal_text}") for refusal_text in describe_refusals(results.refused)]
    return lines


def describe_refusals(refusals: Sequence[Refusal]) -> list[str]:
    """Return what could not be run: the labels that have one reason together."""
    labels: dict[str, list[str]] = {}
    for entry in refusals:
        labels.setdefault(entry.reason, []).append(entry.label)
    return [f"{'; '.join(group_labels)}: {reason}" for reason, group_labels in labels.items()]


def _iter_explanations(rows: Sequence[ResultRow]) -> Iterator[str]:
    """What columns mean, of those that are there."""
    num_documents = [
        row.versus_full.documents for row in rows if row.versus_full is not None and row.versus_full.low is not None
    ]
    if num_documents:
        yield (
            "dNLL: difference to the full cache on the same tokens; in brackets its 95 % interval by a paired "
            f"bootstrap over the {num_documents[0]:,} documents."
        )
    if not all(row.is_full for row in rows):
        yield "Change: relative to the full cache."
    if any(row.lossy_ratio is not None for row in rows):
        yield (
            "LOSSY ratio: bytes of the full cache over bytes kept; LOSSLESS ratio: bytes kept over bytes of their "
            "frames, decoded and compared."
        )
    if collect_runtime_stats(rows):
        yield RUNTIME_COLUMNS_NOTE
    if any(row.rounded_first for row in rows):
        kinds = sorted({str(row.lossless_dtype) for row in rows if row.rounded_first})
        yield f"The frames hold {' and '.join(kinds)}: the cache was rounded before, which is LOSSY."


def format_project_title(rows: Sequence[ResultRow]) -> str:
    """Return what stands above the table of `build_project_table`."""
    names = dict.fromkeys(PROJECT_NAMES[row.project.evaluation] for row in rows if row.project is not None)
    return f"By the definitions of {' and of '.join(names)} (docs/lm.md says where they differ):"


def format_csv(results: EvaluationResultsProtocol) -> str:
    """CSV with every scalar: a line for each row, and below it one for each document of that row.

    Columns of nested values are joined by dots (``versus_full.low``, ``tokens_kept.0``). `document` is empty in the
    line that stands for all documents. Not measured is empty.
    """
    lines: list[dict[str, object]] = []
    for row in results.rows:
        row_document = row.to_dict()
        documents = row_document.pop("documents")
        lines.append({"document": "", **dict(iter_scalars(row_document))})
        row_columns = {key: row_document[key] for key in ("label", "policy", "budget", "keep_ratio", "preset", "kind")}
        for document in documents:
            name = document.pop("name")
            lines.append({"document": name, **row_columns, **dict(iter_scalars(document))})
    all_names = dict.fromkeys(["label", "document", *(key for line in lines for key in line)])
    groups = {name[: dot.start()] for name in all_names for dot in re.finditer(r"\.", name)}
    names = [name for name in all_names if name not in groups]  # a group that one row lacks is no column
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([[_format_csv_cell(line.get(name)) for name in names] for line in lines])
    return sink.getvalue()


# -- text -------------------------------------------------------------------------------------------------------------


def _format_markdown_table(columns: Sequence[Column], lines: Sequence[Sequence[str]]) -> str:
    rules = [("---" if column.is_left_aligned else "---:") for column in columns]
    cells = [[column.heading for column in columns], rules, *lines]
    return "\n".join("| " + " | ".join(map(escape_markdown_cell, line)) + " |" for line in cells)


def _format_csv_cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else escape_csv(str(value))


def _join_parts(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part) + "."
