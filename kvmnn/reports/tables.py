"""Results of an evaluation as text: a table that fits a terminal, Markdown, CSV, and LaTeX without extra packages.

A value that was not measured is ``-``; a column without any value is left out.
"""

from __future__ import annotations

import csv
import io
import os
import re
import textwrap
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import TypeVar

from .._util.text import escape_csv, escape_markdown, escape_markdown_cell, join_lines, pluralize
from ..errors import OptionError
from ..policies.h2o.planner import H2OStats, PlannerLayerStats
from .records import (
    EvaluationResultsProtocol,
    FullCacheDifference,
    ProjectStats,
    Refusal,
    ResultRow,
    RuntimeStats,
    find_full_row,
)
from .series import RowSeries, group_into_series, is_number, select_policy_rows

CellFormatter = Callable[[ResultRow, ResultRow | None], str | None]
"""The text of a row next to that of the full cache; None where nothing was measured."""

ABSENT_TEXT = "-"
NO_EVICTION_MARK = "*"
"""Of rows whose policy evicted nothing before the last token was scored."""

_BYTES_PER_MIB = float(1 << 20)


@dataclass(frozen=True)
class Column:
    """A table column: its heading with the unit, and a function for a row's text, None if not measured.

    `drop_rank` says what a narrow terminal goes without: the highest first, 0 never. With 1 labels are shortened for
    it.
    """

    heading: str
    format_cell: CellFormatter
    drop_rank: int
    is_left_aligned: bool = False


def _make_number_formatter(
    get: Callable[[ResultRow], float | None], format_spec: str, scale: float = 1.0
) -> CellFormatter:
    def format_number(row: ResultRow, full: ResultRow | None) -> str | None:
        value = get(row)
        return None if value is None else format(value * scale if scale != 1.0 else value, format_spec)

    return format_number


def _make_change_formatter(get: Callable[[ResultRow], float | None]) -> CellFormatter:
    """Relative to the full cache, in per cent."""

    def format_change(row: ResultRow, full: ResultRow | None) -> str | None:
        value, full_value = get(row), None if full is None or row.is_full else get(full)
        return None if value is None or not full_value else f"{100 * (value / full_value - 1):+.2f}"

    return format_change


def _make_difference_formatter(
    get: Callable[[FullCacheDifference], tuple[float | None, float | None, float | None]],
) -> CellFormatter:
    def format_difference(row: ResultRow, full: ResultRow | None) -> str | None:
        mean, low, high = (None, None, None) if row.versus_full is None else get(row.versus_full)
        if mean is None:
            return None
        return f"{mean:+.4f}" + ("" if low is None or high is None else f" [{low:+.4f}, {high:+.4f}]")

    return format_difference


def _format_budget(row: ResultRow, full: ResultRow | None) -> str | None:
    if row.budget is not None:
        return f"{row.budget:,}"
    return None if row.keep_ratio is None else f"{100 * row.keep_ratio:g} %"


def _format_kept_tokens(row: ResultRow, full: ResultRow | None) -> str | None:
    return format_min_max(row.tokens_kept) if row.tokens_kept else None


def _format_policy_share(row: ResultRow, full: ResultRow | None) -> str | None:
    policy, model = row.policy_seconds, row.model_seconds
    return None if policy is None or not model else f"{100 * policy / model:.1f}"


def _format_attention(row: ResultRow, full: ResultRow | None) -> str | None:
    """Format the attention time; the absent mark if only steps were timed, which a note explains."""
    if row.attention_seconds is None:
        return None if row.tpot_seconds is None else ABSENT_TEXT
    return f"{row.attention_seconds * 1e3:.3f}"


def add_no_eviction_mark(text: str, row: ResultRow) -> str:
    """Return a text about a row with the mark of those that evicted nothing."""
    return f"{text} {NO_EVICTION_MARK}" if row.has_no_eviction else text


def _format_label(row: ResultRow, full: ResultRow | None) -> str | None:
    return add_no_eviction_mark(to_single_line(row.label), row)


