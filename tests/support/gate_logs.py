"""Logs as ``llm_bench`` and ``llm_demo`` write them, small."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

FIGURES: dict[str, float] = {
    "h2o_keep": 0.3211,
    "h2o_lossy": 3.114,
    "h2o_lossless": 1.32,
    "h2o_target_keep_effective": 0.287,
    "h2o_floor_keep": 0.26,
    "h2o_quantized_keep": 0.3211,
    "h2o_evict_us": 12.0,
    "h2o_codec_us": 90.0,
    "h2o_lossless_raw_mb": 8.0,
    "h2o_lossless_comp_mb": 6.0,
    "h2o_lossless_comp_us": 100.0,
    "h2o_lossless_decomp_us": 13941.0,
    "h2o_lossless_queue_peak": 2.5,
    "h2o_lossless_fallback": 0.0,
    "h2o_lossless_backpressure_skip": 0.0,
    "h2o_lossless_async_queue_peak": 2.0,
    "h2o_lossless_async_wait_us": 18708.0,
    "h2o_lossless_decode_cache_hit": 30.0,
    "h2o_lossless_decode_cache_miss": 0.0,
}
"""A row that passes every gate of the fork's case runtime_store, with figures of its sixth round."""

ENCODED = "[H2O-LOSSLESS] layer=0 mode=2 tokens=384 start=16 updates=2 ratio=1.33\n"


def row(decode: float = 5.9, prompt: int = 512, **changed: float) -> dict[str, str]:
    """Cells by column; a figure of None is left out."""
    cells = {
        "model": "llama2",
        "backend": "CPU",
        "threads": "4",
        "llm_demo": f"prompt={prompt}<br>decode=128",
        "speed(tok/s)": f"80.10 ± 0.10<br>{decode:.2f} ± 0.05",
    }
    return cells | {name: f"{value:.4f} ± 0.0010" for name, value in (FIGURES | changed).items() if value is not None}


def table(*rows: dict[str, str]) -> str:
    """A log with the rows between other lines."""
    header = list(rows[0])
    lines = [
        "loading the model",
        bar(header),
        bar(["---"] * len(header)),
        *(bar(list(cells.values())) for cells in rows),
    ]
    return "\n".join([*lines, "done", ""])


def bar(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def write_logs(folder: Path, *rows: dict[str, str], printed: str = ENCODED) -> Path:
    """A folder of logs: one of a table, one of what was printed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run_0001.log").write_text(table(*rows), encoding="utf-8")
    (folder / "stdout.log").write_text(printed, encoding="utf-8")
    return folder / "run_0001.log"


def record(**changed: Any) -> dict[str, Any]:
    """A JSON line of ``llm_demo`` with the figures of the fork's sixth round."""
    found: dict[str, Any] = {"prompt_index": 0, "prompt_tokens": 128, "decode_tokens": 512}
    found |= {"prefill_us": 2_000_000, "decode_us": 90_000_000, "sample_us": 1000}
    found |= {"h2o_keep_ratio": 0.34, "h2o_lossy_ratio": 2.903, "h2o_lossless_ratio": 1.269}
    found |= {"h2o_lossless_raw_bytes": 1 << 20, "h2o_lossless_compressed_bytes": 800_000}
    found |= {"h2o_lossless_decompress_us": 5000, "h2o_lossless_decode_cache_hit": 12}
    return found | changed


def write_demo(folder: Path, records: dict[str, dict[str, Any]], printed: dict[str, str] | None = None) -> Path:
    """Runs of prompts by their names, as the fork's runner lays them down."""
    (folder / "metrics").mkdir(parents=True)
    (folder / "logs").mkdir()
    for name, content in records.items():
        (folder / "metrics" / f"{name}.jsonl").write_text(json.dumps(content) + "\n" if content else "")
        (folder / "logs" / f"{name}.stdout.log").write_text((printed or {}).get(name, ""))
    return folder
