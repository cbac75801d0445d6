"""K and V of the first layer of SmolLM2-135M in MNN's form, in float32 and as the engine's TQ3 or TQ4."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from engine_client import Engine

from kvmnn.dtypes import Part
from kvmnn.packed.layout import PackLayout
from kvmnn.packed.rotated_codes import BLOCK_VALUES, TQ3, TQ4

KV_HEADS, HEAD_DIM = 3, 64
FORMATS = {11: TQ3, 12: TQ3, 13: TQ4, 14: TQ4}
PARTS: dict[int, tuple[Part, ...]] = {11: ("key",), 12: ("key", "value"), 13: ("key",), 14: ("key", "value")}


def _run(model: Path, scratch: Path, ids: list[int], mode: int) -> dict[Part, np.ndarray]:
    """The bytes of the first layer's prefix cache files."""
    folder = scratch / f"mode_{mode}"
    folder.mkdir()
    with Engine(model, scratch / f"live_{mode}", folder, attention_mode=mode) as engine:
        engine.call("prefix", "p")
        engine.call("generate", ids, 0)
    return {part: np.fromfile(folder / f"p_0.{part[0]}", np.uint8) for part in ("key", "value")}


def read_rows(model: Path, scratch: Path, ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
    """K and V, float32 ``[kv_head, token, head_dim]``."""
    files = _run(model, scratch, ids, 8)
    layout = PackLayout.from_backend("x86-avx2", kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    return layout.unpack(files["key"], files["value"], len(ids))


def read_blocks(model: Path, scratch: Path, ids: list[int], mode: int) -> dict[Part, np.ndarray]:
    """The blocks of what a mode quantises, uint8 ``[kv_head, token, block, byte]``; unused rows are checked to be 0."""
    files = _run(model, scratch, ids, mode)
    blocks = {}
    for part in PARTS[mode]:
        rows = files[part].reshape(KV_HEADS, -1, HEAD_DIM // BLOCK_VALUES, FORMATS[mode].nbytes)
        assert not rows[:, len(ids) :].any()
        blocks[part] = rows[:, : len(ids)]
    return blocks
