"""The columns of result tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .results import EvaluationResultsProtocol
from .rows import FullCacheDifference, ProjectStats, ResultRow, find_full_row

CellFormatter = Callable[[ResultRow, ResultRow | None], str | None]
"""The text of a row beside that of the full cache; None where nothing was measured."""

ABSENT_TEXT = "-"
NO_EVICTION_MARK = "*"
"""Of rows whose policy evicted nothing before the last token was scored."""

_BYTES_PER_MIB = float(1 << 20)


@dataclass(frozen=True)
class Column:
    """A column: its heading, unit included, and the text of a row, None where nothing was measured.

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
    """Absent in so many words where steps were timed: a note says why."""
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
    """Columns in which something was measured, and the text of every row."""
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
    """What was measured by projects' own definitions: known quantities with their units first, others by their keys."""
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
    """Against the full cache of the same preset, by the same definition."""
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
    """Leaves of nested mappings and lists, their names joined by dots."""
    for key, entry in value.items():
        name = f"{prefix}{key}"
        if isinstance(entry, (list, tuple)):
            entry = {str(index): element for index, element in enumerate(entry)}
        if isinstance(entry, Mapping):
            yield from iter_scalars(entry, name + ".")
        else:
            yield name, entry


def format_min_max(numbers: Sequence[int]) -> str:
    """The least and the greatest of numbers."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _text_or_absent(text: str | None) -> str:
    return ABSENT_TEXT if text is None else text


def to_single_line(text: object) -> str:
    """One line of text."""
    return " ".join(str(text).split()) or ABSENT_TEXT
