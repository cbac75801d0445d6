"""encode and decode: bytes equal to the reference's, and everything comes back."""

import pickle
from pathlib import Path

import codec_model
import numpy as np
import pytest
from codec_samples import EXAMPLES, NUMPY, PREDICTOR_SETS, STRIDE, kv_like, structured, verdict, word_bytes
from hypothesis import given
from hypothesis import strategies as st
from repository import FIXTURES
from slow_cases import mark_most_slow

import kvmnn
from kvmnn.frames import decoder, options

SIZES = [1, 2, 3, 4, 5, 15, 16, 17, 31, 33, 127, 128, 129, 132, 255, 262, 265, 1000, 4096, 4097, 4111]
REAL = sorted((FIXTURES / "kv_real").glob("*.npy"))


@pytest.mark.parametrize("stride", [2, 4])
@pytest.mark.parametrize("words", mark_most_slow(SIZES, 3))
def test_encode_exact_structured_inputs_equal_the_model(words: int, stride: int) -> None:
    dtype = "fp16" if stride == 2 else "fp32"
    for name, data in structured(words, stride):
        assert len(data) == words * stride, name
        frame = kvmnn.encode(data, dtype=dtype)
        assert frame == codec_model.encode(data, stride), name
        assert verdict(frame) == (dtype, data), name
        without = kvmnn.encode(data, dtype=dtype, codecs=("rle",))
        assert without == codec_model.encode(data, stride, zstd=False), name
        assert verdict(without, codecs=("rle",)) == (dtype, data), name


@pytest.mark.slow
@pytest.mark.parametrize(("words", "stride"), [(150_000, 2), (75_000, 4)])
def test_encode_exact_300_kilobytes_equal_the_model(words: int, stride: int) -> None:
    dtype = "fp16" if stride == 2 else "fp32"
    for name, data in structured(words, stride):
        if name in ("runs", "quantised", "kv"):
            frame = kvmnn.encode(data, dtype=dtype)
            assert frame == codec_model.encode(data, stride), name
            assert verdict(frame, max_bytes=len(data)) == (dtype, data), name


@EXAMPLES
@given(st.data())
def test_encode_exact_any_input_equals_the_model(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(STRIDE)))
    raw = data.draw(word_bytes(STRIDE[dtype]))
    names = data.draw(st.sampled_from(PREDICTOR_SETS))
    zstd = data.draw(st.booleans())
    codecs = ("rle", "zstd") if zstd else ("rle",)
    frame = kvmnn.encode(raw, dtype=dtype, predictors=names, codecs=codecs)
    assert frame == codec_model.encode(raw, STRIDE[dtype], names, zstd=zstd)
    assert verdict(frame, dtype, codecs=codecs) == (dtype, raw)


@EXAMPLES
@given(st.data())
def test_encode_every_effort_decodes_with_the_model(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(STRIDE)))
    raw = data.draw(word_bytes(STRIDE[dtype]))
    names = data.draw(st.sampled_from(PREDICTOR_SETS))
    zstd = data.draw(st.booleans())
    effort = data.draw(st.sampled_from(["balanced", "fast", "max"]))
    codecs = ("rle", "zstd") if zstd else ("rle",)
    options = {"dtype": dtype, "predictors": names, "codecs": codecs}
    frame = kvmnn.encode(raw, effort=effort, **options)
    assert codec_model.decode(frame, STRIDE[dtype], zstd) == raw
    assert {stream.predictor for stream in kvmnn.inspect(frame, codecs=codecs).streams} <= set(names)
    exact = kvmnn.encode(raw, **options)
    if effort == "max":
        assert len(frame) <= min(len(exact), len(kvmnn.encode(raw, effort="fast", **options)))
    elif effort == "balanced":
        assert len(frame) >= len(exact)


@pytest.mark.parametrize("file", REAL, ids=lambda path: path.stem)
def test_encode_real_cache_sizes_of_efforts(file: Path) -> None:
    values = np.load(file)
    stride = values.itemsize
    dtype = "fp16" if stride == 2 else "fp32"
    exact, balanced, fast = (kvmnn.encode(values, effort=effort) for effort in ("exact", "balanced", "fast"))
    assert verdict(exact) == verdict(balanced) == verdict(fast) == (dtype, values.tobytes())
    assert len(exact) <= len(balanced) <= 1.005 * len(exact)
    assert len(fast) <= 1.05 * len(exact)
    part = values[-1, :100]
    frame = kvmnn.encode(part)
    assert frame == codec_model.encode(part.tobytes(), stride)
    assert len(frame) <= len(kvmnn.encode(part, effort="balanced")) <= 1.01 * len(frame)
    assert len(kvmnn.encode(part, effort="max")) < len(frame)
    assert kvmnn.encode_block(part, part).decode()[1].tobytes() == part.tobytes()


