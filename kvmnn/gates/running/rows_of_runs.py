"""Runs of a model in the forms that the engine's programs leave: rows of ``llm_bench``, records of ``llm_demo``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, stdev

from ..checking.metric_rows import MetricRow, MetricRows
from ..demo.runs import DemoRun
from ..logs.columns import BENCH_COLUMNS, order_columns
from .figures import PairedRuns
from .measuring import RunRecord
from .run_cases import RunCase

_BYTES_PER_MIB = 1 << 20
RunMetric = Callable[[RunRecord], float]


def _make_counter_metric(name: str, unit: float = 1.0) -> RunMetric:
    return lambda record: record.get_counter(name) / unit


_METRIC_BY_COLUMN: dict[str, tuple[RunMetric, int]] = {
    "h2o_keep": (lambda record: 1 / record.lossy_ratio, 4),
    "h2o_lossy": (lambda record: record.lossy_ratio, 3),
    "h2o_lossless": (lambda record: record.encoded_ratio or 1.0, 3),
    "h2o_lossless_raw_mb": (_make_counter_metric("raw_bytes", _BYTES_PER_MIB), 2),
    "h2o_lossless_comp_mb": (_make_counter_metric("compressed_bytes", _BYTES_PER_MIB), 2),
    "h2o_lossless_comp_us": (_make_counter_metric("compress_us"), 2),
    "h2o_lossless_decomp_us": (lambda record: record.decompress_us, 2),
    "h2o_lossless_queue_peak": (_make_counter_metric("queue_depth_peak"), 2),
    "h2o_lossless_fallback": (_make_counter_metric("fallback_count"), 2),
    "h2o_lossless_backpressure_skip": (_make_counter_metric("backpressure_skip_count"), 2),
    "h2o_lossless_async_queue_peak": (_make_counter_metric("async_queue_peak"), 2),
    "h2o_lossless_async_wait_us": (_make_counter_metric("async_wait_us"), 2),
    "h2o_lossless_decode_cache_hit": (_make_counter_metric("decode_cache_hit"), 2),
    "h2o_lossless_decode_cache_miss": (_make_counter_metric("decode_cache_miss"), 2),
}
"""Columns of ``llm_bench``, what of a run stands in them, and digits behind the point."""

_PLAN_KEY_BY_COLUMN = {
    "h2o_target_keep_effective": ("h2o_target_keep_effective", 4),
    "h2o_floor_keep": ("h2o_floor_keep_by_recent_sink", 4),
    "h2o_quantized_keep": ("h2o_block_quantized_keep", 4),
    "h2o_evict_us": ("h2o_evict_us", 2),
}
"""Likewise, of the planner's last plan; only where there was one."""


def build_bench_rows(case: RunCase, pairs: Sequence[PairedRuns], model: str, side: str = "candidate") -> MetricRows:
    """A row for each piece of work, means and deviations over its repeats; ratios are those of whole caches."""
    pairs_by_workload: dict[str, list[PairedRuns]] = defaultdict(list)
    for pair in pairs:
        pairs_by_workload[pair.workload.name].append(pair)
    rows = [
        _build_bench_row(case, work_pairs, [getattr(pair, side) for pair in work_pairs], model)
        for work_pairs in pairs_by_workload.values()
    ]
    columns = order_columns(BENCH_COLUMNS, [dict(row.cells) for row in rows])
    return MetricRows(columns=tuple(columns), rows=tuple(rows), files=(case.name,))


def _build_bench_row(case: RunCase, pairs: Sequence[PairedRuns], records: Sequence[RunRecord], model: str) -> MetricRow:
    """Its numbers are the means themselves, not as they are rounded in its cells."""
    workload, metrics = pairs[0].workload, dict(_METRIC_BY_COLUMN)
    for column, (key, digits) in _PLAN_KEY_BY_COLUMN.items():
        if all(key in record.keep for record in records):
            metrics[column] = (_make_plan_metric(key), digits)
    cells = {
        "model": model,
        "backend": "onnxruntime",
        "threads": str(case.settings.threads),
        "llm_demo": f"prompt={sum(map(len, workload.turns))}<br>decode={workload.new_tokens}",
        "speed(tok/s)": (
            f"{_format_mean(records, _compute_prefill_speed, 2)}<br>{_format_mean(records, _get_decode_speed, 2)}"
        ),
        **{column: _format_mean(records, metric, digits) for column, (metric, digits) in metrics.items()},
        "log_file": workload.name,
        "held_ratio": _format_mean(records, lambda record: record.held_ratio, 3),
    }
    exact_values = {column: fmean(map(metric, records)) for column, (metric, _) in metrics.items()}
    row = MetricRow.from_cells(cells)
    return replace(row, numbers={**row.numbers, **exact_values}, decode_speed=fmean(map(_get_decode_speed, records)))


def _make_plan_metric(key: str) -> RunMetric:
    return lambda record: record.keep[key]


def _get_decode_speed(record: RunRecord) -> float:
    return record.decode_speed


def _compute_prefill_speed(record: RunRecord) -> float:
    return record.prompt_tokens / record.prefill_seconds if record.prefill_seconds > 0 else 0.0


def _format_mean(records: Sequence[RunRecord], metric: RunMetric, digits: int) -> str:
    values = [metric(record) for record in records]
    return f"{fmean(values):.{digits}f} \N{PLUS-MINUS SIGN} {stdev(values) if len(values) > 1 else 0.0:.{digits}f}"


def build_demo_runs(pairs: Sequence[PairedRuns], side: str) -> list[DemoRun]:
    """A run of ``llm_demo`` for each run of one side."""
    return [_build_demo_run(pair, getattr(pair, side)) for pair in pairs]


def _build_demo_run(pair: PairedRuns, record: RunRecord) -> DemoRun:
    metrics = {
        "h2o_keep_ratio": 1 / record.lossy_ratio,
        "h2o_lossy_ratio": record.lossy_ratio,
        "h2o_lossless_ratio": record.encoded_ratio or 1.0,
        **record.counters,
        "h2o_lossless_decompress_us": record.decompress_us,
    }
    return DemoRun(
        name=pair.workload.name,
        bucket=pair.workload.bucket,
        return_code=0,
        reason="ok",
        prompt_tokens=record.prompt_tokens,
        decode_tokens=record.decode_tokens,
        prefill_s=record.prefill_seconds,
        decode_s=record.decode_seconds,
        metrics=metrics,
    )
