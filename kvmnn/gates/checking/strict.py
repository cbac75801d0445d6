"""Gates that judge what was measured, and say *not measured* where nothing was (``--strict``)."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean

from .analysis import Analysis
from .drops import Drop, drop_gate
from .metric_rows import MetricRow, MetricRows
from .verdicts import FAIL, NOT_MEASURED, OFF, PASS, Gate, apart, judged

_NOTHING = "nothing was encoded: raw_mb is 0 in every row"

_PLAIN = re.compile(r"\s*[-+]?\d*\.?\d+\s*")
"""A mean that is read as it stands; of ``1e-05`` the fork reads 1, of ``nan ± 0.1`` the deviation."""

_BYTES = ("h2o_lossless_raw_mb", "h2o_lossless_comp_mb")
_DECODED = ("h2o_lossless_decomp_us",)
_BY_COLUMN = {
    "async wait": "h2o_lossless_async_wait_us",
    "queue peak": "h2o_lossless_queue_peak",
    "fallbacks": "h2o_lossless_fallback",
    "skips": "h2o_lossless_backpressure_skip",
    "async queue": "h2o_lossless_async_queue_peak",
}
"""Gates of what the runtime does, and the column of each."""


def strict_gates(analysis: Analysis, baseline: MetricRows | None) -> tuple[Gate, ...]:
    """Judge the rows of a case soundly.

    Ratios of every row, not of the best; the lossless one from the bytes of the run, not from a simulation; decode
    speeds of the same work, mean against mean; a figure without its column is not measured; and consistency cannot be
    told from logs, which compare no bytes.

    Parameters
    ----------
    analysis
        The rows, and what the fork's gates say of them.
    baseline
        Rows of the same work without compression.
    """
    rows, limits = analysis.rows, analysis.limits
    shown = {gate.name: gate for gate in analysis.gates}
    found = [_lossy(rows, limits.lossy_target), _lossless(rows, limits.lossless_target)]
    found.append(_decode(rows, baseline, limits.decode_drop_target))
    hits = ("h2o_lossless_decode_cache_hit", "h2o_lossless_decode_cache_miss")
    restored = _columns(shown["decompression"], rows, _DECODED)
    found.append(_of_activity(restored, rows, 2.0 if limits.require_runtime_decomp else limits.lossless_target))
    active = [_columns(shown[name], rows, (column,)) for name, column in _BY_COLUMN.items()]
    active += [_columns(shown["cache hits"], rows, hits[:1]), _columns(shown["cache lookups"], rows, hits)]
    found += [_of_activity(gate, rows, limits.lossless_target) for gate in active]
    found.append(_consistency(shown["consistency"], analysis))
    return tuple(found)


def _lossy(rows: MetricRows, target: float) -> Gate:
    limit = f">= {target:.3f}"
    missing = _missing(rows, ("h2o_lossy",))
    if missing:
        return Gate(name="lossy ratio", verdict=NOT_MEASURED, limit=limit, why=missing)
    least = min(row.numbers["h2o_lossy"] for row in rows.rows)
    value, limit = apart(least, target, 3)
    return Gate(
        name="lossy ratio",
        verdict=judged(least >= target),
        value=value,
        limit=f">= {limit}",
        why="smallest of the rows: each is one plan of one layer (docs/gates.md)",
    )


def _lossless(rows: MetricRows, target: float) -> Gate:
    raw, compressed = (sum(row.numbers[name] for row in rows.rows) for name in _BYTES)
    missing = _missing(rows, _BYTES)
    if _idle(rows) and target <= 1.0:
        return Gate(name="lossless ratio", verdict=PASS, value="1.000", limit=f">= {target:.3f}", why=_NOTHING)
    if missing or not (raw > 0 and compressed > 0):
        why = missing or "no row has raw and compressed bytes of the run"
        return Gate(name="lossless ratio", verdict=NOT_MEASURED, limit=f">= {target:.3f}", why=why)
    ratio = raw / compressed
    value, limit = apart(ratio, target, 3)
    return Gate(
        name="lossless ratio",
        verdict=judged(ratio >= target),
        value=value,
        limit=f">= {limit}",
        why="raw over compressed bytes of the run, all rows",
    )


def _decode(rows: MetricRows, baseline: MetricRows | None, target: float) -> Gate:
    if baseline is None:
        missing = "a constant is no measurement: give rows of the same work without compression (--baseline)"
        return drop_gate(None, target, "", missing)
    missing = "no work (prompt, decode) has a speed in both tables"
    return drop_gate(Drop.of(list(_pairs(rows, baseline))), target, "of rows of the same work", missing)


def _pairs(rows: MetricRows, baseline: MetricRows) -> Iterator[tuple[float, float]]:
    """Speeds of the same work, without and with compression: row by row, or where one table has more of them, means."""
    before, after = _speeds(baseline.rows), _speeds(rows.rows)
    for work, speeds in after.items():
        others = before.get(work, [])
        if len(others) == len(speeds):
            yield from zip(others, speeds, strict=True)
        elif others:
            yield fmean(others), fmean(speeds)


def _speeds(rows: tuple[MetricRow, ...]) -> dict[str, list[float]]:
    """Speeds above 0 by the work, which the column `llm_demo` says; tables without it have one work."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.decode > 0:
            found[row.cells.get("llm_demo", "")].append(row.decode)
    return dict(found)


