"""Options of a runtime that stores at once: no eviction, no thread, no decoded copies, unless a test asks for them."""

from __future__ import annotations

from typing import Any

from kvmnn.policies.h2o import H2OConfig
from kvmnn.runtime import RuntimeConfig


def store_options(**values: Any) -> RuntimeConfig:
    """`RuntimeConfig` for mode "store" in blocks of 16 tokens; `values` replace what is written here."""
    known: dict[str, Any] = {
        "mode": "store", "front_n": 4, "block_tokens": 16, "hot_recent_tokens": 16, "hot_sink_tokens": 4,
        "async_threads": 0, "decode_cache_blocks": 0,
        "h2o": H2OConfig(enable=False, trigger_min_tokens=1, update_interval=1),
    }  # fmt: skip
    return RuntimeConfig(enable=True, runtime_enable=True, codec="gear_delta", **(known | values))
