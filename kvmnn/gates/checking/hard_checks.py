"""What the fork's script demands of a run before its analyser looks at it; any of these fails the case."""

from __future__ import annotations

import re
from collections.abc import Iterator

from .limits import Limits
from .log_scan import LogScan
from .metric_rows import MetricRow, MetricRows
from .offline_ratio import OfflineRatio
from .verdicts import OFF, Gate, judged

_TOKENS, _UPDATES = re.compile(r"\btokens=(\d{1,15})\b"), re.compile(r"\bupdates=(\d{1,15})\b")
_OLD_GROUP = 192
"""Tokens that an old build grouped whatever it was told."""

_RATIO_APART = 0.01


def hard_checks(
    rows: MetricRows, limits: Limits, logs: LogScan | None, online: OfflineRatio | None
) -> tuple[Gate, ...]:
    """The checks of steps 4 to 6, as gates.

    Parameters
    ----------
    logs
        None where no logs were given: what only they show is off then.
    online
        Likewise, of the offline evaluation.
    """
    return (*_of_rows(rows.rows, limits), *_of_logs(logs, limits), _of_offline(online))


def _of_rows(rows: tuple[MetricRow, ...], limits: Limits) -> Iterator[Gate]:
    filled = sum(row.numbers["h2o_lossless_raw_mb"] > 0 and row.numbers["h2o_lossless"] > 1 for row in rows)
    yield Gate(
        name="lossless figures",
        verdict=judged(filled > 0),
        value=f"{filled} of {len(rows)} rows",
        limit="> 0",
        why="" if filled else "no row has raw_mb > 0 and a ratio above 1",
    )
    names = ("h2o_lossless_raw_mb", "h2o_lossless_comp_mb", "h2o_lossless_comp_us", "h2o_lossless_decomp_us")
    whole = sum(all(row.numbers[name] > 0 for name in names) for row in rows)
    yield Gate(
        name="real decompression",
        verdict=judged(whole > 0, on=limits.require_runtime_decomp),
        value=f"{whole} of {len(rows)} rows",
        limit="> 0" if limits.require_runtime_decomp else "",
        why="" if whole else "no row has raw_mb, comp_mb, comp_us and decomp_us above 0",
    )


def _of_logs(logs: LogScan | None, limits: Limits) -> Iterator[Gate]:
    if logs is None:
        yield Gate(name="encodings in logs", verdict=OFF, why="no logs given (--logs-dir, --bench-stdout-log)")
        return
    steps = [(_found(_TOKENS, line), _found(_UPDATES, line)) for line in logs.encodings]
    yield Gate(
        name="encodings in logs",
        verdict=judged(bool(steps)),
        value=f"{len(steps)} lines",
        limit="> 0",
        why="" if steps else f"no line with [H2O-LOSSLESS] in {logs.files} files",
    )
    old = sum(tokens == _OLD_GROUP for tokens, _ in steps)
    yield Gate(
        name="no fixed groups",
        verdict=judged(old == 0),
        value=f"{old} lines",
        limit="0",
        why=f"tokens={_OLD_GROUP}: an old build's fixed group" if old else "",
    )
    store = limits.runtime_mode == "store" and limits.store_grouped_step_tokens > 0
    expected = limits.store_grouped_step_tokens if store else limits.lossless_block_tokens
    later = [tokens for tokens, updates in steps if updates >= 2]
    right = later.count(expected)
    yield Gate(
        name="step of encodings",
        verdict=judged(right > 0, on=bool(later)),
        value=f"{right} of {len(later)}" if later else "",
        limit=f"{expected} tokens",
        why="" if later else "no line with updates >= 2",
    )


def _of_offline(online: OfflineRatio | None) -> Gate:
    if online is None:
        return Gate(name="offline bytes", verdict=OFF, why="no --offline-lossless-online-json")
    whole = online.raw_bytes > 0 and online.compressed_bytes > 0
    ratio = online.raw_bytes / online.compressed_bytes if whole else 0.0
    return Gate(
        name="offline bytes",
        verdict=judged(whole and abs(ratio - online.ratio) <= _RATIO_APART),
        value=f"{ratio:.4f}" if whole else "no bytes",
        limit=f"{online.ratio:.4f}",
        why="raw over compressed bytes against the ratio it states",
    )


def _found(pattern: re.Pattern[str], line: str) -> int:
    match = pattern.search(line)
    return int(match[1]) if match else -1
