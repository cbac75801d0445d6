"""Results of an evaluation as text: a table that fits a terminal, Markdown, CSV, and LaTeX without extra packages.

A value that was not measured is ``-``; a column without any value is left out.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter
from pathlib import PurePath
from typing import TypeVar

from .._util.text import escape_markdown, pluralize
from ..errors import OptionError
from ..files.result_rows import iter_scalars
from ..policies.h2o.planner import H2OStats
from .records import (
    DivergenceStats,
    EvaluationResultsProtocol,
    FullCacheDifference,
    ModelInfo,
    ProjectStats,
    Refusal,
    ResultRow,
    RuntimeStats,
    find_full_row,
)
from .series import (
    RowSeries,
    group_into_series,
    has_equal_bytes,
    is_number,
    select_best_rows,
    select_policy_rows,
    to_float_or_nan,
)
from .table import (
    ABSENT_TEXT,
    NO_EVICTION_MARK,
    PARTLY_EVICTED_MARK,
    Column,
    Table,
    escape_latex,
    format_csv_lines,
    to_single_line,
    wrap_sentences,
)

_RowAndFull = tuple[ResultRow, ResultRow | None]
"""A row next to that of the full cache."""

_BYTES_PER_MIB = float(1 << 20)


def _make_number_column(
    heading: str, get: Callable[[ResultRow], float | None], format_spec: str, drop_rank: int, scale: float = 1.0
) -> Column:
    def format_number(pair: _RowAndFull) -> str | None:
        value = get(pair[0])
        return None if value is None else format(value * scale if scale != 1.0 else value, format_spec)

    return Column(heading, format_number, drop_rank)


def _make_change_column(heading: str, get: Callable[[ResultRow], float | None], drop_rank: int) -> Column:
    """Make a column of the change relative to the full cache, in per cent."""

    def format_change(pair: _RowAndFull) -> str | None:
        row, full = pair
        value, full_value = get(row), None if full is None or row.is_full else get(full)
        return None if value is None or not full_value else f"{100 * (value / full_value - 1):+.2f}"

    return Column(heading, format_change, drop_rank)


def _make_difference_column(
    heading: str, get: Callable[[FullCacheDifference], tuple[float | None, float | None, float | None]], drop_rank: int
) -> Column:
    def format_difference(pair: _RowAndFull) -> str | None:
        mean, low, high = (None, None, None) if pair[0].versus_full is None else get(pair[0].versus_full)
        if mean is None:
            return None
        return f"{mean:+.4f}" + ("" if low is None or high is None else f" [{low:+.4f}, {high:+.4f}]")

    return Column(heading, format_difference, drop_rank)


def _make_divergence_column(
    heading: str, format_divergence: Callable[[DivergenceStats], str | None], drop_rank: int
) -> Column:
    def format_cell(pair: _RowAndFull) -> str | None:
        return None if pair[0].cut_divergence is None else format_divergence(pair[0].cut_divergence)

    return Column(heading, format_cell, drop_rank)


def _format_divergence_interval(divergence: DivergenceStats) -> str | None:
    low, high = divergence.kl_low, divergence.kl_high
    return None if low is None or high is None else f"[{low:.5f}, {high:.5f}]"


def _format_kind(pair: _RowAndFull) -> str | None:
    """Format whether the cache is that of the model; a policy or codec that did nothing was not tried at all."""
    return pair[0].kind


def _format_budget(pair: _RowAndFull) -> str | None:
    row = pair[0]
    scope = " (prompt)" if row.prompt_only else ""
    if row.budget is not None:
        return f"{row.budget:,}{scope}"
    return None if row.keep_ratio is None else f"{100 * row.keep_ratio:g} %{scope}"


def _format_kept_tokens(pair: _RowAndFull) -> str | None:
    return format_min_max(pair[0].tokens_kept) if pair[0].tokens_kept else None


def _format_policy_share(pair: _RowAndFull) -> str | None:
    policy, model = pair[0].policy_seconds, pair[0].model_seconds
    return None if policy is None or not model else f"{100 * policy / model:.1f}"


def _format_attention(pair: _RowAndFull) -> str | None:
    """Format the attention time; the absent mark if only steps were timed, which a note explains."""
    if pair[0].attention_seconds is None:
        return None if pair[0].tpot_seconds is None else ABSENT_TEXT
    return f"{pair[0].attention_seconds * 1e3:.3f}"


def add_no_eviction_mark(text: str, row: ResultRow) -> str:
    """Return a text about a row with the mark of those that evicted or quantised nothing, in all texts or in some."""
    if row.is_untried:
        return f"{text} {NO_EVICTION_MARK}"
    return f"{text} {PARTLY_EVICTED_MARK}" if row.num_uncut_documents else text


COLUMNS = (
    Column("policy", lambda pair: add_no_eviction_mark(to_single_line(pair[0].label), pair[0]), is_left_aligned=True),
    Column("kind", _format_kind, 2, is_left_aligned=True),
    Column("budget (tokens)", _format_budget, 17),
    _make_number_column("PPL", lambda row: row.perplexity, ".4f", 0),
    _make_change_column("PPL change (%)", lambda row: row.perplexity, 6),
    _make_number_column("accuracy (%)", lambda row: row.accuracy, ".2f", 5, 100),
    _make_change_column("accuracy change (%)", lambda row: row.accuracy, 13),
    _make_number_column("bits/byte", lambda row: row.bits_per_byte, ".4f", 15),
    _make_number_column("deep PPL", lambda row: None if row.deep is None else row.deep.perplexity, ".4f", 10),
    _make_number_column(
        "deep accuracy (%)", lambda row: None if row.deep is None else row.deep.accuracy, ".2f", 19, 100
    ),
    _make_difference_column("dNLL (nats) [95 %]", lambda versus: (versus.nll, versus.low, versus.high), 1),
    _make_difference_column(
        "deep dNLL (nats) [95 %]", lambda versus: (versus.deep_nll, versus.deep_low, versus.deep_high), 18
    ),
    _make_divergence_column("KL after cut (nats)", lambda divergence: f"{divergence.kl:.5f}", 1),
    _make_divergence_column("KL after cut [95 %]", _format_divergence_interval, 7),
    _make_divergence_column("p99 after cut (nats)", lambda divergence: f"{divergence.kl_p99:.4f}", 6),
    _make_divergence_column("same top-1 after cut (%)", lambda divergence: f"{100 * divergence.agreement:.2f}", 4),
    _make_divergence_column("scored after cut", lambda divergence: f"{divergence.tokens:,}", 3),
    Column("KL of all (nats)", lambda pair: None if pair[0].divergence is None else f"{pair[0].divergence.kl:.5f}", 18),
    _make_number_column("tokens scored", lambda row: row.tokens, ",d", 22),
    _make_number_column("TTFT (ms)", lambda row: row.ttft_seconds, ".2f", 14, 1e3),
    _make_number_column("TPOT (ms)", lambda row: row.tpot_seconds, ".3f", 8, 1e3),
    Column("attention (ms)", _format_attention, 15),
    _make_number_column("tokens/s", lambda row: row.tokens_per_second, ",.0f", 11),
    Column("policy/model time (%)", _format_policy_share, 9),
    Column("tokens kept", _format_kept_tokens, 12),
    # of a codec the memory that is measured is that of its dequantised numbers, which a decoder need not hold
    _make_number_column(
        "cache mean (MiB)",
        lambda row: row.cache_bytes_mean if row.codec is None else None,
        ".3f",
        3,
        1 / _BYTES_PER_MIB,
    ),
    _make_number_column(
        "cache peak (MiB)",
        lambda row: row.cache_bytes_peak if row.codec is None else None,
        ".3f",
        7,
        1 / _BYTES_PER_MIB,
    ),
    _make_number_column("process peak (MiB)", lambda row: row.process_peak_bytes, ".0f", 21, 1 / _BYTES_PER_MIB),
    _make_number_column("bytes/token", lambda row: row.bytes_per_token, ",.0f", 2),
    _make_number_column("bits/element", lambda row: row.quantized_bits, ".2f", 7),
    _make_number_column("LOSSY ratio", lambda row: row.lossy_ratio, ".3f", 1),
    _make_number_column("LOSSLESS ratio", lambda row: row.lossless_ratio, ".4f", 16),
    _make_number_column("product", lambda row: row.ratio, ".3f", 4),
)


def build_table(results: EvaluationResultsProtocol) -> Table:
    """Build the table of all rows, with the columns in which something was measured."""
    full = find_full_row(results.rows)
    pairs = [(row, full) for row in results.rows]
    columns = [
        column
        for i, column in enumerate(COLUMNS)
        if i == 0 or any(column.format_cell(pair) is not None for pair in pairs)
    ]
    if any(row.unequal_layers for row in results.rows):  # then the budget does not say what is held
        columns = [
            replace(column, drop_rank=1) if column.format_cell is _format_kept_tokens else column for column in columns
        ]
    return Table.from_items("", columns, pairs)


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


def build_project_table(rows: Sequence[ResultRow]) -> Table | None:
    """Build the table of measurements by projects' own definitions: known quantities first, others by key."""
    project_rows = [(row, row.project_stats) for row in rows if row.project_stats is not None]
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
    columns = [
        Column(to_single_line(heading), itemgetter(i), i // 3, is_left_aligned=i < 2)
        for i, heading in enumerate(headings)
    ]
    names = dict.fromkeys(PROJECT_NAMES[numbers.evaluation] for _, numbers in project_rows)
    title = f"By the definitions of {' and of '.join(names)} (docs/lm.md says where they differ):"
    return Table.from_items(title, columns, cells)


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


def format_min_max(numbers: Sequence[int]) -> str:
    """Format the minimum and the maximum of numbers."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


PIVOT_TITLE = "Perplexity by size; best: the lowest of the line, - for a tie"
_UNEQUAL_BYTES_NOTE = (
    " Where rows of a line take unequal bytes, each is named that no row of at most its bytes beats, with its bytes a "
    "token."
)
_INTERVALS_NOTE = " (intervals of dNLL say how sure that is)"

_PivotKey = tuple[int | float, float | None, bool]
"""Size, protected share, and whether the size is of a prompt only."""


def build_pivot_table(rows: Sequence[ResultRow]) -> Table | None:
    """Build a table with a line for each size and protected share, and a column for each policy.

    Returns None when there are too few rows for a comparison. The sizes are budgets, or keep ratios if there are no
    budgets. Lines distinguish protected shares only where these differ; a policy without one has the same number in all
    lines of its size. Policies that cut a prompt only have lines of their own: they contain all later tokens. Sizes at
    which a single policy ran have no line.
    """
    has_intervals = any(row.versus_full is not None and row.versus_full.low is not None for row in rows)
    title = f"{PIVOT_TITLE}{_INTERVALS_NOTE if has_intervals else ''}."
    title += _format_untried_note(rows)
    rows = [row for row in select_policy_rows(rows) if _get_row_size(row) is not None]
    shares = {_get_recent_share(row) for row in rows} - {None}
    series = group_into_series(rows, ignored_options=("recent_ratio",) if len(shares) > 1 else ())
    size_keys: set[_PivotKey] = {
        (_get_row_size(row) or 0, _get_recent_share(row) if len(shares) > 1 else None, row.prompt_only) for row in rows
    }
    sizes_with_share = {(size, is_of_prompt) for size, share, is_of_prompt in size_keys if share is not None}
    keys = sorted(
        (key for key in size_keys if key[1] is not None or (key[0], key[2]) not in sizes_with_share),
        key=lambda key: (key[2], isinstance(key[0], int), key[0], -1.0 if key[1] is None else key[1]),
    )
    keys = [key for key in keys if sum(_find_pivot_row(entry, key) is not None for entry in series) > 1]
    if len(keys) < 2:
        return None
    lines = [_build_pivot_line(key, series, len(shares) > 1) for key in keys]
    title += _UNEQUAL_BYTES_NOTE if any("; " in line[-1] for line in lines) else ""
    headings = ["budget", *(["recent"] if len(shares) > 1 else []), *(entry.name for entry in series), "best"]
    last_index = len(headings) - 1
    columns = [
        Column(heading, itemgetter(i), 0 if i in (0, last_index) else i, is_left_aligned=i == last_index)
        for i, heading in enumerate(headings)
    ]
    return Table.from_items(title, columns, lines)


def _format_untried_note(rows: Sequence[ResultRow]) -> str:
    """Format the explanation of marked numbers; empty without any."""
    subjects = [
        *(["of policies that evicted nothing"] if any(row.has_no_eviction for row in rows) else []),
        *(
            ["of codecs that quantised nothing"]
            if any(row.has_idle_codec or row.has_late_codec for row in rows)
            else []
        ),
    ]
    if not subjects:
        return ""
    return f" Numbers marked {NO_EVICTION_MARK} are {' or '.join(subjects)}, which are never the best."


def _build_pivot_line(key: _PivotKey, series: Sequence[RowSeries], with_share: bool) -> list[str]:
    series_rows = [_find_pivot_row(entry, key) for entry in series]
    size, share, is_of_prompt = key
    size_text = f"{size:,}" if isinstance(size, int) else f"{100 * size:g} %"
    size_text += " of the prompt" if is_of_prompt else ""
    leading_cells = [size_text, *([ABSENT_TEXT if share is None else f"{share:g}"] if with_share else [])]
    texts = [ABSENT_TEXT if row is None else add_no_eviction_mark(f"{row.perplexity:.2f}", row) for row in series_rows]
    return [*leading_cells, *texts, _find_best(series_rows, series)]


def _find_best(series_rows: Sequence[ResultRow | None], series: Sequence[RowSeries]) -> str:
    """Return the policies that none of at most their bytes beats, by `select_best_rows`.

    Where the best take equal bytes there is one, or the absent mark for a tie; otherwise each has its bytes a token.
    """
    names = {id(row): entry.name for row, entry in zip(series_rows, series, strict=True)}
    best_rows = select_best_rows([row for row in series_rows if row is not None])
    if not best_rows or (len(best_rows) > 1 and has_equal_bytes(best_rows)):
        return ABSENT_TEXT
    if len(best_rows) == 1:
        return names[id(best_rows[0])]
    return "; ".join(f"{names[id(row)]} ({to_float_or_nan(row.bytes_per_token):,.0f} B)" for row in best_rows)


def _find_pivot_row(entry: RowSeries, key: _PivotKey) -> ResultRow | None:
    for row in entry.rows:
        has_share = key[1] is None or _get_recent_share(row) in (None, key[1])
        if _get_row_size(row) == key[0] and has_share and row.prompt_only == key[2]:
            return row
    return None


def _get_row_size(row: ResultRow) -> int | float | None:
    return row.keep_ratio if row.budget is None else row.budget


def _get_recent_share(row: ResultRow) -> float | None:
    value = row.options.get("recent_ratio")
    return float(value) if is_number(value) else None


H2O_TITLE = "The H2O planner by layer, under the engine's names (docs/h2o.md):"

_H2O_COLUMNS = (
    Column("policy", lambda pair: to_single_line(pair[0]), is_left_aligned=True),
    Column("layer", lambda pair: f"{pair[1].layer}"),
    Column("kept of seen", lambda pair: f"{pair[1].tokens_kept:,} of {pair[1].tokens_seen:,}"),
    Column("lossy", lambda pair: f"{pair[1].lossy_ratio:.3f}"),
    Column("h2o_lossy_ratio", lambda pair: f"{pair[1].h2o_lossy_ratio:.3f}", 1),
    Column("h2o_keep_ratio", lambda pair: f"{pair[1].h2o_keep_ratio:.3f}", 2),
    Column("h2o_total_evict_tokens", lambda pair: f"{pair[1].h2o_total_evict_tokens:,}", 3),
    Column("plans", lambda pair: f"{pair[1].triggers:,}", 4),
    Column("h2o_evict_us", lambda pair: f"{pair[1].h2o_evict_us:,}", 5),
    Column("h2o_target_keep_effective", lambda pair: f"{pair[1].h2o_target_keep_effective:.3f}", 6),
    Column("h2o_floor_keep_by_recent_sink", lambda pair: f"{pair[1].h2o_floor_keep_by_recent_sink:.3f}", 7),
    Column("h2o_block_quantized_keep", lambda pair: f"{pair[1].h2o_block_quantized_keep:.3f}", 8),
)
"""Columns of a label and the statistics of a layer."""


def build_h2o_table(stats_by_label: Sequence[tuple[str, H2OStats]]) -> Table | None:
    """Build the table of labelled runs, which one run alone needs no label for; None without runs.

    The column `lossy` is that of the run: tokens seen over tokens kept.
    """
    if not stats_by_label:
        return None
    columns = _H2O_COLUMNS if len(stats_by_label) > 1 else _H2O_COLUMNS[1:]
    pairs = [(label, layer) for label, stats in stats_by_label for layer in stats.layers]
    return Table.from_items(H2O_TITLE, columns, pairs)


def collect_h2o_stats(rows: Sequence[ResultRow]) -> list[tuple[str, H2OStats]]:
    """Return the statistics of rows in which the engine's planner evicted tokens, with their labels."""
    return [(row.label, row.h2o) for row in rows if row.h2o is not None]


def _make_ratio_column(heading: str, get: Callable[[RuntimeStats], float | None], drop_rank: int = 0) -> Column:
    def format_ratio(pair: tuple[str, RuntimeStats]) -> str | None:
        ratio = get(pair[1])
        return None if ratio is None else f"{ratio:.3f}"

    return Column(heading, format_ratio, drop_rank)


_RUNTIME_COLUMNS = (
    Column("policy", lambda pair: to_single_line(pair[0]), is_left_aligned=True),
    Column("mode", lambda pair: pair[1].mode, is_left_aligned=True),
    _make_ratio_column("lossy", lambda stats: stats.lossy_ratio),
    _make_ratio_column("lossless", lambda stats: stats.lossless_ratio),
    _make_ratio_column("total", lambda stats: stats.total_ratio),
    _make_ratio_column("encoded ratio", lambda stats: stats.encoded_ratio, 1),
    Column("held (MiB)", lambda pair: f"{pair[1].held_bytes / _BYTES_PER_MIB:.3f}", 2),
    Column("blocks", lambda pair: f"{sum(layer.blocks for layer in pair[1].layers):,}", 3),
    Column("encode (ms)", lambda pair: f"{pair[1].h2o_lossless_compress_us / 1e3:.1f}", 4),
    Column("decode (ms)", lambda pair: f"{pair[1].h2o_lossless_decompress_us / 1e3:.1f}", 5),
    Column("fallbacks", lambda pair: f"{pair[1].h2o_lossless_fallback_count:,}", 6),
)
"""Columns of a label and the statistics of its run."""


RUNTIME_COLUMNS_NOTE = (
    "Of the runtime: lossy: bytes of all tokens over those that the policy left; lossless: those over held, the bytes "
    "that hold them at the end, hot tokens and room to grow included (of a LOSSY codec lossless is -, and lossy, "
    "where it encoded, of all tokens over held); encoded ratio: raw over compressed bytes of what was encoded; "
    "encode, decode: sums of the run."
)


def build_runtime_table(stats_by_label: Sequence[tuple[str, RuntimeStats]], num_texts: int = 1) -> Table | None:
    """Build the table of labelled runs over this many texts; None without runs."""
    if not stats_by_label:
        return None
    scope_text = "of the same runs" if num_texts < 2 else f"sums over {num_texts:,} texts"
    title = f"The runtime around the cache, {scope_text} (docs/runtime.md):"
    return Table.from_items(title, _RUNTIME_COLUMNS, stats_by_label)


def collect_runtime_stats(rows: Sequence[ResultRow]) -> list[tuple[str, RuntimeStats]]:
    """Return the statistics of rows whose model ran with the lossless runtime, with their labels."""
    return [(row.label, row.runtime) for row in rows if row.runtime is not None]


_ELSEWHERE_TEXT = "a wider terminal, -v, --csv, --json"
"""Where everything is that a table of an evaluation leaves out in a narrow terminal."""

PROJECT_NAMES = {"E1": "l2_compress / KnormPress", "E2": "StreamingLLM + H2O"}
"""Whose definitions the table of a preset follows, by `ProjectStats.evaluation`."""


def list_tables(results: EvaluationResultsProtocol) -> list[Table]:
    """List the tables of an evaluation, those without lines left out."""
    rows = results.rows
    tables = (
        build_table(results),
        build_project_table(rows),
        build_h2o_table(collect_h2o_stats(rows)),
        build_pivot_table(rows),
        build_runtime_table(collect_runtime_stats(rows), len(results.documents)),
    )
    return [table for table in tables if table is not None]


def format_markdown(results: EvaluationResultsProtocol) -> str:
    """Format Markdown: the table, the table by projects' definitions if any, and notes on the measurement."""
    parts = [text for table in list_tables(results) for text in (table.title, table.to_markdown()) if text]
    return escape_markdown("\n\n".join([*parts, "\n".join(build_notes(results))])) + "\n"


def format_terminal(results: EvaluationResultsProtocol, width: int) -> str:
    """Format the tables for a terminal of `width` columns: labels are shortened, omitted columns named below."""
    parts = [_format_with_title(table, width, _ELSEWHERE_TEXT) for table in list_tables(results)]
    return "\n\n".join([*parts, wrap_sentences(build_notes(results), width)]) + "\n"


def format_latex(results: EvaluationResultsProtocol) -> str:
    """Format the tables of `kvmnn.reports.tables.format_markdown` in LaTeX, with notes on the measurement.

    It ends with a newline. A table of many columns becomes several, each with the policies in its first column.
    """
    parts = [part for table in list_tables(results) for part in table.iter_latex()]
    return "\n\n".join([*parts, "\n".join(f"{escape_latex(note)}\\par" for note in build_notes(results))]) + "\n"


def _format_with_title(table: Table, width: int, *elsewhere_text: str) -> str:
    title = [wrap_sentences([table.title], width)] if table.title else []
    return "\n\n".join([*title, table.to_terminal(width, *elsewhere_text)])


def format_h2o_text(stats: H2OStats, width: int) -> str:
    """Format the figures of the engine's planner in one run for a terminal of `width` columns."""
    table = build_h2o_table([("", stats)])
    return _format_with_title(table, width) if table else ""


def format_runtime_text(stats_by_label: Sequence[tuple[str, RuntimeStats]], width: int) -> str:
    """Format the figures of the lossless runtime in labelled runs for a terminal of `width` columns."""
    table = build_runtime_table(stats_by_label)
    if not table:
        return ""
    return f"{_format_with_title(table, width)}\n\n{wrap_sentences([RUNTIME_COLUMNS_NOTE], width)}"


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
        _join_parts(
            f"Model: {to_single_line(results.model.name)}",
            None if results.model.architecture is None else to_single_line(results.model.architecture),
            None if results.model.weights is None else to_single_line(results.model.weights),
            f"K and V in {results.model.cache_dtype}",
            f"kvmnn {results.kvmnn}",
        ),
    ]
    if any(row.ttft_seconds is not None for row in rows):
        lines.append(f"TTFT and TPOT: medians of {pluralize(settings.repeats, 'run')} after a warm-up.")
    if any(row.attention_seconds is not None for row in rows):
        lines.append("Attention: scores, softmax and values of all layers in a step of one token, profiled apart.")
    lines += _iter_explanations(rows, results.model)
    lines += [to_single_line(note) for note in results.notes]
    lines += [to_single_line(f"Not run: {refusal_text}") for refusal_text in describe_refusals(results.refused)]
    return lines


