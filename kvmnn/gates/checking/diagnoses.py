"""What is behind figures that look wrong, in words: the fork's own list of what goes wrong most."""

from __future__ import annotations

from collections.abc import Iterator

from .analysis import Analysis
from .log_scan import LogScan

_APART = 0.02
"""Share by which an offline ratio and that of the run may differ before it is said."""


def diagnoses(analysis: Analysis, logs: LogScan | None) -> tuple[str, ...]:
    """Sentences about a case, each from what its rows and logs show."""
    found = [
        *_zero_despite_log(analysis, logs),
        *_below_ceiling(analysis),
        *_no_decompression(analysis, logs),
        *_slow_store(analysis),
        *_apart(analysis),
        *_headers(analysis),
    ]
    return tuple(found)


def _zero_despite_log(analysis: Analysis, logs: LogScan | None) -> Iterator[str]:
    if logs is None or not _lost(analysis, logs):
        return
    yield (
        f"The log tells of {len(logs.encodings):,} encodings, the table has none (raw_mb is 0 in every row): the "
        "figures were lost on their way. The engine overwrites its sums where a layer reports no bytes, or copies them "
        "to the context before the last layer; or llm_bench is older than the engine."
    )


def _lost(analysis: Analysis, logs: LogScan | None) -> bool:
    """Whether the log tells of encodings, and the table of none."""
    return logs is not None and bool(logs.encodings) and not analysis.rows.largest("h2o_lossless_raw_mb") > 0


def _below_ceiling(analysis: Analysis) -> Iterator[str]:
    """Rows in which sinks and recent tokens, or whole blocks, keep more than the target allows."""
    target, rows = analysis.limits.lossy_target, analysis.rows.rows
    floors, blocks = list[float](), list[tuple[float, float]]()
    for row in rows:
        floor, quantised = (row.numbers[f"h2o_{name}_keep"] for name in ("floor", "quantized"))
        if _is_above(floor, target):  # then smaller blocks or another target change nothing
            floors.append(floor)
        elif _is_above(quantised, target):
            blocks.append((quantised, floor))
    if floors:
        most = max(floors)
        yield (
            f"Lossy cannot reach {target:.3f} in {len(floors)} of {len(rows)} rows: blocks of sinks and recent tokens "
            f"alone keep {most:.1%}, so at most {1 / most:.3f}. Take longer prompts, or lower h2o_recent_tokens or "
            "h2o_sink_tokens; where these are smaller than a block, lower h2o_block_tokens."
        )
    if blocks:
        quantised, floor = max(blocks)
        yield (
            f"Lossy cannot reach {target:.3f} in {len(blocks)} of {len(rows)} rows: the target in whole blocks keeps "
            f"{quantised:.1%} (blocks of sinks and recent tokens {floor:.1%}), so at most {1 / quantised:.3f}. Lower "
            "h2o_block_tokens, or raise h2o_target_lossy_ratio."
        )


def _is_above(kept: float, target: float) -> bool:
    """Return whether a share that is kept rules the target out; 0 is a row without plans."""
    return kept > 0 and 1.0 / kept + 1e-6 < target


def _no_decompression(analysis: Analysis, logs: LogScan | None) -> Iterator[str]:
    rows, limits = analysis.rows, analysis.limits
    if rows.largest("h2o_lossless_decomp_us") > 0 or "h2o_lossless_decomp_us" not in rows.columns:
        return
    if limits.runtime_mode == "probe":
        yield "Decompression took no time: mode probe measures one layer and may restore nothing."
    elif rows.largest("h2o_lossless_raw_mb") > 0:
        yield (
            "Decompression took no time although bytes were encoded: nothing was restored. In mode store blocks are "
            "restored at the next call of their layer: generate more tokens. In mode full, look at kept_sample_layers."
        )
    elif _lost(analysis, logs):
        return  # that figures were lost is said already, and this one may be among them
    elif limits.runtime_mode or limits.require_runtime_decomp:
        yield (
            "Decompression took no time because nothing was encoded: too few tokens, or none that are cold "
            "(h2o_trigger_min_tokens, hot_sink_tokens, hot_recent_tokens), or the runtime is off."
        )


def _slow_store(analysis: Analysis) -> Iterator[str]:
    if analysis.limits.runtime_mode != "store":
        return
    failed = {gate.name for gate in analysis.gates if gate.verdict == "fail"}
    slow = [name for name in ("decode drop", "decompression", "async wait") if name in failed]
    if slow and analysis.rows.largest("h2o_lossless_decomp_us") > 0:
        yield (
            f"Mode store is slow ({', '.join(slow)}): restoring costs at every step. Try store_disable_front first, "
            "then a smaller store_bootstrap_tokens and a larger store_grouped_step_tokens."
        )


def _apart(analysis: Analysis) -> Iterator[str]:
    """The offline ratio that was judged, beside that of the run."""
    if analysis.source == "runtime":
        return
    raw, compressed = (analysis.rows.mean(f"h2o_lossless_{name}_mb") for name in ("raw", "comp"))
    if raw <= 0 or compressed <= 0:
        return
    run, said = raw / compressed, analysis.selected
    if abs(said - run) <= _APART * run:
        return
    offline = analysis.online or analysis.upper
    layers = f", layers {offline.layers}" if offline is not None and offline.layers else ""
    yield (
        f"Offline and online are apart: {said:.3f} of a dump ({analysis.source}{layers}), {run:.3f} of this run's own "
        "bytes. The dump is another run, perhaps of other layers: compare under one scope (chunked_grouped, the same "
        "front_n), and believe the run (--strict judges it)."
    )


def _headers(analysis: Analysis) -> Iterator[str]:
    repeated = sum(row.is_header for row in analysis.rows.rows)
    if repeated:
        yield (
            f"{repeated} of {len(analysis.rows.rows)} rows are headers of a second table in a log: they count as rows "
            "of zeros, in the means as well."
        )
