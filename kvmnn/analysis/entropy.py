"""Byte entropies and split ("gear") ratios of dumps, by layer and head, as in earlier analyses of the H2O work on MNN.

fp16 elements are split into high and low bytes, fp32 elements into high and low 16-bit halves (little-endian bytes).
"delta" is the high part minus that of the previous token, modulo its range; the first token is unchanged. Sizes are of
zstd frames that are discarded. Files: layer_metrics.csv, head_metrics.csv, summary.md and grouped_summary.md.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, field, replace
from pathlib import Path

import numpy as np

from .._util.dataclass import dataclass
from .._util.parallel import Progress
from ..dtypes import PART_LETTERS, PARTS, Elements, Part
from ..errors import SourceError
from ..files.atomic import DirectoryOutput
from ..files.schema import Record
from ..frames import _streams, _zstdlib
from ..reports.table import format_csv_lines
from .options import Scope
from .selection import DumpEntry, DumpSelection
from .tensor_reader import FileTensor

ALL_LAYERS_SCOPE = Scope(scope="all")
"""A scope that takes every dump."""


def with_all_layers(scope: Scope) -> Scope:
    """Return a scope of all layers with the stages and lengths of `scope`."""
    return replace(ALL_LAYERS_SCOPE, stage=scope.stage, min_seq_len=scope.min_seq_len, max_seq_len=scope.max_seq_len)


@dataclass(frozen=True)
class EntropyMetrics:
    """Metrics of one tensor, or of one head of it; 0 where a metric does not apply to its element size."""

    #: Bits per byte, order 0.
    entropy: float = 0.0
    #: Ratio of one zstd frame of all bytes.
    zstd_ratio: float = 0.0
    #: fp16: entropies and ratios of the high and the low bytes.
    hi_entropy: float = 0.0
    lo_entropy: float = 0.0
    hi_ratio: float = 0.0
    lo_ratio: float = 0.0
    #: fp16: ratio of both parts together; of the high bytes with the delta predictor; of both parts with it.
    gear_ratio: float = 0.0
    hi_delta_ratio: float = 0.0
    gear_delta_ratio: float = 0.0
    #: fp32: the same with 16-bit halves.
    hi16_entropy: float = 0.0
    lo16_entropy: float = 0.0
    hi16_ratio: float = 0.0
    lo16_ratio: float = 0.0
    split16_ratio: float = 0.0
    hi16_delta_ratio: float = 0.0
    split16_delta_ratio: float = 0.0


RATIO_NAMES = tuple(name for name in EntropyMetrics.__dataclass_fields__ if name.endswith("ratio"))


@dataclass(frozen=True)
class MetricsRow:
    """The metrics of K or V of one dump, of all heads or of one."""

    #: The dump.
    entry: DumpEntry
    #: K or V.
    part: Part
    #: KV head; None for all heads.
    head: int | None
    #: Bytes of the dumped elements.
    raw_bytes: int
    metrics: EntropyMetrics


@dataclass
class EntropyAnalysis:
    """All rows, and the number of failed dumps."""

    layer_rows: list[MetricsRow] = field(default_factory=list)
    head_rows: list[MetricsRow] = field(default_factory=list)
    num_failed: int = 0

    @property
    def num_tensors(self) -> int:
        """Number of analysed tensors."""
        return len(self.layer_rows)


def analyze_entropy(
    selection: DumpSelection,
    *,
    level: int = 3,
    with_heads: bool = True,
    progress: Progress | None = None,
) -> EntropyAnalysis:
    """Compute the metrics of every selected dump whose files are complete; others count as failed.

    Parameters
    ----------
    selection
        Made by `select` with a scope such as `ALL_LAYERS_SCOPE`.
    level
        zstd level.
    """
    selection.require_entries()
    analysis, zstd = EntropyAnalysis(), _ZstdFrameSizer(level)
    for entry in selection.entries:
        try:
            tensors = [(part, _load_elements(entry.get_tensor(part))) for part in PARTS]
        except SourceError:
            analysis.num_failed += 1
            continue
        for part, elements in tensors:
            analysis.layer_rows.append(MetricsRow(entry, part, None, elements.nbytes, compute_metrics(elements, zstd)))
            if with_heads:
                analysis.head_rows.extend(_iter_head_rows(entry, part, elements, zstd))
            if progress:
                progress(elements.nbytes)
    return analysis


def compute_metrics(elements: Elements, zstd: Callable[[Elements], int]) -> EntropyMetrics:
    """Compute metrics of ``[token, ...]`` elements: uint16 for fp16, uint32 for fp32; `zstd` returns the size of a
    frame.
    """
    nbytes = elements.nbytes
    shared_metrics = {"entropy": _compute_entropy(elements), "zstd_ratio": _compute_ratio(nbytes, zstd(elements))}
    element_type, bits = (np.uint8, 8) if elements.itemsize == 2 else (np.uint16, 16)
    hi, lo = (elements >> bits).astype(element_type), elements.astype(element_type)
    delta = hi.copy()
    np.subtract(hi[1:], hi[:-1], out=delta[1:])
    sizes = {name: zstd(stream) for name, stream in (("hi", hi), ("lo", lo), ("delta", delta))}
    split_metrics = {
        "hi_entropy": _compute_entropy(hi),
        "lo_entropy": _compute_entropy(lo),
        "hi_ratio": _compute_ratio(hi.nbytes, sizes["hi"]),
        "lo_ratio": _compute_ratio(lo.nbytes, sizes["lo"]),
        "gear_ratio": _compute_ratio(nbytes, sizes["hi"] + sizes["lo"]),
        "hi_delta_ratio": _compute_ratio(hi.nbytes, sizes["delta"]),
        "gear_delta_ratio": _compute_ratio(nbytes, sizes["delta"] + sizes["lo"]),
    }
    if bits == 8:
        return EntropyMetrics(**shared_metrics, **split_metrics)
    wide_metrics = {
        _WIDE_RATIO_NAMES.get(name, name.replace("_", "16_", 1)): value for name, value in split_metrics.items()
    }
    return EntropyMetrics(**shared_metrics, **wide_metrics)


_WIDE_RATIO_NAMES = {"gear_ratio": "split16_ratio", "gear_delta_ratio": "split16_delta_ratio"}


def compute_averages(rows: Sequence[MetricsRow], name: str) -> tuple[float, float]:
    """Return the mean of a ratio over dumps, and the ratio of the sums of bytes.

    A ratio of 0 means that a row has none; such rows only count in the mean of ``zstd_ratio``.
    """
    values = [(row.raw_bytes, float(getattr(row.metrics, name))) for row in rows]
    counted_values = [value for _, value in values if value > 0 or name == "zstd_ratio"]
    mean = sum(counted_values) / len(counted_values) if counted_values else 0.0
    byte_pairs = [(raw_bytes, raw_bytes / value) for raw_bytes, value in values if value > 0]
    compressed_bytes = sum(compressed_part_bytes for _, compressed_part_bytes in byte_pairs)
    return mean, sum(raw_bytes for raw_bytes, _ in byte_pairs) / compressed_bytes if compressed_bytes else 0.0


def _iter_head_rows(
    entry: DumpEntry, part: Part, elements: Elements, zstd: Callable[[Elements], int]
) -> Iterator[MetricsRow]:
    for head in range(entry.kv_heads):
        head_elements = np.ascontiguousarray(elements[:, head])
        yield MetricsRow(entry, part, head, head_elements.nbytes, compute_metrics(head_elements, zstd))


def _load_elements(tensor: object) -> Elements:
    """Load the elements of a dump's file, ``[token, kv_head, head_dim]``, not rounded."""
    if not isinstance(tensor, FileTensor):
        raise SourceError("only KV dumps are analysed")
    if not tensor.is_complete():
        raise SourceError(f"{tensor.path}: has {tensor.file_bytes} bytes, its metadata says otherwise")
    chunks = [chunk.copy() for chunk in tensor.iter_raw_chunks(max(tensor.file_bytes, 1))]
    return chunks[0].view(f"<u{tensor.stored_itemsize}").reshape(tensor.shape)


