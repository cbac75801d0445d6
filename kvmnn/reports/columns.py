"""The columns of result tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from .results import Results
from .rows import Difference, ProjectNumbers, Row, full_row

Text = Callable[[Row, Row | None], str | None]
"""The text of a row beside that of the full cache; None where nothing was measured."""

ABSENT = "-"
UNCUT_MARK = "*"
"""Of rows whose policy evicted nothing before the last token was scored."""

_MIB = float(1 << 20)


@dataclass(frozen=True)
class Column:
    """A column: its heading, unit included, and the text of a row, None where nothing was measured.

    `rank` says what a narrow terminal goes without: the highest first, 0 never. With 1 labels are shortened for it.
    """

    heading: str
    text: Text
    rank: int
    left: bool = False


def _number(get: Callable[[Row], float | None], form: str, scale: float = 1.0) -> Text:
    def text(row: Row, full: Row | None) -> str | None:
        value = get(row)
        return None if value is None else format(value * scale if scale != 1.0 else value, form)

    return text


def _change(get: Callable[[Row], float | None]) -> Text:
    """Relative to the full cache, in per cent."""

    def text(row: Row, full: Row | None) -> str | None:
        here, there = get(row), None if full is None or row.is_full else get(full)
        return None if here is None or not there else f"{100 * (here / there - 1):+.2f}"

    return text


def _difference(get: Callable[[Difference], tuple[float | None, float | None, float | None]]) -> Text:
    def text(row: Row, full: Row | None) -> str | None:
        mean, low, high = (None, None, None) if row.versus_full is None else get(row.versus_full)
        if mean is None:
            return None
        return f"{mean:+.4f}" + ("" if low is None or high is None else f" [{low:+.4f}, {high:+.4f}]")

    return text


def _budget(row: Row, full: Row | None) -> str | None:
    if row.budget is not None:
        return f"{row.budget:,}"
    return None if row.keep_ratio is None else f"{100 * row.keep_ratio:g} %"


def _kept(row: Row, full: Row | None) -> str | None:
    return range_text(row.tokens_kept) if row.tokens_kept else None


def _policy_share(row: Row, full: Row | None) -> str | None:
    policy, model = row.policy_seconds, row.model_seconds
    return None if policy is None or not model else f"{100 * policy / model:.1f}"


def _attention(row: Row, full: Row | None) -> str | None:
    """Absent in so many words where steps were timed: a note says why."""
    if row.attention_seconds is None:
        return None if row.tpot_seconds is None else ABSENT
    return f"{row.attention_seconds * 1e3:.3f}"


def marked(text: str, row: Row) -> str:
    """Return a text about a row with the mark of those that evicted nothing."""
    return f"{text} {UNCUT_MARK}" if row.is_uncut else text


def _label(row: Row, full: Row | None) -> str | None:
    return marked(plain(row.label), row)


COLUMNS = (
    Column("policy", _label, 0, left=True),
    Column("kind", lambda row, full: row.kind, 2, left=True),
    Column("budget (tokens)", _budget, 17),
    Column("PPL", _number(lambda row: row.perplexity, ".4f"), 0),
    Column("PPL change (%)", _change(lambda row: row.perplexity), 6),
    Column("accuracy (%)", _number(lambda row: row.accuracy, ".2f", 100), 5),
    Column("accuracy change (%)", _change(lambda row: row.accuracy), 13),
    Column("bits/byte", _number(lambda row: row.bits_per_byte, ".4f"), 15),
    Column("deep PPL", _number(lambda row: None if row.deep is None else row.deep.perplexity, ".4f"), 10),
    Column("deep accuracy (%)", _number(lambda row: None if row.deep is None else row.deep.accuracy, ".2f", 100), 19),
    Column("dNLL (nats) [95 %]", _difference(lambda found: (found.nll, found.low, found.high)), 1),
    Column("deep dNLL (nats) [95 %]", _difference(lambda found: (found.deep_nll, found.deep_low, found.deep_high)), 18),
    Column("tokens scored", _number(lambda row: row.tokens, ",d"), 22),
    Column("TTFT (ms)", _number(lambda row: row.ttft_seconds, ".2f", 1e3), 14),
    Column("TPOT (ms)", _number(lambda row: row.tpot_seconds, ".3f", 1e3), 8),
    Column("attention (ms)", _attention, 15),
    Column("tokens/s", _number(lambda row: row.tokens_per_second, ",.0f"), 11),
    Column("policy/model time (%)", _policy_share, 9),
    Column("tokens kept", _kept, 12),
    Column("cache mean (MiB)", _number(lambda row: row.cache_bytes_mean, ".3f", 1 / _MIB), 3),
    Column("cache peak (MiB)", _number(lambda row: row.cache_bytes_peak, ".3f", 1 / _MIB), 7),
    Column("process peak (MiB)", _number(lambda row: row.process_peak_bytes, ".0f", 1 / _MIB), 21),
    Column("LOSSY ratio", _number(lambda row: row.lossy_ratio, ".3f"), 1),
    Column("LOSSLESS ratio", _number(lambda row: row.lossless_ratio, ".4f"), 16),
    Column("product", _number(lambda row: row.ratio, ".3f"), 4),
)


def filled(results: Results, columns: Sequence[Column]) -> tuple[list[Column], list[list[str]]]:
    """Columns in which something was measured, and the text of every row."""
    full = full_row(results.rows)
    if any(row.unequal_layers for row in results.rows):  # then the budget does not say what is held
        columns = [replace(column, rank=1) if column.text is _kept else column for column in columns]
    texts = [[column.text(row, full) for column in columns] for row in results.rows]
    used = [i for i in range(len(columns)) if i == 0 or any(line[i] is not None for line in texts)]
    return [columns[i] for i in used], [[_or_absent(line[i]) for i in used] for line in texts]


_PROJECT_HEADINGS: dict[str, tuple[str, str, float]] = {
    "perplexity": ("PPL", ".4f", 1),
    "perplexity_change": ("PPL change (%)", "+.2f", 100),
    "accuracy": ("accuracy (%)", ".2f", 100),
    "accuracy_change": ("accuracy change (%)", "+.2f", 100),
    "ttft_seconds": ("TTFT (ms)", ".2f", 1e3),
    "tpot_seconds": ("TPOT (ms)", ".3f", 1e3),
    "attention_seconds": ("attention of a layer (ms)", ".4f", 1e3),
    "tokens_per_second": ("tokens/s", ",.0f", 1),
    "process_peak_bytes": ("process peak (MiB)", ".0f", 1 / _MIB),
    "final_cache_tokens": ("tokens kept", ",d", 1),
    "scored_tokens": ("tokens scored", ",d", 1),
    "chunk": ("chunk (tokens)", ",d", 1),
    "text_tokens": ("tokens of text", ",d", 1),
    "chunks_left_out": ("chunks left out", ",d", 1),
    "prompt_tokens": ("prompt (tokens)", ",d", 1),
    "new_tokens": ("generated (tokens)", ",d", 1),
    "repeats": ("warm repeats", ",d", 1),
}


_IN_FIRST_COLUMNS = ("label", "nll")


def project_table(rows: Sequence[Row]) -> tuple[list[Column], list[list[str]]] | None:
    """What was measured by projects' own definitions: known quantities with their units first, others by their keys."""
    found = [(row, row.project) for row in rows if row.project is not None]
    if not found:
        return None
    lines = [numbers.to_dict() | _changes(row, numbers, found) for row, numbers in found]
    known = dict.fromkeys(key for line in lines for key, value in line.items() if value is not None)
    keys = [key for key in _PROJECT_HEADINGS if key in known]
    keys += [key for key in known if key not in _PROJECT_HEADINGS and key not in _IN_FIRST_COLUMNS]
    headings = ["policy", "preset", *(_PROJECT_HEADINGS[key][0] if key in _PROJECT_HEADINGS else key for key in keys)]
    cells = [
        [
            plain(numbers.label or row.label),
            plain(row.preset or ABSENT),
            *(_project_text(key, line.get(key)) for key in keys),
        ]
        for (row, numbers), line in zip(found, lines, strict=True)
    ]
    return [Column(plain(heading), _label, i // 3, left=i < 2) for i, heading in enumerate(headings)], cells


def _changes(row: Row, numbers: ProjectNumbers, found: Sequence[tuple[Row, ProjectNumbers]]) -> dict[str, float]:
    """Against the full cache of the same preset, by the same definition."""
    base = next((other for entry, other in found if entry.is_full and entry.preset == row.preset), None)
    if base is None or base is numbers:
        return {}
    pairs = {
        "perplexity_change": (numbers.perplexity, base.perplexity),
        "accuracy_change": (numbers.accuracy, base.accuracy),
    }
    return {key: here / there - 1 for key, (here, there) in pairs.items() if here is not None and there}


def _project_text(key: str, value: object) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _, form, scale = _PROJECT_HEADINGS.get(key, ("", ",d" if isinstance(value, int) else ".6g", 1))
        return format(value if scale == 1 else value * scale, form)
    return plain(value)


def scalars(value: Mapping[str, object], prefix: str = "") -> Iterator[tuple[str, object]]:
    """Leaves of nested mappings and lists, their names joined by dots."""
    for key, entry in value.items():
        name = f"{prefix}{key}"
        if isinstance(entry, (list, tuple)):
            entry = {str(index): element for index, element in enumerate(entry)}
        if isinstance(entry, Mapping):
            yield from scalars(entry, name + ".")
        else:
            yield name, entry


def range_text(numbers: Sequence[int]) -> str:
    """The least and the greatest of numbers."""
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _or_absent(text: str | None) -> str:
    return ABSENT if text is None else text


def plain(text: object) -> str:
    """One line of text."""
    return " ".join(str(text).split()) or ABSENT
