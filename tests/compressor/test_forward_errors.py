"""What the forward pass refuses, and that it refuses before anything has changed."""

from __future__ import annotations

import importlib.util
import sys

import numpy as np
import pytest
from compressor_model import to_words, weight_file

from kvmnn import KvmnnError, MissingDependencyError
from kvmnn.arrays.layer_cache import LayerCache
from kvmnn.compressor.forward.compress import compress_cache
from kvmnn.compressor.forward.plan import ForwardOptions

ENGINES = ["numpy", *(["onnx"] if all(map(importlib.util.find_spec, ("onnx", "onnxruntime"))) else [])]


def arrays(*shape, dtype="fp32"):
    random = np.random.default_rng(4)
    return tuple(to_words(random.standard_normal(shape), dtype) for _ in range(2))


def refused(match, weights, keys, values, error=KvmnnError, **options):
    """The call fails, and leaves K and V as they were."""
    before = [np.array(array) for array in (keys, values)]
    with pytest.raises(error, match=match):
        compress_cache(weights, keys, values, ForwardOptions(**options))
    for array, old in zip((keys, values), before, strict=True):
        assert np.asarray(array).tobytes() == old.tobytes()


@pytest.fixture
def weights():
    return weight_file(np.random.default_rng(0), layers=2)


# -- shapes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "match"),
    [
        ((2, 1, 2, 12), r"keys have shape \[2, 1, 2, 12\]: expected 5 axes"),
        ((0, 1, 2, 12, 4), "has no layers"),
        ((2, 1, 0, 12, 4), "has no heads or no head_dim"),
        ((2, 1, 2, 12, 0), "has no heads or no head_dim"),
        ((3, 1, 2, 12, 4), "made.bin: has weights for 2 layers, the cache has a layer 2: expected at least 3"),
        ((2, 1, 2, 12, 5), r"layer 0, compress_tk: linear 0 takes 12 inputs, expected 15 \(factor 3 x head_dim 5\)"),
    ],
)
def test_compress_cache_invalid_shapes_are_refused(weights, shape, match):
    refused(match, weights, *arrays(*shape))


def test_compress_cache_mismatched_k_and_v_are_refused(weights):
    keys, values = arrays(2, 1, 2, 12, 4)
    refused("expected the same for both", weights, keys, values[..., :9, :])
    refused("keys are float32, values float16", weights, keys, values.astype(np.float16))
    refused("keys are float64: expected float16", weights, keys.astype(float), values, error=TypeError)
    refused("keys must be a numpy array, not list", weights, keys.tolist(), values, error=TypeError)


