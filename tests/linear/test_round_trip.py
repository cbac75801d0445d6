"""Linear streams come back bit for bit, whatever words and positions there are; sizes keep within their limits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from linear_samples import DTYPES, GEOMETRY, is_equal, make_cache, make_profile

import kvmnn.linear.encoder as encoder
from kvmnn import linear
from kvmnn._simd import set_simd_level, simd_level, simd_levels
from kvmnn.arrays.layer_cache import LayerCache
from kvmnn.errors import KvmnnError, LimitError
from kvmnn.linear.header import METHOD_LINEAR, read_header


@pytest.fixture
def only_linear(monkeypatch):
    """Linear streams wherever they are possible."""
    monkeypatch.setattr(encoder, "_NUM_DENSE_LAYERS", 0)
    monkeypatch.setattr(encoder, "_MAX_LINEAR_FRACTION", 9)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("below", [0, 1, 2])
def test_encode_layers_decode_layers(dtype, below, only_linear):
    for tokens in (1, 15, 16, 17, 130):
        for is_odd in (False, True):
            cache = make_cache(tokens, dtype, seed=tokens, is_odd=is_odd)
            streams = list(linear.encode_layers(cache, make_profile(), below=below))
            assert all(map(is_equal, cache, linear.decode_layers(streams, make_profile())))
            for layer, stream in zip(cache, streams, strict=True):
                assert len(stream) <= layer.nbytes + 64
                if tokens == 130 and not is_odd:
                    is_linear = [method == METHOD_LINEAR for method in read_header(stream).methods]
                    assert is_linear == [True, GEOMETRY[layer.layer].value_dim % 2 == 0]


@pytest.mark.parametrize("below", [0, 2])
def test_encode_layer_decode_layer(below):
    cache = make_cache(70, "fp16", positions=np.arange(100)[np.arange(100) % 10 > 2])
    streams = list(linear.encode_layers(cache, make_profile(), below=below))
    for layer in cache:
        lower = cache[max(0, layer.layer - below) : layer.layer]
        stream = linear.encode_layer(layer, make_profile(), lower, below=below)
        assert stream == streams[layer.layer]
        assert is_equal(linear.decode_layer(stream, make_profile(), lower), layer)
        assert is_equal(linear.decode_layer(bytearray(stream), make_profile(), lower[::-1]), layer)


def test_encode_layers_predicts_from_below(only_linear):
    cache = make_cache(300, "fp16")
    sizes = [sum(map(len, linear.encode_layers(cache, make_profile(), below=below))) for below in (0, 1, 2)]
    assert sizes[0] < 0.95 * sum(layer.nbytes for layer in cache)
    assert sizes[1] < 0.97 * sizes[0]
    assert sizes[2] < sizes[1]


@settings(max_examples=30, deadline=None)
@given(
    tokens=st.integers(0, 60),
    dtype=st.sampled_from(DTYPES),
    below=st.integers(0, 2),
    seed=st.integers(0, 1000),
    is_odd=st.booleans(),
    gaps=st.booleans(),
    window=st.integers(1, 60),
)
def test_encode_layers_of_any_cache(tokens, dtype, below, seed, is_odd, gaps, window):
    positions = np.cumsum(np.random.default_rng(seed).integers(1, 4 if gaps else 2, tokens)).astype(np.int64)
    cache = make_cache(tokens, dtype, seed, positions, is_odd)
    # the last layer is one of a window, with fewer tokens than those below it
    last, begin = cache[-1], max(0, tokens - window)
    cache[-1] = LayerCache(
        layer=last.layer, keys=last.keys[:, begin:], values=last.values[:, begin:], positions=positions[begin:]
    )
    streams = list(linear.encode_layers(cache, make_profile(), below=below))
    assert all(map(is_equal, cache, linear.decode_layers(streams, make_profile())))
    for layer, stream in zip(cache, streams, strict=True):
        assert len(stream) <= layer.nbytes + 64 + 4 * layer.tokens


def test_encode_layers_positions_of_heads():
    cache = make_cache(20, "fp16")
    moved = [
        LayerCache(
            layer=layer.layer,
            keys=layer.keys,
            values=layer.values,
            positions=np.stack([np.arange(20) + 3 * head for head in range(layer.kv_heads)]),
        )
        for layer in cache
    ]
    streams = list(linear.encode_layers(moved, make_profile()))
    assert all(read_header(stream).key is None for stream in streams)
    assert all(map(is_equal, moved, linear.decode_layers(streams, None)))
    mixed = [*moved[:1], *cache[1:]]
    streams = list(linear.encode_layers(mixed, make_profile()))
    assert all(map(is_equal, mixed, linear.decode_layers(streams, make_profile())))


@pytest.mark.parametrize("dtype", DTYPES)
def test_encode_layers_at_each_simd_level(dtype, only_linear):
    cache = make_cache(75, dtype, is_odd=True)
    before, streams = simd_level(), []
    try:
        for level in simd_levels():
            set_simd_level(level)
            streams.append(list(linear.encode_layers(cache, make_profile())))
            assert all(map(is_equal, cache, linear.decode_layers(streams[0], make_profile())))
    finally:
        set_simd_level(before)
    assert all(other == streams[0] for other in streams)


def test_encode_layer_says_what_is_missing():
    cache = make_cache(4, "fp16")
    with pytest.raises(KvmnnError, match="layer 2: needs layer 1, which is not given"):
        linear.encode_layer(cache[2], make_profile())
    with pytest.raises(KvmnnError, match="layer 1 is fp32, layer 2 fp16"):
        linear.encode_layer(cache[2], make_profile(), make_cache(4, "fp32")[:2])
    with pytest.raises(KvmnnError, match="layer 1 at place 0: expected the layers of a cache in their order"):
        list(linear.encode_layers(cache[1:], make_profile()))
    with pytest.raises(KvmnnError, match="below"):
        linear.encode_layer(cache[0], make_profile(), below=3)
    other = LayerCache(layer=9, keys=cache[0].keys, values=cache[0].values)
    with pytest.raises(KvmnnError, match="layer 9: the profile is of 4 layers"):
        linear.encode_layer(other, make_profile())
    with pytest.raises(KvmnnError, match="the profile 2 of 8 and 8"):
        linear.encode_layer(LayerCache(layer=0, keys=cache[3].keys, values=cache[3].values), make_profile())


def test_decode_layer_says_what_is_missing():
    cache = make_cache(40, "fp16")
    streams = list(linear.encode_layers(cache, make_profile()))
    with pytest.raises(KvmnnError, match=f"profile {make_profile().key.hex()}: none is given"):
        linear.decode_layer(streams[0], None)
    with pytest.raises(KvmnnError, match=f"{make_profile(2).key.hex()} is given"):
        linear.decode_layer(streams[0], make_profile(2))
    with pytest.raises(KvmnnError, match="layer 1: needs layer 0, which is not given"):
        linear.decode_layer(streams[1], make_profile())
    with pytest.raises(KvmnnError, match=r"checksum|entropy coder"):
        linear.decode_layer(streams[1], make_profile(), make_cache(40, "fp16", seed=5)[:1])
    with pytest.raises(LimitError, match="max_bytes is 100"):
        linear.decode_layer(streams[0], make_profile(), max_bytes=100)
