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
from .analyses import RATIO_NAMES, EntropyAnalysis, EntropyMetrics, MetricsRow, analyze_entropy, compute_averages
from .selection import DumpSelection

PROMPT_TOKEN_BINS = ((0, 256), (257, 512), (513, 1024), (1025, 2048), (2049, None))
"""Prompt tokens by which runs are grouped: first and last of each group."""

_CSV_COLUMNS = ("run_id", "layer", "stage", "seq_start", "tokens", "kv_heads", "head_dim", "bytes_per_elem", "part")


@dataclass(frozen=True, kw_only=True)
class EntropyReport:
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
    analysis: EntropyAnalysis
    skipped: dict[str, int]

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "analysis": self.output,
            "tensors": len(self.analysis.layer_rows),
            "failed": self.analysis.num_failed,
            "skipped": self.skipped,
        }

    def __str__(self) -> str:
        return f"{format_summary(self.analysis)}\nWrote {self.output}"


def write_entropy_report(
    selection: DumpSelection,
    output: str,
    *,
    level: int = 3,
    with_heads: bool = True,
    run_log: str | None = None,
    force: bool = False,
    progress: Progress | None = None,
) -> EntropyReport:
    """Analyse the selected dumps and write the files into a directory, all of them or none.

    Parameters
    ----------
    selection, level, with_heads, progress
        As for `analyze_entropy`.
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
        analysis = analyze_entropy(selection, level=level, with_heads=with_heads, progress=progress)
        _write_files(analysis, directory, prompts, with_heads)
        directory.commit()
    return EntropyReport(output=output, analysis=analysis, skipped=dict(selection.skip_counts))


def _write_files(
    analysis: EntropyAnalysis, output: DirectoryOutput, prompts: Mapping[str, int] | None, with_heads: bool
) -> None:
    files = {"layer_metrics.csv": format_csv(analysis.layer_rows)}
    if with_heads:
        files["head_metrics.csv"] = format_csv(analysis.head_rows)
    files["summary.md"] = format_summary(analysis)
    if prompts is not None:
        files["grouped_summary.md"] = format_grouped_summary(analysis, prompts)
    output.check_names(files)
    for name, text in files.items():
        output.open_file(name).write(text.encode())


def format_csv(rows: Iterable[MetricsRow]) -> str:
    """One line for each row; the column ``head`` is there where rows are of heads."""
    rows = list(rows)
    head_column = ("head",) if rows and rows[0].head is not None else ()
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*_CSV_COLUMNS, *head_column, "raw_bytes", *EntropyMetrics.__dataclass_fields__])
    for row in rows:
        entry = row.entry
        location_cells = [
            escape_csv(entry.run_id),
            entry.layer,
            entry.stage,
            entry.seq_start,
            entry.tokens,
            entry.kv_heads,
            entry.head_dim,
        ]
        itemsize = row.raw_bytes // (entry.tokens * entry.head_dim * (1 if head_column else entry.kv_heads))
        metric_cells = [f"{value:.6f}" for value in asdict(row.metrics).values()]
        writer.writerow(
            [
                *location_cells,
                itemsize,
                PART_LETTERS[row.part],
                *([row.head] if head_column else []),
                row.raw_bytes,
                *metric_cells,
            ]
        )
    return text.getvalue()


def format_summary(analysis: EntropyAnalysis) -> str:
    """Averages and weighted ratios of all dumps."""
    lines = [
        "# KV dumps: entropies and split ratios",
        "",
        "Simulated: sizes of zstd frames that were made and thrown away.",
        "Average: mean over dumps; weighted: ratio of the sums of bytes.",
        "",
        f"- Tensors: {len(analysis.layer_rows)}",
        f"- Dumps that could not be read whole: {analysis.num_failed}",
        "",
        *_format_ratio_table(analysis.layer_rows),
    ]
    return "\n".join(lines) + "\n"


def format_grouped_summary(analysis: EntropyAnalysis, prompts: Mapping[str, int]) -> str:
    """The same by prompt length; runs that `prompts` does not know come last."""
    lines = ["# KV dumps by prompt tokens", ""]
    for label, rows in _group_by_prompt_length(analysis.layer_rows, prompts).items():
        lines += [f"## {label}", "", f"- Tensors: {len(rows)}", "", *_format_ratio_table(rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def _group_by_prompt_length(rows: Sequence[MetricsRow], prompts: Mapping[str, int]) -> dict[str, list[MetricsRow]]:
    rows_by_label: dict[str, list[MetricsRow]] = {}
    for min_tokens, max_tokens in PROMPT_TOKEN_BINS:
        label = f"{min_tokens}-{max_tokens}" if max_tokens is not None else f"{min_tokens}+"
        for row in rows:
            tokens = prompts.get(row.entry.run_id)
            if tokens is not None and min_tokens <= tokens and (max_tokens is None or tokens <= max_tokens):
                rows_by_label.setdefault(label, []).append(row)
    unknown_rows = [row for row in rows if row.entry.run_id not in prompts]
    return {**rows_by_label, "not in the log": unknown_rows} if unknown_rows else rows_by_label


def _format_ratio_table(rows: Sequence[MetricsRow]) -> list[str]:
    lines = ["| ratio | K average | K weighted | V average | V weighted |", "|---|---|---|---|---|"]
    for name in RATIO_NAMES:
        cells = []
        for part in PARTS:
            mean, weighted_mean = compute_averages([row for row in rows if row.part == part], name)
            cells += [f"{mean:.4f}", f"{weighted_mean:.4f}"]
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
        tokens_by_run = {str(row["run_id"]): int(row["prompt_tokens"]) for row in rows}
    except (ValueError, TypeError, KeyError, RecursionError, csv.Error):
        tokens_by_run = {}
    if not tokens_by_run or min(tokens_by_run.values()) < 0:
        raise SourceError(f"{path}: expected JSON lines or CSV with run_id and prompt_tokens")
    return tokens_by_run