COLUMNS = (
    Column("policy", _format_label, 0, is_left_aligned=True),
    Column("kind", lambda row, full: row.kind, 2, is_left_aligned=True),
    Column("budget (tokens)", _format_budget, 17),
    Column("PPL", _make_number_formatter(lambda row: row.perplexity, ".4f"), 0),
    Column("PPL change (%)", _make_change_formatter(lambda row: row.perplexity), 6),
    Column("accuracy (%)", _make_number_formatter(lambda row: row.accuracy, ".2f", 100), 5),
    Column("accuracy change (%)", _make_change_formatter(lambda row: row.accuracy), 13),
    Column("bits/byte", _make_number_formatter(lambda row: row.bits_per_byte, ".4f"), 15),
    Column(
        "deep PPL", _make_number_formatter(lambda row: None if row.deep is None else row.deep.perplexity, ".4f"), 10
    ),
    Column(
        "deep accuracy (%)",
        _make_number_formatter(lambda row: None if row.deep is None else row.deep.accuracy, ".2f", 100),
        19,
    ),
    Column(
        "dNLL (nats) [95 %]",
        _make_difference_formatter(lambda difference: (difference.nll, difference.low, difference.high)),
        1,
    ),
    Column(
        "deep dNLL (nats) [95 %]",
        _make_difference_formatter(lambda difference: (difference.deep_nll, difference.deep_low, difference.deep_high)),
        18,
    ),
    Column("tokens scored", _make_number_formatter(lambda row: row.tokens, ",d"), 22),
    Column("TTFT (ms)", _make_number_formatter(lambda row: row.ttft_seconds, ".2f", 1e3), 14),
    Column("TPOT (ms)", _make_number_formatter(lambda row: row.tpot_seconds, ".3f", 1e3), 8),
    Column("attention (ms)", _format_attention, 15),
    Column("tokens/s", _make_number_formatter(lambda row: row.tokens_per_second, ",.0f"), 11),
    Column("policy/model time (%)", _format_policy_share, 9),
    Column("tokens kept", _format_kept_tokens, 12),
    Column("cache mean (MiB)", _make_number_formatter(lambda row: row.cache_bytes_mean, ".3f", 1 / _BYTES_PER_MIB), 3),
    Column("cache peak (MiB)", _make_number_formatter(lambda row: row.cache_bytes_peak, ".3f", 1 / _BYTES_PER_MIB), 7),
    Column(
        "process peak (MiB)", _make_number_formatter(lambda row: row.process_peak_bytes, ".0f", 1 / _BYTES_PER_MIB), 21
    ),
    Column("LOSSY ratio", _make_number_formatter(lambda row: row.lossy_ratio, ".3f"), 1),
    Column("LOSSLESS ratio", _make_number_formatter(lambda row: row.lossless_ratio, ".4f"), 16),
    Column("product", _make_number_formatter(lambda row: row.ratio, ".3f"), 4),
)


def build_table(results: EvaluationResultsProtocol, columns: Sequence[Column]) -> tuple[list[Column], list[list[str]]]:
    """Return the columns in which something was measured, and the text of every row."""
    full = find_full_row(results.rows)
    if any(row.unequal_layers for row in results.rows):  # then the budget does not say what is held
        columns = [
            replace(column, drop_rank=1) if column.format_cell is _format_kept_tokens else column for column in columns
        ]
    texts = [[column.format_cell(row, full) for column in columns] for row in results.rows]
    used_indices = [i for i in range(len(columns)) if i == 0 or any(line[i] is not None for line in texts)]
    return [columns[i] for i in used_indices], [[_text_or_absent(line[i]) for i in used_indices] for line in texts]


_PROJECT_COLUMNS: dict[str, tuple[str, str, float]] = {
    "perplexity": ("PPL", ".4f", 1),
    "perplexity_change": ("PPL change (%)", "+.2f", 100),
    "accuracy": ("accuracy (%)", ".2f", 100),
    "accuracy_change": ("accuracy change (%)", "+.2f", 100),
    "ttft_seconds": ("TTFT (ms)", ".2f", 1e3),
    "tpot_seconds": ("TPOT (ms)", ".3f", 1e3),
    "attention_seconds": ("attention of a layer (ms)", ".4f", 1e3),
    "tokens_per_second": ("tokens/s", ",.0f", 1),
    "process_peak_bytes": ("process peak (MiB)", ".0f", 1 / _BYTES_PER_MIB),
    "final_cache_tokens": ("tokens kept", ",d", 1),
    "scored_tokens": ("tokens scored", ",d", 1),
    "chunk": ("chunk (tokens)", ",d", 1),
    "text_tokens": ("tokens of text", ",d", 1),
    "chunks_left_out": ("chunks left out", ",d", 1),
    "prompt_tokens": ("prompt (tokens)", ",d", 1),
    "new_tokens": ("generated (tokens)", ",d", 1),
    "repeats": ("warm repeats", ",d", 1),
}


