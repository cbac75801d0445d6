"""Gates that judge measurements only, and report *not measured* without one (``--strict``)."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from statistics import fmean

from .._util.patterns import declare_pattern
from .analysis import CaseAnalysis
from .case_inputs import MetricRow, MetricRows
from .latency_limits import LATENCY_LIMITS
from .slowdown import DecodeSlowdown, build_slowdown_gate
from .verdict import FAIL, NOT_MEASURED, OFF, PASS, TOTAL_GATE, GateResult, format_distinct, verdict_from

_NOTHING_ENCODED_TEXT = "nothing was encoded: raw_mb is 0 in every row"

_PLAIN_NUMBER_REGEX = declare_pattern(r"\s*[-+]?\d*\.?\d+\s*")
"""A mean that is read as it stands; of ``1e-05`` the fork reads 1, of ``nan ± 0.1`` the deviation."""

_BYTES_COLUMNS = ("h2o_lossless_raw_mb", "h2o_lossless_comp_mb")
_DECOMPRESS_COLUMNS = ("h2o_lossless_decomp_us",)
_COLUMN_BY_GATE = {
    "async wait": "h2o_lossless_async_wait_us",
    "queue peak": "h2o_lossless_queue_peak",
    "fallbacks": "h2o_lossless_fallback",
    "skips": "h2o_lossless_backpressure_skip",
    "async queue": "h2o_lossless_async_queue_peak",
}
"""Gates of what the runtime does, and the column of each."""


def build_strict_gates(analysis: CaseAnalysis, baseline: MetricRows | None) -> tuple[GateResult, ...]:
    """Judge the rows of a case by measured quantities, stricter than the MNN fork.

    Ratios are those of every row, not of the best; the lossless one is from the bytes of the run, not from a
    simulation. Decode speeds are compared for the same work, mean with mean. A figure without its column is not
    measured, and neither is consistency, because logs compare no bytes.
    """
    rows, limits = analysis.rows, analysis.limits
    gate_by_name = {gate.name: gate for gate in analysis.gates}
    gates = [_build_lossy_gate(rows, limits.lossy_target), _build_lossless_gate(rows, limits.lossless_target)]
    gates.append(_build_decode_gate(rows, baseline, limits.decode_drop_target))
    cache_columns = ("h2o_lossless_decode_cache_hit", "h2o_lossless_decode_cache_miss")
    decompression_gate = _require_columns(gate_by_name["decompression"], rows, _DECOMPRESS_COLUMNS)
    gates.append(
        _require_activity(decompression_gate, rows, 2.0 if limits.require_runtime_decomp else limits.lossless_target)
    )
    activity_gates = [_require_columns(gate_by_name[name], rows, (column,)) for name, column in _COLUMN_BY_GATE.items()]
    activity_gates += [
        _require_columns(gate_by_name["cache hits"], rows, cache_columns[:1]),
        _require_columns(gate_by_name["cache lookups"], rows, cache_columns),
    ]
    gates += [_require_activity(gate, rows, limits.lossless_target) for gate in activity_gates]
    gates.append(_build_consistency_gate(gate_by_name["consistency"], analysis))
    measured_by_runs = (TOTAL_GATE, *(entry.gate for entry in LATENCY_LIMITS))
    gates += [gate_by_name[name] for name in measured_by_runs if name in gate_by_name]
    return tuple(gates)


def _build_lossy_gate(rows: MetricRows, target: float) -> GateResult:
    limit = f">= {target:.3f}"
    missing_reason = _explain_missing(rows, ("h2o_lossy",))
    if missing_reason:
        return GateResult(name="lossy ratio", verdict=NOT_MEASURED, limit=limit, why=missing_reason)
    min_ratio = min(row.numbers["h2o_lossy"] for row in rows.rows)
    value, limit = format_distinct(min_ratio, target, 3)
    return GateResult(
        name="lossy ratio",
        verdict=verdict_from(min_ratio >= target),
        value=value,
        limit=f">= {limit}",
        why="smallest of the rows: each is one plan of one layer (docs/gates.md)",
    )


def _build_lossless_gate(rows: MetricRows, target: float) -> GateResult:
    raw_mb, compressed_mb = (sum(row.numbers[name] for row in rows.rows) for name in _BYTES_COLUMNS)
    missing_reason = _explain_missing(rows, _BYTES_COLUMNS)
    if _has_no_encoding(rows) and target <= 1.0:
        return GateResult(
            name="lossless ratio", verdict=PASS, value="1.000", limit=f">= {target:.3f}", why=_NOTHING_ENCODED_TEXT
        )
    if missing_reason or not (raw_mb > 0 and compressed_mb > 0):
        why = missing_reason or "no row has raw and compressed bytes of the run"
        return GateResult(name="lossless ratio", verdict=NOT_MEASURED, limit=f">= {target:.3f}", why=why)
    ratio = raw_mb / compressed_mb
    value, limit = format_distinct(ratio, target, 3)
    return GateResult(
        name="lossless ratio",
        verdict=verdict_from(ratio >= target),
        value=value,
        limit=f">= {limit}",
        why="raw over compressed bytes of the run, all rows",
    )


def _build_decode_gate(rows: MetricRows, baseline: MetricRows | None, target: float) -> GateResult:
    if baseline is None:
        missing_reason = "a constant is no measurement: give rows of the same work without compression (--baseline)"
        return build_slowdown_gate(None, target, "", missing_reason)
    missing_reason = "no work (prompt, decode) has a speed in both tables"
    return build_slowdown_gate(
        DecodeSlowdown.from_pairs(list(_pair_speeds(rows, baseline))),
        target,
        "of rows of the same work",
        missing_reason,
    )


def _pair_speeds(rows: MetricRows, baseline: MetricRows) -> Iterator[tuple[float, float]]:
    """Pair speeds of the same work without and with compression: row by row, or means if the counts differ."""
    baseline_speeds, candidate_speeds = _group_speeds(baseline.rows), _group_speeds(rows.rows)
    for work, speeds in candidate_speeds.items():
        work_baseline = baseline_speeds.get(work, [])
        if len(work_baseline) == len(speeds):
            yield from zip(work_baseline, speeds, strict=True)
        elif work_baseline:
            yield fmean(work_baseline), fmean(speeds)


def _group_speeds(rows: tuple[MetricRow, ...]) -> dict[str, list[float]]:
    """Group speeds above 0 by the work in the column `llm_demo`; a table without it has one work."""
    speeds_by_work: dict[str, list[float]] = defaultdict(list)
    for row in rows:
        if row.decode_speed > 0:
            speeds_by_work[row.cells.get("llm_demo", "")].append(row.decode_speed)
    return dict(speeds_by_work)


def _require_columns(gate: GateResult, rows: MetricRows, names: tuple[str, ...]) -> GateResult:
    """Return the gate, as not measured if it is active and lacks a column."""
    missing_reason = _explain_missing(rows, names)
    if gate.verdict == OFF or not missing_reason:
        return gate
    return GateResult(name=gate.name, verdict=NOT_MEASURED, limit=gate.limit, why=missing_reason)


def _require_activity(gate: GateResult, rows: MetricRows, lossless_target: float) -> GateResult:
    """Return the gate, as not measured if nothing was encoded, or as off if nothing has to be."""
    if (
        gate.verdict not in (PASS, FAIL)
        or not _has_no_encoding(rows)
        or (gate.verdict == FAIL and float(gate.value.split()[0].replace(",", "")) > 0)
    ):
        return gate
    verdict = OFF if lossless_target <= 1.0 else NOT_MEASURED
    return GateResult(name=gate.name, verdict=verdict, limit=gate.limit, why=_NOTHING_ENCODED_TEXT)


def _has_no_encoding(rows: MetricRows) -> bool:
    """Return whether the table shows that nothing was encoded."""
    return not _explain_missing(rows, _BYTES_COLUMNS) and not any(
        row.numbers[_BYTES_COLUMNS[0]] > 0 for row in rows.rows
    )


def _build_consistency_gate(gate: GateResult, analysis: CaseAnalysis) -> GateResult:
    """Return the gate if logs show damage, fallbacks or missing restores; else as not measured."""
    has_damage = "false" in (
        analysis.section_lines["kv_invalid_log_pass"],
        analysis.section_lines["kv_fallback_clean_pass"],
    )
    if gate.verdict == OFF or (gate.verdict == FAIL and (has_damage or not _has_no_encoding(analysis.rows))):
        return gate
    return GateResult(name=gate.name, verdict=NOT_MEASURED, why="logs compare no bytes of K and V; kvmnn gate run does")


def _explain_missing(rows: MetricRows, names: tuple[str, ...]) -> str:
    """Explain why columns contain no measurement; empty if they do."""
    for name in names:
        if name not in rows.columns:
            return f"no column {name}"
        for row_number, row in enumerate(rows.rows, start=1):
            cell = row.cells.get(name) or ""
            if not _PLAIN_NUMBER_REGEX.fullmatch(cell.partition("\N{PLUS-MINUS SIGN}")[0]):
                return f"{name}: row {row_number} has no plain number"
            if row.numbers[name] < 0:
                return f"{name}: row {row_number} has {row.numbers[name]:g}, which nothing can be"
    return ""
