"""What encode takes and decode gives: types, shapes, orders, buffers, limits and refusals."""

import array
import mmap
import pickle
from pathlib import Path

import numpy as np
import pytest
from codec_samples import NUMPY, kv_like

import kvmnn
from kvmnn import FrameError, KvmnnError, LimitError
from kvmnn.frames.buffers import integrity_checksum
from kvmnn.frames.decoder import FrameDecoder

RNG = np.random.default_rng(3)
FP16 = RNG.normal(size=(2, 6, 8)).astype(np.float16)
FP32 = RNG.normal(size=(3, 5)).astype(np.float32)
BF16 = RNG.integers(0, 1 << 16, (4, 3, 2, 1)).astype(np.uint16)
EXAMPLE_OF = {"fp16": FP16, "fp32": FP32, "bf16": BF16}


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "bf16"])
def test_encode_infers_dtype_of_array(dtype: str) -> None:
    values = EXAMPLE_OF[dtype]
    frame = kvmnn.encode(values)
    assert isinstance(frame, bytes)
    assert frame == kvmnn.encode(values, dtype=dtype) == kvmnn.encode(values.tobytes(), dtype=dtype)
    back = kvmnn.decode(frame, dtype=dtype)
    assert back.dtype == NUMPY[dtype] and back.ndim == 1 and back.flags.writeable
    assert back.tobytes() == values.tobytes()


def test_encode_bf16_and_fp16_share_a_container() -> None:
    frame = kvmnn.encode(BF16)
    assert frame == kvmnn.encode(BF16.view(np.float16)) == kvmnn.encode(BF16, dtype="fp16")
    assert kvmnn.decode(bytes(frame)).dtype == np.float16
    assert kvmnn.decode(frame, dtype="fp16").dtype == np.float16
    assert kvmnn.decode(bytes(frame), dtype="bf16").dtype == np.uint16


@pytest.mark.parametrize("size", [1, 96, 40_000, 5 << 20])
@pytest.mark.parametrize("effort", ["exact", "balanced", "fast"])
def test_decode_frame_of_bf16_array_is_uint16_without_dtype(size: int, effort: str) -> None:
    words = np.resize(BF16, size)
    frame = kvmnn.encode(words, effort=effort)
    for other in (frame, pickle.loads(pickle.dumps(frame)), kvmnn.encode_many([words], effort=effort)[0]):
        back = kvmnn.decode(other)
        assert back.dtype == np.uint16 and (back == words).all()
    assert kvmnn.decode_many([frame, kvmnn.encode(FP16)])[0].dtype == np.uint16
    assert kvmnn.inspect(frame).dtype == "bf16"
    block = kvmnn.encode_block(words, words, effort=effort)
    assert block.key_frame is None or kvmnn.decode(block.key_frame).dtype == np.uint16
    assert type(kvmnn.encode(words, dtype="fp16")) is type(kvmnn.encode(FP16)) is bytes


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [("<i2", "fp16"), ("<u2", "fp16"), ("V2", "fp16"), ("<i2", "bf16"), ("<f2", "bf16"), ("<i4", "fp32"),
     ("<u4", "fp32"), ("V4", "fp32"), ([("lo", "u1"), ("hi", "u1")], "fp16"), ("(2,)u1", "fp16")],
)  # fmt: skip
def test_encode_any_elements_of_right_size(kind: object, dtype: str) -> None:
    raw = kv_like(40, dtype)
    if kind == "(2,)u1":
        values = np.frombuffer(raw, np.uint8).reshape(-1, 2)
    else:
        values = np.frombuffer(raw, np.dtype(kind))
    assert kvmnn.encode(values, dtype=dtype) == kvmnn.encode(raw, dtype=dtype)


def test_encode_nan_payloads_round_trip() -> None:
    words = np.array([0x7C01, 0xFE00, 0x8000, 0x0001, 0xFFFF, 0x7C00], np.uint16)  # NaNs, -0, a subnormal, infinity
    assert (kvmnn.decode(kvmnn.encode(words.view(np.float16))).view(np.uint16) == words).all()


@pytest.mark.parametrize("values", [FP16, FP32, BF16])
def test_encode_any_memory_layout(values: np.ndarray) -> None:
    expected = kvmnn.encode(np.ascontiguousarray(values))
    wide = np.zeros((*values.shape[:-1], values.shape[-1] * 2), values.dtype)
    wide[..., ::2] = values
    strided = wide[..., ::2]
    reverse = np.ascontiguousarray(values[::-1])[::-1]
    read_only = values.copy()
    read_only.flags.writeable = False
    swapped = values.astype(values.dtype.newbyteorder(">"))
    shifted = np.frombuffer(b"\0" + values.tobytes(), values.dtype, offset=1).reshape(values.shape)
    assert not shifted.flags.aligned
    for same in (strided, reverse, read_only, np.asfortranarray(values), swapped, shifted, np.asfortranarray(swapped)):
        before = same.tobytes()
        assert kvmnn.encode(same) == expected
        assert same.tobytes() == before
    assert kvmnn.encode(values.T) == kvmnn.encode(np.ascontiguousarray(values.T))


