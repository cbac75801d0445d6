"""The data of an evaluation's plots: rows grouped into series, and the quantities on their axes."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import MISSING, field, fields
from typing import Any, TypeGuard

from .._util.dataclass import dataclass
from ..policies.policy import FullCache
from ..policies.registry import MODEL_POLICIES, POLICIES
from .plot_style import make_line_style
from .records import DivergenceStats, DocumentTrace, EvaluationResultsProtocol, ResultRow

_SIZE_OPTIONS = ("budget", "keep_ratio")


@dataclass(frozen=True)
class MeasuredPoint:
    """A measured value `y` at `x` on the axis, with the bounds of its confidence interval, None without one.

    `is_untried`: the policy or the codec of its row did nothing (`ResultRow.is_untried`).
    """

    x: float
    y: float
    low: float | None = None
    high: float | None = None
    is_untried: bool = False


@dataclass
class RowSeries:
    """Rows of one policy that differ in the cache size and in options that depend on it."""

    name: str
    rows: list[ResultRow] = field(default_factory=list)


def select_policy_rows(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return all rows except the full cache's and those without a finite perplexity."""
    return [row for row in rows if not row.is_full and is_number(row.perplexity)]


def select_memory_traces(results: EvaluationResultsProtocol) -> tuple[list[DocumentTrace], str]:
    """Return the traces of the cache's bytes except those of codecs, and a note on what they are."""
    codec_labels = {row.label for row in results.rows if row.codec is not None}
    traces = [trace for trace in results.traces if trace.cache_bytes and trace.label not in codec_labels]
    note = "Bytes after the cut of a step; the cache peak of tables is before it."
    if any(trace.label in codec_labels for trace in results.traces):
        note += (
            " Rows with a codec are left out: their numbers are held dequantized, and take what those of the policy "
            "take."
        )
    return traces, note


MAX_EQUAL_BYTES_RATIO = 1.01
"""Bytes a token up to this ratio count as equal: codecs and policies round differently."""


def select_best_rows(rows: Sequence[ResultRow]) -> list[ResultRow]:
    """Return the rows that no other row of at most their bytes beats, those of the fewest bytes first.

    Rows whose policy or codec did nothing (`ResultRow.is_untried`) are never among them, and beat no other. A row beats
    another by a lower perplexity, or by the same one with fewer bytes a token; perplexities are compared as tables show
    them. Rows without a number of bytes, as in results of older versions, are compared by perplexity alone. Several
    rows of equal bytes are a tie.
    """
    rivals = [row for row in rows if not row.is_untried]
    return sorted(
        (row for row in rivals if not any(_is_beaten_by(row, rival) for rival in rivals)),
        key=lambda row: to_float_or_nan(row.bytes_per_token),
    )


def has_equal_cuts(rows: Sequence[ResultRow]) -> bool:
    """Return whether all rows were scored after a cut over the same tokens: as many of every text."""
    counts = {
        (row.cut_divergence.tokens, *(text.cut_divergence and text.cut_divergence.tokens for text in row.documents))
        for row in rows
        if row.cut_divergence is not None
    }
    return len(counts) < 2


def select_divergences(rows: Sequence[ResultRow]) -> list[DivergenceStats | None]:
    """Return the divergence of each row that may be compared with those of all `rows`: over the same tokens.

    It is that after the cut where `has_equal_cuts`, as that is not diluted by tokens before it; else that of all scored
    tokens. None where a row has none.
    """
    is_after_cut = has_equal_cuts(rows)
    return [row.cut_divergence if is_after_cut else row.divergence for row in rows]


def describe_untried(rows: Sequence[ResultRow]) -> str:
    """Say, as part of a sentence, what the rows that are marked did not do; empty if none is."""
    texts = [
        *(["evicted nothing in these texts"] if any(row.has_no_eviction for row in rows) else []),
        *(["quantised nothing of what was kept"] if any(row.has_idle_codec for row in rows) else []),
        *(["quantised nothing before the last token was scored"] if any(row.has_late_codec for row in rows) else []),
    ]
    return " or ".join(texts)


def has_equal_bytes(rows: Sequence[ResultRow]) -> bool:
    """Return whether rows take equal bytes a token, as far as these are known."""
    sizes = [row.bytes_per_token for row in rows if row.bytes_per_token is not None]
    return not sizes or max(sizes) <= MAX_EQUAL_BYTES_RATIO * min(sizes)


