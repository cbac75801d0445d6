"""What is behind figures that look wrong, in words: the fork's own list of what goes wrong most."""

from __future__ import annotations

from collections.abc import Iterator

from .analysis import CaseAnalysis
from .log_scan import LogScan

_MAX_OFFLINE_DIFFERENCE_FRACTION = 0.02
"""Share by which an offline ratio and that of the run may differ before it is said."""


def diagnose(analysis: CaseAnalysis, logs: LogScan | None) -> tuple[str, ...]:
    """Sentences about a case, each from what its rows and logs show."""
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
    """Whether the log tells of encodings, and the table of none."""
    return logs is not None and bool(logs.encoding_lines) and not analysis.rows.max_value("h2o_lossless_raw_mb") > 0


def _diagnose_unreachable_target(analysis: CaseAnalysis) -> Iterator[str]:
    """Rows in which sinks and recent tokens, or whole blocks, keep more than the target allows."""
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
            f"recent tokens "
            f"alone keep {max_fraction:.1%}, so at most {1 / max_fraction:.3f}. Take longer prompts, or lower "
            f"h2o_recent_tokens or "
            "h2o_sink_tokens; where these are smaller than a block, lower h2o_block_tokens."
        )
    if block_fractions:
        quantized_fraction, floor_fraction = max(block_fractions)
        yield (
            f"Lossy cannot reach {target:.3f} in {len(block_fractions)} of {len(rows)} rows: the target in whole "
            f"blocks keeps "
            f"{quantized_fraction:.1%} (blocks of sinks and recent tokens {floor_fraction:.1%}), so at most "
            f"{1 / quantized_fraction:.3f}. Lower "
            "h2o_block_tokens, or raise h2o_target_lossy_ratio."
        )


def _rules_out_target(keep_fraction: float, target: float) -> bool:
    """Return whether a share that is kept rules the target out; 0 is a row without plans."""
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
            f"first, "
            "then a smaller store_bootstrap_tokens and a larger store_grouped_step_tokens."
        )


def _diagnose_offline_difference(analysis: CaseAnalysis) -> Iterator[str]:
    """The offline ratio that was judged, beside that of the run."""
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
        f"{run_ratio:.3f} of this run's own "
        "bytes. The dump is another run, perhaps of other layers: compare under one scope (chunked_grouped, the same "
        "front_n), and believe the run (--strict judges it)."
    )


def _diagnose_repeated_headers(analysis: CaseAnalysis) -> Iterator[str]:
    num_headers = sum(row.is_header for row in analysis.rows.rows)
    if num_headers:
        yield (
            f"{num_headers} of {len(analysis.rows.rows)} rows are headers of a second table in a log: they count as "
            f"rows "
            "of zeros, in the means as well."
        )
