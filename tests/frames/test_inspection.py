"""inspect accounts for every byte."""

import json
import math

import codec_model
import numpy as np
import pytest
from codec_samples import EXAMPLES, STRIDE, kv_like, structured, word_bytes
from hypothesis import given
from hypothesis import strategies as st

import kvmnn
from kvmnn import FrameError, KvmnnError


def order0(data: bytes) -> float:
    counts = [data.count(value) for value in set(data)]
    return sum(-c / len(data) * math.log2(c / len(data)) for c in counts)


def check(frame: bytes, dtype: str, raw: bytes) -> None:
    stride = STRIDE[dtype]
    info = kvmnn.inspect(frame, dtype=dtype)
    assert (info.dtype, info.container) == (dtype, "fp16" if stride == 2 else "fp32")
    assert info.words == len(raw) // stride == int.from_bytes(frame[:4], "little")
    assert (info.raw_bytes, info.frame_bytes) == (len(raw), len(frame))
    assert info.header_bytes == 4 + 10 * stride
    assert info.ratio == len(raw) / len(frame)
    names = ["lo", "hi"] if stride == 2 else ["lane0", "lane1", "lane2", "lane3"]
    at = 4
    for stream, name, lane in zip(info.streams, names, codec_model.split(raw, stride), strict=True):
        assert stream.name == name
        assert (stream.offset, stream.payload_offset) == (at, at + 10)
        assert frame[at] == ("raw", "delta_seq", "xor_seq").index(stream.predictor)
        assert frame[at + 1] == ("rle", "zstd").index(stream.codec)
        assert frame[at + 2 : at + 6] == stream.raw_bytes.to_bytes(4, "little")
        assert frame[at + 6 : at + 10] == stream.payload_bytes.to_bytes(4, "little")
        assert stream.bits_per_byte == pytest.approx(8 * stream.payload_bytes / len(lane))
        assert stream.entropy == pytest.approx(order0(lane), abs=1e-9)
        at = stream.payload_offset + stream.payload_bytes
    assert at == len(frame)
    entropies = [s.entropy for s in info.streams]
    assert info.entropy_ratio == (pytest.approx(8 * stride / sum(entropies)) if sum(entropies) else math.inf)


@pytest.mark.parametrize("stride", [2, 4])
@pytest.mark.parametrize("words", [1, 7, 500])
def test_inspect_structured_inputs_account_for_every_byte(words: int, stride: int) -> None:
    dtype = "fp16" if stride == 2 else "fp32"
    for _, raw in structured(words, stride):
        check(kvmnn.encode(raw, dtype=dtype), dtype, raw)


@EXAMPLES
@given(st.data())
def test_inspect_any_input_accounts_for_every_byte(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from(sorted(STRIDE)))
    raw = data.draw(word_bytes(STRIDE[dtype]))
    check(kvmnn.encode(raw, dtype=dtype, effort="fast"), dtype, raw)


def test_inspect_container_is_detected_or_checked() -> None:
    two, four = kvmnn.encode(kv_like(50), dtype="fp16"), kvmnn.encode(kv_like(50, "fp32"), dtype="fp32")
    assert kvmnn.inspect(two).dtype == "fp16" and kvmnn.inspect(four).dtype == "fp32"
    assert kvmnn.inspect(two, dtype="bf16").dtype == "bf16"
    with pytest.raises(FrameError, match="2 streams"):
        kvmnn.inspect(two, dtype="fp32")


def test_inspect_json_and_text() -> None:
    for dtype in ("fp16", "fp32"):
        info = kvmnn.inspect(kvmnn.encode(kv_like(500, dtype), dtype=dtype))
        record = json.loads(json.dumps(info.to_dict(), allow_nan=False))
        total = record["header_bytes"] + sum(s["payload_bytes"] for s in record["streams"])
        assert total == record["frame_bytes"] == info.frame_bytes
        assert record["streams"][1]["predictor"] == info.streams[1].predictor
        text = str(info)
        for stream in info.streams:
            assert stream.name in text and stream.predictor in text and f"{stream.payload_bytes:,}" in text
        assert text.splitlines()[-1].split() == [f"{info.frame_bytes:,}", "end"]


def test_inspect_zero_entropy_is_null_in_json() -> None:
    info = kvmnn.inspect(kvmnn.encode(bytes(100), dtype="fp16"))
    assert info.entropy_ratio == math.inf
    assert info.to_dict()["entropy_ratio"] is None
    assert json.dumps(info.to_dict(), allow_nan=False)


def test_inspect_headers_only_skips_payloads() -> None:
    raw = kv_like(900)
    frame = bytearray(kvmnn.encode(raw, dtype="fp16"))
    full, quick = kvmnn.inspect(frame), kvmnn.inspect(frame, entropy=False)
    assert quick.entropy_ratio is None and quick.to_dict()["entropy_ratio"] is None
    assert [s.entropy for s in quick.streams] == [None, None]
    assert [s.payload_bytes for s in quick.streams] == [s.payload_bytes for s in full.streams]
    assert "order-0" in str(full) and "order-0" not in str(quick)
    frame[-3:] = b"\xff\xff\xff"
    frame[full.streams[0].payload_offset] ^= 255
    assert kvmnn.inspect(frame, entropy=False) == quick
    with pytest.raises(FrameError):
        kvmnn.inspect(frame)


def test_inspect_refuses_what_decode_refuses() -> None:
    frame = kvmnn.encode(kv_like(40), dtype="fp16")
    for bad in (b"", frame[:-1], frame + b"\0", bytes(14), frame[:4], frame[:20]):
        with pytest.raises(FrameError):
            kvmnn.inspect(bad)
    with pytest.raises(FrameError, match="not available"):
        kvmnn.inspect(kvmnn.encode(kv_like(4000), dtype="fp16"), codecs=("rle",))
    with pytest.raises(TypeError):
        kvmnn.inspect(None)
    with pytest.raises(KvmnnError):
        kvmnn.inspect(frame, codecs=())


def test_compute_order0_entropy_of_known_inputs() -> None:
    from kvmnn.frames import _streams

    assert _streams.compute_order0_entropy(b"") == 0
    assert _streams.compute_order0_entropy(bytes(1000)) == 0
    assert _streams.compute_order0_entropy(bytes(range(256)) * 3) == pytest.approx(8)
    data = np.random.default_rng(1).integers(0, 7, 10_001, np.uint8).tobytes()
    assert _streams.compute_order0_entropy(data) == pytest.approx(order0(data))
