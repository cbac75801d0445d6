"""The forward pass of KV compressors by every engine: numbers against the plain model, lengths, positions."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from compressor_model import Model, to_floats, to_words, weight_file
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmnn import KvmnnError
from kvmnn.arrays.layer_cache import LayerCache
from kvmnn.compressor.forward.cache_file import PositionSpans
from kvmnn.compressor.forward.compress import compress_cache, compress_layers
from kvmnn.compressor.forward.plan import ForwardOptions

ONNX = all(importlib.util.find_spec(name) for name in ("onnx", "onnxruntime"))
ENGINES = ["numpy", *(["onnx"] if ONNX else [])]
TOLERANCE = {"fp32": (1e-4, 1e-5), "fp16": (2e-3, 1e-2), "bf16": (1e-3, 1e-2)}


def cache(random, *shape, dtype="fp32"):
    return tuple(to_words(random.standard_normal(shape), dtype) for _ in range(2))


def close(found, expected, dtype):
    absolute, relative = TOLERANCE[dtype]
    expected = np.asarray(expected, np.float64).reshape(found.shape)
    assert np.all(np.abs(to_floats(found) - expected) <= absolute + relative * np.abs(expected))


@st.composite
def situations(draw):
    random = np.random.default_rng(draw(st.integers(0, 2**32)))
    layers, head_dim, factor = draw(st.integers(1, 2)), draw(st.integers(1, 5)), draw(st.integers(2, 4))
    file = {
        "layers": layers + draw(st.integers(0, 1)),
        "prefixes": draw(st.sampled_from([1, 2, 2, 3, 4, 4, 4])),
        "factor": factor,
        "head_dim": head_dim,
        "widths": (draw(st.integers(1, 6)), draw(st.integers(1, 6))),
        "dtype": draw(st.sampled_from(["fp16", "bf16", "fp32"])),
        "min_seq_len": draw(st.integers(0, 3)),
        "header_factor": draw(st.sampled_from([factor, factor, 1, factor + 1])),
    }
    some_biases = draw(st.booleans())
    weights = weight_file(random, **file, bias=lambda: not some_biases or random.random() < 0.5)
    options = {
        "image_len": draw(st.integers(0, 18)),
        "factor": draw(st.sampled_from([0, 1, factor, factor, factor + 1])),
        "min_seq_len": draw(st.integers(0, 3)),
    }
    shape = (layers, draw(st.integers(1, 2)), draw(st.integers(1, 3)), draw(st.integers(0, 16)), head_dim)
    return weights, cache(random, *shape, dtype=draw(st.sampled_from(["fp16", "bf16", "fp32"]))), options


@pytest.mark.slow
@given(situations(), st.sampled_from(ENGINES), st.sampled_from(["fp32", "fp16"]), st.integers(0, 20) | st.none())
@settings(max_examples=150, deadline=None)
def test_compress_cache_equals_the_model(situation, engine, precision, seq_len):
    weights, (keys, values), options = situation
    if keys.dtype == np.uint16:
        precision = "fp32"
    live = slice(0, keys.shape[3] if seq_len is None else seq_len)
    model = Model(weights, **options, half=precision == "fp16")
    new_keys, new_values, spans = model.run(to_floats(keys)[:, :, :, live], to_floats(values)[:, :, :, live])
    before = keys.tobytes() + values.tobytes()
    made = compress_cache(
        weights, keys, values, ForwardOptions(**options, seq_len=seq_len, precision=precision, engine=engine)
    )
    assert keys.tobytes() + values.tobytes() == before
    assert made.num_tokens == len(spans)
    assert made.next_position == min(live.stop, keys.shape[3])
    assert list(zip(made.positions.tolist(), made.ends.tolist(), strict=True)) == spans
    assert made.keys.shape == made.values.shape == (*keys.shape[:3], len(spans), keys.shape[4])
    dtype = {"f2": "fp16", "f4": "fp32", "u2": "bf16"}[made.keys.dtype.str[1:]]
    assert made.keys.dtype == (np.float16 if precision == "fp16" else keys.dtype)
    close(made.keys, new_keys, dtype)
    close(made.values, new_values, dtype)


@pytest.mark.parametrize("engine", ENGINES)
def test_compress_cache_fp16_precision_rounds_every_linear(engine):
    random = np.random.default_rng(5)
    weights = weight_file(random, factor=5, head_dim=16, dtype="fp16")
    keys, values = cache(random, 1, 1, 2, 40, 16, dtype="fp16")
    made = compress_cache(weights, keys, values, ForwardOptions(precision="fp16", engine=engine))
    plain = compress_cache(weights, keys, values)
    rows = keys[0, 0, 0].astype(np.float32).reshape(8, 80)
    for index in range(3):
        block = weights.get_block(0, index)
        rows = rows @ block.weight.astype(np.float32).T + block.bias.astype(np.float32)
        rows = rows.astype(np.float16).astype(np.float32)
        rows = np.maximum(rows, 0) if index < 2 else rows
    ulps = np.abs(made.keys[0, 0, 0].astype(np.float32) - rows) / np.spacing(np.abs(rows).astype(np.float16))
    assert np.mean(ulps == 0) > 0.95
    assert ulps.max() <= 4
    assert (made.keys != plain.keys).any(), "rounding once is something else"


@pytest.mark.skipif(not ONNX, reason="onnx and onnxruntime (extra lm) are not installed")
@given(situations(), st.sampled_from(["fp32", "fp16"]))
@settings(max_examples=40, deadline=None)
def test_compress_cache_numpy_and_onnx_agree(situation, precision):
    weights, (keys, values), options = situation
    if keys.dtype == np.uint16:
        precision = "fp32"
    first, second = (
        compress_cache(weights, keys, values, ForwardOptions(**options, precision=precision, engine=engine))
        for engine in ("numpy", "onnx")
    )
    dtype = {"f2": "fp16", "f4": "fp32", "u2": "bf16"}[first.keys.dtype.str[1:]]
    close(first.keys, to_floats(second.keys), dtype)
    close(first.values, to_floats(second.values), dtype)


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_compress_cache_uncompressed_tokens_keep_their_bits(dtype):
    random = np.random.default_rng(1)
    weights = weight_file(random, prefixes=2)
    keys, values = cache(random, 1, 1, 2, 20, 4, dtype=dtype)
    keys[..., -1, 0] = keys[..., 0, 1] = to_words(np.nan, dtype)  # the remainder, and an image without weights
    made = compress_cache(weights, keys, values, ForwardOptions(image_len=7))
    assert made.num_tokens == 7 + 4 + 1
    for new, old in ((made.keys, keys), (made.values, values)):
        assert new[..., :7, :].tobytes() == np.ascontiguousarray(old[..., :7, :]).tobytes()
        assert new[..., -1, :].tobytes() == np.ascontiguousarray(old[..., -1, :]).tobytes()


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_compress_cache_rounds_once_to_nearest_even(dtype):
    step = {"fp16": 2.0**-10, "bf16": 2.0**-7}[dtype]  # between numbers of the type from 1 to 2
    inputs = np.array([1, 1 + step, 1 + step, 1 + 2 * step], np.float32)
    shifts = np.array([0.5, 0.5, 0.49, 0.51], np.float32) * np.float32(step)

    class Identity:
        """Each Linear hands on the first token of its group; the last adds the shifts."""

        calls = 0

        def standard_normal(self, shape):
            if not isinstance(shape, int):
                return np.eye(*shape) * np.sqrt(shape[1])
            self.calls += 1
            return shifts if self.calls % 3 == 0 else np.zeros(shape)

    weights = weight_file(Identity(), factor=2, min_seq_len=1)
    keys = to_words(np.stack([inputs, inputs])[None, None, None], dtype)
    made = compress_cache(weights, keys, keys)
    expected = np.array([1, 1 + 2 * step, 1 + step, 1 + 3 * step], np.float32)
    np.testing.assert_array_equal(to_floats(made.keys).ravel(), expected)


def test_compress_cache_unchanged_result_is_a_copy():
    random = np.random.default_rng(1)
    keys, values = cache(random, 1, 1, 2, 5, 4)
    made = compress_cache(weight_file(random), keys, values)
    assert made.plan.reason == "too_short"
    assert not np.shares_memory(made.keys, keys)
    assert not np.shares_memory(made.values, values)


def test_compress_cache_any_strides_and_byte_order():
    random = np.random.default_rng(1)
    weights = weight_file(random)
    keys, values = cache(random, 2, 1, 3, 9, 4)[0:2]
    keys, values = keys[:1], values[:1]
    expected = compress_cache(weights, keys, values)
    token_major = [
        np.ascontiguousarray(array.transpose(3, 0, 1, 2, 4)).transpose(1, 2, 3, 0, 4) for array in (keys, values)
    ]
    swapped = [array.astype(">f4") for array in (keys, values)]
    frozen = [array.copy() for array in (keys, values)]
    for array in frozen:
        array.setflags(write=False)
    for pair in (token_major, swapped, frozen):
        made = compress_cache(weights, *pair)
        np.testing.assert_allclose(made.keys, expected.keys, rtol=0, atol=1e-6)
        np.testing.assert_allclose(made.values, expected.values, rtol=0, atol=1e-6)


def test_compress_cache_chunked_equals_whole(monkeypatch):
    random = np.random.default_rng(3)
    weights = weight_file(random)
    keys, values = cache(random, 1, 2, 5, 61, 4)
    expected = compress_cache(weights, keys, values, ForwardOptions(image_len=31))
    for rows in (1, 3, 7, 20, 45):
        monkeypatch.setattr("kvmnn.compressor.forward.compress._MAX_CHUNK_BYTES", rows * 4 * 12)
        made = compress_cache(weights, keys, values, ForwardOptions(image_len=31))
        np.testing.assert_allclose(made.keys, expected.keys, rtol=0, atol=1e-6)
        np.testing.assert_allclose(made.values, expected.values, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("file", "options", "tokens", "reason"),
    [
        ({}, {"enabled": False}, 12, "disabled"),
        ({}, {}, 0, "empty"),
        ({}, {"seq_len": 0}, 12, "empty"),
        ({"header_factor": 1}, {}, 12, "factor"),
        ({"header_factor": 0}, {"factor": 1}, 12, "factor"),
        ({"prefixes": 1}, {}, 12, "no_text_mlp"),
        ({}, {}, 5, "too_short"),
        ({}, {"min_seq_len": 5}, 14, "too_short"),
        ({"prefixes": 2}, {"image_len": 12}, 12, "too_short"),
        ({}, {"factor": 4}, 12, "factor_not_trained"),
    ],
)
def test_compress_cache_explains_why_nothing_is_done(file, options, tokens, reason):
    random = np.random.default_rng(0)
    keys, values = cache(random, 1, 1, 2, tokens, 4)
    made = compress_cache(weight_file(random, **file), keys, values, ForwardOptions(**options))
    assert made.plan.reason == reason
    assert made.plan.explanation
    assert made.plan.ratio == 1
    assert made.num_tokens == made.plan.seq_len == made.next_position
    assert made.keys.tobytes() == keys[..., : made.num_tokens, :].tobytes()
    assert made.positions.tolist() == list(range(made.num_tokens))


def test_compress_cache_empty_batch_is_unchanged():
    random = np.random.default_rng(0)
    made = compress_cache(weight_file(random), *cache(random, 1, 0, 2, 12, 4))
    assert (made.plan.reason, made.num_tokens, made.keys.shape) == ("empty", 12, (1, 0, 2, 12, 4))


def test_compress_cache_lengths_of_the_published_example():
    random = np.random.default_rng(0)
    weights = weight_file(random, factor=5, head_dim=2)
    made = compress_cache(weights, *cache(random, 1, 1, 1, 21, 2), ForwardOptions(image_len=11))
    assert [(s.kind, s.tokens, s.groups, s.new_tokens) for s in made.plan.segments] == [
        ("image", 11, 2, 3),
        ("text", 10, 2, 2),
    ]
    assert (made.num_tokens, made.next_position, made.plan.ratio) == (5, 21, 4.2)
    assert made.plan.to_dict()["segments"][0]["new_tokens"] == 3


# -- LayerCache --------------------------------------------------------------------------------------------------------


def test_compress_layers_use_weights_of_their_number():
    random = np.random.default_rng(8)
    weights = weight_file(random, layers=4)
    keys, values = cache(random, 4, 1, 2, 13, 4)
    whole = compress_cache(weights, keys, values)
    layers = [LayerCache(layer=n, keys=keys[n, 0], values=values[n, 0]) for n in (3, 1)]
    new, plan = compress_layers(weights, layers)
    assert plan.to_dict() == whole.plan.to_dict()
    assert [layer.layer for layer in new] == [3, 1]
    for layer in new:
        np.testing.assert_allclose(layer.keys, whole.keys[layer.layer, 0], rtol=0, atol=1e-6)
        np.testing.assert_allclose(layer.values, whole.values[layer.layer, 0], rtol=0, atol=1e-6)
        assert layer.positions.tolist() == [0, 3, 6, 9, 12]
        assert layer.ends.tolist() == [3, 6, 9, 12, 13]
        assert layer.tokens_seen == 13


def test_compress_layers_positions_survive_eviction_and_two_passes():
    random = np.random.default_rng(8)
    weights = weight_file(random)
    keys, values = cache(random, 2, 12, 4)
    positions = np.array([[0, 1, 2, 3, 10, 11, 12, 13, 14, 15, 16, 17], [0, 5, 4, 7, 8, 9, 12, 13, 14, 15, 18, 19]])
    layer = LayerCache(layer=0, keys=keys, values=values, positions=positions, tokens_seen=25)
    (once,), _ = compress_layers(weights, [layer])
    assert once.positions.tolist() == [[0, 3, 12, 15], [0, 7, 12, 15]]
    assert once.ends.tolist() == [[3, 12, 15, 18], [6, 10, 15, 20]]
    assert once.tokens_seen == 25
    (twice,), _ = compress_layers(weights, [once], ForwardOptions(min_seq_len=1))
    assert twice.positions.tolist() == [[0, 15], [0, 15]]
    assert twice.ends.tolist() == [[15, 18], [15, 20]]
    assert (twice.tokens, twice.tokens_seen) == (2, 25)


def test_position_spans_from_token_count_are_consecutive():
    spans = PositionSpans.from_token_count(3)
    assert (spans.to_list(), spans.next_position) == ([[0, 1], [1, 2], [2, 3]], 3)
    assert (spans.take_first(2).to_list(), spans.take_first(2).next_position) == ([[0, 1], [1, 2]], 2)


def test_compress_layers_mismatched_layers_are_refused():
    random = np.random.default_rng(8)
    weights = weight_file(random, layers=2)
    keys, values = cache(random, 2, 12, 4)
    layer = LayerCache(layer=0, keys=keys, values=values)
    other = LayerCache(layer=1, keys=keys[:, :9], values=values[:, :9])
    with pytest.raises(KvmnnError, match="has no layers"):
        compress_layers(weights, [])
    with pytest.raises(KvmnnError, match="appears twice"):
        compress_layers(weights, [layer, layer])
    with pytest.raises(KvmnnError, match=r"layer 1 is float32 \[1, 2, 9, 4\], layer 0 float32 \[1, 2, 12, 4\]"):
        compress_layers(weights, [layer, other])
    with pytest.raises(KvmnnError, match="all tokens of a LayerCache are live"):
        compress_layers(weights, [layer], ForwardOptions(seq_len=9))
