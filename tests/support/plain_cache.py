"""A cache without a runtime: what attention must read, whatever is stored how."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class PlainLayer:
    """All rows of a layer, and where they stand."""

    def __init__(self, kv_heads: int, head_dim: int, dtype: str) -> None:
        self.rows = np.empty((2, kv_heads, 0, head_dim), dtype)
        self.positions = np.empty(0, np.int64)

    def append(self, rows: Array, position: int) -> None:
        self.rows = np.concatenate([self.rows, rows], axis=2)
        self.positions = np.concatenate([self.positions, position + np.arange(rows.shape[2])])

    def keep(self, mask: Array) -> None:
        self.rows, self.positions = self.rows[:, :, mask], self.positions[mask]

    def evict(self, pairs: Any, remove: int) -> None:
        mask = np.arange(self.rows.shape[2]) < self.rows.shape[2] - remove
        start = self.rows.shape[2] - remove
        for begin, size in pairs:
            mask[start + begin : start + begin + size] = True
        self.keep(mask)

    def erase(self, begin: int, end: int) -> None:
        self.keep((self.positions < begin) | (self.positions >= end))


def new_rows(rng: np.random.Generator, kv_heads: int, tokens: int, head_dim: int, dtype: str, kind: str) -> Array:
    """K and V of new tokens, ``[2, kv_head, token, head_dim]``: random, smooth (compresses), or constant."""
    shape = (2, kv_heads, tokens, head_dim)
    if kind == "random":
        size = int(np.prod(shape)) * np.dtype(dtype).itemsize
        return np.frombuffer(rng.bytes(size), dtype).reshape(shape).copy()
    if kind == "constant":
        return np.full(shape, 3, dtype)
    base = np.linspace(0.5, 1.0, head_dim)[None, None, None] + rng.integers(0, 3, shape) / 64
    return base.astype(dtype) if np.dtype(dtype).kind == "f" else (base * 1000).astype(dtype)
