"""Every array comes back word for word, and no stream is longer than its words and 28 bytes."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from dense_samples import DTYPES, KINDS, near_rows, rotated, sample, to_dtype
from hypothesis import given, settings
from hypothesis import strategies as st

from kvmnn import _simd, dense
from kvmnn.errors import KvmnnError, LimitError

Words = np.ndarray[Any, Any]


def same(found: Words, expected: Words) -> bool:
    return found.shape == expected.shape and found.dtype == expected.dtype and found.tobytes() == expected.tobytes()


def check(array: Words, **options: Any) -> bytes:
    stream = dense.encode(array, **options)
    given = {name: options[name] for name in ("history", "tables") if name in options}
    assert same(dense.decode(stream, **given), array)
    assert len(stream) <= array.nbytes + 28
    info = dense.inspect(stream)
    assert sum(info.sections.values()) == info.stream_bytes == len(stream)
    assert (info.kv_heads, info.tokens, info.head_dim) == array.shape
    return stream


@settings(max_examples=150, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    heads=st.integers(1, 5),
    tokens=st.one_of(st.integers(1, 40), st.sampled_from([97, 128, 129, 300])),
    dim=st.sampled_from([1, 2, 3, 7, 16, 33, 64]),
    dims=st.integers(0, 32),
    pairing=st.sampled_from(["half", "interleaved"]),
    seed=st.integers(0, 1 << 20),
)
def test_dense_round_trip_any_array(
    kind: str, dtype: str, heads: int, tokens: int, dim: int, dims: int, pairing: str, seed: int
) -> None:
    array = sample(kind, dtype, heads, tokens, dim, seed)
    rotary = dense.RopeConfig(dims=2 * dims, pairing=pairing) if 0 < 2 * dims <= dim else None
    check(array, rotary=rotary)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0), (1, 2, 0)])
def test_encode_any_strides_give_the_same_stream(dtype: str, order: tuple[int, int, int]) -> None:
    array = sample("cache", dtype, 3, 50, 16, 1)
    stored = np.ascontiguousarray(array.transpose(order))
    view = stored.transpose(np.argsort(order))
    assert dense.encode(view) == dense.encode(array)
    assert dense.encode(np.concatenate([array, array], 1)[:, :50][:, ::1]) == dense.encode(array)
    backwards = np.ascontiguousarray(array[:, ::-1, ::-1])[:, ::-1, ::-1]
    assert dense.encode(backwards) == dense.encode(array)


def test_encode_unaligned_and_big_endian_arrays() -> None:
    array = sample("cache", "fp32", 2, 30, 8, 2)
    shifted = np.frombuffer(b"x" + array.tobytes(), np.uint8)[1:].view(np.float32).reshape(array.shape)
    assert dense.encode(shifted) == dense.encode(array) == dense.encode(array.astype(">f4"))


def test_dense_round_trip_every_16_bit_value() -> None:
    words = np.arange(65536, dtype=np.uint16).reshape(1, 256, 256)
    for dtype in ("fp16", "bf16"):
        array = words.view(np.float16) if dtype == "fp16" else words
        check(array, rotary=dense.RopeConfig(dims=256))
        again = np.concatenate([array, array[:, ::-1]], 1)
        check(again, rotary=dense.RopeConfig(dims=128, pairing="interleaved"))
        check(again)


@pytest.mark.parametrize("dtype", DTYPES)
def test_encode_wrong_rotation_costs_only_size(dtype: str) -> None:
    rng = np.random.default_rng(3)
    plain = near_rows(rng, 4, 400, 32)
    positions = np.cumsum(rng.integers(1, 4, 400))
    for pairing in ("half", "interleaved"):
        keys = to_dtype(rotated(plain, 32, 10000.0, positions, pairing), dtype)
        good = dense.RopeConfig(dims=32, pairing=pairing)
        told = len(check(keys, rotary=good, positions=positions))
        assert told < 0.9 * len(check(keys))
        assert told < len(check(keys, rotary=good))
        assert told < len(
            check(keys, rotary=dense.RopeConfig(theta=500.0, dims=32, pairing=pairing), positions=positions)
        )


def test_encode_any_positions_round_trip() -> None:
    rng = np.random.default_rng(5)
    array = to_dtype(near_rows(rng, 2, 100, 32, 10), "fp16")
    rotary = dense.RopeConfig(dims=2)
    for positions in (
        np.arange(100) + ((1 << 31) - 100),
        rng.integers(0, 1 << 31, 100),
        np.tile([(1 << 31) - 1, 0], 50),
        np.zeros(100, np.int64),
        np.arange(100)[::-1],
        np.arange(100, dtype=np.int8),
    ):
        stream = check(array, rotary=rotary, positions=positions)
        assert dense.inspect(stream).method == "rows"


def test_encode_equal_rows_are_copied() -> None:
    row = np.random.default_rng(6).standard_normal((2, 1, 64)).astype(np.float16)
    assert len(check(np.repeat(row, 1000, 1))) < 1200


def test_encode_token_ids_find_distant_rows() -> None:
    rng = np.random.default_rng(7)
    kinds = rng.standard_normal((2, 1500, 32)).astype(np.float32)
    ids = np.concatenate([np.arange(1500), rng.permutation(1500)])
    array = to_dtype(kinds[:, ids] + 1e-3 * rng.standard_normal((2, 3000, 32)).astype(np.float32), "bf16")
    assert len(check(array, token_ids=ids)) < 0.98 * len(check(array))


def test_encode_layers_share_reference_rows() -> None:
    rng = np.random.default_rng(12)
    ids = rng.integers(0, 40, 500)
    keys = [near_rows(rng, 2, 40, 32)[:, ids] + 0.05 * rng.standard_normal((2, 500, 32)) for _ in range(3)]
    rotary = dense.RopeConfig(dims=32)
    arrays, rotaries = [], []
    for plain in keys:
        turned = rotated(plain.astype(np.float32), 32, 10000.0, np.arange(500), "half")
        arrays += [to_dtype(turned, "bf16"), to_dtype(plain[:, :, ::-1].astype(np.float32), "bf16")]
        rotaries += [rotary, None]
    for options in ({}, {"token_ids": ids}, {"history": [array[:, :100] for array in arrays]}):
        streams = dense.encode_many(arrays, rotary=rotaries, positions=np.arange(100, 600), **options)
        for number, (stream, array) in enumerate(zip(streams, arrays, strict=True)):
            before = options["history"][number] if "history" in options else None
            assert same(dense.decode(stream, history=before), array)
    assert dense.encode_many([], rotary=rotary) == []
    assert dense.encode_many(arrays[1:2]) == [dense.encode(arrays[1])]
    with pytest.raises(KvmnnError, match="an array has 499 tokens: the one before it has 500"):
        dense.encode_many([arrays[0], arrays[1][:, 1:]])
    with pytest.raises(KvmnnError, match="rotary for 1 arrays: expected 6"):
        dense.encode_many(arrays, rotary=[None])


@pytest.mark.parametrize("dtype", DTYPES)
def test_encode_history_reduces_size(dtype: str) -> None:
    array = sample("cache", dtype, 4, 300, 32, 8)
    before, own = array[:, :240], array[:, 240:]
    alone = len(check(own))
    assert len(check(own, history=before)) < alone
    plain = near_rows(np.random.default_rng(9), 4, 450, 32)
    for pairing in ("half", "interleaved"):
        keys = to_dtype(rotated(plain, 32, 10000.0, np.arange(450), pairing), dtype)
        rotary = dense.RopeConfig(dims=32, pairing=pairing)
        stream = check(keys[:, 370:], history=keys[:, :370], rotary=rotary, positions=np.arange(370, 450))
        assert dense.inspect(stream).history == 256
        whole = dense.encode(keys[:, 370:], history=keys[:, 114:370], rotary=rotary, positions=np.arange(114, 450))
        assert whole == stream
    with pytest.raises(KvmnnError, match="refers to 256 rows before it"):
        dense.decode(stream)
    with pytest.raises(KvmnnError, match="other history"):
        dense.decode(stream, history=keys[:, 1:371])


def test_encode_every_simd_level_gives_the_same_bytes() -> None:
    arrays = [(sample(kind, dtype, 3, 150, 48, 10), dtype) for kind in KINDS for dtype in DTYPES]
    rotary = dense.RopeConfig(dims=32)
    made = []
    level = _simd.simd_level()
    try:
        for name in _simd.simd_levels():
            _simd.set_simd_level(name)
            made.append([dense.encode(array, dtype=dtype, rotary=rotary) for array, dtype in arrays])
            assert all(same(dense.decode(s), a) for s, (a, _) in zip(made[0], arrays, strict=True))
    finally:
        _simd.set_simd_level(level)
    assert all(streams == made[0] for streams in made)


def test_encode_from_threads_gives_the_same_bytes() -> None:
    arrays = [sample(kind, dtype, 2, 120, 32, seed) for seed in range(3) for kind in KINDS for dtype in DTYPES]
    expected = [dense.encode(array) for array in arrays]
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(dense.encode, arrays)) == expected
        assert all(map(same, pool.map(dense.decode, expected), arrays))


def test_decode_out_takes_any_strides_and_survives_errors() -> None:
    array = sample("cache", "fp16", 3, 40, 16, 11)
    stream = dense.encode(array)
    cache = np.zeros((3, 64, 16), np.float16)
    out = cache[:, 10:50]
    assert dense.decode(stream, out=out) is out
    assert same(np.ascontiguousarray(out), array) and not cache[:, :10].any() and not cache[:, 50:].any()
    cache[:] = 7
    with pytest.raises(KvmnnError):
        dense.decode(stream[:-1] + b"\x55", out=out)
    assert (cache == 7).all()
    with pytest.raises(KvmnnError, match=r"out has shape \[3, 64, 16\]: expected \[3, 40, 16\]"):
        dense.decode(stream, out=cache)
    with pytest.raises(KvmnnError, match="out has words of type >f2: expected the byte order of this machine"):
        dense.decode(stream, out=np.zeros((3, 40, 16), ">f2"))
    out.flags.writeable = False
    with pytest.raises(KvmnnError, match="out is read-only: expected a writable array"):
        dense.decode(stream, out=out)


def test_encode_unsupported_shapes_are_refused() -> None:
    with pytest.raises(KvmnnError, match="axes"):
        dense.encode(np.zeros((2, 2), np.float16))
    with pytest.raises(KvmnnError, match="empty"):
        dense.encode(np.zeros((2, 0, 2), np.float16))
    with pytest.raises(LimitError, match="1 heads of 65537"):
        dense.encode(np.zeros((1, 1, 65537), np.float16))
    with pytest.raises(TypeError, match="cannot infer"):
        dense.encode(np.zeros((1, 1, 1), np.float64))
    with pytest.raises(KvmnnError, match="at most the head_dim, 8"):
        dense.encode(np.zeros((1, 1, 8), np.float16), rotary=dense.RopeConfig(dims=16))
    with pytest.raises(KvmnnError, match="positions has 2 entries: expected 1"):
        dense.encode(np.zeros((1, 1, 8), np.float16), rotary=dense.RopeConfig(dims=8), positions=[1, 2])
    with pytest.raises(KvmnnError, match="expected 0 to"):
        dense.encode(np.zeros((1, 1, 8), np.float16), rotary=dense.RopeConfig(dims=8), positions=[-1])
    with pytest.raises(KvmnnError, match="token_ids has shape"):
        dense.encode(np.zeros((1, 1, 8), np.float16), token_ids=[1, 2])
    with pytest.raises(KvmnnError, match="history has 2 heads"):
        dense.encode(np.zeros((1, 1, 8), np.float16), history=np.zeros((2, 1, 8), np.float16))
    with pytest.raises(LimitError, match="1 heads of 65536"):
        dense.encode(np.zeros((1, 1, 65536), np.float16))
    check(np.zeros((2, 2, 32768), np.float16))
    check(np.zeros((65535, 2, 1), np.float16))


@pytest.mark.parametrize("tokens", [1, 2, 16, 40])
def test_encode_few_rows_near_their_history_round_trip(tokens: int) -> None:
    """All low parts are coded then, and the room for what is coded is the smallest that there is."""
    before = np.random.default_rng(5).standard_normal((4, 64, 64)).astype(np.float16)
    array = before[:, :tokens].copy()
    array[:, :, 5] += np.float16(0.25)
    stream = dense.encode(array, history=before)
    assert dense.inspect(stream).method == "rows"
    assert len(stream) < array.nbytes / (5 if tokens > 2 else 1.5)
    assert dense.decode(stream, history=before).tobytes() == array.tobytes()
