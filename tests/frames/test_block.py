"""The engine's unit: K and V together, kept only if they gain together."""

from dataclasses import replace

import codec_model
import numpy as np
import pytest
from codec_samples import EXAMPLES, STRIDE, kv_like, word_bytes
from hypothesis import given
from hypothesis import strategies as st

import kvmnn
from kvmnn import KvmnnError, encode_block

RNG = np.random.default_rng(11)
GOOD = np.frombuffer(kv_like(2048), np.float16).reshape(2, 16, 64)
NOISE = RNG.integers(0, 1 << 16, 200).astype(np.uint16).view(np.float16)


def test_encode_block_both_gain_is_stored() -> None:
    values = GOOD[:, :10]
    block = encode_block(GOOD, values)
    key_frame, value_frame = kvmnn.encode(GOOD), kvmnn.encode(values)
    assert block.is_stored and not block.fallback and block.dtype == "fp16"
    assert (block.key_frame, block.value_frame) == (key_frame, value_frame)
    assert block.raw_bytes == GOOD.nbytes + values.nbytes
    assert block.compressed_bytes == block.attempted_bytes == len(key_frame) + len(value_frame)
    assert block.raw_hash == codec_model.fnv1a64(GOOD.tobytes() + values.tobytes())
    assert block.blob_hash == codec_model.fnv1a64(key_frame + value_frame)
    assert block.ratio == block.attempted_ratio == float(np.float32(block.raw_bytes / block.compressed_bytes)) > 1
    keys_back, values_back = block.decode()
    assert keys_back.tobytes() == GOOD.tobytes() and values_back.tobytes() == values.tobytes()


def test_block_ratio_is_a_float32() -> None:
    block = encode_block(GOOD, GOOD)
    assert block.ratio != block.raw_bytes / block.compressed_bytes
    assert float(np.float32(block.ratio)) == block.ratio


def test_block_repr_is_one_line() -> None:
    block = encode_block(GOOD, NOISE)
    assert repr(block).startswith(f"<Block fp16, {block.raw_bytes:,} -> {block.compressed_bytes:,} bytes, ratio ")
    assert repr(encode_block(NOISE, NOISE)) == "<Block fp16, 800 -> 800 bytes, ratio 1.0000, kept raw>"
    odd = encode_block(b"odd", b"odd", dtype="fp16")
    assert repr(odd) == "<Block fp16, 6 -> 6 bytes, ratio 1.0000, kept raw, fallback>"
    assert all(len(repr(each)) < 120 and "\n" not in repr(each) for each in (block, odd))


def test_encode_block_one_may_grow_if_sum_gains() -> None:
    block = encode_block(GOOD, NOISE)
    assert block.is_stored and len(block.value_frame) > NOISE.nbytes
    assert block.decode()[1].tobytes() == NOISE.tobytes()


def test_encode_block_without_gain_is_not_stored() -> None:
    block = encode_block(NOISE, NOISE)
    attempted = 2 * len(kvmnn.encode(NOISE))
    assert not block.is_stored and not block.fallback
    assert block.attempted_bytes == attempted > block.raw_bytes == block.compressed_bytes == 800
    assert block.ratio == 1.0 and block.attempted_ratio == float(np.float32(800 / attempted)) < 1
    assert block.blob_hash == 0 and block.raw_hash == codec_model.fnv1a64(NOISE.tobytes() * 2)
    with pytest.raises(KvmnnError, match="keeps no frames"):
        block.decode()


@pytest.mark.parametrize("name", ["key_frame", "value_frame"])
def test_block_without_one_frame_is_refused(name: str) -> None:
    with pytest.raises(KvmnnError, match="keeps no frames"):
        replace(encode_block(GOOD, GOOD), **{name: None}).decode()


def test_encode_block_equal_size_is_no_gain() -> None:
    """24 bytes of headers against runs: k words of one value with a few of noise come out even somewhere."""
    even = []
    for constant in range(4, 60):
        for noise in range(30):
            raw = bytes(2 * constant) + NOISE.tobytes()[: 2 * noise]
            frame = codec_model.encode(raw, 2, zstd=False)
            if len(frame) == len(raw):
                even.append(raw)
    assert even
    for raw in even[:20]:
        block = encode_block(raw, raw, dtype="fp16", codecs=("rle",))
        assert block.attempted_bytes == block.raw_bytes and not block.is_stored and not block.fallback
        assert block.ratio == block.attempted_ratio == 1.0


