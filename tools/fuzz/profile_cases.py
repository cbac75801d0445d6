"""Hostile profiles, and streams by profiles, for tools/fuzz/run.py.

Profiles are damaged as bytes, in their header, or in their tables, the last two with checksums that hold; what the
reader takes then encodes and decodes caches. Streams are decoded by their own profile, or by a damaged one that has its
key.
"""

from __future__ import annotations

import struct
import warnings
from dataclasses import dataclass
from functools import cache
from random import Random
from typing import Any

import linear_samples
import numpy as np
import transform_samples
from damage import damaged
from files import edited

from kvmnn import KvmnnError, linear, transform
from kvmnn.arrays.layer_cache import LayerCache
from kvmnn.dense._stream import xxh64
from kvmnn.dense.rope import RopeConfig
from kvmnn.profiles import Profile, measure_tables

HEAD = struct.Struct("<4sHHIIQ")
KEY_OFFSETS = {b"KVML": 34, b"KVMX": 24}
MAX_BYTES = 1 << 20  # of K and V that a stream may claim


@dataclass(frozen=True)
class Sample:
    """A profile, caches, their streams and what these decode to."""

    profile: Profile
    caches: list[LayerCache]
    streams: list[bytes]
    decoded: list[LayerCache]
    options: transform.TransformOptions | None


@cache
def get_samples() -> list[Sample]:
    """Linear and transform samples of all kinds."""
    samples = []
    for dtype, below in (("fp16", 0), ("bf16", 1), ("fp32", 2)):
        profile = linear_samples.make_profile()
        caches = linear_samples.make_cache(20, dtype, positions=np.delete(np.arange(23), [4, 5, 9]), is_odd=below == 1)
        streams = list(linear.encode_layers(caches, profile, below=below))
        samples.append(Sample(profile, caches, streams, caches, None))
    for mode, rope, dtype, below in (
        ("joint", RopeConfig(10000.0, 8), "fp16", 2),
        ("head", RopeConfig(500.0, 6, "interleaved"), "bf16", 0),
        ("diagonal", None, "fp32", 1),
        ("none", RopeConfig(10000.0, 8), "fp16", 0),
    ):
        geometries = transform_samples.create_geometries(3, 2, 8, 6 if mode == "head" else 8, rope)
        profile = transform_samples.create_profile(geometries, (0, 1, 2), mode)  # type: ignore[arg-type]
        caches = transform_samples.create_caches(8, 20, geometries, dtype)
        options = transform.TransformOptions(kl=0.01, below=below, first=2, recent=below)
        encodings: list[Any] = []
        for layer in caches:
            lower = [encoding.decoded for encoding in encodings[::-1][:2]]
            exponents = (
                transform.choose_exponents(np.random.default_rng(5).random(layer.tokens) ** 4) if below else None
            )
            encodings.append(transform.encode_layer(layer, profile, lower, options, exponents=exponents))
        streams = [encoding.data for encoding in encodings]
        samples.append(Sample(profile, caches, streams, [encoding.decoded for encoding in encodings], options))
    return samples


# -- profiles ---------------------------------------------------------------------------------------------------------


def make_profile(rng: Random) -> dict[str, Any]:
    """A damaged profile, mostly one whose checksums hold."""
    number = rng.randrange(len(get_samples()))
    profile = get_samples()[number].profile
    draw = rng.random()
    if draw < 0.3:
        data = damaged(rng, profile.to_bytes())
    elif draw < 0.6:
        data = change_header(rng, profile.to_bytes())
    else:
        data = change_tables(rng, profile)
    return {"sample": number, "profile": data}


