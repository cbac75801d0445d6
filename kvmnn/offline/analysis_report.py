"""The analyses as files: layer_metrics.csv, head_metrics.csv, summary.md and grouped_summary.md."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..dtypes import PART_LETTERS, PARTS
from ..errors import SourceError
from ..files.output import DirectoryOutput
from ..text import escape_csv
from ..threads.pipeline import Progress
from .analyses import RATIOS, Analysis, Metrics, Row, analyse, averages
from .selection import Selection

BINS = ((0, 256), (257, 512), (513, 1024), (1025, 2048), (2049, None))
"""Prompt tokens by which runs are grouped: first and last of each group."""

_COLUMNS = ("run_id", "layer", "stage", "seq_start", "tokens", "kv_heads", "head_dim", "bytes_per_elem", "part")


@dataclass(frozen=True, kw_only=True)
class AnalysisReport:
    """The analyses that were written.

    Attributes
    ----------
    output
        The directory.
    analysis
        All rows.
    skipped
        Why dumps were left out, and how many.
    """

    output: str
    analysis: Analysis
    skipped: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "analysis": self.output,
            "tensors": len(self.analysis.layers),
            "failed": self.analysis.failed,
            "skipped": self.skipped,
        }

    def __str__(self) -> str:
        return f"{summary(self.analysis)}\nWrote {self.output}"


def write_analysis(
    selection: Selection,
    output: str,
    *,
    level: int = 3,
    with_heads: bool = True,
    run_log: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> AnalysisReport:
    """Analyse the selected dumps and write the files into a directory, all of them or none.

    Parameters
    ----------
    selection, level, with_heads, progress
        As for `analyse`.
    output
        The directory; made if it does not exist.
    run_log
        File with the prompt tokens of each run, as `read_run_log` takes it, for grouped_summary.md.
    force
        Replace files that exist.

    Raises
    ------
    NothingSelectedError, SourceError, OutputError
        For a selection without dumps, for the run log, and for the output.
    """
    prompts = read_run_log(run_log) if run_log else None
    selection.require_entries()
    with DirectoryOutput(output, force=force) as directory:
        analysis = analyse(selection, level=level, with_heads=with_heads, progress=progress)
        _write(analysis, directory, prompts, with_heads)
        directory.commit()
    return AnalysisReport(output=output, analysis=analysis, skipped=dict(selection.skipped))


def _write(analysis: Analysis, output: DirectoryOutput, prompts: Mapping[str, int] | None, with_heads: bool) -> None:
    files = {"layer_metrics.csv": to_csv(analysis.layers)}
    if with_heads:
        files["head_metrics.csv"] = to_csv(analysis.heads)
    files["summary.md"] = summary(analysis)
    if prompts is not None:
        files["grouped_summary.md"] = grouped_summary(analysis, prompts)
    output.check_names(files)
    for name, text in files.items():
        output.file(name).write(text.encode())


def to_csv(rows: Iterable[Row]) -> str:
    """One line for each row; the column ``head`` is there where rows are of heads."""
    rows = list(rows)
    heads = ("head",) if rows and rows[0].head is not None else ()
    text = io.StringIO()
    out = csv.writer(text, lineterminator="\n")
    out.writerow([*_COLUMNS, *heads, "raw_bytes", *Metrics.__dataclass_fields__])
    for row in rows:
        entry = row.entry
        place = [
            escape_csv(entry.run_id),
            entry.layer,
            entry.stage,
            entry.seq_start,
            entry.tokens,
            entry.kv_heads,
            entry.head_dim,
        ]
        width = row.raw_bytes // (entry.tokens * entry.head_dim * (1 if heads else entry.kv_heads))
        numbers = [f"{value:.6f}" for value in asdict(row.metrics).values()]
        out.writerow([*place, width, PART_LETTERS[row.part], *([row.head] if heads else []), row.raw_bytes, *numbers])
    return text.getvalue()


def summary(analysis: Analysis) -> str:
    """Averages and weighted ratios of all dumps."""
    lines = [
        "# KV dumps: entropies and split ratios",
        "",
        "Simulated: sizes of zstd frames that were made and thrown away.",
        "Average: mean over dumps; weighted: ratio of the sums of bytes.",
        "",
        f"- Tensors: {len(analysis.layers)}",
        f"- Dumps that could not be read whole: {analysis.failed}",
        "",
        *_table(analysis.layers),
    ]
    return "\n".join(lines) + "\n"


def grouped_summary(analysis: Analysis, prompts: Mapping[str, int]) -> str:
    """The same by prompt length; runs that `prompts` does not know come last."""
    lines = ["# KV dumps by prompt tokens", ""]
    for label, rows in _grouped(analysis.layers, prompts).items():
        lines += [f"## {label}", "", f"- Tensors: {len(rows)}", "", *_table(rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def _grouped(rows: Sequence[Row], prompts: Mapping[str, int]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for first, last in BINS:
        label = f"{first}-{last}" if last is not None else f"{first}+"
        for row in rows:
            tokens = prompts.get(row.entry.run_id)
            if tokens is not None and first <= tokens and (last is None or tokens <= last):
                found.setdefault(label, []).append(row)
    unknown = [row for row in rows if row.entry.run_id not in prompts]
    return {**found, "not in the log": unknown} if unknown else found


def _table(rows: Sequence[Row]) -> list[str]:
    lines = ["| ratio | K average | K weighted | V average | V weighted |", "|---|---|---|---|---|"]
    for name in RATIOS:
        cells = []
        for part in PARTS:
            mean, weighted = averages([row for row in rows if row.part == part], name)
            cells += [f"{mean:.4f}", f"{weighted:.4f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return lines


def read_run_log(path: str) -> dict[str, int]:
    """Prompt tokens by run id: lines of JSON objects, or a CSV file with a header; ``run_id`` and ``prompt_tokens``.

    Raises
    ------
    SourceError
        When the file cannot be read or is neither.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as exc:
        raise SourceError(f"{path}: cannot be read: {exc}") from exc
    try:
        if text.lstrip().startswith("{"):
            rows = [json.loads(line) for line in text.splitlines() if line.strip()]
        else:
            rows = list(csv.DictReader(text.splitlines()))
        found = {str(row["run_id"]): int(row["prompt_tokens"]) for row in rows}
    except (ValueError, TypeError, KeyError, RecursionError, csv.Error):
        found = {}
    if not found or min(found.values()) < 0:
        raise SourceError(f"{path}: expected JSON lines or CSV with run_id and prompt_tokens")
    return found
