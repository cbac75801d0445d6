"""Caches of transformers as torch.save stores them, made without either; bf16 words are uint16."""

from __future__ import annotations

import pickle
from pathlib import Path
from types import SimpleNamespace
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


class Output(Instance):
    """Pickles as an output of a model: its class is called with the values, which it has by name as well."""


class CachePickler(TensorPickler):
    """Pickles `Instance`s besides."""

    def save(self, obj: Any, save_persistent_id: bool = True) -> Any:
        if not isinstance(obj, Instance):
            return super().save(obj, save_persistent_id)
        module, _, name = obj.name.rpartition(".")
        if isinstance(obj, Output):
            self.write(f"c{module}\n{name}\n".encode())
            self.save(tuple(obj.state.values()))
            self.write(pickle.REDUCE + pickle.MARK)
            for item in (each for named in obj.state.items() for each in named):
                self.save(item)
            return self.write(pickle.SETITEMS)
        if (known := self.memo.get(id(obj))) is not None:
            return self.write(self.get(known[0]))
        self.write(f"c{module}\n{name}\n".encode() + pickle.EMPTY_TUPLE + pickle.NEWOBJ)
        self.memoize(obj)
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


KINDS = "transformers.cache_utils."


def old_cache(kind: str, keys: list[Any], values: list[Any], **more: Any) -> Instance:
    """A cache of transformers 4, with two lists."""
    return Instance(KINDS + kind, {"key_cache": keys, "value_cache": values, **more})


def hybrid_cache(
    pairs: list[Pair], sliding: list[bool], *, window: int, rows: int, said: Any = None, kind: str = "HybridCache"
) -> Instance:
    """A static cache of transformers 4.42 to 4.53 whose sliding layers hold the last `window` tokens."""
    lists: tuple[list[Any], list[Any]] = ([], [])
    for pair, is_sliding in zip(pairs, sliding, strict=True):
        for parts, part in zip(lists, pair, strict=True):
            tokens, length = part.shape[2], min(window, rows) if is_sliding else rows
            buffer = np.zeros((*part.shape[:2], length, part.shape[3]), part.dtype)
            buffer[:, :, : min(tokens, length)] = part[:, :, -length:] if is_sliding else part
            parts.append(buffer)
    return old_cache(kind, *lists, is_sliding=sliding if said is None else said, max_cache_len=rows)


def encoder_decoder_cache(decoder: list[Pair], encoder: list[Pair]) -> Instance:
    """An EncoderDecoderCache of transformers 5."""
    state = {
        "self_attention_cache": dynamic_cache(decoder),
        "cross_attention_cache": dynamic_cache(encoder),
        "is_updated": dict.fromkeys(range(len(encoder)), True),
    }
    return Instance(KINDS + "EncoderDecoderCache", state)


def in_memory(value: Any) -> Any:
    """The same object with attributes, under the name of its class."""
    if isinstance(value, dict):
        return {name: in_memory(item) for name, item in value.items()}
    if isinstance(value, Instance):
        kind = type(value.name.rpartition(".")[2], (SimpleNamespace,), {})
        return kind(**{name: in_memory(item) for name, item in value.state.items()})
    return [in_memory(item) for item in value] if isinstance(value, list) else value
