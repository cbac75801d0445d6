"""Caches of transformers as torch.save stores them, made without either; bf16 words are uint16."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
from fixtures.compressor_checkpoint import TensorPickler, write_checkpoint

Pair = tuple[np.ndarray, np.ndarray]
TYPES = {"fp16": "<f2", "bf16": "<u2", "fp32": "<f4"}


class Instance:
    """Pickles as an object of a class that need not exist, with this state."""

    def __init__(self, name: str, state: Any) -> None:
        self.name = name
        self.state = state


class CachePickler(TensorPickler):
    """Pickles `Instance`s besides."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> Any:
        if not isinstance(obj, Instance):
            return super().save(obj, save_persistent_id)
        module, _, name = obj.name.rpartition(".")
        self.write(f"c{module}\n{name}\n".encode() + pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.save(obj.state)
        return self.write(pickle.BUILD)


def pairs(seed: int, *, layers: int = 2, shape: tuple[int, ...] = (1, 2, 5, 4), dtype: str = "bf16") -> list[Pair]:
    """(K, V) of layers: any bit patterns."""
    words = np.dtype(TYPES[dtype])
    bits = np.random.default_rng(seed).integers(0, 1 << 8 * words.itemsize, (layers, 2, *shape), np.uint64)
    return [(keys, values) for keys, values in bits.astype(f"<u{words.itemsize}").view(words)]


def cache_object(kind: str, layer_kind: str, states: list[dict[str, Any]]) -> Instance:
    """A cache of transformers 5."""
    layers = [Instance(f"transformers.cache_utils.{layer_kind}", state) for state in states]
    return Instance(f"transformers.cache_utils.{kind}", {"layers": layers, "offloading": False})


def dynamic_cache(pairs: list[Pair]) -> Instance:
    """A DynamicCache."""
    states = [{"keys": keys, "values": values, "is_initialized": True} for keys, values in pairs]
    return cache_object("DynamicCache", "DynamicLayer", states)


def static_cache(pairs: list[Pair], rows: int, *, says_length: bool = True) -> Instance:
    """A StaticCache whose buffers have `rows` rows; older ones do not say how many hold tokens."""
    states = []
    for keys, values in pairs:
        tokens = keys.shape[2]
        buffers = [np.zeros((*part.shape[:2], rows, part.shape[3]), part.dtype) for part in (keys, values)]
        for buffer, part in zip(buffers, (keys, values), strict=True):
            buffer[:, :, :tokens] = part
        state = {"keys": buffers[0], "values": buffers[1], "is_initialized": True, "max_cache_len": rows}
        states.append(state | ({"cumulative_length": np.array([tokens], "<i8")} if says_length else {}))
    return cache_object("StaticCache", "StaticLayer", states)


def save(path: Path, value: Any) -> Path:
    """As torch.save does it."""
    write_checkpoint(path, value, name=path.stem, pickler_class=CachePickler)
    return path