def grown(layer, block):
    """One more input for one block's weight."""

    def change(at_layer, at_block, weight):
        return np.pad(weight, [(0, 0), (0, 1)]) if (at_layer, at_block) == (layer, block) else weight

    return change


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(
    ("layer", "block", "match"),
    [
        (0, 6, "layer 0, compress_ik: linear 0 takes 13 inputs, expected 12"),
        (1, 9, "layer 1, compress_iv: linear 0 takes 13 inputs, expected 12"),
        (1, 0, "layer 1, compress_tk: linear 0 takes 13 inputs, expected 12"),
        (1, 4, r"layer 1, compress_tv: linear 1 takes 5 inputs, expected 4 \(the outputs of linear 0\)"),
        (0, 2, r"layer 0, compress_tk: linear 2 takes 5 inputs, expected 4 \(the outputs of linear 1\)"),
    ],
)
def test_compress_cache_one_mismatched_compressor_is_refused(engine, layer, block, match):
    broken = weight_file(np.random.default_rng(0), layers=2, change=grown(layer, block))
    refused(match, broken, *arrays(2, 1, 2, 18, 4), image_len=9, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_compress_cache_unused_compressor_may_be_broken(engine):
    broken = weight_file(np.random.default_rng(0), change=grown(0, 7), extra=2)
    made = compress_cache(broken, *arrays(1, 1, 2, 18, 4), ForwardOptions(image_len=5, engine=engine))
    assert made.num_tokens == 5 + 4 + 1


def test_compress_cache_outputs_must_be_head_dim():
    def change(layer, index, weight):
        return np.pad(weight, [(0, 1), (0, 0)]) if index == 5 else weight

    weights = weight_file(np.random.default_rng(0), change=change)
    refused(r"compress_tv: makes 5 outputs, expected 4 \(head_dim\)", weights, *arrays(1, 1, 2, 12, 4))


def test_compress_cache_wrong_shapes_open_no_engine(weights, monkeypatch):
    monkeypatch.setattr("kvmnn.compressor.forward.compress.open_engine", lambda *_: pytest.fail("an engine was opened"))
    refused("expected at least 3", weights, *arrays(3, 1, 2, 12, 4))


# -- numbers -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_compress_cache_non_finite_tokens_are_refused(weights, value, dtype, engine):
    keys, values = arrays(2, 2, 3, 13, 4, dtype=dtype)
    values[1, 1, 2, 10, 3] = to_words(value, dtype)
    where = "values of layer 1: batch 1, kv_head 2, token 10, dimension 3 is -?(nan|inf)"
    refused(where, weights, keys, values, engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_compress_cache_non_finite_weights_are_refused(value, engine):
    def change(layer, index, weight):
        if (layer, index) == (1, 4):
            weight[2, 1] = value
        return weight

    weights = weight_file(np.random.default_rng(0), layers=2, change=change)
    match = rf"layer 1, compress_tv, linear 1 weight: element \[2, 1\] is {value}, which is not finite; 1 such"
    refused(match, weights, *arrays(2, 1, 2, 12, 4), engine=engine)


@pytest.mark.parametrize("engine", ENGINES)
def test_compress_cache_values_beyond_fp16_are_refused(weights, engine):
    keys, values = arrays(2, 1, 2, 13, 4)
    keys[0, 0, 1, 2, 3] = 70000
    refused("token 2, dimension 3 is 70000: is beyond fp16", weights, keys, values, precision="fp16", engine=engine)
    keys[0, 0, 1, 2, 3], keys[0, 0, 1, 12, 3] = 0, 70000
    refused("keys of layer 0: 1 numbers are beyond fp16", weights, keys, values, precision="fp16", engine=engine)

    def huge(layer, index, weight):
        return weight * 1e5 if index == 2 else weight

    large = weight_file(np.random.default_rng(0), change=huge)
    match = r"compress_tk, linear 2 weight: element \[\d, \d\] is .*, which is beyond fp16"
    refused(match, large, *arrays(1, 1, 2, 12, 4), precision="fp16", engine=engine)
    refused("layer 0, compress_tk: .* numbers are beyond fp16", large, *arrays(1, 1, 2, 12, 4, dtype="fp16"))

    def large_twice(layer, index, weight):
        return weight * 1e3

    growing = weight_file(np.random.default_rng(0), change=large_twice)
    match = "layer 0, compress_tk: .* results are not finite"
    refused(match, growing, *arrays(1, 1, 2, 12, 4), precision="fp16", engine=engine)


def test_compress_cache_results_beyond_output_type_are_refused():
    weights = weight_file(np.random.default_rng(0), change=lambda layer, index, weight: weight * 1e15)
    refused("results are not finite", weights, *arrays(1, 1, 2, 12, 4))
    top = weight_file(TopBiases())
    refused("numbers are beyond bf16", top, *arrays(1, 1, 2, 12, 4, dtype="bf16"))


class TopBiases:
    """In place of random numbers: the largest float32, which no bf16 holds once rounded."""

    def standard_normal(self, shape):
        return np.full(shape, np.finfo(np.float32).max if isinstance(shape, int) else 0)


def test_compress_cache_bf16_with_fp16_precision_is_refused(weights):
    refused("precision fp16 is for", weights, *arrays(2, 1, 2, 12, 4, dtype="bf16"), precision="fp16")


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["image_len", "factor", "min_seq_len", "seq_len"])
def test_forward_options_invalid_numbers_are_refused(name):
    with pytest.raises(KvmnnError, match=f"{name} is -1: expected at least 0"):
        ForwardOptions(**{name: -1})
    for wrong in (1.5, "2", True):
        with pytest.raises(TypeError):
            ForwardOptions(**{name: wrong})
    assert getattr(ForwardOptions(**{name: np.int32(7)}), name) == 7


def test_forward_options_huge_numbers_are_accepted(weights):
    keys, values = arrays(2, 1, 2, 12, 4)
    for options in ({"image_len": 2**70}, {"min_seq_len": 2**70}, {"seq_len": 2**70}):
        assert compress_cache(weights, keys, values, ForwardOptions(**options)).num_tokens in (4, 12)
    assert compress_cache(weights, keys, values, ForwardOptions(factor=2**70)).plan.reason == "too_short"


def test_forward_options_unknown_names_are_refused():
    with pytest.raises(KvmnnError, match="unknown precision 'fp8': expected one of fp32, fp16"):
        ForwardOptions(precision="fp8")
    with pytest.raises(KvmnnError, match="unknown engine 'torch': expected one of numpy, onnx"):
        ForwardOptions(engine="torch")


@pytest.mark.parametrize("missing", ["onnx", "onnxruntime"])
def test_compress_cache_missing_onnx_package_is_named(weights, missing, monkeypatch):
    if missing == "onnxruntime":
        monkeypatch.setitem(sys.modules, "onnx", sys)
    monkeypatch.setitem(sys.modules, missing, None)
    match = f"needs the package {missing}: pip install onnxruntime onnx tokenizers"
    refused(match, weights, *arrays(2, 1, 2, 12, 4), error=MissingDependencyError, engine="onnx")


# -- LayerCache --------------------------------------------------------------------------------------------------------


def test_layer_cache_defaults_are_filled_in():
    keys, values = (array[0, 0] for array in arrays(1, 1, 2, 5, 4, dtype="bf16"))
    layer = LayerCache(layer=7, keys=keys, values=values)
    assert (layer.dtype, layer.kv_heads, layer.tokens, layer.head_dim, layer.nbytes) == ("bf16", 2, 5, 4, 160)
    assert (layer.positions.tolist(), layer.ends.tolist(), layer.tokens_seen) == ([0, 1, 2, 3, 4], [1, 2, 3, 4, 5], 5)


@pytest.mark.parametrize(
    ("fields", "match"),
    [
        ({"layer": -1}, "layers count from 0"),
        ({"positions": np.arange(4)}, r"positions \[4\] and ends \[4\] do not fit 2 heads of 5 tokens"),
        ({"positions": np.zeros((3, 5), int)}, "do not fit"),
        ({"ends": np.arange(1, 5)}, "do not fit"),
        ({"positions": np.arange(5) - 1}, "must not be below 0"),
        ({"ends": np.arange(5)}, "ends must lie after them"),
        ({"tokens_seen": 4}, "within the 4 tokens seen"),
        ({"positions": np.arange(5.0)}, "positions are float64: expected integers"),
        ({"keys": np.zeros((2, 5), np.float32)}, r"layer 0: keys have shape \[2, 5\]: expected 3 axes"),
    ],
)
def test_layer_cache_invalid_fields_are_refused(fields, match):
    keys, values = (array[0, 0] for array in arrays(1, 1, 2, 5, 4))
    with pytest.raises(KvmnnError, match=match):
        LayerCache(**{"layer": 0, "keys": keys, "values": values, **fields})
