"""Caches of a model as engines save them: K and V by layer, ``[kv_head, token, head_dim]`` float32, in many formats."""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import NamedTuple

import hf_files
import llama_files
import mlx_files
import numpy as np

Layers = Sequence[tuple[np.ndarray, np.ndarray]]


class Saved(NamedTuple):
    """A file, options that it needs on the command line, and whether its words are the layers' own."""

    path: Path
    options: list[str]
    exact: bool


def llama(path: Path, layers: Layers, ids: Sequence[int], kind: str = "f32", positions: Sequence[int] = ()) -> Path:
    """A session of llama.cpp; `ids` of all tokens of the text, `positions` of those that are held."""
    heads, tokens, dims = layers[0][0].shape
    places = positions or range(tokens)
    data = llama_files.SESSION + struct.pack("<II", 10, len(ids)) + struct.pack(f"<{len(ids)}i", *ids)
    data += struct.pack("<I", 7) + b"gptneox" + struct.pack("<II", 1, tokens)
    data += b"".join(struct.pack("<iIi", place, 1, 0) for place in places)
    data += struct.pack("<II", 0, len(layers))
    for part in (0, 1):
        for pair in layers:
            rows = pair[part].transpose(1, 0, 2).reshape(tokens, heads * dims)
            words = b"".join(map(_ROWS[kind], rows))
            data += struct.pack("<iQ", llama_files.NUMBERS[kind], len(words) // tokens) + words
    path.write_bytes(data)
    return path


def torch(path: Path, layers: Layers, dtype: type = np.float32, batch: int = 1) -> Path:
    """A DynamicCache that `torch.save` stored; the last text of the batch is the one that is meant."""
    pairs = [tuple(np.stack([part * 0] * (batch - 1) + [part]).astype(dtype) for part in pair) for pair in layers]
    return hf_files.save(path, hf_files.dynamic_cache(pairs))


def mlx(path: Path, layers: Layers, room: int = 3) -> Path:
    """A prompt cache of mlx-lm with `room` for further tokens."""
    tensors: dict[str, tuple[str, list[int], bytes]] = {}
    metadata = {"0.model": "tiny", "2.0": ""}
    for layer, pair in enumerate(layers):
        for side, part in enumerate(pair):
            padded = np.pad(part, ((0, 0), (0, room), (0, 0)))[None].astype("<f4")
            tensors[f"{layer}.{side}"] = ("F32", list(padded.shape), padded.tobytes())
        tensors[f"{layer}.2"] = ("I32", [], struct.pack("<i", pair[0].shape[1]))
        metadata[f"1.{layer}"] = "KVCache"
    path.write_bytes(mlx_files.safetensors(Random(1), tensors, metadata))
    return path


def npz(path: Path, layers: Layers, axes: str = "") -> Path:
    """Arrays by name, or one array of all in the order of axes ``2lthd``."""
    if axes:
        assert axes == "2lthd"
        every = np.stack([np.stack([pair[part].transpose(1, 0, 2) for pair in layers]) for part in (0, 1)])
        np.save(path, every)
        return path
    parts = (("key", 0), ("value", 1))
    np.savez(path, **{f"layer_{n}.{name}": pair[part] for n, pair in enumerate(layers) for name, part in parts})
    return path


def q8_0(row: np.ndarray) -> bytes:
    """Blocks of 32: a scale in fp16, and codes of 8 bits."""
    found = b""
    for block in row.reshape(-1, 32).astype(np.float64):
        scale = float(np.float16(np.abs(block).max() / 127))
        codes = np.clip(np.rint(block / scale), -127, 127) if scale else block * 0
        found += struct.pack("<e", scale) + codes.astype(np.int8).tobytes()
    return found


def q4_0(row: np.ndarray) -> bytes:
    """Blocks of 32: a scale in fp16, and codes of 4 bits."""
    found = b""
    for block in row.reshape(-1, 32).astype(np.float64):
        scale = float(np.float16(block[np.abs(block).argmax()] / -8))
        codes = np.clip(np.rint(block / scale) + 8, 0, 15) if scale else block * 0 + 8
        low = codes.astype(np.uint8)
        found += struct.pack("<e", scale) + (low[:16] | low[16:] << 4).tobytes()
    return found


def _bf16(row: np.ndarray) -> bytes:
    bits = row.astype("<f4").view("<u4").astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes()


_ROWS: dict[str, Callable[[np.ndarray], bytes]] = {
    "f32": lambda row: row.astype("<f4").tobytes(),
    "f16": lambda row: row.astype("<f2").tobytes(),
    "bf16": _bf16,
    "q8_0": q8_0,
    "q4_0": q4_0,
}