def _is_beaten_by(row: ResultRow, rival: ResultRow) -> bool:
    loss, rival_loss = round(to_float_or_nan(row.perplexity), 2), round(to_float_or_nan(rival.perplexity), 2)
    size, rival_size = row.bytes_per_token, rival.bytes_per_token
    if size is None or rival_size is None:
        return rival_loss < loss
    has_fewer_bytes = rival_size * MAX_EQUAL_BYTES_RATIO < size
    return (rival_loss < loss and rival_size <= MAX_EQUAL_BYTES_RATIO * size) or (
        rival_loss == loss and has_fewer_bytes
    )


def group_into_series(rows: Sequence[ResultRow], ignored_options: Sequence[str] = ()) -> list[RowSeries]:
    """Group rows by policy, and by options that differ between rows of equal policy and size.

    An option that only changes with the budget (such as half of it for recent tokens) does not split a series; nor do
    options in `ignored_options`, which are an axis of the plot.
    """
    series_by_key: dict[tuple[object, ...], RowSeries] = {}
    for row in rows:
        same_policy_rows = [candidate for candidate in rows if candidate.policy == row.policy]
        options = [
            _format_option(name, row, same_policy_rows)
            for name in _find_distinguishing_options(same_policy_rows, ignored_options)
        ]
        name = " ".join(_build_name_parts(row, options))
        key = (row.policy, row.codec, *options)
        series = series_by_key.setdefault(key, RowSeries(name))
        if any(
            _make_budget_key(row, ignored_options) == _make_budget_key(candidate, ignored_options)
            for candidate in series.rows
        ):
            # The options do not say what differs: the label does.
            series = series_by_key.setdefault((*key, row.label), RowSeries(row.label))
        series.rows.append(row)
    return list(series_by_key.values())


def _build_name_parts(row: ResultRow, options: Sequence[str]) -> list[str]:
    """Build the name of a row's series: policy, distinguishing options, codec, and initial cache."""
    start = [] if row.initial_cache is None else [f"from {row.initial_cache}"]
    policy = [] if (start or row.codec) and row.policy == FullCache.name else [row.policy]
    names = [*policy, *(text for text in options if text), *(["(prompt)"] if row.prompt_only else [])]
    spec = _shorten_codec(row.codec or "")
    codec = [] if row.codec is None else ["+", spec] if names else [spec]
    return [*names, *codec, *(["(prompt)"] if row.codes_prompt_only else []), *start]


def _shorten_codec(spec: str) -> str:
    """Shorten the spec of a codec: files without folders, and no ``when=prompt``, which names have as ``(prompt)``."""
    name, _, options = spec.partition(":")
    parts = [part for part in options.split(",") if part and part != "when=prompt"]
    short = [os.path.basename(part.removeprefix("profile=")) if part.startswith("profile=") else part for part in parts]
    return ":".join([name, *([",".join(short)] if short else [])])


def format_prompt_note(rows: Sequence[ResultRow]) -> str:
    """Format the explanation of ``(prompt)`` in names of series; empty if no policy of these rows is marked so."""
    texts = [
        *(["the budget is of the prompt, all later tokens stay"] if any(row.prompt_only for row in rows) else []),
        *(["the codec rounds the prompt, later tokens are fp16"] if any(row.codes_prompt_only for row in rows) else []),
    ]
    return f"(prompt): {'; '.join(texts)}." if texts else ""


class LineStyles:
    """The line styles of a run's policies: each has one colour in all figures.

    Policies that run with several values of a text option (``strategy``, ``form``) get a colour for each; rows that
    differ only in numbers have the same colour, and different dashes and markers.

    Parameters
    ----------
    rows
        All rows of the run, whose order gives the colours.
    """

    def __init__(self, rows: Sequence[ResultRow]) -> None:
        policy_rows = select_policy_rows(rows)
        self._family_numbers: dict[tuple[object, ...], int] = {}
        self._style_by_label: dict[str, tuple[int, int]] = {}
        variants: dict[int, int] = {}
        members: dict[str, int] = {}
        for entry in group_into_series(policy_rows):
            for row in entry.rows:
                members.setdefault(row.label, id(entry))
        style_by_series: dict[int, tuple[int, int]] = {}
        for row in policy_rows:
            family = self._family_numbers.setdefault(_make_family_key(row, policy_rows), len(self._family_numbers))
            if members[row.label] not in style_by_series:
                style_by_series[members[row.label]] = (family, variants.get(family, 0))
                variants[family] = variants.get(family, 0) + 1
            self._style_by_label[row.label] = style_by_series[members[row.label]]

    def get_style(self, label: str, variant: int | None = None) -> dict[str, Any]:
        """Return the style of the row `label`; with `variant`, that variant instead of the row's own."""
        family, own_variant = self._style_by_label.get(label, (len(self._family_numbers), 0))
        return make_line_style(family, own_variant if variant is None else variant)

    def get_family(self, label: str) -> int:
        """Return the number of the colour of the row `label`."""
        return self._style_by_label.get(label, (len(self._family_numbers), 0))[0]


