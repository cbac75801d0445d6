"""Runs of a model in the forms that the engine's programs leave: rows of ``llm_bench``, records of ``llm_demo``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from statistics import fmean, stdev

from ..checking.metric_rows import MetricRow, MetricRows
from ..demo.runs import DemoRun
from ..logs.columns import BENCH, ordered
from .figures import Pair
from .measuring import RunRecord
from .run_cases import RunCase

_MIB = 1 << 20
Figure = Callable[[RunRecord], float]


def _counter(name: str, unit: float = 1.0) -> Figure:
    return lambda record: record.counter(name) / unit


_FIGURES: dict[str, tuple[Figure, int]] = {
    "h2o_keep": (lambda record: 1 / record.lossy_ratio, 4),
    "h2o_lossy": (lambda record: record.lossy_ratio, 3),
    "h2o_lossless": (lambda record: record.encoded_ratio or 1.0, 3),
    "h2o_lossless_raw_mb": (_counter("raw_bytes", _MIB), 2),
    "h2o_lossless_comp_mb": (_counter("compressed_bytes", _MIB), 2),
    "h2o_lossless_comp_us": (_counter("compress_us"), 2),
    "h2o_lossless_decomp_us": (lambda record: record.decompress_us, 2),
    "h2o_lossless_queue_peak": (_counter("queue_depth_peak"), 2),
    "h2o_lossless_fallback": (_counter("fallback_count"), 2),
    "h2o_lossless_backpressure_skip": (_counter("backpressure_skip_count"), 2),
    "h2o_lossless_async_queue_peak": (_counter("async_queue_peak"), 2),
    "h2o_lossless_async_wait_us": (_counter("async_wait_us"), 2),
    "h2o_lossless_decode_cache_hit": (_counter("decode_cache_hit"), 2),
    "h2o_lossless_decode_cache_miss": (_counter("decode_cache_miss"), 2),
}
"""Columns of ``llm_bench``, what of a run stands in them, and digits behind the point."""

_OF_PLANS = {
    "h2o_target_keep_effective": ("h2o_target_keep_effective", 4),
    "h2o_floor_keep": ("h2o_floor_keep_by_recent_sink", 4),
    "h2o_quantized_keep": ("h2o_block_quantized_keep", 4),
    "h2o_evict_us": ("h2o_evict_us", 2),
}
"""Likewise, of the planner's last plan; only where there was one."""


def bench_rows(case: RunCase, pairs: Sequence[Pair], model: str, side: str = "candidate") -> MetricRows:
    """A row for each piece of work, means and deviations over its repeats; ratios are those of whole caches."""
    by_work: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_work[pair.work.name].append(pair)
    rows = [_row(case, found, [getattr(pair, side) for pair in found], model) for found in by_work.values()]
    columns = ordered(BENCH, [dict(row.cells) for row in rows])
    return MetricRows(columns=tuple(columns), rows=tuple(rows), files=(case.name,))


def _row(case: RunCase, pairs: Sequence[Pair], records: Sequence[RunRecord], model: str) -> MetricRow:
    """Its numbers are the means themselves, not as they are rounded in its cells."""
    work, figures = pairs[0].work, dict(_FIGURES)
    for column, (key, digits) in _OF_PLANS.items():
        if all(key in record.keep for record in records):
            figures[column] = (_plan(key), digits)
    cells = {
        "model": model,
        "backend": "onnxruntime",
        "threads": str(case.settings.threads),
        "llm_demo": f"prompt={sum(map(len, work.turns))}<br>decode={work.new_tokens}",
        "speed(tok/s)": f"{_mean(records, _prefill_speed, 2)}<br>{_mean(records, _decode_speed, 2)}",
        **{column: _mean(records, figure, digits) for column, (figure, digits) in figures.items()},
        "log_file": work.name,
        "held_ratio": _mean(records, lambda record: record.held_ratio, 3),
    }
    exact = {column: fmean(map(figure, records)) for column, (figure, _) in figures.items()}
    row = MetricRow.of(cells)
    return replace(row, numbers={**row.numbers, **exact}, decode=fmean(map(_decode_speed, records)))


def _plan(key: str) -> Figure:
    return lambda record: record.keep[key]


def _decode_speed(record: RunRecord) -> float:
    return record.decode_speed


def _prefill_speed(record: RunRecord) -> float:
    return record.prompt_tokens / record.prefill_seconds if record.prefill_seconds > 0 else 0.0


def _mean(records: Sequence[RunRecord], figure: Figure, digits: int) -> str:
    values = [figure(record) for record in records]
    return f"{fmean(values):.{digits}f} \N{PLUS-MINUS SIGN} {stdev(values) if len(values) > 1 else 0.0:.{digits}f}"


def demo_runs(pairs: Sequence[Pair], side: str) -> list[DemoRun]:
    """A run of ``llm_demo`` for each run of one side."""
    return [_demo_run(pair, getattr(pair, side)) for pair in pairs]


def _demo_run(pair: Pair, record: RunRecord) -> DemoRun:
    figures = {
        "h2o_keep_ratio": 1 / record.lossy_ratio,
        "h2o_lossy_ratio": record.lossy_ratio,
        "h2o_lossless_ratio": record.encoded_ratio or 1.0,
        **record.counters,
        "h2o_lossless_decompress_us": record.decompress_us,
    }
    return DemoRun(
        name=pair.work.name,
        bucket=pair.work.bucket,
        return_code=0,
        reason="ok",
        prompt_tokens=record.prompt_tokens,
        decode_tokens=record.decode_tokens,
        prefill_s=record.prefill_seconds,
        decode_s=record.decode_seconds,
        record=figures,
    )
