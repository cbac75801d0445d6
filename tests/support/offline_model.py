"""The offline evaluation once more, in slow plain Python over zstandard, and small dumps to run it on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import zstandard


def predict(x: np.ndarray, name: str) -> np.ndarray:
    """One predictor over uint8 [token, head, dim], element by element."""
    out = x.astype(int)
    if name.startswith("pair_delta"):
        for j in range(1, x.shape[2], 2):
            out[:, :, j] = out[:, :, j] - x[:, :, j - 1]
        if name == "pair_delta":
            return (out % 256).astype(np.uint8)
        x = (out % 256).astype(np.uint8)
        name = "delta_seq"
    before = np.zeros_like(x)
    before[1:] = x[:-1]
    if name == "delta_seq":
        return ((x.astype(int) - before) % 256).astype(np.uint8)
    return x ^ before if name == "xor_seq" else x


def bitshuffle(data: bytes) -> bytes:
    """Bit by bit."""
    bits = [byte >> plane & 1 for plane in range(8) for byte in data]
    return bytes(sum(bits[8 * i + j] << j for j in range(8)) for i in range(len(data)))


def stream_size(
    lane: np.ndarray, names: list[str], block: int, level: int, shuffled: bool, adaptive: bool = True
) -> tuple[int, dict[str, int]]:
    """Size and modes of one lane; `block` tokens take one predictor."""

    def payload(part: np.ndarray, name: str) -> bytes:
        data = predict(part, name).tobytes()
        return bitshuffle(data) if shuffled else data

    zstd = zstandard.ZstdCompressor(level=level)
    modes = dict.fromkeys(names, 0)
    chosen = []
    for start in range(0, len(lane), block):
        tried = [(payload(lane[start : start + block], name), name) for name in names]
        best = min(tried, key=lambda entry: len(zstd.compress(entry[0])))
        modes[best[1]] += 1
        chosen.append(best[0])
    size = len(zstd.compress(b"".join(chosen)))
    return size + len(chosen) + 8 if adaptive else size, modes


def write_dump(
    root: Path, layer: int, start: int, keys: np.ndarray, values: np.ndarray, run: str | None = "run", **changes: Any
) -> Path:
    """A dump as the engine writes it; `changes` replace metadata, None removes it. Returns the metadata's path."""
    folder = root / (run or "none") / f"layer_{layer}"
    folder.mkdir(parents=True, exist_ok=True)
    tokens, heads, dims = keys.shape
    end = start + tokens
    for name, words in (("k", keys), ("v", values)):
        (folder / f"{name}_t{start}_{end}.bin").write_bytes(words.tobytes())
    fields = {
        "layer_id": layer,
        "seq_start": start,
        "seq_len": tokens,
        "seq_end_exclusive": end,
        "kv_heads": heads,
        "head_dim": dims,
        "bytes_per_elem": keys.itemsize,
        "dtype": "fp16" if keys.itemsize == 2 else "fp32",
        "stage": "decode" if tokens == 1 else "prefill",
        "run_id": run,
        "k_file": f"k_t{start}_{end}.bin",
        "v_file": f"v_t{start}_{end}.bin",
    }
    fields = {key: value for key, value in {**fields, **changes}.items() if value is not None}
    meta = folder / f"meta_t{start}_{end}.json"
    meta.write_text(json.dumps(fields))
    return meta


def words(seed: int, tokens: int, heads: int = 2, dims: int = 8, dtype: str = "<f2") -> np.ndarray:
    """Something with structure along the tokens."""
    rng = np.random.default_rng(seed)
    steps = rng.standard_normal((tokens, heads, dims)).cumsum(axis=0) / 8
    return (steps + rng.standard_normal((1, heads, dims))).astype(dtype)