def describe_refusals(refusals: Sequence[Refusal]) -> list[str]:
    """Describe the configurations that could not run, labels with the same reason on one line."""
    labels: dict[str, list[str]] = {}
    for entry in refusals:
        labels.setdefault(entry.reason, []).append(entry.label)
    return [f"{'; '.join(group_labels)}: {reason}" for reason, group_labels in labels.items()]


def _iter_explanations(rows: Sequence[ResultRow], model: ModelInfo) -> Iterator[str]:
    """Yield explanations of the columns that the table has."""
    num_documents = [
        row.versus_full.documents for row in rows if row.versus_full is not None and row.versus_full.low is not None
    ]
    if num_documents:
        yield (
            "dNLL: difference to the full cache on the same tokens; in brackets its 95 % interval by a paired "
            f"bootstrap over the {num_documents[0]:,} documents."
        )
    if any(row.divergence is not None for row in rows):
        has_interval = any(row.cut_divergence is not None and row.cut_divergence.kl_low is not None for row in rows)
        interval_text = " [95 %]: the interval by a bootstrap over the documents." if has_interval else ""
        yield (
            "KL: divergence of the next-token distribution from that of the full cache, mean over tokens (p99: the "
            "percentile); a lower bound, as words of less than 0.0004 % count together. Same top-1: tokens at which "
            "both find the same word most probable. After cut: over the tokens that were scored with an evicted, "
            "quantised or loaded cache, as many as the column says; KL of all: over all scored tokens, 0 before the "
            f"cut, so that late cuts look better there.{interval_text}"
        )
    if not all(row.is_full for row in rows):
        yield "Change: relative to the full cache."
    if any(row.lossy_ratio is not None for row in rows):
        kinds = sorted({str(row.lossless_dtype) for row in rows if row.lossy_ratio is not None and row.lossless_dtype})
        kind_text = f", K and V as {' and '.join(kinds)}," if kinds else ""
        yield (
            f"Bytes/token: bytes kept{kind_text} over tokens of the text. LOSSY ratio: bytes of the full cache over "
            "bytes kept; LOSSLESS ratio: bytes kept over bytes of their frames, decoded and compared."
        )
        if model.window is not None:
            has_lossy_runtime = any(stats.is_lossy for _, stats in collect_runtime_stats(rows))
            runtime_text = ", but for rows whose runtime rounds, which count all" if has_lossy_runtime else ""
            yield (
                f"{model.windowed_layers} of {pluralize(model.layers, 'layer')} attend to the latest {model.window:,} "
                "tokens alone: of these layers only such tokens count in bytes and ratios, of the full cache as well"
                f"{runtime_text}."
            )
    if any(row.quantized_bits is not None for row in rows):
        yield "Bits/element: of the elements that the codec quantised, scales included."
    if collect_runtime_stats(rows):
        yield f"{RUNTIME_COLUMNS_NOTE} Its bytes are of K and V in {model.cache_dtype}, the model's type."
    if any(row.rounded_first for row in rows):
        kinds = sorted({str(row.lossless_dtype) for row in rows if row.rounded_first})
        yield f"The frames hold {' and '.join(kinds)}: the cache was rounded before, which is LOSSY."


