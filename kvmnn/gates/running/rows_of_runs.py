"""Runs of a model in the forms that the engine's programs leave: rows of ``llm_bench``, records of ``llm_demo``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from statistics import fmean, stdev

from ..checking.metric_rows import MetricRow, MetricRows
from ..demo.runs import DemoRun
from ..logs.columns import BENCH, ordered
from .case_gates import Pair
from .measuring import RunRecord
from .run_cases import RunCase

_MIB = 1 << 20
_COUNTERS = {
    "h2o_lossless_comp_us": ("compress_us", 2),
    "h2o_lossless_decomp_us": ("decompress_us", 2),
    "h2o_lossless_queue_peak": ("queue_depth_peak", 2),
    "h2o_lossless_fallback": ("fallback_count", 2),
    "h2o_lossless_backpressure_skip": ("backpressure_skip_count", 2),
    "h2o_lossless_async_queue_peak": ("async_queue_peak", 2),
    "h2o_lossless_async_wait_us": ("async_wait_us", 2),
    "h2o_lossless_decode_cache_hit": ("decode_cache_hit", 2),
    "h2o_lossless_decode_cache_miss": ("decode_cache_miss", 2),
}


def bench_rows(case: RunCase, pairs: Sequence[Pair], model: str, side: str = "candidate") -> MetricRows:
    """A row for each piece of work, means and deviations over its repeats; ratios are those of whole caches."""
    by_work: dict[str, list[Pair]] = defaultdict(list)
    for pair in pairs:
        by_work[pair.work.name].append(pair)
    cells = [_cells(case, found, [getattr(pair, side) for pair in found], model) for found in by_work.values()]
    columns = ordered(BENCH, cells)
    return MetricRows(columns=tuple(columns), rows=tuple(map(MetricRow.of, cells)), files=(case.name,))


def _cells(case: RunCase, pairs: Sequence[Pair], records: Sequence[RunRecord], model: str) -> dict[str, str]:
    work = pairs[0].work

    def counter(name: str) -> Callable[[RunRecord], float]:
        return lambda record: record.counters.get(f"h2o_lossless_{name}", 0.0)

    prefill, decode = _mean(records, _prefill_speed, 2), _mean(records, lambda record: record.decode_speed, 2)
    cells = {
        "model": model,
        "backend": "onnxruntime",
        "threads": str(case.settings.threads),
        "llm_demo": f"prompt={sum(map(len, work.turns))}<br>decode={work.new_tokens}",
        "speed(tok/s)": f"{prefill}<br>{decode}",
        "h2o_keep": _mean(records, lambda record: 1 / record.lossy_ratio, 4),
        "h2o_lossy": _mean(records, lambda record: record.lossy_ratio, 3),
        "h2o_lossless": _mean(records, lambda record: record.encoded_ratio or 1.0, 3),
        "h2o_lossless_raw_mb": _mean(records, lambda record: counter("raw_bytes")(record) / _MIB, 2),
        "h2o_lossless_comp_mb": _mean(records, lambda record: counter("compressed_bytes")(record) / _MIB, 2),
    }
    cells |= {column: _mean(records, counter(name), digits) for column, (name, digits) in _COUNTERS.items()}
    return cells | {"log_file": work.name, "held_ratio": _mean(records, lambda record: record.held_ratio, 3)}


def _prefill_speed(record: RunRecord) -> float:
    return record.prompt_tokens / record.prefill_seconds if record.prefill_seconds > 0 else 0.0


def _mean(records: Sequence[RunRecord], figure: Callable[[RunRecord], float], digits: int) -> str:
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