def test_real_caches_are_present() -> None:
    assert len(REAL) >= 3


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "bf16"])
def test_encode_efforts_order_sizes_on_cache_like_data(dtype: str) -> None:
    data = kv_like(1 << 16, dtype)
    sizes = {}
    for effort in options.EFFORTS:
        frame = kvmnn.encode(data, dtype=dtype, effort=effort)
        assert codec_model.decode(frame, STRIDE[dtype]) == data
        sizes[effort] = len(frame)
    assert sizes["max"] <= sizes["exact"] <= sizes["balanced"] <= 1.005 * sizes["exact"]
    assert sizes["max"] <= sizes["fast"] <= 1.05 * sizes["exact"]


def test_encode_max_gains_from_levels_and_content_size() -> None:
    text = b"".join(b"%d squared is %d; " % (i, i * i) for i in range(3000))
    text += bytes(len(text) % 2)
    assert len(kvmnn.encode(text, dtype="fp16", effort="max")) < len(kvmnn.encode(text, dtype="fp16"))


def test_to_mode_bits_empty_set_is_raw() -> None:
    # Only reachable below the API: a spec parsed with default_raw=False.
    assert options.to_mode_bits(frozenset()) == options.to_mode_bits(frozenset({"raw"}))


def test_encode_reused_workspaces_change_nothing() -> None:
    """The same input gives the same frame whatever the workspaces saw before, larger or smaller."""
    inputs = [kv_like(words, seed=words) for words in (70_000, 3, 9_000, 70_001, 1, 400, 33_000)]
    first = [codec_model.encode(data, 2) for data in inputs]
    for order in (range(7), reversed(range(7)), (0, 0, 3, 3, 0, 5, 3)):
        for i in order:
            assert kvmnn.encode(inputs[i], dtype="fp16") == first[i]
            assert kvmnn.encode(inputs[i], dtype="fp16", effort="max", codecs=("rle",)) != b""
            assert verdict(first[i]) == ("fp16", inputs[i])


def test_encode_exact_after_max_is_unchanged() -> None:
    data = kv_like(5000)
    exact = kvmnn.encode(data, dtype="fp16")
    for _ in range(3):
        kvmnn.encode(data, dtype="fp16", effort="max", threads=1)
        assert kvmnn.encode(data, dtype="fp16", threads=1) == exact == codec_model.encode(data, 2)


def test_verify_roundtrip_compares_every_byte() -> None:
    data = kv_like(3000)
    frame = kvmnn.encode(data, dtype="fp16")
    array = np.frombuffer(data, NUMPY["fp16"])
    assert decoder.verify_roundtrip(frame, array)
    assert decoder.verify_roundtrip(frame, array.view("<u2"))
    assert decoder.verify_roundtrip(frame, data, dtype="bf16")
    assert not decoder.verify_roundtrip(frame, array[:-1])
    for at in (0, 1, 2047, 2048, 4095, 4096, 5999):
        other = bytearray(data)
        other[at] ^= 1
        assert not decoder.verify_roundtrip(frame, other, dtype="fp16"), at
    with pytest.raises(kvmnn.FrameError):
        decoder.verify_roundtrip(frame[:-1], array)
    with pytest.raises(kvmnn.FrameError, match="2 streams"):
        decoder.verify_roundtrip(frame, np.zeros(3000, np.float32))


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_verify_roundtrip_large_frame(dtype: str) -> None:
    data = kv_like(600_000, dtype)
    frame = kvmnn.encode(data, dtype=dtype)
    assert decoder.verify_roundtrip(frame, data, dtype=dtype)
    other = bytearray(data)
    other[-1] ^= 128
    assert not decoder.verify_roundtrip(frame, other, dtype=dtype)


@pytest.mark.parametrize("shape", [(3, 4, 5), (60,), (1, 60, 1)])
def test_encode_keep_shape_gives_the_shape_back(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(1).standard_normal(shape).astype(np.float16)
    for array in (values, values.view(np.uint16), values.astype(np.float32), values.T):
        frame = kvmnn.encode(array, keep_shape=True)
        assert frame == kvmnn.encode(array)
        for copy in (frame, pickle.loads(pickle.dumps(frame))):
            decoded = kvmnn.decode(copy)
            assert (decoded.shape, decoded.dtype) == (array.shape, array.dtype)
            assert np.array_equal(decoded, array)
        assert kvmnn.decode(bytes(frame)).shape == (60,)
    raw = kvmnn.encode(values.tobytes(), dtype="bf16", keep_shape=True)
    assert np.array_equal(kvmnn.decode(raw), values.view(np.uint16).reshape(-1))
    out = np.empty(60, np.float16)
    assert kvmnn.decode(kvmnn.encode(values, keep_shape=True), out=out) is out