def test_encode_scalar_and_single_element() -> None:
    for values in (np.array(1.5, np.float16), np.array([[[1.5]]], np.float16), np.float16(1.5)):
        frame = kvmnn.encode(values, dtype="fp16")
        assert kvmnn.decode(frame).tolist() == [1.5]
    assert len(kvmnn.encode(np.float32(1.5), dtype="fp32")) == 4 + 4 * 12


def test_encode_bytes_like_objects(tmp_path: Path) -> None:
    raw = FP16.tobytes()
    expected = kvmnn.encode(FP16)
    file = tmp_path / "raw"
    file.write_bytes(raw)
    with file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert kvmnn.encode(mapped, dtype="fp16") == expected
    frame_file = tmp_path / "frame"
    frame_file.write_bytes(expected)
    with frame_file.open("rb") as stream, mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert kvmnn.decode(mapped).tobytes() == raw
    for same in (
        bytearray(raw),
        memoryview(raw),
        memoryview(FP16),
        memoryview(b"".join(bytes([b, 0]) for b in raw))[::2],
        array.array("B", raw),
        array.array("H", np.frombuffer(raw, "<u2").tolist()),
        np.frombuffer(raw, np.uint8),
        np.frombuffer(raw, np.uint8).reshape(2, -1),
        np.memmap(file, np.float16, "r"),
    ):
        assert kvmnn.encode(same, dtype="fp16") == expected
    for same in (bytearray(expected), memoryview(expected), array.array("B", expected), np.frombuffer(expected, "u1")):
        assert kvmnn.decode(same).tobytes() == raw


@pytest.mark.parametrize("values", [b"ab", bytearray(4), memoryview(bytes(4)), np.zeros(4, np.uint8)])
def test_encode_raw_bytes_without_dtype_are_refused(values: object) -> None:
    with pytest.raises(TypeError, match="raw bytes need a dtype"):
        kvmnn.encode(values)


@pytest.mark.parametrize(
    "values",
    [np.zeros(4, t) for t in ("f8", "i2", "i4", "u4", "i8", "V4", "c8", "bool", "i1", "S2", "M8[s]")]
    + [np.array(["a"])],
)
def test_encode_ambiguous_array_type_is_refused(values: np.ndarray) -> None:
    with pytest.raises(TypeError, match="cannot infer"):
        kvmnn.encode(values)


