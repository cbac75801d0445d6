"""One module for each format of vectors; `FORMATS` maps the name in an index to the function that checks it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import (
    compressor,
    compressor_forward,
    dense,
    engines,
    frames,
    gates,
    h2o,
    hf_cache,
    layout,
    offline,
    policies,
    profile_streams,
    real,
    store,
)
from .common import CaseResult

Runner = Callable[[Path, dict[str, Any]], Iterator[CaseResult]]

FORMATS: dict[str, Runner] = {
    "h2o-gate-vectors-1": gates.run,
    "h2o-planner-vectors-1": h2o.run,
    "hf-cache-1": hf_cache.run,
    "kv-policy-vectors-1": policies.run,
    "kvmnn-dense/1": dense.run,
    "kvmnn-linear/1": profile_streams.run_linear,
    "kvmnn-profile/1": profile_streams.run_profile,
    "kvmnn-store-trace/1": store.run,
    "kvmnn-transform/1": profile_streams.run_transform,
    "kvcm-convert-vectors/1": compressor.run_convert,
    "kvcm-corrupt-vectors/1": compressor.run_corrupt,
    "kvcm-forward-vectors/1": compressor_forward.run,
    "llama-state-1": engines.run_llama,
    "mlx-prompt-cache-1": engines.run_mlx,
    "mnn-frame-vectors-1": frames.run,
    "mnn-h2o-live-1": real.run_h2o,
    "mnn-offline-lossless-vectors-1": offline.run,
    "mnn-packed-kv-layout-vectors-1": layout.run,
    "mnn-prefix-1": real.run_prefix,
    "mnn-real-kv-1": real.run_snapshots,
}

__all__ = ["FORMATS", "CaseResult"]
