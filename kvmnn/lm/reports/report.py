"""Results of an evaluation as text: Markdown, CSV, and a table that fits a terminal.

All three take the document that `kvmnn.lm.evaluation` makes. A value that nobody measured is ``-``; a column in which
nobody measured anything is left out.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Row = Mapping[str, Any]
Results = Mapping[str, Any]

ABSENT = "-"
_MIB = float(1 << 20)
_SEED_TITLE = "As the seed defines each quantity (docs/lm.md says where that differs):"


@dataclass(frozen=True)
class _Column:
    """A column: its heading, unit included, and the text of a row, None where nothing was measured.

    `rank` says what a narrow terminal goes without: the highest first, 0 never.
    """

    heading: str
    text: Callable[[Row, Row | None], str | None]
    rank: int
    left: bool = False


def markdown(results: Results) -> str:
    """Markdown: the table, the same as a preset's seed defines it where there is one, and what was measured on what.

    Parameters
    ----------
    results
        ``{"model", "settings", "documents", "rows"}``, rows as `kvmnn.lm.evaluation.evaluation` makes them.

    Returns
    -------
    str
        Ends with a newline.
    """
    parts = [_as_markdown(*_filled(results, _COLUMNS))]
    seeds = _seed_table(results["rows"])
    if seeds:
        parts += [_SEED_TITLE, _as_markdown(*seeds)]
    parts.append("\n".join(notes(results)))
    return "\n\n".join(parts) + "\n"


def terminal(results: Results, width: int) -> str:
    """The tables for a terminal of `width` columns: what does not fit is left out and named below them."""
    parts = [_as_text(*_filled(results, _COLUMNS), width)]
    seeds = _seed_table(results["rows"])
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
            f"{_range(scored)} scored by each row" if scored else None,
            f"a prompt of {_counted(settings['prompt'], 'token')}" if settings.get("prompt") else None,
            f"fed {_counted(settings['chunk'], 'token')} at a time" if settings.get("chunk") else None,
            f"deep: from token {settings['deep_from']:,} on" if settings.get("deep_from") is not None else None,
            f"seed {settings['seed']}" if settings.get("seed") is not None else None,
            _counted(settings["threads"], "thread") if settings.get("threads") else None,
        )
    ]
    name = model.get("label") or model.get("name") or model.get("path")
    if name:
        lines.append(_sentence(f"Model: {_plain(name)}", f"kvmnn {results['kvmnn']}" if "kvmnn" in results else None))
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
    lines += [_plain(note) for note in results.get("notes") or ()]
    lines += [_plain(f"Not run: {entry['label']}: {entry['reason']}") for entry in results.get("refused") or ()]
    return lines


def csv_text(results: Results) -> str:
    """CSV with every scalar: a line for each row, and below it one for each document of that row.

    Columns of nested values are joined by dots (``versus_full.low``, ``tokens_kept.0``). `document` is empty in the
    line that stands for all documents. Not measured is empty.
    """
    lines: list[dict[str, Any]] = []
    for row in results["rows"]:
        lines.append({"document": "", **dict(_scalars({k: v for k, v in row.items() if k != "documents"}))})
        for document in row.get("documents") or ():
            about = {key: row.get(key) for key in ("label", "policy", "budget", "keep_ratio", "preset", "kind")}
            found = dict(_scalars({key: value for key, value in document.items() if key != "name"}))
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
    return _range(row["tokens_kept"]) if row.get("tokens_kept") else None


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
    return _plain(row["label"])


_COLUMNS = (
    _Column("policy", _label, 0, left=True),
    _Column("kind", lambda row, full: row.get("kind"), 1, left=True),
    _Column("budget (tokens)", _budget, 16),
    _Column("PPL", _number("perplexity", ".4f"), 0),
    _Column("PPL change (%)", _change("perplexity"), 3),
    _Column("accuracy (%)", _number("accuracy", ".2f", 100), 2),
    _Column("accuracy change (%)", _change("accuracy"), 12),
    _Column("bits/byte", _number("bits_per_byte", ".4f"), 14),
    _Column("deep PPL", _number("deep.perplexity", ".4f"), 9),
    _Column("deep accuracy (%)", _number("deep.accuracy", ".2f", 100), 18),
    _Column("dNLL (nats) [95 %]", _difference(""), 8),
    _Column("deep dNLL (nats) [95 %]", _difference("deep_"), 17),
    _Column("TTFT (ms)", _number("ttft_seconds", ".2f", 1e3), 13),
    _Column("TPOT (ms)", _number("tpot_seconds", ".3f", 1e3), 6),
    _Column("tokens/s", _number("tokens_per_second", ",.0f"), 10),
    _Column("policy/model time (%)", _policy_share, 7),
    _Column("tokens kept", _kept, 19),
    _Column("cache mean (MiB)", _number("cache_bytes_mean", ".3f", 1 / _MIB), 11),
    _Column("cache peak (MiB)", _number("cache_bytes_peak", ".3f", 1 / _MIB), 4),
    _Column("process peak (MiB)", _number("process_peak_bytes", ".0f", 1 / _MIB), 20),
    _Column("LOSSY ratio", _number("lossy_ratio", ".3f"), 15),
    _Column("LOSSLESS ratio", _number("lossless_ratio", ".4f"), 15),
    _Column("product", _number("ratio", ".3f"), 5),
)


def _filled(results: Results, columns: Sequence[_Column]) -> tuple[list[_Column], list[list[str]]]:
    """Columns in which something was measured, and the text of every row."""
    rows: Sequence[Row] = results["rows"]
    full = next((row for row in rows if row["policy"] == "full"), None)
    texts = [[column.text(row, full) for column in columns] for row in rows]
    used = [i for i in range(len(columns)) if i == 0 or any(line[i] is not None for line in texts)]
    return [columns[i] for i in used], [[_or_absent(line[i]) for i in used] for line in texts]


# -- as the seeds define it -------------------------------------------------------------------------------------------

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


def _seed_table(rows: Sequence[Row]) -> tuple[list[_Column], list[list[str]]] | None:
    """Rows with `as_seed`: known quantities with their units first, others under the names that they have."""
    seeded = [row for row in rows if row.get("as_seed")]
    if not seeded:
        return None
    lines = [dict(_scalars(row["as_seed"])) | _seed_changes(row, seeded) for row in seeded]
    found = dict.fromkeys(key for line in lines for key, value in line.items() if value is not None)
    keys = [key for key in _SEED_HEADINGS if key in found]
    keys += [key for key in found if key not in _SEED_HEADINGS and key not in _IN_FIRST_COLUMNS]
    headings = ["policy", "preset", *(_SEED_HEADINGS[key][0] if key in _SEED_HEADINGS else key for key in keys)]
    cells = [
        [
            _plain(line.get("label") or row["label"]),
            _plain(row.get("preset") or ABSENT),
            *(_seed_text(key, line.get(key)) for key in keys),
        ]
        for row, line in zip(seeded, lines, strict=True)
    ]
    return [_Column(_plain(heading), _label, i // 3, left=i < 2) for i, heading in enumerate(headings)], cells


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
    return _plain(value)


# -- text -------------------------------------------------------------------------------------------------------------


def _as_markdown(columns: Sequence[_Column], lines: Sequence[Sequence[str]]) -> str:
    rules = [("---" if column.left else "---:") for column in columns]
    cells = [[column.heading for column in columns], rules, *lines]
    return "\n".join("| " + " | ".join(text.replace("|", "\\|") for text in line) + " |" for line in cells)


def _as_text(columns: Sequence[_Column], lines: Sequence[Sequence[str]], width: int) -> str:
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


def _widths(columns: Sequence[_Column], lines: Sequence[Sequence[str]]) -> list[int]:
    return [max([len(column.heading), *(len(line[i]) for line in lines)]) for i, column in enumerate(columns)]


def _width(columns: Sequence[_Column], lines: Sequence[Sequence[str]]) -> int:
    return sum(_widths(columns, lines)) + 2 * (len(columns) - 1)


def _padded(line: Sequence[str], widths: Sequence[int], columns: Sequence[_Column]) -> str:
    cells = [f"{text:<{w}}" if c.left else f"{text:>{w}}" for text, w, c in zip(line, widths, columns, strict=True)]
    return "  ".join(cells).rstrip()


def _without(line: Sequence[str], index: int) -> list[str]:
    return [text for i, text in enumerate(line) if i != index]


def _look_up(row: Row, key: str) -> Any:
    value: Any = row
    for part in key.split("."):
        if value is None:
            return None
        value = value.get(part)
    return value


def _scalars(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Leaves of nested mappings and lists, their names joined by dots."""
    for key, entry in value.items():
        name = f"{prefix}{key}"
        if isinstance(entry, (list, tuple)):
            entry = {str(index): element for index, element in enumerate(entry)}
        if isinstance(entry, Mapping):
            yield from _scalars(entry, name + ".")
        else:
            yield name, entry


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    return repr(value) if isinstance(value, float) else str(value)


def _sentence(*parts: str | None) -> str:
    return ", ".join(part for part in parts if part) + "."


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return f"{low:,}" if low == high else f"{low:,} to {high:,}"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}" + ("" if number == 1 else "s")


def _or_absent(text: str | None) -> str:
    return ABSENT if text is None else text


def _plain(text: Any) -> str:
    """One line of text."""
    return " ".join(str(text).split()) or ABSENT