@pytest.mark.parametrize(
    ("values", "dtype", "message"),
    [
        (np.zeros(4, "f8"), "fp16", "8-byte words"),
        (np.zeros(4, "f4"), "fp16", "4-byte words"),
        (np.zeros(4, "f2"), "fp32", "2-byte words"),
        (np.zeros(4, "i1"), "fp16", "1-byte words"),
        (np.zeros(4, "S2"), "fp16", "kind f, i, u or V"),
        (np.array(["a"]), "fp32", "kind f, i, u or V"),
        (np.zeros(4, bool), "fp16", "kind f, i, u or V"),
        (np.zeros(4, object), "fp16", "kind f, i, u or V"),
        ([1.0, 2.0], "fp16", "bytes-like"),
        ("text", "fp16", "bytes-like"),
        (None, "fp16", "bytes-like"),
        (1.5, "fp16", "bytes-like"),
        (np.zeros(4, "f2"), 16, "dtype must be a string"),
        (np.zeros(4, "f2"), np.float16, "dtype must be a string"),
    ],
)
def test_encode_wrong_types_are_refused(values: object, dtype: object, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        kvmnn.encode(values, dtype=dtype)


@pytest.mark.parametrize(
    ("values", "options", "message"),
    [
        (b"", {"dtype": "fp16"}, "nothing to encode"),
        (b"", {"dtype": "fp32"}, "nothing to encode"),
        (np.zeros((0, 4), np.float16), {}, "nothing to encode"),
        (b"abc", {"dtype": "fp16"}, "3 bytes are not a whole number of 2-byte words"),
        (b"abcdef", {"dtype": "fp32"}, "6 bytes are not a whole number of 4-byte words"),
        (FP16, {"dtype": "fp8"}, "unknown dtype 'fp8'"),
        (FP16, {"effort": "best"}, "unknown effort 'best'"),
        (FP16, {"codecs": ()}, "no codec allowed"),
        (FP16, {"codecs": ("lz4",)}, "unknown codec 'lz4'"),
        (FP16, {"threads": 0}, "threads is 0"),
        (FP16, {"threads": -2}, "threads is -2"),
    ],
)
@pytest.mark.parametrize("effort", ["exact", "balanced", "fast", "max"])
def test_encode_invalid_values_and_options_are_refused(
    values: object, options: dict, message: str, effort: str
) -> None:
    with pytest.raises(KvmnnError, match=message):
        kvmnn.encode(values, **{"effort": effort, **options})


@pytest.mark.parametrize("options", [{"threads": 1.0}, {"threads": True}, {"threads": "2"}, {"codecs": "rle"}])
def test_encode_options_of_wrong_type_are_refused(options: dict) -> None:
    with pytest.raises(TypeError):
        kvmnn.encode(FP16, **options)
    with pytest.raises(TypeError):
        kvmnn.decode(kvmnn.encode(FP16), **options)


def test_encode_large_odd_size_is_refused_on_threads() -> None:
    with pytest.raises(KvmnnError, match="whole number"):
        kvmnn.encode(bytes((1 << 20) + 1), dtype="fp16", threads=2)


# -- decode -----------------------------------------------------------------------------------------------------------


def test_decode_checks_the_dtype() -> None:
    two, four = kvmnn.encode(FP16), kvmnn.encode(FP32)
    with pytest.raises(FrameError, match="frame has 2 streams: expected the 4 of fp32"):
        kvmnn.decode(two, dtype="fp32")
    for dtype in ("fp16", "bf16"):
        with pytest.raises(FrameError, match=f"frame has 4 streams: expected the 2 of {dtype}"):
            kvmnn.decode(four, dtype=dtype)
    with pytest.raises(KvmnnError, match="unknown dtype"):
        kvmnn.decode(two, dtype="f2")
    with pytest.raises(TypeError, match="dtype must be a string"):
        kvmnn.decode(two, dtype=np.float16)


@pytest.mark.parametrize("frame", ["text", None, 3, [1]])
def test_decode_non_buffer_is_refused(frame: object) -> None:
    with pytest.raises(TypeError, match="frame: expected"):
        kvmnn.decode(frame)


@pytest.mark.parametrize("out_dtype", ["<f2", "<u2", "u1", "<f4", "<i8", "V16"])
def test_decode_out_arrays(out_dtype: str) -> None:
    out = np.zeros(FP16.nbytes // np.dtype(out_dtype).itemsize, out_dtype)
    assert kvmnn.decode(kvmnn.encode(FP16), out=out) is out
    assert out.tobytes() == FP16.tobytes()
    shaped = np.zeros(FP16.shape, np.float16)
    assert kvmnn.decode(kvmnn.encode(FP16), out=shaped) is shaped
    assert (shaped == FP16).all()


def test_decode_out_buffers() -> None:
    frame = kvmnn.encode(FP32)
    for out in (bytearray(FP32.nbytes), memoryview(bytearray(FP32.nbytes)), array.array("f", bytes(FP32.nbytes))):
        back = kvmnn.decode(frame, out=out)
        assert back.dtype == np.float32 and back.tobytes() == FP32.tobytes() == bytes(out)
        back[0] = 7  # the same memory
        assert np.frombuffer(out, np.float32)[0] == 7


def test_decode_out_inside_larger_array() -> None:
    cache = np.full((4, 96), 9, np.float16)
    kvmnn.decode(kvmnn.encode(FP16), out=cache[2])
    assert (cache[2] == FP16.reshape(-1)).all() and (cache[[0, 1, 3]] == 9).all()


@pytest.mark.parametrize("dtype", [np.float16, np.float32])
def test_decode_out_strided_in_first_axis(dtype: type) -> None:
    values = RNG.standard_normal((3, 5, 8)).astype(dtype)
    cache = np.full((3, 40, 8), 9, dtype)
    out = cache[:, 20:25]
    assert kvmnn.decode(kvmnn.encode(values), out=out) is out
    assert (cache[:, 20:25] == values).all() and (cache[:, :20] == 9).all() and (cache[:, 25:] == 9).all()
    for refused in (cache[:, 20:30:2], cache[:, 20:25, ::-1], np.zeros((3, 8, 5), dtype).transpose(0, 2, 1)):
        with pytest.raises(KvmnnError, match="C-contiguous"):
            kvmnn.decode(kvmnn.encode(values), out=refused)
    with pytest.raises(KvmnnError, match="C-contiguous"):  # one row, which a view cannot show either
        kvmnn.decode(kvmnn.encode(values[:1]), out=cache[:1, 20:30:2])


def test_frame_decoder_decodes_several_frames() -> None:
    values = RNG.standard_normal((2, 3, 5, 8)).astype(np.float16)
    decoder, frames = FrameDecoder("fp16"), tuple(kvmnn.encode(part) for part in values)
    cache = np.full((2, 3, 40, 8), 9, np.float16)
    decoder.decode_into(frames, cache[:, :, 20:25])
    assert (cache[:, :, 20:25] == values).all() and (cache[:, :, :20] == 9).all() and (cache[:, :, 25:] == 9).all()
    cache[:] = 9
    for out, message in (
        (cache[:, :, 20:24], "out has 192 bytes: the frame holds 240"),
        (cache[:, :, 20:30:2], "contiguous tokens"),
        (cache[:1, :, 20:25], "2 frames: expected 1"),
    ):
        with pytest.raises(KvmnnError, match=message):
            decoder.decode_into(frames, out)
    with pytest.raises(FrameError):
        decoder.decode_into((frames[0], frames[1][:-1]), cache[:, :, 20:25])
    assert (cache == 9).all()


def test_frame_decoder_compares_checksum_of_several_frames() -> None:
    values = RNG.standard_normal((2, 3, 5, 8)).astype(np.float16)
    first, second = (kvmnn.encode(part) for part in values)
    other = kvmnn.encode(values[1] + np.float16(1))
    out = np.zeros_like(values)
    both = integrity_checksum(second, integrity_checksum(first))
    FrameDecoder("fp16").decode_into((first, second), out, both)
    assert (out == values).all()
    for frames, number in (((first, second), both ^ 1), ((first, other), both), ((second, first), both)):
        with pytest.raises(FrameError, match="do not match their checksum"):
            FrameDecoder("fp16").decode_into(frames, out, number)


def test_decode_out_may_be_the_input() -> None:
    frame = bytearray(kvmnn.encode(RNG.integers(0, 1 << 16, 500).astype(np.uint16)))
    expected = kvmnn.decode(bytes(frame)).tobytes()
    kvmnn.decode(frame, out=memoryview(frame)[:1000])
    assert frame[:1000] == expected


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (np.zeros(95, np.float16), "out has 190 bytes: the frame holds 192"),
        (np.zeros(97, np.float16), "out has 194 bytes"),
        (bytearray(191), "out has 191 bytes"),
        (bytearray(0), "out has 0 bytes"),
        (np.zeros(192, np.float16)[::2], "C-contiguous"),
        (np.zeros((8, 12), np.float16, order="F"), "C-contiguous"),
        (memoryview(bytearray(384))[::2], "C-contiguous"),
        (np.zeros(24, object), "plain numbers"),
        (bytes(192), "writable"),
        (memoryview(bytes(192)), "writable"),
    ],
)
def test_decode_out_of_wrong_size_is_refused(out: object, message: str) -> None:
    with pytest.raises(KvmnnError, match=message):
        kvmnn.decode(kvmnn.encode(FP16), out=out)


