"""Small caches for tests: logical arrays, and prefix-cache files made from them with a plain loop over the formulas."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np

WORDS = {"fp16": "<f2", "bf16": "<u2", "fp32": "<f4"}


def arrays(layers: int, heads: int, tokens: int, dims: int, dtype: str = "fp32", seed: int = 0) -> list[np.ndarray]:
    """K and V of every layer, ``[kv_head, token, head_dim]``, by turns."""
    rng = np.random.default_rng(seed)
    made = [rng.standard_normal((heads, tokens, dims)).astype(np.float32) for _ in range(2 * layers)]
    if dtype == "bf16":
        return [(array.view("<u4") >> np.uint32(16)).astype("<u2") for array in made]
    return [array.astype(WORDS[dtype]) for array in made]


def packed(
    keys: np.ndarray, values: np.ndarray, lP: int, hP: int, block: int | None, capacity: int, padding: bytes = b"\xa5"
) -> tuple[np.ndarray, np.ndarray]:
    """Both buffers, element by element; every byte of padding is `padding`."""
    heads, tokens, dims = keys.shape
    fa = block or capacity
    up = lambda a, b: -(-a // b)  # noqa: E731
    k_head = up(capacity, hP) * hP * up(dims, lP) * lP
    s2 = hP * lP
    s1 = up(fa, lP) * s2
    s0 = s1 * up(dims, hP)
    v_head = up(capacity, fa) * s0
    k, v = (np.frombuffer(padding * (heads * size * keys.itemsize), keys.dtype).copy() for size in (k_head, v_head))
    t, d = np.meshgrid(np.arange(tokens), np.arange(dims), indexing="ij")
    k_at = t // hP * (up(dims, lP) * lP * hP) + d // lP * s2 + t % hP * lP + d % lP
    r = t % fa
    v_at = t // fa * s0 + d // hP * s1 + r // lP * s2 + d % hP * lP + r % lP
    for head in range(heads):
        k[head * k_head + k_at] = keys[head]
        v[head * v_head + v_at] = values[head]
    return k, v


def write_prefix(
    folder: Path,
    layers: list[np.ndarray],
    *,
    name: str = "sys",
    lP: int = 1,
    hP: int = 4,
    block: int | None = 64,
    capacity: int,
    markers: bool = True,
    padding: bytes = b"\xa5",
) -> SimpleNamespace:
    """A prefix cache as the engine would leave it."""
    folder.mkdir(parents=True, exist_ok=True)
    for layer in range(len(layers) // 2):
        buffers = packed(layers[2 * layer], layers[2 * layer + 1], lP, hP, block, capacity, padding)
        for part, buffer in zip("kv", buffers, strict=True):
            (folder / f"{name}_{layer}.{part}").write_bytes(buffer.tobytes())
            if markers:
                (folder / f"{name}_{layer}_sync.{part}").touch()
    heads, tokens, dims = layers[0].shape
    options = ["--kv-heads", heads, "--head-dim", dims, "--valid-tokens", tokens]
    return SimpleNamespace(path=folder, options=options, arrays=layers)
