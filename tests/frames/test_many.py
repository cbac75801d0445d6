"""encode_many and decode_many: the same as one by one, and errors that name their item."""

import numpy as np
import pytest
from codec_samples import kv_like

import kvmnn
from kvmnn import FrameError, KvmnnError, LimitError

ARRAYS = [np.frombuffer(kv_like(words, seed=words), np.float16) for words in (1, 5, 1000, 2, 40_000, 333, 64)]
LARGE = [np.frombuffer(kv_like(1 << 19, seed=words), np.float16) for words in (1, 2)]


@pytest.mark.parametrize("threads", [None, 1, 2, 5, 16])
@pytest.mark.parametrize("arrays", [ARRAYS, LARGE, ARRAYS[:1], []], ids=["many", "large", "one", "none"])
def test_encode_many_equals_encode_of_each(arrays: list[np.ndarray], threads: int | None) -> None:
    frames = kvmnn.encode_many(arrays, threads=threads)
    assert frames == [kvmnn.encode(a, threads=1) for a in arrays]
    back = kvmnn.decode_many(frames, threads=threads)
    assert [b.tobytes() for b in back] == [a.tobytes() for a in arrays]
    assert all(b.dtype == np.float16 and b.ndim == 1 for b in back)


@pytest.mark.parametrize("effort", ["exact", "balanced", "fast", "max"])
def test_encode_many_options_reach_every_item(effort: str) -> None:
    options = {"predictors": ["delta_seq"], "hi_predictors": "raw,xor_seq", "codecs": ["rle"], "effort": effort}
    frames = kvmnn.encode_many(ARRAYS, **options)
    assert frames == [kvmnn.encode(a, **options) for a in ARRAYS]
    back = kvmnn.decode_many(frames, codecs=["rle"], dtype="bf16")
    assert [b.dtype for b in back] == [np.uint16] * len(ARRAYS)
    with pytest.raises(FrameError, match=r"item 0: .*not available"):
        kvmnn.decode_many(kvmnn.encode_many(ARRAYS[4:]), codecs=("rle",))


def test_encode_many_generators_are_consumed_once() -> None:
    frames = kvmnn.encode_many((a for a in ARRAYS), predictors=iter(["raw", "xor_seq"]), codecs=iter(["rle", "zstd"]))
    assert frames == [kvmnn.encode(a, predictors=("raw", "xor_seq")) for a in ARRAYS]
    back = kvmnn.decode_many(iter(frames), codecs=iter(["rle", "zstd"]))
    assert [b.tobytes() for b in back] == [a.tobytes() for a in ARRAYS]


def test_encode_many_arrays_of_different_dtypes() -> None:
    arrays = [ARRAYS[2], np.arange(50, dtype=np.float32), np.arange(7, dtype=np.uint16)]
    back = kvmnn.decode_many(kvmnn.encode_many(arrays))
    assert [b.dtype.str for b in back] == ["<f2", "<f4", "<u2"]
    assert [b.tobytes() for b in back] == [a.tobytes() for a in arrays]


def test_decode_many_fills_given_outputs() -> None:
    frames = kvmnn.encode_many(ARRAYS)
    outs = [np.zeros(a.shape, np.float16) for a in ARRAYS]
    back = kvmnn.decode_many(frames, out=outs)
    assert all(b is out for b, out in zip(back, outs, strict=True))
    assert [b.tobytes() for b in outs] == [a.tobytes() for a in ARRAYS]
    with pytest.raises(KvmnnError, match="out has 1 buffers for 7 frames"):
        kvmnn.decode_many(frames, out=outs[:1])
    outs[3] = np.zeros(3, np.float16)
    with pytest.raises(KvmnnError, match="item 3: out has 6 bytes"):
        kvmnn.decode_many(frames, out=outs)


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_encode_many_error_names_the_item(threads: int) -> None:
    for bad, error, message in (
        (np.zeros(0, np.float16), KvmnnError, "item 2: nothing to encode"),
        ("text", TypeError, "item 2: values: expected"),
        (b"raw", TypeError, "item 2: bytes: raw bytes need a dtype"),
    ):
        with pytest.raises(error, match=message):
            kvmnn.encode_many([ARRAYS[0], ARRAYS[1], bad, ARRAYS[2]], threads=threads)


@pytest.mark.parametrize("threads", [1, 2, 16])
def test_decode_many_error_names_the_item(threads: int) -> None:
    frames = kvmnn.encode_many(ARRAYS)
    for bad, error, message in (
        (frames[2][:-1], FrameError, "item 4: "),
        (b"", FrameError, "item 4: .*at least 4"),
        (None, TypeError, "item 4: frame: expected"),
    ):
        with pytest.raises(error, match=message):
            kvmnn.decode_many([*frames[:4], bad, *frames[5:]], threads=threads)
    with pytest.raises(LimitError, match="item 4: frame holds 80000 bytes: max_bytes is 2000"):
        kvmnn.decode_many(frames, max_bytes=2000, threads=threads)


def test_decode_many_names_first_bad_item() -> None:
    frames = kvmnn.encode_many(ARRAYS)
    with pytest.raises(FrameError, match="item 1: "):
        kvmnn.decode_many([frames[0], b"abc", b"", frames[3]], threads=1)


@pytest.mark.parametrize("options", [{"threads": 0}, {"effort": "none"}, {"codecs": ()}, {"dtype": "fp64"}])
def test_encode_many_invalid_options_are_refused(options: dict) -> None:
    with pytest.raises(KvmnnError):
        kvmnn.encode_many(ARRAYS, **options)
