"""The columns of result tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]


Results = Mapping[str, Any]


ABSENT = "-"


_MIB = float(1 << 20)


@dataclass(frozen=True)
class Column:
    """A column: its heading, unit included, and the text of a row, None where nothing was measured.

    `rank` says what a narrow terminal goes without: the highest first, 0 never.
    """

    heading: str
    text: Callable[[Row, Row | None], str | None]
    rank: int
    left: bool = False


def _number(key: str, form: str, scale: float = 1.0) -> Callable[[Row, Row | None], str | None]:
    def text(row: Row, full: Row | None) -> str | None:
        value = _look_up(row, key)
        return None if value is None else format(value * scale if scale != 1.0 else value, form)

    return text


def _change(key: str) -> Callable[[Row, Row | None], str | None]:
    """Relative to the full cache, in per cent, as the seeds print it."""

    def text(row: Row, full: Row | None) -> str | None:
        here, there = _look_up(row, key), None if full is None or row["policy"] == "full" else _look_up(full, key)
        return None if here is None or not there else f"{100 * (here / there - 1):+.2f}"

    return text


def _budget(row: Row, full: Row | None) -> str | None:
    if row.get("budget") is not None:
        return f"{row['budget']:,}"
    return None if row.get("keep_ratio") is None else f"{100 * row['keep_ratio']:g} %"


def _kept(row: Row, full: Row | None) -> str | None:
    return range_text(row["tokens_kept"]) if row.get("tokens_kept") else None


def _difference(prefix: str) -> Callable[[Row, Row | None], str | None]:
    def text(row: Row, full: Row | None) -> str | None:
        versus = row.get("versus_full") or {}
        mean = versus.get(f"{prefix}nll")
        if mean is None:
            return None
        low, high = versus.get(f"{prefix}low"), versus.get(f"{prefix}high")
        return f"{mean:+.4f}" + ("" if low is None or high is None else f" [{low:+.4f}, {high:+.4f}]")

    return text


def _policy_share(row: Row, full: Row | None) -> str | None:
    policy, model = row.get("policy_seconds"), row.get("model_seconds")
    return None if policy is None or not model else f"{100 * policy / model:.1f}"


def _label(row: Row, full: Row | None) -> str | None:
    return plain(row["label"])


COLUMNS = (
    Column("policy", _label, 0, left=True),
    Column("kind", lambda row, full: row.get("kind"), 1, left=True),
    Column("budget (tokens)", _budget, 16),
    Column("PPL", _number("perplexity", ".4f"), 0),
    Column("PPL change (%)", _change("perplexity"), 3),
    Column("accuracy (%)", _number("accuracy", ".2f", 100), 2),
    Column("accuracy change (%)", _change("accuracy"), 12),
    Column("bits/byte", _number("bits_per_byte", ".4f"), 14),
    Column("deep PPL", _number("deep.perplexity", ".4f"), 9),
    Column("deep accuracy (%)", _number("deep.accuracy", ".2f", 100), 18),
    Column("dNLL (nats) [95 %]", _difference(""), 8),
    Column("deep dNLL (nats) [95 %]", _difference("deep_"), 17),
    Column("TTFT (ms)", _number("ttft_seconds", ".2f", 1e3), 13),
    Column("TPOT (ms)", _number("tpot_seconds", ".3f", 1e3), 6),
    Column("tokens/s", _number("tokens_per_second", ",.0f"), 10),
    Column("policy/model time (%)", _policy_share, 7),
    Column("tokens kept", _kept, 19),
    Column("cache mean (MiB)", _number("cache_bytes_mean", ".3f", 1 / _MIB), 11),
    Column("cache peak (MiB)", _number("cache_bytes_peak", ".3f", 1 / _MIB), 4),
    Column("process peak (MiB)", _number("process_peak_bytes", ".0f", 1 / _MIB), 20),
    Column("LOSSY ratio", _number("lossy_ratio", ".3f"), 15),
    Column("LOSSLESS ratio", _number("lossless_ratio", ".4f"), 15),
    Column("product", _number("ratio", ".3f"), 5),
)


def filled(results: Results, columns: Sequence[Column]) -> tuple[list[Column], list[list[str]]]:
    """Columns in which something was measured, and the text of every row."""
    rows: Sequence[Row] = results["rows"]
    full = next((row for row in rows if row["policy"] == "full"), None)
    texts = [[column.text(row, full) for column in columns] for row in rows]
    used = [i for i in range(len(columns)) if i == 0 or any(line[i] is not None for line in texts)]
    return [columns[i] for i in used], [[_or_absent(line[i]) for i in used] for line in texts]


_SEED_HEADINGS: dict[str, tuple[str, str, float]] = {
    "perplexity": ("PPL", ".4f", 1),
    "perplexity_change": ("PPL change (%)", "+.2f", 100),
    "accuracy": ("accuracy (%)", ".2f", 100),
    "accuracy_change": ("accuracy change (%)", "+.2f", 100),
    "ttft_seconds": ("TTFT (ms)", ".2f", 1e3),
    "tpot_seconds": ("TPOT (ms)", ".3f", 1e3),
    "tokens_per_second": ("tokens/s", ",.0f", 1),
    "final_cache_tokens": ("tokens kept", ",d", 1),
    "scored_tokens": ("tokens scored", ",d", 1),
    "chunk": ("chunk (tokens)", ",d", 1),
    "text_tokens": ("tokens of text", ",d", 1),
    "chunks_left_out": ("chunks left out", ",d", 1),
    "prompt_tokens": ("prompt (tokens)", ",d", 1),
    "new_tokens": ("generated (tokens)", ",d", 1),
}


_IN_FIRST_COLUMNS = ("label", "nll")


def seed_table(rows: Sequence[Row]) -> tuple[list[Column], list[list[str]]] | None:
    """Rows with `as_seed`: known quantities with their units first, others under the names that they have."""
    seeded = [row for row in rows if row.get("as_seed")]
    if not seeded:
        return None
    lines = [dict(scalars(row["as_seed"])) | _seed_changes(row, seeded) for row in seeded]
    found = dict.fromkeys(key for line in lines for key, value in line.items() if value is not None)
    keys = [key for key in _SEED_HEADINGS if key in found]
    keys += [key for key in found if key not in _SEED_HEADINGS and key not in _IN_FIRST_COLUMNS]
    headings = ["policy", "preset", *(_SEED_HEADINGS[key][0] if key in _SEED_HEADINGS else key for key in keys)]
    cells = [
        [
            plain(line.get("label") or row["label"]),
            plain(row.get("preset") or ABSENT),
            *(_seed_text(key, line.get(key)) for key in keys),
        ]
        for row, line in zip(seeded, lines, strict=True)
    ]
    return [Column(plain(heading), _label, i // 3, left=i < 2) for i, heading in enumerate(headings)], cells


def _seed_changes(row: Row, seeded: Sequence[Row]) -> dict[str, float]:
    """Against the full cache of the same preset, which the same seed measured."""
    base = next((other for other in seeded if other["policy"] == "full" and other["preset"] == row["preset"]), None)
    changes = {}
    for key in ("perplexity", "accuracy"):
        here, there = row["as_seed"].get(key), None if base is None or base is row else base["as_seed"].get(key)
        if here is not None and there:
            changes[f"{key}_change"] = here / there - 1
    return changes


def _seed_text(key: str, value: Any) -> str:
    if value is None:
        return ABSENT
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        _, form, scale = _SEED_HEADINGS.get(key, ("", ",d" if isinstance(value, int) else ".6g", 1))
        return format(value if scale == 1 else value * scale, form)
    return plain(value)


def _look_up(row: Row, key: str) -> Any:
    value: Any = row
    for part in key.split("."):
        if value is None:
            return None
        value = value.get(part)
    return value


def scalars(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
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
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _or_absent(text: str | None) -> str:
    return ABSENT if text is None else text


def plain(text: Any) -> str:
    """One line of text."""
    return " ".join(str(text).split()) or ABSENT
