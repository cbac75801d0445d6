"""Arrays like K and V, and unlike them, for the tests of dense streams."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kvmnn import dense

Words = npt.NDArray[Any]
DTYPES = ("fp16", "bf16", "fp32")
KINDS = ("cache", "rotated", "noise", "zeros", "words", "few", "spikes")


def to_dtype(values: npt.NDArray[np.float32], dtype: str) -> Words:
    if dtype == "bf16":
        bits = values.view(np.uint32)
        return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    with np.errstate(over="ignore"):
        return values.astype({"fp16": np.float16, "fp32": np.float32}[dtype])


def rotated(
    values: npt.NDArray[np.float32], dims: int, theta: float, positions: Any, pairing: str
) -> npt.NDArray[np.float32]:
    """``[head, token, dim]`` with its first `dims` words rotated as transformers does it, in float64."""
    half = dims // 2
    angles = np.asarray(positions, np.float64)[:, None] * theta ** (-2.0 * np.arange(half) / dims)
    first = np.arange(half) if pairing == "half" else 2 * np.arange(half)
    second = first + half if pairing == "half" else first + 1
    made = values.astype(np.float64)
    a, b = values[:, :, first].astype(np.float64), values[:, :, second].astype(np.float64)
    made[:, :, first] = a * np.cos(angles) - b * np.sin(angles)
    made[:, :, second] = b * np.cos(angles) + a * np.sin(angles)
    return made.astype(np.float32)


def near_rows(rng: np.random.Generator, heads: int, tokens: int, dim: int, words: int = 12) -> npt.NDArray[np.float32]:
    """Rows of few tokens, each time a little different."""
    kinds = rng.standard_normal((heads, words, dim)).astype(np.float32)
    drawn = kinds[:, rng.integers(0, words, tokens)]
    return drawn + rng.choice([0, 0.02, 0.3], (1, tokens, 1)).astype(np.float32) * rng.standard_normal(
        drawn.shape
    ).astype(np.float32)


def sample(kind: str, dtype: str, heads: int, tokens: int, dim: int, seed: int) -> Words:
    """``[head, token, dim]``."""
    rng = np.random.default_rng(seed)
    shape = (heads, tokens, dim)
    if kind == "cache":
        return to_dtype(near_rows(rng, *shape), dtype)
    if kind == "rotated":
        return to_dtype(rotated(near_rows(rng, *shape), dim // 2 * 2, 10000.0, np.arange(tokens), "half"), dtype)
    if kind == "zeros":
        return to_dtype(np.zeros(shape, np.float32), dtype)
    if kind == "noise":
        return to_dtype(rng.standard_normal(shape).astype(np.float32), dtype)
    if kind == "few":
        return to_dtype(rng.choice(np.array([0, -0.0, 1, 2.5, -3e-5], np.float32), shape), dtype)
    size = 4 if dtype == "fp32" else 2
    words = rng.integers(0, 256, heads * tokens * dim * size, np.uint8)
    if kind == "spikes":  # rows that come again, with words of all kinds strewn in: NaN, infinities, subnormals
        made = to_dtype(near_rows(rng, *shape), dtype)
        strewn = rng.random(shape) < 0.02
        made.view(np.uint16 if size == 2 else np.uint32)[strewn] = words.view(
            np.uint16 if size == 2 else np.uint32
        ).reshape(shape)[strewn]
        return made
    return words.view({"fp16": np.float16, "bf16": np.uint16, "fp32": np.float32}[dtype]).reshape(shape)


def streams() -> list[tuple[bytes, Words, dict[str, Any]]]:
    """Small streams of every method, with what decoding them needs."""
    made = []
    for dtype in DTYPES:
        for kind in ("cache", "rotated", "spikes"):
            array = sample(kind, dtype, 2, 70, 24, 1)
            rotary = dense.RopeConfig(dims=24) if kind == "rotated" else None
            made.append((dense.encode(array, rotary=rotary, positions=None), array, {}))
        before, own = sample("cache", dtype, 2, 40, 16, 2)[:, :30], sample("cache", dtype, 2, 40, 16, 2)[:, 30:]
        made.append((dense.encode(own, history=before), own, {"history": before}))
        tables = dense.SharedTables.from_arrays(
            [sample("rotated", dtype, 2, 200, 16, 4)], rotary=dense.RopeConfig(dims=16)
        )
        own = sample("rotated", dtype, 2, 90, 16, 5)
        before, own = own[:, :50], own[:, 50:]
        stream = dense.encode(own, history=before, tables=tables, positions=np.arange(50, 90))
        made.append((stream, own, {"history": before, "tables": tables}))
        for kind, shape in (("words", (2, 9, 8)), ("zeros", (2, 30, 8))):
            array = sample(kind, dtype, *shape, 3)
            made.append((dense.encode(array), array, {}))
    return made