def change_header(rng: Random, data: bytes) -> bytes:
    """Numbers and strings of the header changed; its checksum holds."""
    magic, version, flags, size, reserved, _ = HEAD.unpack_from(data)
    document = data[HEAD.size : HEAD.size + size]
    rest = data[-(-(HEAD.size + size) // 64) * 64 :]
    for _ in range(rng.choice((1, 1, 2, 3))):
        cut = rng.randrange(len(document)) if rng.random() < 0.7 else 0  # edited() looks at the next 6,000 bytes
        document = document[:cut] + edited(rng, document[cut:])
    head = HEAD.pack(magic, version, flags, len(document), reserved, xxh64(document)) + document
    return head + bytes(-len(head) % 64) + rest


def change_tables(rng: Random, profile: Profile) -> bytes:
    """Tables with other numbers, shapes or types, or without one of them."""
    arrays = dict(profile.arrays)
    for name in rng.sample(sorted(arrays), rng.choice((1, 1, 2, 5))):
        array = arrays[name].copy()
        draw = rng.randrange(8)
        if draw == 0:
            del arrays[name]
            continue
        if draw == 1:
            array = array.reshape(-1) if rng.random() < 0.5 else array[..., :-1]
        elif draw == 2:
            array = array.astype(rng.choice(("int8", "int16", "int32", "float32", "float64", "uint8")))
        elif array.size:
            flat = array.reshape(-1)
            places = [rng.randrange(flat.size) for _ in range(rng.choice((1, 1, 4, flat.size)))]
            if array.dtype.kind == "f":
                flat[places] = rng.choice((0.0, -1.0, np.nan, np.inf, 1e38, 1e-40, flat[places[0]] * 1e6))
            else:
                limits = np.iinfo(array.dtype)
                if rng.random() < 0.3:
                    flat[places] = [rng.randint(limits.min, limits.max) for _ in places]
                else:
                    flat[places] = rng.choice((0, 1, limits.min, limits.max, limits.max - 1))
        arrays[name] = array
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the conversions above
        return Profile(profile.info, arrays).to_bytes()


def check_profile(rng: Random, case: dict[str, Any]) -> tuple[int, int]:
    """Refused with one line, or read: then inspected, and used by both codecs."""
    sample = get_samples()[case["sample"]]
    try:
        profile = Profile.from_bytes(case["profile"], "x.kvmp")
    except KvmnnError as error:
        assert str(error).startswith("x.kvmp: ") and "\n" not in str(error), f"message: {error}"
        return 1, 0
    str([str(size) for size in measure_tables(profile)])
    calls = 2
    for number, stream in enumerate(sample.streams):
        calls += 1 + decode(set_key(stream, profile.key), profile, sample.decoded[:number][::-1][:2])[0]
        calls += check_encoding(sample, profile, number)
    return calls, 1


def set_key(stream: bytes, key: bytes) -> bytes:
    """The stream with the key of another profile, if it has one."""
    offset = KEY_OFFSETS[stream[:4]]
    if stream[:4] == b"KVML" and 2 not in (stream[8] & 15, stream[8] >> 4):
        return stream  # no side of it is linear
    return stream[:offset] + key + stream[offset + len(key) :]


def decode(stream: bytes, profile: Profile, lower: list[LayerCache]) -> tuple[int, LayerCache | None]:
    """Decode by the codec that the stream begins as; None where it is refused, with one line."""
    codec = transform if stream[:4] == b"KVMX" else linear
    try:
        return 1, codec.decode_layer(stream, profile, lower, max_bytes=MAX_BYTES)
    except KvmnnError as error:
        assert str(error) and "\n" not in str(error), f"message: {error}"
        return 1, None


def check_encoding(sample: Sample, profile: Profile, number: int) -> int:
    """What an encoder writes by a hostile profile decodes to what it says."""
    lower = sample.decoded[:number][::-1][:2]
    layer = sample.caches[number]
    try:
        if sample.options is None:
            stream, expected = linear.encode_layer(layer, profile, lower), layer
        else:
            encoding = transform.encode_layer(layer, profile, lower, sample.options)
            stream, expected = encoding.data, encoding.decoded
    except KvmnnError as error:
        assert str(error) and "\n" not in str(error), f"message: {error}"
        return 1
    _, decoded = decode(stream, profile, lower)
    assert decoded is not None and linear_samples.is_equal(decoded, expected), "an own stream decodes differently"
    return 2


# -- streams ----------------------------------------------------------------------------------------------------------


def make_stream(rng: Random) -> dict[str, Any]:
    """A damaged stream of a layer."""
    number = rng.randrange(len(get_samples()))
    layer = rng.randrange(len(get_samples()[number].streams))
    stream = get_samples()[number].streams[layer]
    if rng.random() < 0.5:  # its words alone, so that the header is taken
        keep = rng.randrange(min(66, len(stream)), len(stream))
        stream = stream[:keep] + damaged(rng, stream[keep:])
    else:
        stream = damaged(rng, stream)
    return {"sample": number, "layer": layer, "stream": stream}


def check_stream(rng: Random, case: dict[str, Any]) -> tuple[int, int]:
    """Refused, or no damage: a checksum is of all of it."""
    sample, layer = get_samples()[case["sample"]], case["layer"]
    stream = case["stream"]
    calls, decoded = decode(stream, sample.profile, sample.decoded[:layer][::-1][:2])
    is_whole = stream == sample.streams[layer]
    assert is_whole == (decoded is not None), "a damaged stream is decoded" if decoded else "a stream is refused"
    if stream[:4] == b"KVMX":
        try:
            str(transform.inspect_layer(stream))
        except KvmnnError:
            assert not is_whole, "inspect refuses a stream"
        calls += 1
    return calls, int(is_whole)