def test_decode_out_must_be_writable_buffer() -> None:
    out = np.zeros(96, np.float16)
    out.flags.writeable = False
    with pytest.raises(KvmnnError, match="writable"):
        kvmnn.decode(kvmnn.encode(FP16), out=out)
    with pytest.raises(TypeError):
        kvmnn.decode(kvmnn.encode(FP16), out=[0] * 96)
    with pytest.raises(TypeError):
        kvmnn.decode(kvmnn.encode(FP16), out="text")


@pytest.mark.parametrize("words", [96, 1 << 19])
def test_decode_out_is_unchanged_on_error(words: int) -> None:
    frame = bytearray(kvmnn.encode(kv_like(words - 12) + bytes(24), dtype="fp16", codecs=("rle",)))
    frame[-2] ^= 0x80  # the last token, a run, becomes literals that are not there
    out = np.full(words * 2, 0x77, np.uint8)
    for options in ({}, {"threads": 1}, {"threads": 2}, {"dtype": "fp16"}, {"dtype": "fp32"}, {"codecs": ("zstd",)}):
        with pytest.raises(FrameError):
            kvmnn.decode(frame, out=out, **options)
        with pytest.raises(FrameError):
            kvmnn.decode(frame[:-1], out=out, **options)
    with pytest.raises(LimitError):
        kvmnn.decode(kvmnn.encode(kv_like(words), dtype="fp16"), out=out, max_bytes=1)
    assert (out == 0x77).all()


def test_decode_above_max_bytes_is_refused() -> None:
    frame = kvmnn.encode(FP16)
    assert kvmnn.decode(frame, max_bytes=192).size == 96
    for limit in (191, 1, 0):
        with pytest.raises(LimitError, match=f"holds 192 bytes: max_bytes is {limit}"):
            kvmnn.decode(frame, max_bytes=limit)


def test_errors_are_kvmnn_and_value_errors() -> None:
    for error in (FrameError, LimitError):
        assert issubclass(error, KvmnnError) and issubclass(error, ValueError)
