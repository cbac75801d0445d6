"""Results of an evaluation as text: Markdown, CSV, and a table that fits a terminal.

All three take the document that `kvmnn.evaluation` makes. A value that nobody measured is ``-``; a column in which
nobody measured anything is left out.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Sequence
from typing import Any

from .columns import COLUMNS, Column, Results, Row, filled, plain, range_text, scalars, seed_table

_SEED_TITLE = "As the seed defines each quantity (docs/lm.md says where that differs):"


def markdown(results: Results) -> str:
    """Markdown: the table, the same as a preset's seed defines it where there is one, and what was measured on what.

    Parameters
    ----------
    results
        ``{"model", "settings", "documents", "rows"}``, rows as `kvmnn.evaluation.evaluating` makes them.

    Returns
    -------
    str
        Ends with a newline.
    """
    parts = [_as_markdown(*filled(results, COLUMNS))]
    seeds = seed_table(results["rows"])
    if seeds:
        parts += [_SEED_TITLE, _as_markdown(*seeds)]
    parts.append("\n".join(notes(results)))
    return "\n\n".join(parts) + "\n"


def terminal(results: Results, width: int) -> str:
    """The tables for a terminal of `width` columns: what does not fit is left out and named below them."""
    parts = [_as_text(*filled(results, COLUMNS), width)]
    seeds = seed_table(results["rows"])
    if seeds:
        parts += [_SEED_TITLE, _as_text(*seeds, width)]
    return "\n\n".join([*parts, "\n".join(notes(results))]) + "\n"


def notes(results: Results) -> list[str]:
    """What was measured on what, one sentence or two a line."""
    documents, settings, model = results["documents"], results.get("settings", {}), results.get("model", {})
    rows: Sequence[Row] = results["rows"]
    scored = [row["tokens"] for row in rows if row.get("tokens") is not None]
    lines = [
        _sentence(
            f"{_counted(len(documents), 'document')}",
            f"{sum(d['tokens'] for d in documents):,} tokens" if documents else None,
            f"{range_text(scored)} scored by each row" if scored else None,
            f"a prompt of {_counted(settings['prompt'], 'token')}" if settings.get("prompt") else None,
            f"fed {_counted(settings['chunk'], 'token')} at a time" if settings.get("chunk") else None,
            f"deep: from token {settings['deep_from']:,} on" if settings.get("deep_from") is not None else None,
            f"seed {settings['seed']}" if settings.get("seed") is not None else None,
            _counted(settings["threads"], "thread") if settings.get("threads") else None,
        )
    ]
    name = model.get("label") or model.get("name") or model.get("path")
    if name:
        lines.append(_sentence(f"Model: {plain(name)}", f"kvmnn {results['kvmnn']}" if "kvmnn" in results else None))
    if any((row.get("versus_full") or {}).get("low") is not None for row in rows):
        lines.append(
            "dNLL: difference to the full cache on the same tokens; in brackets its 95 % interval by a paired "
            "bootstrap over the documents."
        )
    if any(row["policy"] != "full" for row in rows):
        lines.append("Change: relative to the full cache.")
    if any(row.get("lossy_ratio") is not None for row in rows):
        lines.append(
            "LOSSY ratio: bytes of the full cache over bytes kept; LOSSLESS ratio: bytes kept over bytes of their "
            "frames, decoded and compared."
        )
    if any(row.get("rounded_first") for row in rows):
        kinds = sorted({str(row["lossless_dtype"]) for row in rows if row.get("rounded_first")})
        lines.append(f"The frames hold {' and '.join(kinds)}: the cache was rounded before, which is LOSSY.")
    lines += [plain(note) for note in results.get("notes") or ()]
    lines += [plain(f"Not run: {entry['label']}: {entry['reason']}") for entry in results.get("refused") or ()]
    return lines


def csv_text(results: Results) -> str:
    """CSV with every scalar: a line for each row, and below it one for each document of that row.

    Columns of nested values are joined by dots (``versus_full.low``, ``tokens_kept.0``). `document` is empty in the
    line that stands for all documents. Not measured is empty.
    """
    lines: list[dict[str, Any]] = []
    for row in results["rows"]:
        lines.append({"document": "", **dict(scalars({k: v for k, v in row.items() if k != "documents"}))})
        for document in row.get("documents") or ():
            about = {key: row.get(key) for key in ("label", "policy", "budget", "keep_ratio", "preset", "kind")}
            found = dict(scalars({key: value for key, value in document.items() if key != "name"}))
            lines.append({"document": document["name"], **about, **found})
    found_names = dict.fromkeys(["label", "document", *(key for line in lines for key in line)])
    groups = {name[: dot.start()] for name in found_names for dot in re.finditer(r"\.", name)}
    names = [name for name in found_names if name not in groups]  # a group that one row lacks is no column
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([[_cell(line.get(name)) for name in names] for line in lines])
    return sink.getvalue()


# -- the columns ------------------------------------------------------------------------------------------------------


# -- as the seeds define it -------------------------------------------------------------------------------------------


# -- text -------------------------------------------------------------------------------------------------------------


def _as_markdown(columns: Sequence[Column], lines: Sequence[Sequence[str]]) -> str:
    rules = [("---" if column.left else "---:") for column in columns]
    cells = [[column.heading for column in columns], rules, *lines]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in cells)


def _as_text(columns: Sequence[Column], lines: Sequence[Sequence[str]], width: int) -> str:
    """Aligned, without the columns of the highest rank where it would be wider than `width`."""
    dropped: list[str] = []
    while _width(columns, lines) > width and any(column.rank for column in columns):
        last = max(range(len(columns)), key=lambda index: columns[index].rank)
        dropped.append(columns[last].heading)
        columns, lines = [c for i, c in enumerate(columns) if i != last], [_without(line, last) for line in lines]
    widths = _widths(columns, lines)
    text = [_padded([c.heading for c in columns], widths, columns), "  ".join("-" * size for size in widths)]
    text += [_padded(line, widths, columns) for line in lines]
    if dropped:
        text += ["", "Too wide for this terminal (--json, --csv and Markdown have it): " + ", ".join(reversed(dropped))]
    return "\n".join(text)


def _widths(columns: Sequence[Column], lines: Sequence[Sequence[str]]) -> list[int]:
    return [max([len(column.heading), *(len(line[i]) for line in lines)]) for i, column in enumerate(columns)]


def _width(columns: Sequence[Column], lines: Sequence[Sequence[str]]) -> int:
    return sum(_widths(columns, lines)) + 2 * (len(columns) - 1)


def _padded(line: Sequence[str], widths: Sequence[int], columns: Sequence[Column]) -> str:
    cells = [f"{text:<{w}}" if c.left else f"{text:>{w}}" for text, w, c in zip(line, widths, columns, strict=True)]
    return "  ".join(cells).rstrip()


def _without(line: Sequence[str], index: int) -> list[str]:
    return [text for i, text in enumerate(line) if i != index]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


def _sentence(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part) + "."


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")
