"""Every gate, number and verdict that the fork's analyser gives for the rows of one case."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..logs.parsing import missing_columns
from . import gate_section as section
from .conditions import Conditions, Decode
from .limits import Limits
from .log_scan import LogScan
from .metric_rows import MetricRows
from .offline_ratio import OfflineRatio
from .verdicts import Gate, apart, judged

_OLD = "[WARN] likely using an older llm_bench binary/log format; rebuild and use the expected v6 llm_bench."
_UPPER = (
    "[WARN] online-sim lossless JSON not provided or invalid; falling back to upper-bound. "
    "Gate result may be unreliable."
)
_RUN = "[WARN] no offline lossless JSON provided; falling back to runtime value. Gate result may be unreliable."

SELECTED_WARNINGS = frozenset({_UPPER, _RUN})
"""What is said of where the lossless ratio was taken from."""


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """One case as the fork's analyser judges it.

    Attributes
    ----------
    rows, limits
        What was judged, and by what.
    selected, source
        The lossless ratio that counts, and where it comes from: ``"offline_online_sim"``, ``"offline_upper_bound"``
        or ``"runtime"``.
    decode
        Speeds over the rows.
    gates
        The parts of the verdict, in the fork's order.
    lines
        Its section *Quality Gate*, name to text.
    warnings
        What it prints besides.
    measured
        Whether rows and lines are those of runs on a model, not of logs.
    """

    rows: MetricRows
    limits: Limits
    online: OfflineRatio | None
    upper: OfflineRatio | None
    selected: float
    source: str
    decode: Decode
    gates: tuple[Gate, ...]
    lines: Mapping[str, str]
    warnings: tuple[str, ...]
    measured: bool = False

    @property
    def passed(self) -> bool:
        """Whether all gates that are on passed."""
        return self.lines["overall_pass"] == "true"


def analyse(
    rows: MetricRows,
    limits: Limits,
    *,
    online: OfflineRatio | None = None,
    upper: OfflineRatio | None = None,
    logs: LogScan | None = None,
) -> Analysis:
    """Judge the rows of one case exactly as the fork's analyser does.

    Parameters
    ----------
    rows, limits
        What was measured, and what it must reach.
    online, upper
        Offline evaluations; the former is preferred, and without either the mean of the rows counts.
    logs
        What the logs of the run say of damage.
    """
    selected, source, warned = _selected(rows, online, upper)
    decode = Decode.of(rows.rows, limits.decode_gate_aggregation)
    found = Conditions(rows, limits, logs or LogScan(), decode, selected, online)
    warnings = [*columns_warned(rows.columns), *warned, *found.headroom_warned()]
    gates = _gates(found)
    lines = {
        **section.lossy_lines(found, source),
        **section.runtime_lines(found),
        **section.consistency_lines(found),
        "overall_pass": section.flag(all(gate.verdict != "fail" for gate in gates)),
        **section.decode_lines(found),
        **section.offline_lines("upper", upper),
        **section.offline_lines("online", online),
    }
    lines = {"quality_status": "PASS" if lines["overall_pass"] == "true" else "FAIL", **lines}
    return Analysis(
        rows=rows,
        limits=limits,
        online=online,
        upper=upper,
        selected=selected,
        source=source,
        decode=decode,
        gates=tuple(gates),
        lines=lines,
        warnings=tuple(warnings),
    )


def _selected(
    rows: MetricRows, online: OfflineRatio | None, upper: OfflineRatio | None
) -> tuple[float, str, list[str]]:
    """The lossless ratio that counts, its source, and what is said of it."""
    if online is not None:
        return online.ratio, "offline_online_sim", []
    if upper is not None:
        return upper.ratio, "offline_upper_bound", [_UPPER]
    return rows.mean("h2o_lossless"), "runtime", [_RUN]


def columns_warned(columns: Sequence[str]) -> list[str]:
    """What is said of a table that lacks columns of the runtime."""
    missing = missing_columns(columns)
    return [f"[WARN] runtime metric columns missing in CSV: {', '.join(missing)}", _OLD] if missing else []


def _gates(found: Conditions) -> list[Gate]:
    """The parts of the verdict."""
    limits = found.limits
    decomp_on = limits.require_runtime_decomp or limits.max_lossless_decomp_us >= 0.0
    worked, most = apart(found.decomp, limits.max_lossless_decomp_us, 0)
    bound = [f"<= {most} us"] if limits.max_lossless_decomp_us >= 0.0 else []
    lost, least = apart(100 * found.drop, 100 * limits.decode_drop_target, 2)
    drop = f"{'' if lost.startswith('-') else '+'}{lost}%" if found.decode_on else f"{found.decode.gate:.2f} tok/s"
    return [
        _at_least("lossy ratio", found.lossy, limits.lossy_target, found.lossy_pass, "largest of the rows"),
        _at_least("lossless ratio", found.lossless, limits.lossless_target, found.lossless_pass, _of_what(found)),
        Gate(
            name="decode drop",
            verdict=judged(found.decode_pass, on=found.decode_on),
            value=drop,
            limit=f"<= {least}%" if found.decode_on else "",
            why=f"{found.decode.gate:.2f} of {limits.decode_baseline:.2f} tok/s" if found.decode_on else "",
        ),
        Gate(
            name="columns",
            verdict=judged(found.columns_pass, on=limits.strict_runtime_metric_columns),
            value=f"{len(found.missing)} missing",
            limit="0 missing" if limits.strict_runtime_metric_columns else "",
            why=", ".join(found.missing),
        ),
        Gate(
            name="decompression",
            verdict=judged(found.decomp_pass, on=decomp_on),
            value=f"{worked} us",
            limit=", ".join((["> 0"] if limits.require_runtime_decomp else []) + bound),
        ),
        _at_most("async wait", found.wait, limits.max_lossless_async_wait_us, found.wait_pass, " us"),
        _some("async queue", found.async_queue, limits.require_async_queue_activity, found.async_queue_pass),
        _some("cache hits", found.hit, limits.require_decode_cache_hit, found.hit_pass),
        _some("cache lookups", found.activity, limits.require_decode_cache_activity, found.activity_pass),
        _at_most("queue peak", found.queue, limits.max_lossless_queue_peak, found.queue_pass),
        _at_most("fallbacks", found.fallback, limits.max_lossless_fallback, found.fallback_pass),
        _at_most("skips", found.skip, limits.max_lossless_backpressure_skip, found.skip_pass),
        Gate(
            name="consistency",
            verdict=judged(found.consistent, on=limits.require_kv_content_consistency),
            why=_consistency_said(found) if limits.require_kv_content_consistency else "",
        ),
    ]


def _of_what(found: Conditions) -> str:
    return "mean of the rows" if found.lossless == found.rows.mean("h2o_lossless") else "of an offline simulation"


def _consistency_said(found: Conditions) -> str:
    """Which part failed; where none did, what was looked at, which is not K and V."""
    failed = [
        said
        for passed, said in (
            (found.log_pass, f"{found.logs.invalid} lines of damage in the logs"),
            (found.async_pass, "nothing was done by the threads"),
            (found.restore_pass, "nothing was decompressed"),
            (found.clean_pass, f"{found.fallback:g} fallbacks"),
        )
        if not passed
    ]
    return "; ".join(failed) or "activity and logs; no bytes are compared"


def _at_least(name: str, value: float, limit: float, passed: bool, why: str) -> Gate:
    shown, target = apart(value, limit, 3)
    return Gate(name=name, verdict=judged(passed), value=shown, limit=f">= {target}", why=why)


def _at_most(name: str, value: float, limit: float, passed: bool, unit: str = "") -> Gate:
    shown, target = f"{value:,.0f}" if unit else f"{value:,.4g}", f"{limit:,.0f}"
    if shown == target:
        shown, target = apart(value, limit, 0)
    return Gate(
        name=name,
        verdict=judged(passed, on=limit >= 0.0),
        value=f"{shown}{unit}",
        limit=f"<= {target}{unit}" if limit >= 0.0 else "",
    )


def _some(name: str, value: float, required: bool, passed: bool) -> Gate:
    return Gate(name=name, verdict=judged(passed, on=required), value=f"{value:g}", limit="> 0" if required else "")
