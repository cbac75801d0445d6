"""Damaged linear streams are refused with an error, without a crash and without much memory."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from linear_samples import make_cache, make_profile

from kvmnn import linear
from kvmnn.errors import FrameError, KvmnnError


def make_streams():
    cache = make_cache(20, "fp16", positions=np.delete(np.arange(22), [4, 5]))
    return cache, list(linear.encode_layers(cache, make_profile()))


def test_decode_layer_refuses_a_flip_of_any_byte():
    cache, streams = make_streams()
    for layer in (0, 1):
        for at in range(len(streams[layer])):
            for mask in (1, 128):
                damaged = bytearray(streams[layer])
                damaged[at] ^= mask
                with pytest.raises(KvmnnError):
                    linear.decode_layer(damaged, make_profile(), cache[:layer])


def test_decode_layer_refuses_truncated_and_longer_streams():
    cache, streams = make_streams()
    for end in range(len(streams[1])):
        with pytest.raises(KvmnnError):
            linear.decode_layer(streams[1][:end], make_profile(), cache[:1])
    for tail in (b"\0", bytes(4), bytes(64)):
        with pytest.raises(KvmnnError):
            linear.decode_layer(streams[1] + tail, make_profile(), cache[:1])


@pytest.mark.parametrize("tokens", [1 << 24, (1 << 32) - 1])
def test_decode_layer_takes_no_memory_for_tokens_that_are_not_there(tokens):
    _, streams = make_streams()
    damaged = bytearray(streams[0])
    damaged[18:22] = struct.pack("<I", tokens)
    damaged[7] = 0
    with pytest.raises(FrameError):
        linear.decode_layer(damaged, make_profile(), max_bytes=None)


def test_decode_layer_refuses_random_payloads():
    cache, streams = make_streams()
    rng = np.random.default_rng(7)
    for _ in range(300):
        damaged = bytearray(streams[1])
        begin = int(rng.integers(66, len(damaged)))
        damaged[begin:] = rng.bytes(len(damaged) - begin)
        with pytest.raises(KvmnnError):
            linear.decode_layer(damaged, make_profile(), cache[:1])


def test_profile_with_values_beyond_their_limits_is_refused():
    from kvmnn.profiles import Profile

    profile = make_profile()
    for name, value in (("sigmas", 0), ("deviations", 0), ("correlations", 20000), ("exponents", 2000)):
        arrays = dict(profile.arrays)
        damaged = arrays[f"linear/0/key/0/{name}"].copy()
        damaged[1] = value
        arrays[f"linear/0/key/0/{name}"] = damaged
        with pytest.raises(KvmnnError, match=f"linear/0/key/0/{name}"):
            linear.encode_layer(make_cache(4, "fp16")[0], Profile(profile.info, arrays), below=0)
