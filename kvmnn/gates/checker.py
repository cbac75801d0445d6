"""Check one case of ``llm_bench``: the MNN fork's gates and hard checks, the strict gates, likely causes of failure."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import field, replace

from .._util.dataclass import dataclass
from .._util.text import pluralize, wrap_lines
from ..errors import OptionError, SourceError
from .analysis import SELECTED_RATIO_WARNINGS, CaseAnalysis, analyse, format_case_markdown
from .case_inputs import LogScan, MetricRow, MetricRows, OfflineRatio, read_offline_ratio, scan_logs
from .limits import GateLimits
from .logs import LOG_FILE_COLUMN
from .strict import build_strict_gates
from .verdict import (
    OFF,
    GateResult,
    JudgedResult,
    format_gate_table,
    summarize_verdicts,
    verdict_from,
)

_TOKENS_REGEX, _UPDATES_REGEX = re.compile(r"\btokens=(\d{1,15})\b"), re.compile(r"\bupdates=(\d{1,15})\b")
_OLD_BUILD_GROUP_TOKENS = 192
"""Tokens that an old build grouped regardless of its options."""

_MAX_RATIO_DIFFERENCE = 0.01


def run_hard_checks(
    rows: MetricRows, limits: GateLimits, logs: LogScan | None, online_ratio: OfflineRatio | None
) -> tuple[GateResult, ...]:
    """Run the checks of steps 4 to 6 and return them as gates."""
    return (*_check_rows(rows.rows, limits), *_check_logs(logs, limits), _check_offline_bytes(online_ratio))


def _check_rows(rows: tuple[MetricRow, ...], limits: GateLimits) -> Iterator[GateResult]:
    num_filled = sum(row.numbers["h2o_lossless_raw_mb"] > 0 and row.numbers["h2o_lossless"] > 1 for row in rows)
    yield GateResult(
        name="lossless figures",
        verdict=verdict_from(num_filled > 0),
        value=f"{num_filled} of {len(rows)} rows",
        limit="> 0",
        why="" if num_filled else "no row has raw_mb > 0 and a ratio above 1",
    )
    names = ("h2o_lossless_raw_mb", "h2o_lossless_comp_mb", "h2o_lossless_comp_us", "h2o_lossless_decomp_us")
    num_complete = sum(all(row.numbers[name] > 0 for name in names) for row in rows)
    yield GateResult(
        name="real decompression",
        verdict=verdict_from(num_complete > 0, is_active=limits.require_runtime_decomp),
        value=f"{num_complete} of {len(rows)} rows",
        limit="> 0" if limits.require_runtime_decomp else "",
        why="" if num_complete else "no row has raw_mb, comp_mb, comp_us and decomp_us above 0",
    )


def _check_logs(logs: LogScan | None, limits: GateLimits) -> Iterator[GateResult]:
    if logs is None:
        yield GateResult(name="encodings in logs", verdict=OFF, why="no logs given (--logs-dir, --bench-stdout-log)")
        return
    steps = [(_parse_count(_TOKENS_REGEX, line), _parse_count(_UPDATES_REGEX, line)) for line in logs.encoding_lines]
    yield GateResult(
        name="encodings in logs",
        verdict=verdict_from(bool(steps)),
        value=f"{len(steps)} lines",
        limit="> 0",
        why="" if steps else f"no line with [H2O-LOSSLESS] in {logs.num_files} files",
    )
    num_old = sum(tokens == _OLD_BUILD_GROUP_TOKENS for tokens, _ in steps)
    yield GateResult(
        name="no fixed groups",
        verdict=verdict_from(num_old == 0),
        value=f"{num_old} lines",
        limit="0",
        why=f"tokens={_OLD_BUILD_GROUP_TOKENS}: an old build's fixed group" if num_old else "",
    )
    is_grouped_store = limits.runtime_mode == "store" and limits.store_grouped_step_tokens > 0
    expected = limits.store_grouped_step_tokens if is_grouped_store else limits.lossless_block_tokens
    later_steps = [tokens for tokens, updates in steps if updates >= 2]
    num_right = later_steps.count(expected)
    yield GateResult(
        name="step of encodings",
        verdict=verdict_from(num_right > 0, is_active=bool(later_steps)),
        value=f"{num_right} of {len(later_steps)}" if later_steps else "",
        limit=f"{expected} tokens",
        why="" if later_steps else "no line with updates >= 2",
    )


def _check_offline_bytes(online_ratio: OfflineRatio | None) -> GateResult:
    if online_ratio is None:
        return GateResult(name="offline bytes", verdict=OFF, why="no --offline-lossless-online-json")
    has_bytes = online_ratio.raw_bytes > 0 and online_ratio.compressed_bytes > 0
    ratio = online_ratio.raw_bytes / online_ratio.compressed_bytes if has_bytes else 0.0
    return GateResult(
        name="offline bytes",
        verdict=verdict_from(has_bytes and abs(ratio - online_ratio.ratio) <= _MAX_RATIO_DIFFERENCE),
        value=f"{ratio:.4f}" if has_bytes else "no bytes",
        limit=f"{online_ratio.ratio:.4f}",
        why="raw over compressed bytes against the ratio it states",
    )


def _parse_count(pattern: re.Pattern[str], line: str) -> int:
    match = pattern.search(line)
    return int(match[1]) if match else -1


_MAX_OFFLINE_DIFFERENCE_FRACTION = 0.02
"""Relative difference of the offline ratio and that of the run above which it is reported."""


def diagnose(analysis: CaseAnalysis, logs: LogScan | None) -> tuple[str, ...]:
    """Return sentences that explain a case from its rows and logs."""
    sentences = [
        *_diagnose_lost_figures(analysis, logs),
        *_diagnose_unreachable_target(analysis),
        *_diagnose_no_decompression(analysis, logs),
        *_diagnose_slow_store(analysis),
        *_diagnose_offline_difference(analysis),
        *_diagnose_repeated_headers(analysis),
    ]
    return tuple(sentences)


def _diagnose_lost_figures(analysis: CaseAnalysis, logs: LogScan | None) -> Iterator[str]:
    if logs is None or not _has_lost_figures(analysis, logs):
        return
    yield (
        f"The log tells of {len(logs.encoding_lines):,} encodings, the table has none (raw_mb is 0 in every row): the "
        "figures were lost on their way. The engine overwrites its sums where a layer reports no bytes, or copies them "
        "to the context before the last layer; or llm_bench is older than the engine."
    )


def _has_lost_figures(analysis: CaseAnalysis, logs: LogScan | None) -> bool:
    """Return whether the log reports encodings that the table lacks."""
    return logs is not None and bool(logs.encoding_lines) and not analysis.rows.max_value("h2o_lossless_raw_mb") > 0


def _diagnose_unreachable_target(analysis: CaseAnalysis) -> Iterator[str]:
    """Explain rows whose sinks and recent tokens, or whole blocks, exceed the tokens the target permits."""
    target, rows = analysis.limits.lossy_target, analysis.rows.rows
    floor_fractions, block_fractions = list[float](), list[tuple[float, float]]()
    for row in rows:
        floor_fraction, quantized_fraction = (row.numbers[f"h2o_{name}_keep"] for name in ("floor", "quantized"))
        if _rules_out_target(floor_fraction, target):  # then smaller blocks or another target change nothing
            floor_fractions.append(floor_fraction)
        elif _rules_out_target(quantized_fraction, target):
            block_fractions.append((quantized_fraction, floor_fraction))
    if floor_fractions:
        max_fraction = max(floor_fractions)
        yield (
            f"Lossy cannot reach {target:.3f} in {len(floor_fractions)} of {len(rows)} rows: blocks of sinks and "
            f"recent tokens alone keep {max_fraction:.1%}, so at most {1 / max_fraction:.3f}. Take longer prompts, or "
            "lower h2o_recent_tokens or h2o_sink_tokens; where these are smaller than a block, lower h2o_block_tokens."
        )
    if block_fractions:
        quantized_fraction, floor_fraction = max(block_fractions)
        yield (
            f"Lossy cannot reach {target:.3f} in {len(block_fractions)} of {len(rows)} rows: the target in whole "
            f"blocks keeps {quantized_fraction:.1%} (blocks of sinks and recent tokens {floor_fraction:.1%}), so at "
            f"most {1 / quantized_fraction:.3f}. Lower h2o_block_tokens, or raise h2o_target_lossy_ratio."
        )


def _rules_out_target(keep_fraction: float, target: float) -> bool:
    """Return whether keeping this fraction of tokens makes the target unreachable; 0 is a row without plans."""
    return keep_fraction > 0 and 1.0 / keep_fraction + 1e-6 < target


def _diagnose_no_decompression(analysis: CaseAnalysis, logs: LogScan | None) -> Iterator[str]:
    rows, limits = analysis.rows, analysis.limits
    if rows.max_value("h2o_lossless_decomp_us") > 0 or "h2o_lossless_decomp_us" not in rows.columns:
        return
    if limits.runtime_mode == "probe":
        yield "Decompression took no time: mode probe measures one layer and may restore nothing."
    elif rows.max_value("h2o_lossless_raw_mb") > 0:
        yield (
            "Decompression took no time although bytes were encoded: nothing was restored. In mode store blocks are "
            "restored at the next call of their layer: generate more tokens. In mode full, look at kept_sample_layers."
        )
    elif _has_lost_figures(analysis, logs):
        return  # that figures were lost is said already, and this one may be among them
    elif limits.runtime_mode or limits.require_runtime_decomp:
        yield (
            "Decompression took no time because nothing was encoded: too few tokens, or none that are cold "
            "(h2o_trigger_min_tokens, hot_sink_tokens, hot_recent_tokens), or the runtime is off."
        )


def _diagnose_slow_store(analysis: CaseAnalysis) -> Iterator[str]:
    if analysis.limits.runtime_mode != "store":
        return
    failed_names = {gate.name for gate in analysis.gates if gate.verdict == "fail"}
    slow_names = [name for name in ("decode drop", "decompression", "async wait") if name in failed_names]
    if slow_names and analysis.rows.max_value("h2o_lossless_decomp_us") > 0:
        yield (
            f"Mode store is slow ({', '.join(slow_names)}): restoring costs at every step. Try store_disable_front "
            "first, then a smaller store_bootstrap_tokens and a larger store_grouped_step_tokens."
        )


def _diagnose_offline_difference(analysis: CaseAnalysis) -> Iterator[str]:
    """Compare the offline ratio that was judged with that of the run."""
    if analysis.ratio_source == "runtime":
        return
    raw_mb, compressed_mb = (analysis.rows.mean_value(f"h2o_lossless_{name}_mb") for name in ("raw", "comp"))
    if raw_mb <= 0 or compressed_mb <= 0:
        return
    run_ratio, offline_ratio = raw_mb / compressed_mb, analysis.selected_ratio
    if abs(offline_ratio - run_ratio) <= _MAX_OFFLINE_DIFFERENCE_FRACTION * run_ratio:
        return
    offline = analysis.online_ratio or analysis.upper_bound
    layers_text = f", layers {offline.layers}" if offline is not None and offline.layers else ""
    yield (
        f"Offline and online are apart: {offline_ratio:.3f} of a dump ({analysis.ratio_source}{layers_text}), "
        f"{run_ratio:.3f} of this run's own bytes. The dump is another run, perhaps of other layers: compare under one "
        "scope (chunked_grouped, the same front_n), and believe the run (--strict judges it)."
    )


def _diagnose_repeated_headers(analysis: CaseAnalysis) -> Iterator[str]:
    num_headers = sum(row.is_header for row in analysis.rows.rows)
    if num_headers:
        yield (
            f"{num_headers} of {len(analysis.rows.rows)} rows are headers of a second table in a log: they count as "
            "rows of zeros, in the means as well."
        )


_STRICT_BASIS = (
    "strict: ratios of every row, the lossless one from the run's own bytes, decode speed against that of the "
    "same work, by the interval of the drop; what is not measured, or unclear, is no pass."
)


@dataclass(frozen=True, kw_only=True)
class CaseResult(JudgedResult):
    """One case and its verdict."""

    json_keys = (
        "case verdict overall_pass=has_passed failure=failure_text strict rows=_num_rows "
        "files=analysis.rows.files limits=analysis.limits gate=_section_document gates hard_checks=checks "
        "warnings notes=analysis.rows.notes diagnoses prompts"
    )

    #: Name of the case.
    case: str
    #: The fork's figures and verdict, in any mode.
    analysis: CaseAnalysis
    #: The gates of the verdict: the fork's, or with `strict` those of `kvmnn.gates.strict`.
    gates: tuple[GateResult, ...]
    #: The hard checks; empty unless requested.
    checks: tuple[GateResult, ...] = ()
    #: Whether the strict gates were used.
    strict: bool = False
    #: Sentence on the basis of the verdict, if it is not the fork's.
    basis: str = ""
    #: Explanations of figures that look wrong, in sentences.
    diagnoses: tuple[str, ...] = ()
    #: Source of the prompts of runs on a model; empty for logs, which do not record it.
    prompts: str = field(default="", metadata={"omit": True})

    @property
    def all_gates(self) -> tuple[GateResult, ...]:
        return (*self.checks, *self.gates)

    @property
    def warnings(self) -> tuple[str, ...]:
        """The fork's warnings; with `strict`, without those about a ratio that it takes from the run itself."""
        all_warnings = self.analysis.warnings
        return (
            tuple(line for line in all_warnings if line not in SELECTED_RATIO_WARNINGS) if self.strict else all_warnings
        )

    @property
    def _num_rows(self) -> int:
        return len(self.analysis.rows.rows)

    @property
    def _section_document(self) -> dict[str, str]:
        return dict(self.analysis.section_lines)  # the fork's section, its values as text

    def to_markdown(self) -> str:
        """Return the report of the case, see `format_case_markdown`."""
        return format_case_markdown(self.analysis)

    def format_lines(self, width: int) -> list[str]:
        """Return the verdict, the gates and their explanations, in `width` columns."""
        rows = self.analysis.rows
        active_gates = [gate for gate in (*self.gates, *self.checks) if gate.verdict != "off"]
        unused_names = [gate.name for gate in (*self.gates, *self.checks) if gate.verdict == "off"]
        heading = (
            f"{self.verdict.upper()}: {self.case}, {summarize_verdicts(active_gates)}; "
            f"{pluralize(len(rows.rows), 'row')}"
        )
        heading += f"; prompts: {self.prompts}" if self.prompts else ""
        gates = [gate for gate in self.gates if gate.verdict != "off"]
        lines = [*wrap_lines([heading], width), "", *format_gate_table(gates, width)]
        checks = [gate for gate in self.checks if gate.verdict != "off"]
        if checks:
            lines += ["", "before the gates:", *format_gate_table(checks, width)]
        remarks = [*self.warnings, *self.diagnoses]
        for paragraph in (
            [f"off: {', '.join(unused_names)}"] if unused_names else [],
            [self.basis] if self.basis else [],
            remarks,
        ):
            lines += ["", *wrap_lines(paragraph, width)] if paragraph else []
        return lines