class _ZstdFrameSizer:
    """Computes sizes of zstd frames."""

    def __init__(self, level: int) -> None:
        self._context = _zstdlib.ZstdContext()
        self._level = level

    def __call__(self, elements: Elements) -> int:
        data = np.ascontiguousarray(elements).reshape(-1).view(np.uint8)
        return self._context.compress_into(
            np.empty(_zstdlib.max_compressed_size(data.size), np.uint8), data, self._level
        )


def _compute_entropy(elements: Elements) -> float:
    return _streams.compute_order0_entropy(np.ascontiguousarray(elements).reshape(-1).view(np.uint8))


def _compute_ratio(raw_bytes: int, compressed_bytes: int) -> float:
    return raw_bytes / compressed_bytes if compressed_bytes else 0.0


PROMPT_TOKEN_BINS = ((0, 256), (257, 512), (513, 1024), (1025, 2048), (2049, None))
"""Prompt tokens by which runs are grouped: first and last of each group."""

_CSV_COLUMNS = ("run_id", "layer", "stage", "seq_start", "tokens", "kv_heads", "head_dim", "bytes_per_elem", "part")


@dataclass(frozen=True, kw_only=True)
class EntropyReport(Record):
    """Result of writing the analyses."""

    json_keys = "analysis=output tensors=analysis.num_tensors failed=analysis.num_failed skipped"

    #: Path of the directory.
    output: str
    #: All rows.
    analysis: EntropyAnalysis
    #: Number of skipped dumps by reason.
    skipped: dict[str, int]

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
    """Write the analysis of the selected dumps into a directory: all of its files, or none.

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
    prompt_tokens_by_run = read_run_log(run_log) if run_log else None
    selection.require_entries()
    with DirectoryOutput(output, force=force) as directory:
        analysis = analyze_entropy(selection, level=level, with_heads=with_heads, progress=progress)
        _write_files(analysis, directory, prompt_tokens_by_run, with_heads)
        directory.commit()
    return EntropyReport(output=output, analysis=analysis, skipped=dict(selection.skip_counts))


def _write_files(
    analysis: EntropyAnalysis, output: DirectoryOutput, prompt_tokens_by_run: Mapping[str, int] | None, with_heads: bool
) -> None:
    files = {"layer_metrics.csv": format_csv(analysis.layer_rows)}
    if with_heads:
        files["head_metrics.csv"] = format_csv(analysis.head_rows)
    files["summary.md"] = format_summary(analysis)
    if prompt_tokens_by_run is not None:
        files["grouped_summary.md"] = format_grouped_summary(analysis, prompt_tokens_by_run)
    output.check_names(files)
    for name, text in files.items():
        output.open_file(name).write(text.encode())


def format_csv(rows: Iterable[MetricsRow]) -> str:
    """Format one line for each row; there is a column ``head`` if the rows are of heads."""
    rows = list(rows)
    head_column = ("head",) if rows and rows[0].head is not None else ()
    lines: list[list[object]] = [[*_CSV_COLUMNS, *head_column, "raw_bytes", *EntropyMetrics.__dataclass_fields__]]
    for row in rows:
        entry = row.entry
        itemsize = row.raw_bytes // (entry.tokens * entry.head_dim * (1 if head_column else entry.kv_heads))
        lines.append([
            entry.run_id, entry.layer, entry.stage, entry.seq_start, entry.tokens, entry.kv_heads, entry.head_dim,
            itemsize, PART_LETTERS[row.part], *([row.head] if head_column else []), row.raw_bytes,
            *(f"{value:.6f}" for value in asdict(row.metrics).values()),
        ])  # fmt: skip
    return format_csv_lines(lines)


def format_summary(analysis: EntropyAnalysis) -> str:
    """Format the averages and weighted ratios of all dumps as Markdown."""
    lines = [
        "# KV dumps: entropies and split ratios",
        "",
        "Simulated: sizes of zstd frames that were made and thrown away.",
        "Average: mean over dumps; weighted: ratio of the sums of bytes.",
        "",
        f"- Tensors: {analysis.num_tensors}",
        f"- Dumps that could not be read whole: {analysis.num_failed}",
        "",
        *_format_ratio_table(analysis.layer_rows),
    ]
    return "\n".join(lines) + "\n"


def format_grouped_summary(analysis: EntropyAnalysis, prompt_tokens_by_run: Mapping[str, int]) -> str:
    """Format the summary by prompt length as Markdown; runs that are not in `prompt_tokens_by_run` come last."""
    lines = ["# KV dumps by prompt tokens", ""]
    for label, rows in _group_by_prompt_length(analysis.layer_rows, prompt_tokens_by_run).items():
        lines += [f"## {label}", "", f"- Tensors: {len(rows)}", "", *_format_ratio_table(rows), ""]
    return "\n".join(lines).rstrip() + "\n"


def _group_by_prompt_length(
    rows: Sequence[MetricsRow], prompt_tokens_by_run: Mapping[str, int]
) -> dict[str, list[MetricsRow]]:
    rows_by_label: dict[str, list[MetricsRow]] = {}
    for min_tokens, max_tokens in PROMPT_TOKEN_BINS:
        label = f"{min_tokens}-{max_tokens}" if max_tokens is not None else f"{min_tokens}+"
        for row in rows:
            tokens = prompt_tokens_by_run.get(row.entry.run_id)
            if tokens is not None and min_tokens <= tokens and (max_tokens is None or tokens <= max_tokens):
                rows_by_label.setdefault(label, []).append(row)
    unknown_rows = [row for row in rows if row.entry.run_id not in prompt_tokens_by_run]
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
    """Read the prompt tokens of each run: JSON lines, or CSV with a header, with ``run_id`` and ``prompt_tokens``."""
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