_FIRST_COLUMN_KEYS = ("label", "nll")


def build_project_table(rows: Sequence[ResultRow]) -> tuple[list[Column], list[list[str]]] | None:
    """Build the table of measurements by projects' own definitions: known quantities first, others by key."""
    project_rows = [(row, row.project) for row in rows if row.project is not None]
    if not project_rows:
        return None
    lines = [numbers.to_dict() | _compute_project_changes(row, numbers, project_rows) for row, numbers in project_rows]
    measured_keys = dict.fromkeys(key for line in lines for key, value in line.items() if value is not None)
    keys = [key for key in _PROJECT_COLUMNS if key in measured_keys]
    keys += [key for key in measured_keys if key not in _PROJECT_COLUMNS and key not in _FIRST_COLUMN_KEYS]
    headings = ["policy", "preset", *(_PROJECT_COLUMNS[key][0] if key in _PROJECT_COLUMNS else key for key in keys)]
    cells = [
        [
            to_single_line(numbers.label or row.label),
            to_single_line(row.preset or ABSENT_TEXT),
            *(_format_project_value(key, line.get(key)) for key in keys),
        ]
        for (row, numbers), line in zip(project_rows, lines, strict=True)
    ]
    return [
        Column(to_single_line(heading), _format_label, i // 3, is_left_aligned=i < 2)
        for i, heading in enumerate(headings)
    ], cells


def _compute_project_changes(
    row: ResultRow, numbers: ProjectStats, project_rows: Sequence[tuple[ResultRow, ProjectStats]]
) -> dict[str, float]:
    """Compute the changes from the full cache of the same preset, by the same definition."""
    base = next(
        (other_stats for entry, other_stats in project_rows if entry.is_full and entry.preset == row.preset), None
    )
    if base is None or base is numbers:
        return {}
    pairs = {
        "perplexity_change": (numbers.perplexity, base.perplexity),
        "accuracy_change": (numbers.accuracy, base.accuracy),
    }
    return {
        key: value / full_value - 1 for key, (value, full_value) in pairs.items() if value is not None and full_value
    }


def _format_project_value(key: str, value: object) -> str:
    if value is None:
        return ABSENT_TEXT
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _, format_spec, scale = _PROJECT_COLUMNS.get(key, ("", ",d" if isinstance(value, int) else ".6g", 1))
        return format(value if scale == 1 else value * scale, format_spec)
    return to_single_line(value)


def iter_scalars(value: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Yield the leaves of nested mappings and lists, with their names joined by dots."""
    for key, entry in value.items():
        name = f"{prefix}{key}"
        if isinstance(entry, (list, tuple)):
            entry = {str(index): element for index, element in enumerate(entry)}
        if isinstance(entry, Mapping):
            yield from iter_scalars(entry, name + ".")
        else:
            yield name, entry


def format_min_max(numbers: Sequence[int]) -> str:
    """Format the minimum and the maximum of numbers."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _text_or_absent(text: str | None) -> str:
    return ABSENT_TEXT if text is None else text


def to_single_line(text: object) -> str:
    """Join the words of a text to one line; return the absent mark for an empty text."""
    return " ".join(str(text).split()) or ABSENT_TEXT


_MIN_LABEL_WIDTH, _MAX_LABEL_WIDTH = 16, 32
_COLUMN_GAP = 2
_ABBREVIATIONS = (
    (r"\bskip_layers=", "skip "),
    (r"\brecent_ratio=", "recent "),
    (r"\bstrategy=", ""),
    (r"(\w)=", r"\1 "),
)


def format_table(
    columns: Sequence[Column],
    lines: Sequence[Sequence[str]],
    width: int,
    elsewhere_text: str = "a wider terminal, --json",
) -> str:
    """Format the table in `width` terminal columns.

    Columns that do not fit are named in a line, with `elsewhere_text` for where to find them.

    Columns of rank 0 are always there. Those of rank 1 are, where they leave room for a short label; others follow by
    their ranks. The first column holds the labels.
    """
    widths = _measure_widths(columns, lines)
    shown_indices, label = _choose_columns(columns, widths, width)
    names = [line[0] for line in lines]
    short = _shorten_names(names, label)
    widths[0] = max(len(text) for text in (columns[0].heading, *short))
    table = [
        _pad_cells([column.heading for column in columns], widths, columns, shown_indices),
        (" " * _COLUMN_GAP).join("-" * widths[i] for i in shown_indices),
        *(
            _pad_cells([name, *line[1:]], widths, columns, shown_indices)
            for name, line in zip(short, lines, strict=True)
        ),
    ]
    pairs = dict(zip(names, short, strict=True))
    shortened_texts = [
        f"{short_name} is {name}" for name, short_name in pairs.items() if short_name not in (name, _abbreviate(name))
    ]
    dropped_headings = [column.heading for i, column in enumerate(columns) if i not in shown_indices]
    notes = [f"Shortened: {'; '.join(shortened_texts)}."] if shortened_texts else []
    if dropped_headings:
        notes.append(f"Not shown in {width} columns ({elsewhere_text}): {', '.join(dropped_headings)}.")
    return "\n\n".join(["\n".join(table), *([wrap_sentences(notes, width)] if notes else [])])


def wrap_sentences(sentences: Sequence[str], width: int) -> str:
    """Wrap sentences, each at the start of a line, between words only."""
    return "\n".join(
        line
        for sentence in sentences
        for line in textwrap.wrap(sentence, max(width, 40), break_long_words=False, break_on_hyphens=False) or [""]
    )


def _choose_columns(columns: Sequence[Column], widths: Sequence[int], width: int) -> tuple[list[int], int]:
    """Choose the columns to show and the width of labels."""
    order = sorted(range(1, len(columns)), key=lambda i: columns[i].drop_rank)
    shown_indices = {0, *(i for i in order if columns[i].drop_rank == 0)}

    def count_used_width() -> int:
        return sum(widths[i] + _COLUMN_GAP for i in shown_indices if i)

    for i in order:
        if (
            columns[i].drop_rank == 1
            and count_used_width() + widths[i] + _COLUMN_GAP + min(widths[0], _MIN_LABEL_WIDTH) <= width
        ):
            shown_indices.add(i)
    fits_completely = sum(widths) + _COLUMN_GAP * (len(widths) - 1) <= width
    max_label_width = widths[0] if fits_completely else min(widths[0], _MAX_LABEL_WIDTH)
    label_width = min(max_label_width, max(width - count_used_width(), _MIN_LABEL_WIDTH))
    for i in order:
        if i not in shown_indices:
            if label_width + count_used_width() + widths[i] + _COLUMN_GAP > width:
                break
            shown_indices.add(i)
    return sorted(shown_indices), label_width


def _shorten_names(names: Sequence[str], width: int) -> list[str]:
    """Shorten names to `width` columns but leave them distinct; return them unchanged if all fit.

    The mark at the end of a name stays.
    """
    if all(len(name) <= width for name in names):
        return list(names)
    short_by_name: dict[str, str] = {}
    for name in dict.fromkeys(names):
        mark_suffix = f" {NO_EVICTION_MARK}" if name.endswith(f" {NO_EVICTION_MARK}") else ""
        full_name = _abbreviate(name.removesuffix(mark_suffix))
        short = full_name if len(full_name + mark_suffix) <= width else full_name[: width - 2 - len(mark_suffix)] + ".."
        number = 1
        while short + mark_suffix in short_by_name.values():
            number += 1
            mark = f"..{number}"
            short = full_name[: width - len(mark) - len(mark_suffix)] + mark
        short_by_name[name] = short + mark_suffix
    return [short_by_name[name] for name in names]


def _abbreviate(name: str) -> str:
    for pattern, text in _ABBREVIATIONS:
        name = re.sub(pattern, text, name)
    return name


def _measure_widths(columns: Sequence[Column], lines: Sequence[Sequence[str]]) -> list[int]:
    return [max([len(column.heading), *(len(line[i]) for line in lines)]) for i, column in enumerate(columns)]


def _pad_cells(
    line: Sequence[str], widths: Sequence[int], columns: Sequence[Column], shown_indices: Sequence[int]
) -> str:
    cells = [
        f"{line[i]:<{widths[i]}}" if columns[i].is_left_aligned else f"{line[i]:>{widths[i]}}" for i in shown_indices
    ]
    return (" " * _COLUMN_GAP).join(cells).rstrip()


PIVOT_TITLE = (
    "Perplexity by size; best: the lowest of the line, - for a tie (the intervals above say how sure that is)."
)
_NO_EVICTION_NOTE = (
    f" Numbers marked {NO_EVICTION_MARK} are of policies that evicted nothing, which are never the best."
)

_PivotKey = tuple[int | float, float | None]


def format_pivot_title(rows: Sequence[ResultRow]) -> str:
    """Return what stands above the table of these rows."""
    return PIVOT_TITLE + (_NO_EVICTION_NOTE if any(row.has_no_eviction for row in rows) else "")


def build_pivot_table(rows: Sequence[ResultRow]) -> tuple[list[Column], list[list[str]]] | None:
    """Build a table with a line for each size and protected share, and a column for each policy.

    Returns None when there are too few rows for a comparison. The sizes are budgets, or keep ratios if there are no
    budgets. Lines distinguish protected shares only where these differ; a policy without one has the same number in all
    lines of its size. Sizes at which a single policy ran have no line.
    """
    rows = [row for row in select_policy_rows(rows) if _get_row_size(row) is not None]
    shares = {_get_recent_share(row) for row in rows} - {None}
    series = group_into_series(rows, ignored_options=("recent_ratio",) if len(shares) > 1 else ())
    size_keys = {(_get_row_size(row) or 0, _get_recent_share(row) if len(shares) > 1 else None) for row in rows}
    sizes_with_share = {size for size, share in size_keys if share is not None}
    keys = sorted(
        (key for key in size_keys if key[1] is not None or key[0] not in sizes_with_share), key=_make_sort_key
    )
    keys = [key for key in keys if sum(_find_pivot_row(entry, key) is not None for entry in series) > 1]
    if len(keys) < 2:
        return None
    headings = ["budget", *(["recent"] if len(shares) > 1 else []), *(entry.name for entry in series), "best"]
    last_index = len(headings) - 1
    columns = [
        Column(heading, _no_pivot_text, 0 if i in (0, last_index) else i, is_left_aligned=i == last_index)
        for i, heading in enumerate(headings)
    ]
    return columns, [_build_pivot_line(key, series, len(shares) > 1) for key in keys]


def _build_pivot_line(key: _PivotKey, series: Sequence[RowSeries], with_share: bool) -> list[str]:
    series_rows = [_find_pivot_row(entry, key) for entry in series]
    size, share = key
    size_text = f"{size:,}" if isinstance(size, int) else f"{100 * size:g} %"
    leading_cells = [size_text, *([ABSENT_TEXT if share is None else f"{share:g}"] if with_share else [])]
    texts = [ABSENT_TEXT if row is None else add_no_eviction_mark(f"{row.perplexity:.2f}", row) for row in series_rows]
    return [*leading_cells, *texts, _find_best(series_rows, texts, series)]


def _find_best(series_rows: Sequence[ResultRow | None], texts: Sequence[str], series: Sequence[RowSeries]) -> str:
    """Return the policy with the lowest perplexity among those that evicted tokens.

    Returns the absent mark if the table shows another one with the same number.
    """
    candidates = [
        (row.perplexity, series_index)
        for series_index, row in enumerate(series_rows)
        if row is not None and not row.has_no_eviction
    ]
    numbers = [(value, series_index) for value, series_index in candidates if value is not None]
    if not numbers:
        return ABSENT_TEXT
    series_index = min(numbers)[1]
    return series[series_index].name if texts.count(texts[series_index]) == 1 else ABSENT_TEXT


def _find_pivot_row(entry: RowSeries, key: _PivotKey) -> ResultRow | None:
    for row in entry.rows:
        if _get_row_size(row) == key[0] and (key[1] is None or _get_recent_share(row) in (None, key[1])):
            return row
    return None


def _get_row_size(row: ResultRow) -> int | float | None:
    return row.keep_ratio if row.budget is None else row.budget


def _get_recent_share(row: ResultRow) -> float | None:
    value = row.options.get("recent_ratio")
    return float(value) if is_number(value) else None


def _make_sort_key(key: _PivotKey) -> tuple[bool, float, float]:
    return isinstance(key[0], int), key[0], -1.0 if key[1] is None else key[1]


def _no_pivot_text(row: ResultRow, full: ResultRow | None) -> None:
    """Return no text: pivot tables have texts of their own."""


H2O_TITLE = "The H2O planner by layer, under the engine's names (docs/h2o.md):"

_H2O_COLUMNS: tuple[tuple[str, Callable[[PlannerLayerStats], str], int], ...] = (
    ("layer", lambda stats: f"{stats.layer}", 0),
    ("kept of seen", lambda stats: f"{stats.tokens_kept:,} of {stats.tokens_seen:,}", 0),
    ("lossy", lambda stats: f"{stats.lossy_ratio:.3f}", 0),
    ("h2o_lossy_ratio", lambda stats: f"{stats.h2o_lossy_ratio:.3f}", 1),
    ("h2o_keep_ratio", lambda stats: f"{stats.h2o_keep_ratio:.3f}", 2),
    ("h2o_total_evict_tokens", lambda stats: f"{stats.h2o_total_evict_tokens:,}", 3),
    ("plans", lambda stats: f"{stats.triggers:,}", 4),
    ("h2o_evict_us", lambda stats: f"{stats.h2o_evict_us:,}", 5),
    ("h2o_target_keep_effective", lambda stats: f"{stats.h2o_target_keep_effective:.3f}", 6),
    ("h2o_floor_keep_by_recent_sink", lambda stats: f"{stats.h2o_floor_keep_by_recent_sink:.3f}", 7),
    ("h2o_block_quantized_keep", lambda stats: f"{stats.h2o_block_quantized_keep:.3f}", 8),
)


def build_h2o_table(stats_by_label: Sequence[tuple[str, H2OStats]]) -> tuple[list[Column], list[list[str]]] | None:
    """Return columns and lines for labelled runs; None without runs.

    The column `lossy` is that of the run: tokens seen over tokens kept.
    """
    if not stats_by_label:
        return None
    lines = [
        [to_single_line(label), *(text(layer) for _, text, _ in _H2O_COLUMNS)]
        for label, stats in stats_by_label
        for layer in stats.layers
    ]
    columns = [Column("policy", _no_h2o_text, 0, is_left_aligned=True)]
    columns += [Column(heading, _no_h2o_text, rank) for heading, _, rank in _H2O_COLUMNS]
    if len(stats_by_label) == 1:
        return columns[1:], [line[1:] for line in lines]
    return columns, lines


def collect_h2o_stats(rows: Sequence[ResultRow]) -> list[tuple[str, H2OStats]]:
    """Return the statistics of rows in which the engine's planner evicted tokens, with their labels."""
    return [(row.label, row.h2o) for row in rows if row.h2o is not None]


def _no_h2o_text(row: ResultRow, full: ResultRow | None) -> None:
    return None


_RUNTIME_BYTES_PER_MIB = float(1 << 20)

_RUNTIME_COLUMNS: tuple[tuple[str, Callable[[RuntimeStats], str], int], ...] = (
    ("mode", lambda stats: stats.mode, 0),
    ("lossy", lambda stats: _format_ratio(stats.lossy_ratio), 0),
    ("lossless", lambda stats: _format_ratio(stats.lossless_ratio), 0),
    ("total", lambda stats: _format_ratio(stats.total_ratio), 0),
    ("encoded ratio", lambda stats: _format_ratio(stats.encoded_ratio), 1),
    ("held (MiB)", lambda stats: f"{stats.held_bytes / _RUNTIME_BYTES_PER_MIB:.3f}", 2),
    ("blocks", lambda stats: f"{sum(layer.blocks for layer in stats.layers):,}", 3),
    ("encode (ms)", lambda stats: f"{stats.h2o_lossless_compress_us / 1e3:.1f}", 4),
    ("decode (ms)", lambda stats: f"{stats.h2o_lossless_decompress_us / 1e3:.1f}", 5),
    ("fallbacks", lambda stats: f"{stats.h2o_lossless_fallback_count:,}", 6),
)


RUNTIME_COLUMNS_NOTE = (
    "Of the runtime: lossy: bytes of all tokens over those that the policy left; lossless: those over held, the bytes "
    "that hold them at the end, hot tokens and room to grow included; encoded ratio: raw over compressed bytes of what "
    "was encoded; encode, decode: sums of the run."
)


def format_runtime_title(texts: int = 1) -> str:
    """Format the title above the table of runs over this many texts."""
    scope_text = "of the same runs" if texts < 2 else f"sums over {texts:,} texts"
    return f"The lossless runtime around the cache, {scope_text} (docs/runtime.md):"


def build_runtime_table(
    stats_by_label: Sequence[tuple[str, RuntimeStats]],
) -> tuple[list[Column], list[list[str]]] | None:
    """Return columns and lines for labelled runs; None without runs."""
    if not stats_by_label:
        return None
    columns = [Column("policy", _no_runtime_text, 0, is_left_aligned=True)]
    columns += [
        Column(heading, _no_runtime_text, rank, is_left_aligned=heading == "mode")
        for heading, _, rank in _RUNTIME_COLUMNS
    ]
    return columns, [
        [to_single_line(label), *(text(stats) for _, text, _ in _RUNTIME_COLUMNS)] for label, stats in stats_by_label
    ]


def collect_runtime_stats(rows: Sequence[ResultRow]) -> list[tuple[str, RuntimeStats]]:
    """Return the statistics of rows whose model ran with the lossless runtime, with their labels."""
    return [(row.label, row.runtime) for row in rows if row.runtime is not None]


def _format_ratio(value: float | None) -> str:
    return ABSENT_TEXT if value is None else f"{value:.3f}"


def _no_runtime_text(row: ResultRow, full: ResultRow | None) -> None:
    return None


_ELSEWHERE_TEXT = "a wider terminal, -v, --csv, --json"
"""Where everything is that a table of an evaluation leaves out in a narrow terminal."""

PROJECT_NAMES = {"E1": "l2_compress / KnormPress", "E2": "StreamingLLM + H2O"}
"""Whose definitions the table of a preset follows, by `ProjectStats.evaluation`."""


def format_markdown(results: EvaluationResultsProtocol) -> str:
    """Format Markdown: the table, the table by projects' definitions if any, and notes on the measurement."""
    parts = [_format_markdown_table(*build_table(results, COLUMNS))]
    project = build_project_table(results.rows)
    if project:
        parts += [format_project_title(results.rows), _format_markdown_table(*project)]
    h2o = build_h2o_table(collect_h2o_stats(results.rows))
    if h2o:
        parts += [H2O_TITLE, _format_markdown_table(*h2o)]
    pivot = build_pivot_table(results.rows)
    if pivot:
        parts += [format_pivot_title(results.rows), _format_markdown_table(*pivot)]
    runtime = build_runtime_table(collect_runtime_stats(results.rows))
    if runtime:
        parts += [format_runtime_title(len(results.documents)), _format_markdown_table(*runtime)]
    parts.append("\n".join(build_notes(results)))
    return escape_markdown("\n\n".join(parts)) + "\n"


def format_terminal(results: EvaluationResultsProtocol, width: int) -> str:
    """Format the tables for a terminal of `width` columns: labels are shortened, omitted columns named below."""
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
        parts += [
            wrap_sentences([format_pivot_title(results.rows)], width),
            format_table(*pivot, width, _ELSEWHERE_TEXT),
        ]
    runtime = build_runtime_table(collect_runtime_stats(results.rows))
    if runtime:
        parts += [
            wrap_sentences([format_runtime_title(len(results.documents))], width),
            format_table(*runtime, width, _ELSEWHERE_TEXT),
        ]
    return "\n\n".join([*parts, wrap_sentences(build_notes(results), width)]) + "\n"


def format_h2o_text(stats: H2OStats, width: int) -> str:
    """Format the figures of the engine's planner in one run for a terminal of `width` columns."""
    table = build_h2o_table([("", stats)])
    return wrap_sentences([H2O_TITLE], width) + "\n\n" + format_table(*table, width) if table else ""


def format_runtime_text(stats_by_label: Sequence[tuple[str, RuntimeStats]], width: int) -> str:
    """Format the figures of the lossless runtime in labelled runs for a terminal of `width` columns."""
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
    """Build notes on the data and the setup of the measurement, one or two sentences a line."""
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
    """Yield explanations of the columns that the table has."""
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
    """Format CSV with every scalar: a line for each row, followed by one for each of its documents.

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


_MAX_LATEX_COLUMNS = 9
"""Columns of a table next to its first one: more are wider than a page, and are in further tables."""

_LATEX_ESCAPES = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"{\char34}",
    "`": r"{\char96}",
    **{letter: f"\\{letter}" for letter in "&%$#_"},
}


def format_latex(results: EvaluationResultsProtocol) -> str:
    """Format the tables of `kvmnn.reports.tables.format_markdown` in LaTeX, with notes on the measurement.

    It ends with a newline. A table of many columns becomes several, each with the policies in its first column.
    """
    rows = results.rows
    parts = [*_iter_latex_tables("", build_table(results, COLUMNS))]
    parts += _iter_latex_tables(format_project_title(rows), build_project_table(rows))
    parts += _iter_latex_tables(H2O_TITLE, build_h2o_table(collect_h2o_stats(rows)))
    parts += _iter_latex_tables(format_pivot_title(rows), build_pivot_table(rows))
    parts += _iter_latex_tables(
        format_runtime_title(len(results.documents)), build_runtime_table(collect_runtime_stats(rows))
    )
    parts.append("\n".join(f"{escape_latex(note)}\\par" for note in build_notes(results)))
    return "\n\n".join(parts) + "\n"


def escape_latex(text: str) -> str:
    """Return a text as LaTeX prints it in one line; a command is never made of it."""
    return re.sub(".", lambda letter: _LATEX_ESCAPES.get(letter[0], letter[0]), join_lines(text))


def _iter_latex_tables(title: str, table: tuple[Sequence[Column], Sequence[Sequence[str]]] | None) -> Iterator[str]:
    if table is None:
        return
    if title:
        yield f"{escape_latex(title)}\\par"
    columns, lines = table
    order = sorted(range(1, len(columns)), key=lambda column_index: columns[column_index].drop_rank)
    for begin in range(0, max(len(order), 1), _MAX_LATEX_COLUMNS):
        column_indices = [0, *sorted(order[begin : begin + _MAX_LATEX_COLUMNS])]
        alignment = "".join("l" if columns[column_index].is_left_aligned else "r" for column_index in column_indices)
        rows = [_format_latex_row(line[column_index] for column_index in column_indices) for line in lines]
        heading = _format_latex_row(columns[column_index].heading for column_index in column_indices)
        yield "\n".join(
            [
                f"\\begin{{tabular}}{{{alignment}}}",
                "\\hline",
                heading,
                "\\hline",
                *rows,
                "\\hline",
                "\\end{tabular}\\par",
            ]
        )


def _format_latex_row(cells: Iterable[str]) -> str:
    """Format one line; braces prevent ``\\\\`` of the previous line from reading ``*`` or ``[`` as its argument."""
    return "{}" + " & ".join(escape_latex(cell) for cell in cells) + r" \\"


_FormatName = TypeVar("_FormatName", bound=str)


def choose_format(
    path: str | os.PathLike[str], formats: Mapping[str, _FormatName], default: _FormatName
) -> _FormatName:
    """Return the form that the suffix of a name stands for."""
    suffix = PurePath(path).suffix.lower()
    if not suffix:
        return default
    if suffix not in formats:
        *other_suffixes, last_suffix = formats
        raise OptionError(
            f"{os.fspath(path)}: results are not written as {suffix}: expected a name that ends in "
            f"{', '.join(other_suffixes)} or {last_suffix}"
        )
    return formats[suffix]