def check(
    rows: MetricRows,
    limits: GateLimits,
    *,
    case: str = "runtime",
    online_json: str | os.PathLike[str] | None = None,
    upper_json: str | os.PathLike[str] | None = None,
    logs: Sequence[str | os.PathLike[str]] = (),
    baseline: MetricRows | None = None,
    strict: bool = False,
) -> CaseResult:
    """Judge the rows of a case.

    Parameters
    ----------
    rows, limits
        The measured rows, and their limits.
    case
        Its name.
    online_json, upper_json
        Documents of offline evaluations; the fork takes its lossless ratio from them.
    logs
        Files and folders of logs of the same run, which are searched for damage and encodings.
    baseline
        Rows of the same work without compression; `strict` judges the decode speed by them.
    strict
        Judge by `build_strict_gates`.

    Raises
    ------
    SourceError
        For documents and logs that cannot be read; with `strict` for rows that are headers.
    OptionError
        With `strict` for a baseline that is the table itself: the same file, or the same rows.
    """
    online_ratio, upper_ratio = _read_optional_ratio(online_json), _read_optional_ratio(upper_json)
    log_scan = scan_logs(logs) if logs else None
    analysis = analyse(rows, limits, online_ratio=online_ratio, upper_bound=upper_ratio, logs=log_scan)
    if strict:
        _check_no_headers(rows)
        if baseline is not None:
            _check_distinct_baseline(rows, baseline)
    gates = build_strict_gates(analysis, baseline) if strict else analysis.gates
    return CaseResult(
        case=case,
        analysis=analysis,
        gates=gates,
        checks=run_hard_checks(rows, limits, log_scan, online_ratio) if limits.hard_checks else (),
        strict=strict,
        basis=_STRICT_BASIS if strict else "",
        diagnoses=diagnose(replace(analysis, gates=gates), log_scan),
    )


def _read_optional_ratio(path: str | os.PathLike[str] | None) -> OfflineRatio | None:
    return None if path is None else read_offline_ratio(path)


def _check_distinct_baseline(rows: MetricRows, baseline: MetricRows) -> None:
    judged_files = {os.path.realpath(name): name for name in rows.files}
    shared_file = next((name for name in baseline.files if os.path.realpath(name) in judged_files), None)
    if shared_file is None and _list_cells(rows) == _list_cells(baseline):
        shared_file = next(iter(baseline.files), "the baseline")
    if shared_file is not None:
        raise OptionError(
            f"{shared_file}: holds the rows that are judged and is their baseline as well: expected rows of runs "
            "without compression (--baseline)"
        )


def _list_cells(rows: MetricRows) -> list[dict[str, str]]:
    return [{name: cell for name, cell in row.cells.items() if name != LOG_FILE_COLUMN} for row in rows.rows]


def _check_no_headers(rows: MetricRows) -> None:
    for row_number, row in enumerate(rows.rows, start=1):
        if row.is_header:
            raise SourceError(
                f"{', '.join(rows.files)[:120]}: row {row_number} is the header of a second table, expected figures"
            )