def format_csv(results: EvaluationResultsProtocol) -> str:
    """Format CSV with every scalar: a line for each row, followed by one for each of its documents.

    Columns of nested values are joined by dots (``versus_full.low``, ``tokens_kept.0``). `scope` is "all texts" in the
    line that stands for all documents, whose `document` is empty, and "text" in others. Not measured is empty.
    """
    lines: list[dict[str, object]] = []
    for row in results.rows:
        row_document = row.to_dict()
        documents = row_document.pop("documents")
        lines.append({"document": "", "scope": "all texts", **dict(iter_scalars(row_document))})
        row_columns = {key: row_document[key] for key in ("label", "policy", "budget", "keep_ratio", "preset", "kind")}
        for document in documents:
            name = document.pop("name")
            lines.append({"document": name, "scope": "text", **row_columns, **dict(iter_scalars(document))})
    all_names = dict.fromkeys(["label", "document", "scope", *(key for line in lines for key in line)])
    groups = {name[: dot.start()] for name in all_names for dot in re.finditer(r"\.", name)}
    names = [name for name in all_names if name not in groups]  # a group that one row lacks is no column
    return format_csv_lines([names, *([line.get(name) for name in names] for line in lines)])


def _join_parts(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part) + "."


_FormatName = TypeVar("_FormatName", bound=str)


def choose_format(
    path: str | os.PathLike[str], formats: Mapping[str, _FormatName], default: _FormatName
) -> _FormatName:
    """Return the format for the suffix of a name."""
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
