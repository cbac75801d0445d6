"""Folders as vLLM's ExampleConnector writes them: a .safetensors file for each layer."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np


def folder(path: Path, shape: tuple[int, ...], layers: int = 12) -> list[np.ndarray]:
    """Write a folder of bf16 tensors of this shape; the tensors are returned."""
    path.mkdir()
    bits = np.random.default_rng(7).integers(0, 1 << 16, (layers, *shape), np.uint16)
    for n, array in enumerate(bits):
        header = {"kv_cache": {"dtype": "BF16", "shape": shape, "data_offsets": [0, array.nbytes]}}
        text = json.dumps(header).encode()
        file = path / f"model.layers.{n}.self_attn.attn.safetensors"
        file.write_bytes(len(text).to_bytes(8, "little") + text + array.tobytes())
    return list(bits)
