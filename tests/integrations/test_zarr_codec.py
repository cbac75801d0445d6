"""The codec and the data type of Zarr version 3, through zarr itself; and of version 2."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import zarr
import zarr.registry
from codec_entry_points import declared, run_elsewhere

import kvmnn
import kvmnn.integrations.bfloat16
from kvmnn.errors import FrameError, KvmnnError
from kvmnn.integrations.chunk_codec import CODEC_NAME
from kvmnn.integrations.numcodecs import FrameCompressor
from kvmnn.integrations.zarr import ZarrFrameCodec

RNG = np.random.default_rng(6)
SHAPE, CHUNKS = (3, 50, 8), (2, 16, 8)


@pytest.fixture(autouse=True)
def _registered() -> None:
    """As the entry points of an installed kvmnn do it; `test_zarr_codec_is_found_by_entry_points` is about those."""
    zarr.registry.register_codec(CODEC_NAME, ZarrFrameCodec)


def create(path: Path, dtype: object, **options: object) -> zarr.Array:
    made = {"shape": SHAPE, "chunks": CHUNKS, "serializer": {"name": CODEC_NAME}, "compressors": None, **options}
    return zarr.create_array(path, dtype=dtype, overwrite=True, **made)


@pytest.mark.parametrize("dtype", ["<f2", ">f2", "<f4", ">f4", "<u2", ml_dtypes.bfloat16], ids=str)
def test_zarr_codec_round_trips(tmp_path: Path, dtype: object) -> None:
    words = RNG.normal(size=SHAPE).astype(dtype)
    array = create(tmp_path / "a", words.dtype)
    array[:] = words
    again = zarr.open_array(tmp_path / "a", mode="r")
    assert again[:].astype(words.dtype).tobytes() == words.tobytes()
    first = np.zeros(CHUNKS, words.dtype.newbyteorder("<") if dtype != ml_dtypes.bfloat16 else np.uint16)
    first[:] = words[:2, :16].view(np.uint16) if dtype == ml_dtypes.bfloat16 else words[:2, :16]
    assert (tmp_path / "a/c/0/0/0").read_bytes() == kvmnn.encode(first)


@pytest.mark.parametrize("effort", ["exact", "balanced", "fast"])
def test_zarr_codec_effort_reaches_the_encoder(tmp_path: Path, effort: str) -> None:
    words = RNG.normal(size=(1, 1024, 64)).astype(np.float32)
    array = create(
        tmp_path / "a", "f4", shape=words.shape, chunks=words.shape, serializer=ZarrFrameCodec(effort=effort)
    )
    array[:] = words
    chunk = (tmp_path / "a/c/0/0/0").read_bytes()
    assert chunk == kvmnn.encode(words, effort=effort) == FrameCompressor("fp32", effort=effort).encode(words)
    assert (chunk == kvmnn.encode(words, effort="exact")) == (effort != "fast")


def test_zarr_codec_effort_is_stored_in_metadata(tmp_path: Path) -> None:
    words = RNG.normal(size=SHAPE).astype(np.float32)
    array = create(tmp_path / "a", "f4", serializer=ZarrFrameCodec(effort="fast"))
    array[:] = words
    again = zarr.open_array(tmp_path / "a", mode="r")
    assert again.metadata.codecs == (ZarrFrameCodec(effort="fast"),)
    assert (again[:] == words).all()
    with pytest.raises(KvmnnError, match="unknown effort 'most'"):
        create(tmp_path / "a", "f4", serializer={"name": CODEC_NAME, "configuration": {"effort": "most"}})
    with pytest.raises(KvmnnError, match="effort alone"):
        create(tmp_path / "a", "f4", serializer={"name": CODEC_NAME, "configuration": {"level": 3}})


@pytest.mark.parametrize("dtype", ["f8", "i1", "i2", "u1", "i4", "u4", "bool", "c8", "S2"])
def test_zarr_codec_unsupported_type_is_refused(tmp_path: Path, dtype: str) -> None:
    with pytest.raises(KvmnnError, match=f"codec {CODEC_NAME}: type .* is none that frames hold: expected float16"):
        create(tmp_path / "a", dtype)


def test_zarr_codec_shards_and_transposition_round_trip(tmp_path: Path) -> None:
    words = RNG.normal(size=(4, 64, 8)).astype(np.float16)
    array = create(tmp_path / "a", "f2", shape=words.shape, chunks=(2, 16, 8), shards=(4, 32, 8))
    array[:] = words
    assert (zarr.open_array(tmp_path / "a", mode="r")[:] == words).all()
    array = create(tmp_path / "b", "f2", filters=[{"name": "transpose", "configuration": {"order": [2, 1, 0]}}])
    array[:] = words[:3, :50]
    assert (zarr.open_array(tmp_path / "b", mode="r")[:, 3:7] == words[:3, 3:7]).all()


def test_zarr_codec_missing_chunks_have_fill_value(tmp_path: Path) -> None:
    array = create(tmp_path / "a", "f2", fill_value=2.5)
    array[1, 10:20] = 1
    assert len(list((tmp_path / "a").rglob("c/*/*/*"))) == 2
    assert array[:].sum() == 2.5 * (SHAPE[0] * 50 - 10) * 8 + 80


def test_zarr_codec_hostile_chunk_is_refused(tmp_path: Path) -> None:
    array = create(tmp_path / "a", "f2", chunks=SHAPE)
    array[:] = RNG.normal(size=SHAPE)
    chunk = tmp_path / "a/c/0/0/0"
    frame = chunk.read_bytes()
    larger = kvmnn.encode(np.zeros(1 << 20, np.float16))
    for data in (b"", frame[:-1], frame + b"x", frame[:40], larger, kvmnn.encode(np.zeros(SHAPE, np.float32))):
        chunk.write_bytes(data)
        with pytest.raises(FrameError, match=f"codec {CODEC_NAME}: "):
            array[:]
    chunk.write_bytes(kvmnn.encode(np.zeros(5, np.float16)))
    with pytest.raises(FrameError, match="the frame holds 10 bytes: the chunk has 2400"):
        array[:]


def test_zarr_codec_chunk_above_limit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(KvmnnError, match="at most 1,073,741,824"):
        create(tmp_path / "a", "f4", shape=(1 << 16, 1 << 16), chunks=(1 << 15, 1 << 14))


@pytest.mark.parametrize(("dtype", "order"), [("<f2", "C"), ("<f4", "F"), (">f4", "C"), (">f2", "F"), ("<u2", "C")])
def test_zarr_codec_format_2_round_trips(tmp_path: Path, dtype: str, order: str) -> None:
    words = (RNG.normal(size=SHAPE) * 100).astype(np.float32).astype(dtype, casting="unsafe")
    codec = FrameCompressor(endian="big" if dtype[0] == ">" else "little")
    array = zarr.create_array(
        tmp_path / "a", shape=SHAPE, chunks=CHUNKS, dtype=dtype, zarr_format=2, compressors=codec, order=order
    )
    array[:] = words
    assert (zarr.open_array(tmp_path / "a", mode="r")[:] == words).all()
    source = kvmnn.open(tmp_path / "a")
    (name,) = source
    assert (source[name].to_numpy() == words).all()


def test_zarr_codec_bfloat16_is_a_data_type(tmp_path: Path) -> None:
    array = create(tmp_path / "a", ml_dtypes.bfloat16, fill_value=float("nan"))
    assert (array.dtype, array.metadata.to_dict()["data_type"]) == (ml_dtypes.bfloat16, "bfloat16")
    assert np.isnan(array[:].astype(np.float32)).all()
    plain = create(tmp_path / "b", ml_dtypes.bfloat16, serializer="auto", compressors="auto", fill_value=1.5)
    assert (plain[:].astype(np.float32) == 1.5).all()
    plain[:] = -2
    assert (zarr.open_array(tmp_path / "b", mode="r")[:].astype(np.float32) == -2).all()
    with pytest.raises(ValueError, match="2"):
        zarr.create_array(tmp_path / "c", shape=SHAPE, dtype=ml_dtypes.bfloat16, zarr_format=2)
    kind = kvmnn.integrations.bfloat16.BFloat16()
    for said, bits in (("NaN", 0x7FC0), ("-Infinity", 0xFF80), ("0x7fc1", 0x7FC1), (1.0, 0x3F80), (0, 0)):
        assert np.array(kind.from_json_scalar(said, zarr_format=3)).view(np.uint16) == bits
    for wrong in ("one", None, [1], "0x123456"):
        with pytest.raises(TypeError, match="is no bfloat16"):
            kind.from_json_scalar(wrong, zarr_format=3)


BY_NAME = """
import sys, numpy as np, zarr, numcodecs
assert not any(name.partition(".")[0] == "kvmnn" for name in sys.modules)
codec = numcodecs.get_codec({"id": "kvmnn.frame", "dtype": "fp16"})
assert bytes(codec.decode(codec.encode(b"1234"))) == b"1234"
array = zarr.create_array(sys.argv[1], shape=(9,), dtype="f2", serializer={"name": "kvmnn.frame"}, compressors=None)
array[:] = np.arange(9)
print(type(array.metadata.codecs[0]).__name__, zarr.open_array(sys.argv[1], mode="r")[4:6])
if tuple(map(int, zarr.__version__.split(".")[:2])) >= (3, 2):  # 3.1 collects entry points of data types, and no more
    import ml_dtypes
    array = zarr.create_array(sys.argv[1] + "b", shape=(3,), dtype=ml_dtypes.bfloat16)
    assert str(array.dtype) == "bfloat16"
"""


def test_zarr_codec_is_found_by_entry_points(tmp_path: Path) -> None:
    assert {name for names in declared().values() for name in names} == {CODEC_NAME, "bfloat16"}
    assert run_elsewhere(BY_NAME, tmp_path, tmp_path / "a") == "ZarrFrameCodec [4. 5.]\n"