def perplexity(row: ResultRow, x: float) -> MeasuredPoint:
    """Return the perplexity of a row at `x`; the interval is that of the difference to the full cache."""
    value, versus = to_float_or_nan(row.perplexity), row.versus_full
    if versus is None or versus.nll is None or versus.low is None or versus.high is None:
        return MeasuredPoint(x, value, is_untried=row.is_untried)
    low, high = value * math.exp(versus.low - versus.nll), value * math.exp(versus.high - versus.nll)
    return MeasuredPoint(x, value, low, high, row.is_untried)


def accuracy(row: ResultRow, x: float) -> MeasuredPoint:
    """Return the accuracy of a row in per cent at `x`, with the interval of the difference to the full cache."""
    value, versus = 100 * to_float_or_nan(row.accuracy), row.versus_full
    if versus is None or versus.accuracy is None or versus.accuracy_low is None or versus.accuracy_high is None:
        return MeasuredPoint(x, value, is_untried=row.is_untried)
    mean, low, high = versus.accuracy, versus.accuracy_low, versus.accuracy_high
    return MeasuredPoint(x, value, value + 100 * (low - mean), value + 100 * (high - mean), row.is_untried)


def to_float_or_nan(value: float | None) -> float:
    """Return a value, or NaN if nothing was measured."""
    return math.nan if value is None else float(value)


def is_number(value: object) -> TypeGuard[float]:
    """Return whether a value was measured and is finite."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def _find_distinguishing_options(rows: Sequence[ResultRow], ignored_options: Sequence[str]) -> list[str]:
    names = dict.fromkeys(
        key for row in rows for key in _resolve_options(row) if key not in (*_SIZE_OPTIONS, *ignored_options)
    )
    return [name for name in names if _has_differing_option(rows, name)]


def _make_family_key(row: ResultRow, rows: Sequence[ResultRow]) -> tuple[object, ...]:
    """Return the policy and those of its text options that differ between its rows."""
    same_policy_rows = [candidate for candidate in rows if candidate.policy == row.policy]
    values = [_resolve_options(row).get(name) for name in _find_distinguishing_options(same_policy_rows, ())]
    codec = row.codec if row.policy == FullCache.name else None
    return (row.policy, codec, *(value for value in values if isinstance(value, str)))


def _has_differing_option(rows: Sequence[ResultRow], name: str) -> bool:
    """Return whether two rows of the same size differ in the option."""
    values: dict[object, set[str]] = {}
    for row in rows:
        values.setdefault(_make_budget_key(row), set()).add(repr(_resolve_options(row).get(name)))
    return any(len(option_values) > 1 for option_values in values.values())


def _resolve_options(row: ResultRow) -> dict[str, object]:
    """Return the policy's options, with the defaults that a row leaves out."""
    policy = (POLICIES | MODEL_POLICIES).get(row.policy)
    defaults: dict[str, object] = (
        {} if policy is None else {entry.name: entry.default for entry in fields(policy) if entry.repr}
    )
    options: dict[str, object] = {name: value for name, value in defaults.items() if value is not MISSING} | dict(
        row.options
    )
    options["positions"] = "stored positions" if row.positions == "stored" else None
    return {name: list(value) if isinstance(value, tuple) else value for name, value in options.items()}


def _make_budget_key(row: ResultRow, axes: Sequence[str] = ()) -> tuple[object, ...]:
    return (row.budget, row.keep_ratio, *(repr(_resolve_options(row).get(axis)) for axis in axes))


def _format_option(name: str, row: ResultRow, same_policy_rows: Sequence[ResultRow]) -> str:
    """Format an option for names; recent tokens as a share of the budget if more rows agree on the share."""
    value = _resolve_options(row).get(name)
    if value is None:
        return ""
    if isinstance(value, str):
        return value  # keep_low says enough, 0.5 does not
    if isinstance(value, list):
        return f"{name}={'+'.join(map(str, value))}" if value else ""
    share = _get_recent_share(name, row)
    if share is not None:
        num_equal = sum(_resolve_options(candidate).get(name) == value for candidate in same_policy_rows)
        if sum(_get_recent_share(name, candidate) == share for candidate in same_policy_rows) > num_equal:
            return f"{name}={100 * share:.3g}%"
    return f"{name}={value}"


def _get_recent_share(name: str, row: ResultRow) -> float | None:
    """Return the recent tokens as a share of the row's budget; None for options that do not grow with it."""
    value, budget = _resolve_options(row).get(name), row.budget
    return value / budget if name == "recent" and type(value) is int and budget else None
