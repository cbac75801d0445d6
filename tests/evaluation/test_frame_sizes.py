"""Sizes of frames of a cache equal those of real frames of the same bytes."""

from __future__ import annotations

import numpy as np
import pytest

import kvmnn
from kvmnn.arrays.layer_cache import LayerCache
from kvmnn.errors import FrameError
from kvmnn.evaluation.measure import QuantizedStart, measure_frame_sizes
from kvmnn.frames import encoder
from kvmnn.frames import encoder as frame


def layers(dtype=np.float32, kept=(20, 30), seen=50):
    random = np.random.default_rng(3)
    return [
        LayerCache(
            layer=number,
            keys=random.standard_normal((2, tokens, 8)).astype(dtype),
            values=random.standard_normal((2, tokens, 8)).astype(dtype),
            tokens_seen=seen,
        )
        for number, tokens in enumerate(kept)
    ]


def coded(cache, dtype):
    return sum(len(kvmnn.encode(part.astype(dtype))) for layer in cache for part in (layer.keys, layer.values))


def test_measure_frame_sizes_fp32_cache_rounded_to_fp16():
    cache = layers()
    found = measure_frame_sizes(cache)
    assert (found.dtype, found.rounded) == ("fp16", True)
    assert found.full_bytes == 2 * 2 * 2 * 50 * 8 * 2  # layers, K and V, heads, tokens, words, bytes
    assert found.kept_bytes == 2 * 2 * 50 * 8 * 2
    assert found.frame_bytes == coded(cache, np.float16)


def test_measure_frame_sizes_fp32_unrounded():
    cache = layers()
    found = measure_frame_sizes(cache, "fp32")
    assert (found.dtype, found.rounded) == ("fp32", False)
    assert found.full_bytes == 2 * 2 * 2 * 50 * 8 * 4
    assert found.frame_bytes == coded(cache, np.float32)


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_measure_frame_sizes_fp16_cache_is_unchanged(dtype):
    cache = layers(np.float16)
    found = measure_frame_sizes(cache, dtype)
    assert (found.dtype, found.rounded) == ("fp16", False)
    assert found.frame_bytes == coded(cache, np.float16)


def test_measure_frame_sizes_beyond_fp16_is_infinite():
    cache = layers()
    cache[0].keys[0, 0, 0] = 1e6
    assert measure_frame_sizes(cache).frame_bytes == coded_quietly(cache)


def coded_quietly(cache):
    with np.errstate(over="ignore"):
        return coded(cache, np.float16)


def test_measure_frame_sizes_empty_cache_is_zero():
    found = measure_frame_sizes(layers(kept=(0, 0)))
    assert (found.kept_bytes, found.frame_bytes) == (0, 0)
    assert found.full_bytes > 0


def test_measure_frame_sizes_failed_roundtrip_is_refused(monkeypatch):
    good = encoder.encode
    monkeypatch.setattr(frame, "encode", lambda words, **rest: good(np.zeros_like(words), **rest))
    with pytest.raises(FrameError, match="layer 0: the frame of its keys does not decode to them"):
        measure_frame_sizes(layers())


@pytest.mark.parametrize("positions", [np.r_[0:3, 30:37], np.stack([np.r_[0:3, 30:37], np.r_[0:5, 30:35]])])
def test_measure_frame_sizes_of_quantized_start_counts_bytes_of_its_file(positions):
    """Tokens of the start as its file stores them, in heads that keep different ones their mean; later ones as fp16."""
    (cache, _) = layers(np.float16, kept=(10, 10))
    cache = LayerCache(layer=0, keys=cache.keys, values=cache.values, positions=positions, tokens_seen=50)
    found = measure_frame_sizes([cache], start=QuantizedStart(30, [36.0]))
    num_start = float(np.mean(np.sum(np.atleast_2d(positions) < 30, axis=1)))
    assert found.kept_bytes == 36 * num_start + 2 * 2 * 8 * 2 * (10 - num_start)
    assert 36 * num_start < found.frame_bytes and found.full_bytes == 2 * 2 * 50 * 8 * 2
    assert measure_frame_sizes([cache], start=QuantizedStart(0, [36.0])).kept_bytes == 2 * 2 * 8 * 2 * 10
