"""Caches in memory, recognised by their attributes: here with numpy arrays in the place of tensors."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import hf_files
import numpy as np
import pytest
from hf_files import pairs

import kvmnn
from kvmnn.errors import LimitError, MissingDependencyError, OptionError, SourceError
from kvmnn.formats import ReadOptions


class DynamicLayer:
    def __init__(self, keys: Any, values: Any, **more: Any) -> None:
        self.keys, self.values, self.is_initialized = keys, values, True
        self.__dict__.update(more)


class StaticLayer(DynamicLayer):
    def get_seq_length(self) -> int:
        return self.length


class DynamicCache:
    def __init__(self, layers: list[Any]) -> None:
        self.layers = layers


class OldCache:
    def __init__(self, keys: list[Any], values: list[Any]) -> None:
        self.key_cache, self.value_cache = keys, values


class Generator:
    """What onnxruntime_genai's has: outputs by their names, and an exception for all others."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self.arrays = arrays

    def get_output(self, name: str) -> np.ndarray:
        try:
            return self.arrays[name]
        except KeyError:
            raise RuntimeError(f"Unknown output\n{name}") from None


def assert_same(source: Any, expected: list[hf_files.Pair], dtype: str) -> None:
    assert list(source) == [f"layer_{n}.{part}" for n in range(len(expected)) for part in ("key", "value")]
    for number, pair in enumerate(expected):
        for part, words in zip(("key", "value"), pair, strict=True):
            found = source[f"layer_{number}.{part}"]
            assert (found.dtype, found.shape, found.to_numpy().tobytes()) == (dtype, words.shape, words.tobytes())


@pytest.mark.parametrize("shape", [(1, 2, 5, 4), (3, 1, 1, 7)], ids=str)
@pytest.mark.parametrize("dtype", hf_files.TYPES)
def test_open_in_memory_every_form_of_cache(dtype: str, shape: tuple[int, ...]) -> None:
    made = pairs(9, layers=3, shape=shape, dtype=dtype)
    longer = [[np.concatenate([part, np.zeros_like(part)], axis=2) for part in pair] for pair in made]
    forms = {
        "cache": DynamicCache([DynamicLayer(*pair) for pair in made]),
        "static": DynamicCache([StaticLayer(*pair, length=shape[2], max_cache_len=2 * shape[2]) for pair in longer]),
        "pairs": made,
        "legacy": tuple(made),
        "dict": {"past_key_values": OldCache(*map(list, zip(*made, strict=True))), "n": 1},
    }
    for kind, cache in forms.items():
        source = kvmnn.open(cache)
        assert_same(source, made, dtype)
        assert source.engine_cache is not None and source.engine_cache.kind == kind
        assert (source.engine_cache.batch, source.engine_cache.tokens) == (shape[0], shape[2])
    strided = [tuple(np.asfortranarray(part) for part in pair) for pair in made]
    assert_same(kvmnn.open(strided), made, dtype)
    one = kvmnn.open(made, batch=shape[0] - 1)
    assert_same(one, [(keys[-1], values[-1]) for keys, values in made], dtype)


def test_open_in_memory_arrays_by_name_and_axes() -> None:
    ((keys, values),) = pairs(3, layers=1, dtype="fp16")
    source = kvmnn.open({"layers.4.k": keys[0], "layers.4.v": values[0]}, axes="htd")
    assert source["layer_4.value"].to_numpy().tobytes() == values.tobytes()
    turned = [(keys.swapaxes(1, 2), values.swapaxes(1, 2))]
    assert kvmnn.open(turned, axes="bthd")["layer_0.key"].to_numpy().tobytes() == keys.tobytes()
    assert list(kvmnn.open({"a": keys, "b": values}, tensors=("b",))) == ["b"]
    assert kvmnn.open(keys).names == ("tensor",)


def test_open_in_memory_onnx_outputs() -> None:
    made = pairs(5, layers=2, dtype="fp32")
    names = ("present.{}.key", "present.{}.value")
    outputs = {names[m].format(n): made[n][m] for n in range(2) for m in range(2)}
    source = kvmnn.open(Generator(outputs))
    assert_same(source, made, "fp32")
    said = source.engine_cache
    assert said is not None and (said.engine, said.kind, said.tokens) == ("ONNX Runtime GenAI", "generator", 5)
    with pytest.raises(SourceError, match=r"<Generator in memory>: has no output 'present.0.key': Unknown output$"):
        kvmnn.open(Generator({}))


def test_open_in_memory_other_objects_are_refused() -> None:
    ((keys, values), *_) = pairs(1)
    with pytest.raises(TypeError, match=r"cannot open int: expected a path, a cache of transformers"):
        kvmnn.open(3)
    with pytest.raises(SourceError, match="a DynamicCache without a layer that holds anything"):
        kvmnn.open(DynamicCache([]))
    with pytest.raises(SourceError, match="layer 0 is a DynamicLayer, whose older tokens are quantised"):
        kvmnn.open(DynamicCache([DynamicLayer(keys, values, _quantized_keys=keys)]))
    with pytest.raises(SourceError, match="whose cross_attention_cache is no cache"):
        kvmnn.open(SimpleNamespace(self_attention_cache=DynamicCache([]), cross_attention_cache=None))
    with pytest.raises(LimitError, match="above the limit of 100"):
        kvmnn.open([(keys, values)], ReadOptions(max_bytes=100))
    with pytest.raises(OptionError, match=r"says itself how its arrays lie \(bhtd\)"):
        kvmnn.open(DynamicCache([DynamicLayer(keys, values)]), axes="bthd")
    assert kvmnn.open(DynamicCache([DynamicLayer(keys, values)]), axes="bhtd").engine_cache is not None
    cycle: list[Any] = []
    cycle.append(cycle)
    with pytest.raises(TypeError, match="cannot open list"):
        kvmnn.open(cycle)


def test_to_cache_without_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    with pytest.raises(MissingDependencyError, match="import torch first"):
        kvmnn.to_cache(pairs(1))
    assert "torch" not in sys.modules