def _columns(gate: Gate, rows: MetricRows, names: tuple[str, ...]) -> Gate:
    """A gate that is on needs its columns."""
    missing = _missing(rows, names)
    if gate.verdict == OFF or not missing:
        return gate
    return Gate(name=gate.name, verdict=NOT_MEASURED, limit=gate.limit, why=missing)


def _of_activity(gate: Gate, rows: MetricRows, lossless_target: float) -> Gate:
    """Where nothing was encoded, a figure of 0 says nothing; where nothing need be, its gate is off."""
    if gate.verdict not in (PASS, FAIL) or not _idle(rows) or (gate.verdict == FAIL and _first(gate.value) > 0):
        return gate
    verdict = OFF if lossless_target <= 1.0 else NOT_MEASURED
    return Gate(name=gate.name, verdict=verdict, limit=gate.limit, why=_NOTHING)


def _idle(rows: MetricRows) -> bool:
    """Whether the table says that nothing was encoded."""
    return not _missing(rows, _BYTES) and not any(row.numbers[_BYTES[0]] > 0 for row in rows.rows)


def _first(value: str) -> float:
    """The figure that was judged, of a gate's text; those are 0 or above."""
    return float(value.split()[0].replace(",", ""))


def _consistency(gate: Gate, analysis: Analysis) -> Gate:
    """Fails by damage in the logs, by fallbacks, and where what was encoded was not restored."""
    broken = "false" in (analysis.lines["kv_invalid_log_pass"], analysis.lines["kv_fallback_clean_pass"])
    if gate.verdict == OFF or (gate.verdict == FAIL and (broken or not _idle(analysis.rows))):
        return gate
    return Gate(name=gate.name, verdict=NOT_MEASURED, why="logs compare no bytes of K and V; kvmnn gate run does")


def _missing(rows: MetricRows, names: tuple[str, ...]) -> str:
    """Why columns measure nothing; empty where they do."""
    for name in names:
        if name not in rows.columns:
            return f"no column {name}"
        for place, row in enumerate(rows.rows, start=1):
            cell = row.cells.get(name) or ""
            if not _PLAIN.fullmatch(cell.partition("\N{PLUS-MINUS SIGN}")[0]):
                return f"{name}: row {place} has no plain number"
            if row.numbers[name] < 0:
                return f"{name}: row {place} has {row.numbers[name]:g}, which nothing can be"
    return ""
