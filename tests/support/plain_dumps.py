"""KV dumps as the engine writes them, with values of their own."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def dump(folder: Path, *, start: int = 0, tokens: int = 3, width: int = 2, **changes: object) -> np.ndarray:
    """Write one dump as the engine does; returns K."""
    folder.mkdir(parents=True, exist_ok=True)
    stem = f"t{start}_{start + tokens}"
    values = np.arange(tokens * 2 * 4, dtype=f"<f{width}").reshape(tokens, 2, 4)
    (folder / f"k_{stem}.bin").write_bytes(values.tobytes())
    (folder / f"v_{stem}.bin").write_bytes((-values).tobytes())
    meta = {"layer_id": 0, "seq_start": start, "seq_len": tokens, "kv_heads": 2, "head_dim": 4, "bytes_per_elem": width,
            "dtype": f"fp{8 * width}", "k_file": f"k_{stem}.bin", "v_file": f"v_{stem}.bin", **changes}  # fmt: skip
    (folder / f"meta_{stem}.json").write_text(json.dumps(meta))
    return values


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below a folder, by its name in it."""
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
