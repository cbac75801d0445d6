"""Frames one after another: found without a manifest, decoded, refused with the place of what is wrong."""

import numpy as np
import pytest
from codec_samples import kv_like

import kvmnn
from kvmnn import FrameError, LimitError
from kvmnn.frames import api

HALVES = [np.frombuffer(kv_like(words, seed=words), np.float16) for words in (1, 300, 65536, 7, 131072)]
SINGLES = [np.frombuffer(kv_like(2 * words, seed=words), np.float32) for words in (5, 1, 4000)]


@pytest.mark.parametrize("arrays", [HALVES, SINGLES, HALVES[:1], SINGLES[:1]], ids=["fp16", "fp32", "one", "one fp32"])
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda data: np.frombuffer(data, np.uint8)])
def test_decode_all_every_frame_round_trips(arrays, kind):
    back = kvmnn.decode_all(kind(b"".join(kvmnn.encode_many(arrays))))
    assert [words.dtype for words in back] == [words.dtype for words in arrays]
    assert [words.tobytes() for words in back] == [words.tobytes() for words in arrays]


def test_decode_all_passes_options():
    data = b"".join(kvmnn.encode_many(HALVES, codecs=("rle",)))
    assert {words.dtype for words in kvmnn.decode_all(data, dtype="bf16", codecs=iter(["rle"]))} == {
        np.dtype(np.uint16)
    }
    total = sum(words.nbytes for words in HALVES)
    assert len(kvmnn.decode_all(data, max_bytes=total, threads=1)) == len(HALVES)
    with pytest.raises(LimitError, match=f"5 frames hold {total} bytes: max_bytes is {total - 1}"):
        kvmnn.decode_all(data, max_bytes=total - 1)
    with pytest.raises(FrameError, match=r"after 1 whole fp16 frame, at offset 28: .*not available"):
        kvmnn.decode_all(b"".join(kvmnn.encode_many(HALVES)), dtype="fp16", codecs=("rle",))
    with pytest.raises(FrameError):
        kvmnn.decode_all(data, dtype="fp32")


def test_decode_all_error_names_the_offset():
    frames = kvmnn.encode_many(HALVES)
    data, end = b"".join(frames), len(frames[0]) + len(frames[1]) + len(frames[2])
    with pytest.raises(FrameError, match=rf"after 3 whole fp16 frames, at offset {end}: .*truncated"):
        kvmnn.decode_all(data[: end + 10])
    with pytest.raises(
        FrameError, match=rf"after 5 whole fp16 frames, at offset {len(data)}: frame: 1 bytes: expected"
    ):
        kvmnn.decode_all(data + b"\0")
    with pytest.raises(FrameError, match=r"after 4 whole fp16 frames, at offset \d+: "):  # half of it is one
        kvmnn.decode_all(b"".join(frames[:3]) + kvmnn.encode(SINGLES[0]))
    for one in (b"", b"abc", frames[1][:-1], kvmnn.encode(SINGLES[2])[:-1], b"\xff" * 40, bytes(40)):
        with pytest.raises(FrameError) as found:
            kvmnn.decode_all(one)
        with pytest.raises(FrameError) as expected:
            kvmnn.decode(one)
        assert str(found.value) == str(expected.value)


def test_decode_all_above_max_frames_is_refused(monkeypatch):
    monkeypatch.setattr(api, "MAX_FRAMES", 3)
    frames = kvmnn.encode_many(HALVES)
    assert len(kvmnn.decode_all(b"".join(frames[:3]))) == 3
    with pytest.raises(LimitError, match="more than 3 frames"):
        kvmnn.decode_all(b"".join(frames))