@pytest.mark.parametrize(
    ("keys", "values", "dtype"),
    [
        (b"", b"", "fp16"),
        (np.zeros(0, np.float16), GOOD, None),
        (GOOD, np.zeros((0, 3), np.float16), None),
        (b"abc", b"abcd", "fp16"),
        (b"abcd", b"abc", "fp16"),
        (bytes(6), bytes(8), "fp32"),
        (np.zeros(5, np.float64), np.zeros(5, np.float64), None),
        (np.zeros(5, np.int8), np.zeros(5, np.int8), None),
        (np.zeros(5, np.float64), np.zeros(5, np.float64), "fp16"),
    ],
)
def test_encode_block_unencodable_input_falls_back(keys: object, values: object, dtype: str | None) -> None:
    block = encode_block(keys, values, dtype=dtype)
    raw = b"".join(part.tobytes() if isinstance(part, np.ndarray) else part for part in (keys, values))
    assert block.fallback and not block.is_stored
    assert block.raw_bytes == block.compressed_bytes == block.attempted_bytes == len(raw)
    assert block.ratio == block.attempted_ratio == 1.0
    assert block.blob_hash == 0 and block.raw_hash == codec_model.fnv1a64(raw)


def test_encode_block_raw_hash_is_optional() -> None:
    block = encode_block(GOOD, GOOD, strict_roundtrip_check=False)
    assert block.raw_hash == 0 and block.blob_hash != 0


def test_encode_block_big_endian_equals_little_endian() -> None:
    swapped = GOOD.astype(">f2")
    assert encode_block(swapped, swapped) == encode_block(GOOD, GOOD)


def test_encode_block_predictors_for_keys_and_values() -> None:
    block = encode_block(GOOD, GOOD, predictors_k="delta_seq", predictors_v=("xor_seq",))
    assert block.key_frame == kvmnn.encode(GOOD, predictors="delta_seq")
    assert block.value_frame == kvmnn.encode(GOOD, predictors="xor_seq")


@pytest.mark.parametrize(
    ("keys", "values", "dtype"),
    [
        (GOOD, GOOD.astype(np.float32), None),
        (GOOD, GOOD.view(np.uint16), None),
        (GOOD, np.zeros(4, np.float64), None),
    ],
)
def test_encode_block_different_dtypes_are_refused(keys: object, values: object, dtype: str | None) -> None:
    with pytest.raises(KvmnnError, match=r"keys are .*values are"):
        encode_block(keys, values, dtype=dtype)


@pytest.mark.parametrize(("keys", "values"), [("text", GOOD), (GOOD, None), (b"ab", b"ab"), (GOOD, b"abcd")])
def test_encode_block_wrong_types_are_refused(keys: object, values: object) -> None:
    with pytest.raises(TypeError):
        encode_block(keys, values)


def test_encode_block_invalid_options_are_refused() -> None:
    with pytest.raises(KvmnnError, match="effort"):
        encode_block(GOOD, GOOD, effort="none")
    with pytest.raises(KvmnnError, match="unknown dtype"):
        encode_block(GOOD, GOOD, dtype="fp64")


@EXAMPLES
@given(st.data())
def test_encode_block_any_input_equals_the_model(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(STRIDE)))
    keys, values = (data.draw(word_bytes(STRIDE[dtype])) for _ in range(2))
    zstd = data.draw(st.booleans())
    block = encode_block(keys, values, dtype=dtype, codecs=("rle", "zstd") if zstd else ("rle",))
    frames = [codec_model.encode(part, STRIDE[dtype], zstd=zstd) for part in (keys, values)]
    attempted, raw = sum(map(len, frames)), len(keys) + len(values)
    assert (block.raw_bytes, block.attempted_bytes, block.fallback) == (raw, attempted, False)
    assert block.is_stored == (attempted < raw)
    assert block.compressed_bytes == min(attempted, raw)
    if block.is_stored:
        assert [part.tobytes() for part in block.decode()] == [keys, values]
