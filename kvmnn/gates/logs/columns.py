"""Names of columns, in the order in which a table has them."""

from __future__ import annotations

SPEED_COLUMN = "speed(tok/s)"
LOG_FILE_COLUMN = "log_file"

RUNTIME_COLUMNS = (
    "h2o_lossless_decomp_us",
    "h2o_lossless_queue_peak",
    "h2o_lossless_fallback",
    "h2o_lossless_backpressure_skip",
    "h2o_lossless_async_queue_peak",
    "h2o_lossless_async_wait_us",
    "h2o_lossless_decode_cache_hit",
    "h2o_lossless_decode_cache_miss",
)
"""Those that a strict check of columns demands; an ``llm_bench`` from before the fork's v6 prints fewer."""

METRIC_COLUMNS = (
    *("h2o_keep", "h2o_lossy", "h2o_lossless"),
    *("h2o_target_keep_effective", "h2o_floor_keep", "h2o_quantized_keep"),
    *("h2o_evict_us", "h2o_codec_us"),
    *("h2o_lossless_raw_mb", "h2o_lossless_comp_mb", "h2o_lossless_comp_us"),
    *RUNTIME_COLUMNS,
)
"""Columns of ``llm_bench`` that hold a mean and a deviation."""

BENCH_COLUMNS = ("model", "modelSize", "backend", "threads", "llm_demo", SPEED_COLUMN, *METRIC_COLUMNS, LOG_FILE_COLUMN)
"""Of ``llm_bench``; other columns follow, sorted."""

DECOMPRESSED_COLUMN = "h2o_lossless_decompressed_bytes"
"""Counted where a table has it; ``llm_bench`` prints no such column."""

DEMO_COLUMNS = (
    *("prompt_index", "prompt_tokens", "decode_tokens", "prefill_us", "decode_us", "sample_us"),
    *("h2o_keep_ratio", "h2o_lossy_ratio", "h2o_lossless_ratio"),
    *("h2o_lossless_raw_bytes", "h2o_lossless_compressed_bytes", "h2o_lossless_decompressed_bytes"),
    *("h2o_lossless_compress_us", "h2o_lossless_decompress_us"),
    *("h2o_lossless_queue_depth_peak", "h2o_lossless_fallback_count", "h2o_lossless_backpressure_skip"),
    *("h2o_lossless_async_queue_peak", "h2o_lossless_async_wait_us"),
    *("h2o_lossless_decode_cache_hit", "h2o_lossless_decode_cache_miss"),
    *("h2o_last_evict_tokens", "h2o_total_evict_tokens", LOG_FILE_COLUMN),
)
"""Of a record of ``llm_demo``; other keys follow, sorted."""


def order_columns(preferred_order: tuple[str, ...], rows: list[dict[str, str]]) -> list[str]:
    """The columns that any row has: known ones in their order, then the others sorted."""
    present_columns = {name for row in rows for name in row}
    return [name for name in preferred_order if name in present_columns] + sorted(
        present_columns - set(preferred_order)
    )
