"""Transform streams: what is decoded, on every SIMD level and by a second decoder; what is refused."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import transform_decoder as plain
from transform_samples import create_caches, create_geometries, create_profile

from kvmnn import _simd
from kvmnn.arrays.layer_cache import LayerCache
from kvmnn.dense.rope import RopeConfig
from kvmnn.errors import FrameError, KvmnnError, LimitError
from kvmnn.profiles.profile import Profile
from kvmnn.transform import (
    LayerEncoding,
    TransformOptions,
    choose_exponents,
    decode_layer,
    encode_layer,
    get_tables,
    inspect_layer,
    plan_steps,
)
from kvmnn.transform.header import HEADER_BYTES, compute_checksum, read_header
from kvmnn.transform.tables import Mode

HALF, INTERLEAVED = RopeConfig(10000.0, 8), RopeConfig(500.0, 6, "interleaved")
GAPS = [0, 1, 2, 7, 8, 9, 30, 31, 1000, 1001, 1002, 1003, 5000]


@cache
def get_profile(
    heads: int = 2,
    head_dim: int = 8,
    value_dim: int = 8,
    rope: RopeConfig | None = HALF,
    mode: Mode = "joint",
    is_measured: bool = True,
) -> Profile:
    geometries = create_geometries(4, heads, head_dim, value_dim, rope)
    return create_profile(geometries, mode=mode, is_measured=is_measured)


def encode_all(
    profile: Profile, caches: list[LayerCache], options: TransformOptions, attention: bool = False
) -> list[LayerEncoding]:
    encodings: list[LayerEncoding] = []
    for cache_ in caches:
        lower = [encoding.decoded for encoding in encodings[::-1][:2]]
        drawn = np.random.default_rng(5).random(cache_.tokens) ** 4
        encodings.append(
            encode_layer(cache_, profile, lower, options, exponents=choose_exponents(drawn) if attention else None)
        )
    return encodings


def decode_plainly(profile: Profile, streams: list[bytes]) -> list[tuple[plain.Array, plain.Array, list[int]]]:
    layers = []
    for geometry in profile.layers:
        rope = geometry.rope
        own = None if rope is None else plain.Rope(rope.dims, rope.pairing == "interleaved", rope.turns.tolist())
        layers.append(plain.Geometry(geometry.kv_heads, (geometry.head_dim, geometry.value_dim), own))
    decoder = plain.Decoder(profile.key, layers, profile.arrays)
    decoded: list[tuple[plain.Array, plain.Array, list[int]]] = []
    for stream in streams:
        decoded.append(decoder.decode(stream, [(keys, values) for keys, values, _ in decoded[::-1][:2]]))
    return decoded


def assert_same_words(cache_: LayerCache, expected: LayerCache) -> None:
    assert cache_.keys.dtype == expected.keys.dtype and cache_.layer == expected.layer
    assert cache_.keys.tobytes() == expected.keys.tobytes()
    assert cache_.values.tobytes() == expected.values.tobytes()
    np.testing.assert_array_equal(cache_.positions, expected.positions)


CASES = [
    ("fp16", 2, 8, 8, HALF, "joint", 2, False, None),
    ("bf16", 2, 8, 8, HALF, "head", 0, True, GAPS),
    ("fp32", 2, 8, 8, HALF, "diagonal", 2, True, GAPS),
    ("fp16", 3, 9, 5, INTERLEAVED, "joint", 2, True, None),
    ("fp32", 3, 9, 5, INTERLEAVED, "head", 0, False, GAPS),
    ("fp16", 1, 7, 3, None, "none", 2, False, None),
]


@pytest.mark.parametrize(
    ("dtype", "heads", "head_dim", "value_dim", "rope", "mode", "below", "attention", "gaps"), CASES
)
def test_round_trip(
    dtype: str,
    heads: int,
    head_dim: int,
    value_dim: int,
    rope: RopeConfig | None,
    mode: Mode,
    below: int,
    attention: bool,
    gaps: list[int] | None,
) -> None:
    """kvmnn and the plain decoder make the same words of a stream, on every SIMD level; exact tokens are exact."""
    profile = get_profile(heads, head_dim, value_dim, rope, mode)
    caches = create_caches(7, 13, profile.layers, dtype, gaps)
    options = TransformOptions(kl=0.02, below=below, first=2, recent=1)
    encodings = encode_all(profile, caches, options, attention)
    plainly = decode_plainly(profile, [encoding.data for encoding in encodings])
    level = _simd.simd_level()
    try:
        for name in _simd.simd_levels():
            _simd.set_simd_level(name)
            lower: list[LayerCache] = []
            for encoding, original, words in zip(encodings, caches, plainly, strict=True):
                decoded = decode_layer(encoding.data, profile, lower)
                assert_same_words(decoded, encoding.decoded)
                assert decoded.keys.tobytes() == words[0].tobytes() and decoded.values.tobytes() == words[1].tobytes()
                assert words[2] == original.positions.tolist()
                exact = [0, 1, 12]
                assert decoded.keys[:, exact].tobytes() == original.keys[:, exact].tobytes()
                assert decoded.values[:, exact].tobytes() == original.values[:, exact].tobytes()
                lower = [decoded, *lower][:2]
            assert [encoding.data for encoding in encode_all(profile, caches, options, attention)] == [
                encoding.data for encoding in encodings
            ]
    finally:
        _simd.set_simd_level(level)


def test_several_blocks_of_tokens() -> None:
    """Long caches have their own levels, and more than one block of coefficients."""
    profile = get_profile()
    caches = create_caches(11, 520, profile.layers)
    encodings = encode_all(profile, caches, TransformOptions(kl=0.05))
    lower: list[LayerCache] = []
    for encoding in encodings:
        lower = [decode_layer(encoding.data, profile, lower), *lower][:2]
        assert_same_words(lower[0], encoding.decoded)
    assert read_header(encodings[0].data)[0].has_corrections
    assert [words[0].tobytes() for words in decode_plainly(profile, [encodings[0].data])] == [
        encodings[0].decoded.keys.tobytes()
    ]


def test_knobs() -> None:
    """More loss takes fewer bytes and gives larger errors; ratio and bits come out near what was asked for."""
    profile = get_profile()
    caches = create_caches(12, 600, profile.layers)
    results = []
    for kl in (1e-4, 1e-2, 1.0):
        encodings = encode_all(profile, caches, TransformOptions(kl=kl))
        size = sum(len(encoding.data) for encoding in encodings)
        results.append((size, -np.mean([encoding.result.key_errors.relative for encoding in encodings])))
        assert sum(encoding.result.info.predicted_kl or 0 for encoding in encodings) == pytest.approx(kl, rel=1e-5)
    assert sorted(results, reverse=True) == results and sorted(error for _, error in results)[::-1] == [
        error for _, error in results
    ]
    raw = sum(cache_.nbytes for cache_ in caches)
    for options, expected in ((TransformOptions(ratio=4.0), 4.0), (TransformOptions(bits=2.0, below=0), 8.0)):
        ratio = raw / sum(len(encoding.data) for encoding in encode_all(profile, caches, options))
        assert ratio == pytest.approx(expected, rel=0.2)


def test_attention_gives_tokens_smaller_steps() -> None:
    profile = get_profile()
    cache_ = create_caches(13, 400, profile.layers)[0]
    attention = np.where(np.arange(400) % 2, 1.0, 0.01)
    encoding = encode_layer(cache_, profile, (), TransformOptions(kl=0.1), exponents=choose_exponents(attention))
    errors = np.abs(encoding.decoded.values.astype(float) - cache_.values)[:, 4:].mean(axis=(0, 2))
    assert errors[1::2].mean() < 0.6 * errors[::2].mean()
    assert inspect_layer(encoding.data).has_attention_steps


def test_without_sensitivities_no_loss_is_predicted() -> None:
    profile = get_profile(is_measured=False)
    encoding = encode_layer(create_caches(14, 50, profile.layers)[0], profile, (), TransformOptions(bits=3.0))
    assert inspect_layer(encoding.data).predicted_kl is None
    assert "LOSSY" in str(encoding.result.info.to_dict())


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
def test_rows_that_cannot_be_coded_are_exact(dtype: str) -> None:
    """NaN, infinities, outliers: their tokens are stored as they are, the others are coded."""
    profile = get_profile()
    cache_ = create_caches(15, 60, profile.layers, dtype)[0]
    infinity = {"fp16": 0x7C00, "bf16": 0x7F80, "fp32": 0x7F800000}[dtype]
    words = cache_.keys.view(np.uint32 if dtype == "fp32" else np.uint16)
    words[0, 20, 3], words[1, 21, 4] = infinity, infinity + 1
    large = cache_.values.view(np.uint32 if dtype == "fp32" else np.uint16)
    large[0, 40, :] = infinity - 1
    encoding = encode_layer(cache_, profile, (), TransformOptions(kl=0.01, first=0))
    decoded = decode_layer(encoding.data, profile)
    assert_same_words(decoded, encoding.decoded)
    for token in (20, 21, 40):
        assert decoded.keys[:, token].tobytes() == cache_.keys[:, token].tobytes()
        assert decoded.values[:, token].tobytes() == cache_.values[:, token].tobytes()
    assert encoding.result.info.exact_tokens == 3


def test_all_tokens_exact() -> None:
    profile = get_profile()
    cache_ = create_caches(16, 3, profile.layers)[0]
    encoding = encode_layer(cache_, profile)
    assert_same_words(decode_layer(encoding.data, profile), cache_)


def test_other_profile_and_lower_layers_are_refused() -> None:
    profile, other = get_profile(), get_profile(mode="head")
    caches = create_caches(17, 20, profile.layers)
    encodings = encode_all(profile, caches, TransformOptions(kl=0.01))
    with pytest.raises(KvmnnError, match="needs the profile"):
        decode_layer(encodings[0].data, other)
    with pytest.raises(KvmnnError, match="needs layer 0"):
        decode_layer(encodings[1].data, profile)
    with pytest.raises(FrameError, match="lower layers are not those"):
        decode_layer(encodings[1].data, profile, [caches[0]])
    with pytest.raises(KvmnnError, match="other tokens"):
        decode_layer(encodings[1].data, profile, [create_caches(17, 21, profile.layers)[0]])
    with pytest.raises(LimitError):
        decode_layer(encodings[0].data, profile, max_bytes=100)
    with pytest.raises(KvmnnError, match="below=1"):
        encode_layer(caches[0], profile, (), TransformOptions(below=1))
    per_head = np.stack([np.arange(20), np.arange(1, 21)])
    split = LayerCache(layer=0, keys=caches[0].keys, values=caches[0].values, positions=per_head)
    with pytest.raises(KvmnnError, match="different tokens"):
        encode_layer(split, profile)
    with pytest.raises(KvmnnError, match=r"exponents int8 \[3\]: expected int8"):
        encode_layer(caches[0], profile, exponents=np.zeros(3, np.int8))


def test_damaged_streams_are_refused() -> None:
    """No flip of a bit and no cut gives words; a wrong stream with a right checksum of its header gives none either."""
    profile = get_profile()
    cache_ = create_caches(18, 40, profile.layers)[0]
    data = encode_layer(cache_, profile, (), TransformOptions(kl=0.05), exponents=np.zeros(40, np.int8)).data
    random = np.random.default_rng(1)
    for bit in random.choice(8 * len(data), 600, replace=False).tolist() + list(range(8 * HEADER_BYTES)):
        damaged = bytearray(data)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(KvmnnError):
            decode_layer(damaged, profile)
    for size in [*range(HEADER_BYTES + 40), *range(HEADER_BYTES + 40, len(data), 37)]:
        with pytest.raises(FrameError):
            decode_layer(data[:size], profile)
    with pytest.raises(FrameError):
        decode_layer(data + b"\0", profile)


def test_both_decoders_refuse_the_same_payloads() -> None:
    profile = get_profile()
    data = encode_layer(create_caches(19, 12, profile.layers)[0], profile, (), TransformOptions(kl=0.05)).data
    random = np.random.default_rng(2)
    for _ in range(25):
        damaged = bytearray(data)
        damaged[int(random.integers(HEADER_BYTES, len(data)))] = int(random.integers(256))
        with pytest.raises(KvmnnError):
            decode_layer(damaged, profile)
        with pytest.raises(plain.RejectedError):
            decode_plainly(profile, [bytes(damaged)])


def test_small_streams_do_not_claim_much() -> None:
    """A header that claims 2^24 tokens is refused before memory is taken."""
    profile = get_profile()
    data = encode_layer(create_caches(20, 12, profile.layers)[0], profile).data
    header, payload = read_header(data)
    claimed = replace(header, tokens=1 << 24)
    packed = claimed.pack()
    packed = replace(claimed, checksum=compute_checksum(packed, payload)).pack()
    with pytest.raises(FrameError, match="cannot hold"):
        decode_layer(packed + bytes(payload), profile)


def test_layers_of_other_tokens_are_encoded_alone() -> None:
    """A layer whose window has slid is not predicted from one that holds more."""
    profile = get_profile()
    caches = create_caches(22, 30, profile.layers)
    lower = encode_layer(caches[0], profile).decoded
    window = caches[1]
    window = LayerCache(
        layer=1, keys=window.keys[:, 10:], values=window.values[:, 10:], positions=window.positions[10:]
    )
    encoding = encode_layer(window, profile, [lower], TransformOptions(below=2))
    assert inspect_layer(encoding.data).below == 0
    assert_same_words(decode_layer(encoding.data, profile), encoding.decoded)


BAD_TABLES = {
    "transform/tables": [lambda a: a[:56], lambda a: a * 0, lambda a: a.astype(np.int32)],
    "transform/0/key/mean": [lambda a: a * np.nan, lambda a: a * 0 + 1e-30, lambda a: a[1:]],
    "transform/0/value/weights.0": [lambda a: a[:, 1:], lambda a: a.astype(np.int16)],
    "transform/0/key/unit.0": [lambda a: a * 0],
    "transform/0/key/basis.0": [lambda a: a[:, 1:], lambda a: a[0, 0] * 0, lambda a: a.astype(np.float32)],
    "transform/0/key/sensitivity.0": [lambda a: a * 0, lambda a: a * np.nan],
}


@pytest.mark.parametrize("name", BAD_TABLES)
def test_tables_of_other_kinds_are_refused(name: str) -> None:
    profile = get_profile()
    cache_ = create_caches(23, 12, profile.layers)[0]
    for change in BAD_TABLES[name]:
        damaged = Profile(profile.info, {**profile.arrays, name: change(profile.arrays[name])})
        with pytest.raises(KvmnnError, match=r"section|sensitivity"):
            encode_layer(cache_, damaged, (), TransformOptions(below=0))
    missing = Profile(profile.info, {key: array for key, array in profile.arrays.items() if key != name})
    with pytest.raises(KvmnnError, match="section"):
        encode_layer(cache_, missing, (), TransformOptions(below=0))


def test_plan_is_shared_by_layers() -> None:
    profile = get_profile()
    cache_ = create_caches(21, 30, profile.layers)[0]
    options = TransformOptions(kl=0.003, below=0)
    plan = plan_steps(get_tables(profile), options, 30)
    assert plan.kl == pytest.approx(0.003) and plan.steps.shape == (4, 2)
    assert encode_layer(cache_, profile, (), options, plan=plan).data == encode_layer(cache_, profile, (), options).data


def test_plan_predicts_no_loss_where_first_tokens_are_rounded() -> None:
    """Sensitivities leave the first four tokens of a text out."""
    tables = get_tables(get_profile())

    def predicts(first: int, begin_token: int) -> bool:
        options = TransformOptions(kl=0.003, below=0, first=first)
        return plan_steps(tables, options, 30, begin_token=begin_token).is_measured

    assert predicts(4, 0) and predicts(3, 1) and predicts(0, 4)
    assert not predicts(3, 0) and not predicts(0, 3)


def test_choose_exponents_of_zeros_is_refused() -> None:
    with pytest.raises(KvmnnError, match="attention: all zeros"):
        choose_exponents(np.zeros(5))
    assert choose_exponents(np.zeros(1)).tolist() == [0]
