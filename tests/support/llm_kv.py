"""K and V of a real language model, and prefix caches of them in any layout, as the engine would leave them."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import packed_samples
from repository import FIXTURES

from kvmnn.packed.backends import BACKENDS

FILE = FIXTURES / "llm_kv" / "smollm2_96.npz"
KV_HEADS, HEAD_DIM = 3, 64


@cache
def _load() -> list[np.ndarray]:
    with np.load(FILE) as arrays:
        return [arrays[f"layer_{layer}.{part}"] for layer in range(2) for part in ("key", "value")]


def read_layers(tokens: int, dtype: str = "fp32") -> list[np.ndarray]:
    """K and V of two layers by turns, ``[kv_head, token, head_dim]``."""
    return [array[:, :tokens].astype(packed_samples.WORDS[dtype]) for array in _load()]


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
