"""What the fork's script demands of a run before its analyser looks at it; any of these fails the case."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .limits import GateLimits
from .log_scan import LogScan
from .metric_rows import MetricRow, MetricRows
from .offline_ratio import OfflineRatio
from .verdicts import OFF, GateResult, verdict_from

_TOKENS_REGEX, _UPDATES_REGEX = re.compile(r"\btokens=(\d{1,15})\b"), re.compile(r"\bupdates=(\d{1,15})\b")
_OLD_BUILD_GROUP_TOKENS = 192
"""Tokens that an old build grouped whatever it was told."""

_MAX_RATIO_DIFFERENCE = 0.01


def run_hard_checks(
    rows: MetricRows, limits: GateLimits, logs: LogScan | None, online_ratio: OfflineRatio | None
) -> tuple[GateResult, ...]:
    """The checks of steps 4 to 6, as gates.

    Parameters
    ----------
    logs
        None where no logs were given: what only they show is off then.
    online_ratio
        Likewise, of the offline evaluation.
    """
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
