"""Gates that judge what was measured, and say *not measured* where nothing was (``--strict``)."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean, stdev

from .analysis import Analysis
from .metric_rows import MetricRow, MetricRows
from .verdicts import FAIL, NOT_MEASURED, OFF, Gate, judged

_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)
"""Student's t, two-sided 95 %, of 1 to 10 degrees of freedom; beyond, 1.96 + 2.5 / n is within 0.02."""

_PLAIN = re.compile(r"\s*[-+]?\d*\.?\d+\s*")
"""A mean that is read as it stands; of ``1e-05`` the fork reads 1, of ``nan ± 0.1`` the deviation."""


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
    by_column = {
        "async wait": ("h2o_lossless_async_wait_us", limits.max_lossless_async_wait_us),
        "queue peak": ("h2o_lossless_queue_peak", limits.max_lossless_queue_peak),
        "fallbacks": ("h2o_lossless_fallback", limits.max_lossless_fallback),
        "skips": ("h2o_lossless_backpressure_skip", limits.max_lossless_backpressure_skip),
    }
    shown = {gate.name: gate for gate in analysis.gates}
    found = [_lossy(rows, limits.lossy_target), _lossless(rows, limits.lossless_target)]
    found.append(_decode(rows, baseline, limits.decode_drop_target))
    found.append(_columns(shown["decompression"], rows, ("h2o_lossless_decomp_us",)))
    found += [_columns(shown[name], rows, (column,)) for name, (column, _) in by_column.items()]
    found.append(_columns(shown["async queue"], rows, ("h2o_lossless_async_queue_peak",)))
    hits = ("h2o_lossless_decode_cache_hit", "h2o_lossless_decode_cache_miss")
    found += [_columns(shown["cache hits"], rows, hits[:1]), _columns(shown["cache lookups"], rows, hits)]
    found.append(_consistency(shown["consistency"]))
    return tuple(found)


def _lossy(rows: MetricRows, target: float) -> Gate:
    limit = f">= {target:.3f}"
    missing = _missing(rows, ("h2o_lossy",))
    if missing:
        return Gate(name="lossy ratio", verdict=NOT_MEASURED, limit=limit, why=missing)
    least = min(row.numbers["h2o_lossy"] for row in rows.rows)
    return Gate(
        name="lossy ratio",
        verdict=judged(least >= target),
        value=f"{least:.3f}",
        limit=limit,
        why="smallest of the rows: each is one plan of one layer (docs/gates.md)",
    )


def _lossless(rows: MetricRows, target: float) -> Gate:
    names = ("h2o_lossless_raw_mb", "h2o_lossless_comp_mb")
    raw, compressed = (sum(row.numbers[name] for row in rows.rows) for name in names)
    missing = _missing(rows, names)
    if missing or not (raw > 0 and compressed > 0):
        why = missing or "no row has raw and compressed bytes of the run"
        return Gate(name="lossless ratio", verdict=NOT_MEASURED, limit=f">= {target:.3f}", why=why)
    ratio = raw / compressed
    return Gate(
        name="lossless ratio",
        verdict=judged(ratio >= target),
        value=f"{ratio:.3f}",
        limit=f">= {target:.3f}",
        why="raw over compressed bytes of the run, all rows",
    )


def _decode(rows: MetricRows, baseline: MetricRows | None, target: float) -> Gate:
    limit = f"<= {target:.2%}"
    if baseline is None:
        why = "a constant is no measurement: give rows of the same work without compression (--baseline)"
        return Gate(name="decode drop", verdict=NOT_MEASURED, limit=limit, why=why)
    drops = list(_drops(rows, baseline))
    if not drops:
        why = "no work (prompt, decode) has a speed in both tables"
        return Gate(name="decode drop", verdict=NOT_MEASURED, limit=limit, why=why)
    mean, width = fmean(drops), _half_width(drops)
    interval = "one pair, no interval" if width is None else f"95 % {mean - width:+.2%} to {mean + width:+.2%}"
    return Gate(
        name="decode drop",
        verdict=judged(mean <= target),
        value=f"{mean:+.2%}",
        limit=limit,
        why=f"mean against mean of the same work, {len(drops)} of it; {interval}",
    )


def _drops(rows: MetricRows, baseline: MetricRows) -> Iterator[float]:
    """Of every work that both tables have: the share of its mean speed that was lost."""
    before, after = _speeds(baseline.rows), _speeds(rows.rows)
    for work, speeds in after.items():
        if before.get(work):
            yield (fmean(before[work]) - fmean(speeds)) / fmean(before[work])


def _speeds(rows: tuple[MetricRow, ...]) -> dict[str, list[float]]:
    """Speeds above 0 by the work, which the column `llm_demo` says; tables without it have one work."""
    found: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.decode > 0:
            found[row.cells.get("llm_demo", "")].append(row.decode)
    return dict(found)


def _half_width(values: list[float]) -> float | None:
    """Of the 95 % interval of a mean; None where there is one value only."""
    freedom = len(values) - 1
    if freedom < 1:
        return None
    t = _T95[freedom - 1] if freedom <= len(_T95) else 1.96 + 2.5 / freedom
    return t * stdev(values) / math.sqrt(len(values))


def _columns(gate: Gate, rows: MetricRows, names: tuple[str, ...]) -> Gate:
    """A gate that is on needs its columns."""
    missing = _missing(rows, names)
    if gate.verdict == OFF or not missing:
        return gate
    return Gate(name=gate.name, verdict=NOT_MEASURED, limit=gate.limit, why=missing)


def _consistency(gate: Gate) -> Gate:
    if gate.verdict in (OFF, FAIL):
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
    return ""
