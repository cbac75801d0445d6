"""The codec of numcodecs: its own checks, types, byte orders, and buffers that are none."""

from __future__ import annotations

from itertools import product

import ml_dtypes
import numcodecs
import numpy as np
import pytest
from numcodecs.abc import Codec

import kvmnn
from kvmnn.errors import FrameError, KvmnnError, LimitError
from kvmnn.integrations.chunk_codec import CODEC_NAME
from kvmnn.integrations.numcodecs import FrameCompressor

numcodecs.register_codec(FrameCompressor)
RNG = np.random.default_rng(5)
TYPES = {"fp16": np.float16, "bf16": ml_dtypes.bfloat16, "fp32": np.float32}


def arrays(dtype: type) -> list[np.ndarray]:
    """Shapes and orders as numcodecs tries them."""
    values = RNG.normal(size=1000).astype(dtype)
    halves = values.reshape(100, 10)
    return [values, halves, np.asfortranarray(halves), values.reshape(10, 10, 10), np.zeros(7, dtype)]


@pytest.mark.parametrize(("dtype", "effort"), list(product(TYPES, ("exact", "fast"))))
def test_frame_compressor_passes_checks_of_numcodecs(dtype: str, effort: str) -> None:
    common = pytest.importorskip("numcodecs.tests.common", reason="this numcodecs has no tests in it")
    codec = FrameCompressor(dtype=dtype, effort=effort)
    common.check_config(codec)
    for array in arrays(TYPES[dtype]):
        common.check_encode_decode(array.view(np.uint16) if dtype == "bf16" else array, codec)


@pytest.mark.parametrize("dtype", TYPES)
def test_frame_compressor_any_buffer_round_trips(dtype: str) -> None:
    """What `check_encode_decode` of numcodecs does, where it is not installed."""
    codec = numcodecs.get_codec(FrameCompressor(dtype=dtype).get_config())
    assert isinstance(codec, Codec)
    for array in arrays(TYPES[dtype]):
        whole = array.tobytes(order="A")
        for buffer in (array, whole, bytearray(whole), memoryview(whole), np.frombuffer(whole, np.int8)):
            frame = codec.encode(buffer)
            for data in (frame, bytearray(frame), memoryview(frame), np.frombuffer(frame, np.uint8)):
                assert bytes(codec.decode(data)) == whole
            out = np.empty_like(array)
            assert codec.decode(frame, out=out) is out
            assert out.tobytes(order="A") == whole
            room = bytearray(len(whole))
            codec.decode(frame, out=room)
            assert room == whole


def test_frame_compressor_frame_equals_encode() -> None:
    words = RNG.normal(size=(4, 9)).astype(np.float16)
    assert FrameCompressor().encode(words) == kvmnn.encode(words)
    assert FrameCompressor(effort="fast").encode(words) == kvmnn.encode(words, effort="fast")


def test_frame_compressor_infers_dtype_of_array() -> None:
    for dtype in (np.float16, np.float32, np.uint16, ml_dtypes.bfloat16):
        array = RNG.normal(size=50).astype(dtype)
        assert bytes(FrameCompressor().decode(FrameCompressor().encode(array))) == array.tobytes()
    for array in (np.zeros(3), np.zeros(3, np.int32), np.zeros(3, np.int16), np.zeros(3, bool)):
        with pytest.raises(KvmnnError, match=f"{array.dtype} is none that frames hold: expected float16"):
            FrameCompressor().encode(array)
    for buffer in (b"1234", np.zeros(4, np.uint8)):
        with pytest.raises(KvmnnError, match="needs one: dtype='fp16'"):
            FrameCompressor().encode(buffer)


def test_frame_compressor_big_endian_round_trips() -> None:
    words = RNG.normal(size=50).astype(">f4")
    codec = FrameCompressor(endian="big")
    assert codec.encode(words) == kvmnn.encode(words.astype("<f4"))
    assert bytes(codec.decode(codec.encode(words))) == words.tobytes()
    with pytest.raises(KvmnnError, match="big-endian: say endian='big'"):
        FrameCompressor().encode(words)
    with pytest.raises(KvmnnError, match="little-endian: say endian='little'"):
        codec.encode(words.astype("<f4"))


def test_frame_compressor_unknown_options_are_refused() -> None:
    for options in ({"dtype": "fp8"}, {"effort": "some"}, {"effort": 1}, {"endian": "middle"}):
        with pytest.raises(KvmnnError, match=r"fp8|some|1|middle"):
            FrameCompressor(**options)


def test_frame_compressor_damaged_frame_is_refused() -> None:
    frame = FrameCompressor().encode(RNG.normal(size=64).astype(np.float16))
    for data in (b"", frame[:-1], frame + b"x", frame[:20], bytes(100)):
        with pytest.raises(FrameError, match=f"codec {CODEC_NAME}: not the frame of a chunk"):
            FrameCompressor().decode(data)
    with pytest.raises(FrameError, match="128 bytes"):
        FrameCompressor().decode(frame, out=bytearray(126))
    with pytest.raises(FrameError, match="128 bytes: the chunk has 130"):
        FrameCompressor().decode(frame, out=bytearray(130))
    with pytest.raises(KvmnnError, match="cannot be written to"):
        FrameCompressor().decode(frame, out=bytes(128))
    with pytest.raises(KvmnnError, match="not a whole number of fp32 words"):
        FrameCompressor(dtype="fp32").encode(b"12345")
    with pytest.raises(KvmnnError, match="empty"):
        FrameCompressor().encode(np.zeros(0, np.float16))
    with pytest.raises(KvmnnError, match="has no bytes of its own"):
        FrameCompressor(dtype="fp16").encode(np.array([None]))


def test_frame_compressor_chunk_above_limit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    frame = FrameCompressor().encode(np.zeros(64, np.float16))
    monkeypatch.setattr("kvmnn.integrations.chunk_codec.MAX_CHUNK_BYTES", 100)
    with pytest.raises(LimitError, match="max_bytes is 100"):
        FrameCompressor().decode(frame)
    with pytest.raises(LimitError, match="expected at most 100"):
        FrameCompressor().encode(np.zeros(64, np.float16))
