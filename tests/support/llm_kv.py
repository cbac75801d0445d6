"""K and V of a real language model, and prefix caches of them in any layout, as the engine would leave them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import packed_samples
from repository import FIXTURES

from kvmnn.packed.backends import BACKENDS

FILE = FIXTURES / "llm_kv" / "smollm2_96.npz"
KV_HEADS, HEAD_DIM = 3, 64


def read_layers(tokens: int, dtype: str = "fp32") -> list[np.ndarray]:
    """K and V of two layers by turns, ``[kv_head, token, head_dim]``."""
    with np.load(FILE) as arrays:
        names = ("layer_0.key", "layer_0.value", "layer_1.key", "layer_1.value")
        return [arrays[name][:, :tokens].astype(packed_samples.WORDS[dtype]) for name in names]


def write_prefix(
    folder: Path, backend: str, tokens: int, *, room: int = 64, block: int | None = 64, padding: bytes = b"\0"
) -> list[np.ndarray]:
    """A prefix of so many tokens with room for `room` more; returns its K and V."""
    numbers = BACKENDS[backend]
    layers = read_layers(tokens, numbers.dtype)
    packed_samples.write_prefix(
        folder, layers, lP=numbers.lP, hP=numbers.hP, block=block, capacity=tokens + room, padding=padding
    )
    return layers
