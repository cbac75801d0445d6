"""`kvmnn encode -o X.zarr` and back: interoperability, atomic replacement, and metadata that is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from random import Random

import llama_files
import ml_dtypes
import numpy as np
import pytest
from codec_entry_points import run_elsewhere

import kvmnn
from kvmnn import formats
from kvmnn.bundle import EncodeOptions
from kvmnn.errors import LimitError, OptionError, OutputError, SourceError
from kvmnn.formats.zarr import metadata

RNG = np.random.default_rng(8)
ARRAYS = {
    "layer_0.key": RNG.normal(size=(2, 37, 8)).astype(np.float16),
    "layer_0.value": RNG.normal(size=(2, 37, 8)).astype(np.float32),
    "fortran": np.asfortranarray(RNG.normal(size=(5, 4, 3)).astype(np.float32)),
    "words of/bf16": RNG.integers(0, 1 << 16, (3, 5), np.uint16),
    "one": np.float16([1.5]),
    "zarr.json": np.float16([[2.5]]),
    "__reserved": np.float16([3.5]),
}


@pytest.fixture
def arrays(tmp_path: Path) -> Path:
    path = tmp_path / "kv.npz"
    np.savez(path, **ARRAYS)
    return path


def words(path: object, **options: object) -> dict[str, np.ndarray]:
    source = kvmnn.open(path, **options)
    return {name: source[name].to_numpy() for name in source}


@pytest.mark.parametrize("size", ["60", "1K", "4M", "0"])
def test_zarr_store_round_trips(arrays: Path, tmp_path: Path, run, size: str) -> None:
    said = run("encode", arrays, "-o", tmp_path / "x.zarr", "--chunk-bytes", size).out
    assert "LOSSLESS (decoded and compared)" in said
    found = words(tmp_path / "x.zarr")
    assert list(found) == list(ARRAYS)
    for name, array in ARRAYS.items():
        assert found[name].dtype == array.dtype
        assert found[name].flags.f_contiguous == array.flags.f_contiguous or array.ndim == 1
        assert found[name].tobytes("A") == array.tobytes("A")
    run("decode", tmp_path / "x.zarr", "-o", tmp_path / "y.npz")
    assert (tmp_path / "y.npz").read_bytes() == arrays.read_bytes()
    assert "LOSSLESS (decoded, sha256 of the store)" in run("verify", tmp_path / "x.zarr").out


READ = """
import sys, numpy as np, xarray, zarr, dask.array
path, arrays = sys.argv[1], dict(np.load(sys.argv[2]))
data, group = xarray.open_zarr(path, chunks={}), zarr.open_group(path, mode="r")
for name, array in arrays.items():
    folder = {"zarr.json": "array_zarr.json", "__reserved": "array___reserved"}.get(name, name)
    folder = folder.replace(" ", "_").replace("/", "_")
    for found in (data[folder].values, group[folder][...], dask.array.from_zarr(path, component=folder).compute()):
        assert found.tobytes() == array.tobytes(), name
    assert group[folder].attrs["kvmnn"]["name"] == name
    print(name, data[folder].dims, data[folder].chunks, found.dtype)
"""


@pytest.mark.slow
def test_zarr_store_is_read_by_zarr_python(arrays: Path, tmp_path: Path, run) -> None:
    run("encode", arrays, "-o", tmp_path / "x.zarr", "--chunk-bytes", "200")
    assert run_elsewhere(READ, tmp_path, tmp_path / "x.zarr", arrays).splitlines() == [
        "layer_0.key ('kv_head', 'token', 'head_dim') ((1, 1), (10, 10, 10, 7), (8,)) float16",
        "layer_0.value ('kv_head', 'token', 'head_dim') ((1, 1), (6, 6, 6, 6, 6, 6, 1), (8,)) float32",
        "fortran ('axis_0_5', 'axis_1_4', 'axis_2') ((5,), (4,), (2, 1)) float32",
        "words of/bf16 ('axis_0_3', 'axis_1_5') ((3,), (5,)) uint16",
        "one ('axis_0_1',) ((1,),) float16",
        "zarr.json ('axis_0_1', 'axis_1_1') ((1,), (1,)) float16",
        "__reserved ('axis_0_1',) ((1,),) float16",
    ]


MADE = """
import sys, numpy as np, zarr, ml_dtypes, kvmnn.integrations.bfloat16
group = zarr.open_group(sys.argv[1], mode="w")
words = np.arange(6 * 50 * 4).reshape(6, 50, 4) % 1000
for number, options in enumerate([
    {"serializer": {"name": "kvmnn.frame"}, "compressors": None, "dtype": "float16"},
    {"dtype": ml_dtypes.bfloat16},
    {"dtype": "float32", "compressors": {"name": "gzip", "configuration": {"level": 1}}},
    {"dtype": "float16", "compressors": None, "chunk_key_encoding": {"name": "v2"}},
    {"dtype": "float32", "serializer": {"name": "bytes", "configuration": {"endian": "big"}}},
    {"dtype": "float32", "filters": [{"name": "transpose", "configuration": {"order": [2, 1, 0]}}]},
]):
    array = group.create_array(f"layer_{number}.key", shape=words.shape, chunks=(4, 16, 3), **options)
    array[:] = words.astype(array.dtype)
group.create_array("layer_9.key", shape=words.shape, chunks=(4, 16, 3), dtype="f4", fill_value=-2.5)
group.create_group("deep/er").create_array("k", shape=(3,), dtype="f2")[:] = 1
"""


def test_zarr_store_of_zarr_python_is_read(tmp_path: Path) -> None:
    run_elsewhere(MADE, tmp_path, tmp_path / "x.zarr")
    found, expected = words(tmp_path / "x.zarr"), np.arange(6 * 50 * 4).reshape(6, 50, 4) % 1000
    assert list(found) == [*(f"layer_{n}.key" for n in (0, 1, 2, 3, 4, 5, 9)), "deep/er/k"]
    assert (found.pop("layer_9.key") == -2.5).all()
    assert (found.pop("deep/er/k") == 1).all()
    bf16 = found.pop("layer_1.key").view(ml_dtypes.bfloat16)
    assert (bf16 == expected.astype(ml_dtypes.bfloat16)).all()
    for name, array in found.items():
        assert (array == expected).all(), name


def test_zarr_store_keeps_engine_cache_info(tmp_path: Path, run) -> None:
    shape = llama_files.Shape(2, 2, 8, 8, "f16", "f16", False)
    state, _ = llama_files.state(Random(1), shape, [6], gaps=True)
    (tmp_path / "x.session").write_bytes(state)
    run("encode", tmp_path / "x.session", "--kv-heads", 2, "-o", tmp_path / "x.zarr")
    first = kvmnn.open(tmp_path / "x.session", packed=formats.PackedOptions(geometry=_geometry(2)))
    again = kvmnn.open(tmp_path / "x.zarr")
    assert again.engine_cache.to_dict() == first.engine_cache.to_dict()
    assert len(again.engine_cache.position_runs) > 1
    assert all(again[name].to_numpy().tobytes() == first[name].to_numpy().tobytes() for name in first)
    attributes = json.loads((tmp_path / "x.zarr/zarr.json").read_text())["attributes"]["kvmnn"]
    assert attributes["cache"]["positions"] == [list(run) for run in first.engine_cache.position_runs]
    assert ", positions " in run("inspect", tmp_path / "x.zarr").out
    run("decode", tmp_path / "x.zarr", "-o", tmp_path / "y.safetensors")


def _geometry(heads: int):
    from kvmnn.packed.inference import PackedGeometry

    return PackedGeometry(kv_heads=heads)


def test_zarr_store_replacement_is_atomic(arrays: Path, tmp_path: Path, run) -> None:
    store = tmp_path / "x.zarr"
    run("encode", arrays, "-o", store, "--chunk-bytes", "100")
    before = sorted(store.rglob("*"))
    assert "exists already (-f or --force replaces it)" in run("encode", arrays, "-o", store, code=1).err
    assert "is the input itself" in run("encode", store, "-f", "-o", store, code=1).err
    assert "is the input itself, or holds it" in run("encode", store / "one", "-f", "-o", store, code=1).err
    assert sorted(store.rglob("*")) == before
    run("encode", arrays, "--tensor", "one", "-f", "-o", store)
    assert sorted(p.name for p in store.iterdir()) == ["one", "zarr.json"]
    (tmp_path / "mine.zarr").mkdir()
    (tmp_path / "mine.zarr/notes.txt").write_text("mine")
    assert (
        "no Zarr store that could be replaced" in run("encode", arrays, "-f", "-o", tmp_path / "mine.zarr", code=1).err
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kv.npz", "mine.zarr", "x.zarr"]


def test_zarr_store_failure_leaves_old_store(arrays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "x.zarr"
    formats.encode_store(kvmnn.open(arrays, tensors=("one",)), store)

    def broken(*_: object, **__: object) -> object:
        raise SourceError("it is broken")

    monkeypatch.setattr("kvmnn.formats.zarr.writer.read", broken)
    with pytest.raises(OutputError, match=r"x.zarr: does not read back as written: it is broken"):
        formats.encode_store(kvmnn.open(arrays), store, force=True)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["kv.npz", "x.zarr"]
    assert list(kvmnn.open(store)) == ["one"]


def test_zarr_store_wrongly_written_chunk_is_detected(
    arrays: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kvmnn.formats.zarr.writer._pad_chunk", lambda piece, nbytes: np.zeros(nbytes, np.uint8))
    with pytest.raises(OutputError, match=r"array 'layer_0.key': its words do not match the sha256"):
        formats.encode_store(kvmnn.open(arrays), tmp_path / "x.zarr")
    assert not (tmp_path / "x.zarr").exists()


def test_zarr_store_changed_words_are_refused(arrays: Path, tmp_path: Path, run) -> None:
    run("encode", arrays, "-o", tmp_path / "x.zarr")
    chunk = tmp_path / "x.zarr/one/c/0"
    chunk.write_bytes(kvmnn.encode(np.float16([2.5])))
    for verb in (["verify"], ["decode", "-o", tmp_path / "y.npz"], ["encode", "-o", tmp_path / "y.frames/"]):
        assert (
            "array 'one': its words do not match the sha256" in run(verb[0], tmp_path / "x.zarr", *verb[1:], code=1).err
        )
    chunk.unlink()
    (found,) = json.loads(run("inspect", tmp_path / "x.zarr", "--json").out)["inputs"]
    assert found["ratio"] is None and "are not there, and read as the fill value" in found["notes"][0]
    assert "do not match the sha256" in run("verify", tmp_path / "x.zarr", code=1).err
    assert not (tmp_path / "y.npz").exists()
    for document in (tmp_path / "x.zarr").rglob("zarr.json"):
        document.write_text(document.read_text().replace("sha256", "sha255"))
    assert "DECODES (an array has no sha256: nothing to compare with)" in run("verify", tmp_path / "x.zarr").out
    assert "LOSSLESS" not in run("decode", tmp_path / "x.zarr", "-o", tmp_path / "y.npz").out


@pytest.mark.parametrize("name", ["zarr.json", "one/zarr.json"])
def test_zarr_store_conflicting_metadata_is_refused(arrays: Path, tmp_path: Path, run, name: str) -> None:
    """Zarr's libraries read what the group has of its arrays, kvmnn in a directory their own documents."""
    run("encode", arrays, "-o", tmp_path / "x.zarr")
    assert "LOSSLESS" in run("verify", tmp_path / "x.zarr").out
    document = tmp_path / "x.zarr" / name
    document.write_text(document.read_text().replace('"exact"', '"fast"', 1))
    said = run("verify", tmp_path / "x.zarr", code=1)
    assert "its consolidated_metadata says other things of '" in said.err and "LOSSLESS" not in said.out


def test_zarr_store_other_dtype_in_metadata_is_refused(arrays: Path, tmp_path: Path, run) -> None:
    """The hash covers only the words."""
    run("encode", arrays, "-o", tmp_path / "x.zarr")
    for document in (tmp_path / "x.zarr").rglob("zarr.json"):
        text = document.read_text()
        document.write_text(text.replace('"data_type": "float16"', '"data_type": "uint16"').replace("0.0", "0"))
    for argv in (["verify", tmp_path / "x.zarr"], ["decode", tmp_path / "x.zarr", "-o", tmp_path / "y.npz"]):
        assert "its data_type is bf16, kvmnn noted down fp16" in run(*argv, code=1).err


def test_zarr_store_unsupported_options_are_refused(arrays: Path, tmp_path: Path, run) -> None:
    source = kvmnn.open(arrays)
    for options in (EncodeOptions(block=True), EncodeOptions(allow_raw=True)):
        with pytest.raises(OptionError, match="every chunk of a Zarr store is a frame"):
            formats.encode_store(source, tmp_path / "x.zarr", options)
    made = formats.encode_store(source, tmp_path / "x.zarr", EncodeOptions(effort="fast", verify=False, frame_bytes=64))
    assert made.label is None
    assert made.manifest.arrays[0].frames[-1].file == "layer_0.key/c/1/9/0"
    assert '"effort": "fast"' in (tmp_path / "x.zarr/one/zarr.json").read_text()
    assert "no output given" in run("decode", tmp_path / "x.zarr", code=2).err
    assert "cannot hold 7 arrays" in run("decode", tmp_path / "x.zarr", "-o", tmp_path / "y.npy", code=2).err
    assert "is about frames" in run("decode", tmp_path / "x.zarr", "--output-kind", "dump", "-o", "y/", code=2).err
    assert "kvmnn diff compares two" in run("verify", tmp_path / "x.zarr", "--against", arrays, code=2).err


def test_zarr_store_single_array_is_opened(arrays: Path, tmp_path: Path, run) -> None:
    run("encode", arrays, "-o", tmp_path / "x.zarr")
    assert words(tmp_path / "x.zarr/words_of_bf16")["words of/bf16"].tobytes() == ARRAYS["words of/bf16"].tobytes()
    run("decode", tmp_path / "x.zarr/one", "-o", tmp_path / "one.npy")
    assert np.load(tmp_path / "one.npy") == [1.5]
    shutil.rmtree(tmp_path / "x.zarr/one/c")
    assert list(words(tmp_path / "x.zarr", tensors=("layer_0.key",))) == ["layer_0.key"]


def hostile(tmp_path: Path, **changes: object) -> Path:
    document = {
        "zarr_format": 3,
        "node_type": "array",
        "shape": [4],
        "data_type": "float16",
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [4]}},
        "chunk_key_encoding": {"name": "default"},
        "fill_value": 0,
        "codecs": [{"name": "kvmnn.frame"}],
    }
    path = tmp_path / "h.zarr"
    path.mkdir(exist_ok=True)
    (path / "zarr.json").write_text(json.dumps(document | changes))
    return path


def test_zarr_store_unsupported_metadata_is_refused(tmp_path: Path) -> None:
    grid_of = lambda *shape: {"name": "regular", "configuration": {"chunk_shape": shape}}  # noqa: E731
    for changes, said in (
        ({"zarr_format": 4}, "found 4, expected 3"),
        ({"data_type": "complex64"}, 'data type "complex64" is none that frames hold'),
        ({"data_type": {"name": "r16"}}, "is none that frames hold"),
        ({"data_type": "float64"}, "float64 is none that frames hold"),
        ({"shape": [0]}, "is empty"),
        ({"shape": [-1]}, "found -1"),
        ({"shape": [1] * 33}, "has 33 entries"),
        ({"shape": [4, 4]}, "expected 2 lengths"),
        ({"chunk_grid": grid_of(0)}, "found 0"),
        ({"chunk_grid": {"name": "irregular"}}, "chunk grid 'irregular'"),
        ({"chunk_key_encoding": {"name": "hash"}}, "chunk keys 'hash'"),
        ({"chunk_key_encoding": {"name": "v2", "configuration": {"separator": "../"}}}, "separator"),
        ({"codecs": []}, "has 0 entries"),
        ({"codecs": [{"name": "sharding_indexed"}]}, "codec 'sharding_indexed': kvmnn reads kvmnn.frame, and bytes"),
        ({"codecs": [{"name": "bytes"}, {"name": "blosc"}]}, "codec 'blosc'"),
        ({"codecs": [{"name": "kvmnn.frame"}, {"name": "kvmnn.frame"}]}, "codec"),
        ({"fill_value": "some"}, 'found "some"'),
        ({"fill_value": "0x123456"}, 'found "0x123456"'),
        ({"storage_transformers": [{}]}, "storage transformers"),
    ):
        with pytest.raises(kvmnn.KvmnnError) as caught:
            kvmnn.open(hostile(tmp_path, **changes))
        assert said in str(caught.value), changes


@pytest.mark.slow
def test_zarr_store_huge_shapes_are_refused_cheaply(tmp_path: Path) -> None:
    grid_of = lambda *shape: {"name": "regular", "configuration": {"chunk_shape": shape}}  # noqa: E731
    with pytest.raises(LimitError, match="a chunk has"):
        kvmnn.open(hostile(tmp_path, shape=[1 << 40], chunk_grid=grid_of(1 << 40)))
    with pytest.raises(LimitError, match="chunks: expected at most"):
        kvmnn.open(hostile(tmp_path, shape=[1 << 40], chunk_grid=grid_of(1)))
    source = kvmnn.open(hostile(tmp_path, shape=[1 << 36], chunk_grid=grid_of(1 << 28)))
    with pytest.raises(LimitError, match=r"is not there, and .* of fill values"):
        for piece in source.arrays[0].iter_chunks(1 << 20):
            del piece
    with pytest.raises(LimitError, match="above the limit"):
        kvmnn.open(
            hostile(tmp_path, shape=[1 << 36], chunk_grid=grid_of(1 << 28)), formats.ReadOptions(max_bytes=1 << 20)
        )


@pytest.mark.parametrize(
    ("shape", "chunks"), [((5, 7, 3), (2, 3, 2)), ((4, 6), (1, 6)), ((9,), (4,)), ((2, 3, 4), (2, 3, 4))]
)
def test_zarr_regions_cover_every_element_once(shape: tuple, chunks: tuple, monkeypatch: pytest.MonkeyPatch) -> None:
    for slab in (2, 8, 40, 1 << 20):
        monkeypatch.setattr(metadata, "MAX_SLAB_BYTES", slab)
        places = np.arange(np.prod(shape)).reshape(shape)
        seen = []
        for region in metadata.iter_slabs(shape, chunks, 2):
            part = np.full([end - begin for begin, end in region], -1)
            for index, ours, theirs in metadata.iter_overlapping_chunks(region, chunks):
                begin = [i * size for i, size in zip(index, chunks, strict=True)]
                part[ours] = places[tuple(slice(b + s.start, b + s.stop) for b, s in zip(begin, theirs, strict=True))]
            seen.append(part.reshape(-1))
        assert np.array_equal(np.concatenate(seen), np.arange(np.prod(shape)))


@pytest.mark.parametrize("shape", [(3, 100, 8), (1, 1, 1), (7,), (2, 3, 5, 7), (1, 1000)], ids=str)
def test_choose_chunk_shape_fits_the_limit(shape: tuple) -> None:
    for limit in (2, 7, 16, 100, 1000, 1 << 20):
        chunks = metadata.choose_chunk_shape(shape, 2, limit)
        assert np.prod(chunks) * 2 <= max(limit, 2)
        cut = metadata.find_split_axis(chunks)
        assert set(chunks[:cut]) <= {1}
        assert chunks[cut + 1 :] == shape[cut + 1 :]
    assert metadata.choose_chunk_shape(shape, 2, 0) == shape


@pytest.mark.slow
@pytest.mark.parametrize("name", ["x.zarr", "x"])
def test_zarr_group_without_metadata_is_refused(arrays: Path, tmp_path: Path, run, name: str) -> None:
    """They are read neither one by one nor as a group."""
    run("encode", arrays, "-o", tmp_path / "x.zarr")
    (tmp_path / "all").mkdir()
    store = tmp_path / "all" / name
    (tmp_path / "x.zarr").rename(store)
    (store / "zarr.json").unlink()
    said = "and no zarr.json of their group"
    for argv in (
        ("inspect", store),
        ("measure", store),
        ("encode", store, "-o", tmp_path / "f/"),
        ("decode", store, "-o", tmp_path / "y.npz"),
        ("verify", store),
        ("diff", store, store),
    ):
        found = run(*argv, code=1).err
        assert said in found and found.count("\n") == 1
    for verb in ("inspect", "measure", "verify"):
        lines = run(verb, tmp_path / "all", "--jobs", "1", code=1).out.splitlines()
        assert len(lines) == 1 and said in lines[0]
    with pytest.raises(SourceError, match=said):
        kvmnn.open(store)
    assert words(store / "fortran")["fortran"].tobytes() == ARRAYS["fortran"].tobytes()


@pytest.mark.parametrize("consolidated", [True, False])
def test_zarr_store_without_listed_arrays_is_refused(arrays: Path, tmp_path: Path, run, consolidated: bool) -> None:
    """A copy that lost arrays is no smaller cache; those that are there are read by name."""
    store = tmp_path / "x.zarr"
    run("encode", arrays, "-o", store)
    for name in ("layer_0.value", "one"):
        shutil.rmtree(store / name)
    group = json.loads((store / "zarr.json").read_text())
    if not consolidated:
        del group["consolidated_metadata"]
    (store / "zarr.json").write_text(json.dumps(group))
    problem = "2 of 7 arrays that attributes.kvmnn.arrays lists are missing: 'layer_0.value', 'one'"
    for argv in (
        ("inspect", store),
        ("verify", store),
        ("decode", store, "-o", tmp_path / "y.npz"),
        ("encode", store, "-o", tmp_path / "y/"),
        ("diff", store, arrays),
    ):
        said = run(*argv, code=1)
        assert problem in said.err and not said.out
    assert not (tmp_path / "y.npz").exists() and not (tmp_path / "y").exists()
    for opener in (kvmnn.open, formats.verify_store):
        with pytest.raises(SourceError, match=problem):
            opener(str(store))
    with pytest.raises(SourceError, match="arrays lists is missing: 'one'"):
        kvmnn.open(store, tensors=["fortran", "one"])
    assert words(store, tensors=["fortran"])["fortran"].tobytes("A") == ARRAYS["fortran"].tobytes("A")
    group["attributes"]["kvmnn"]["arrays"] = [name for name in ARRAYS if name not in ("layer_0.value", "one")]
    (store / "zarr.json").write_text(json.dumps(group))
    assert len(words(store)) == 5


def test_zarr_v2_group_without_metadata_is_refused(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.create_group(tmp_path / "x", zarr_format=2)
    group.create_array("k", data=ARRAYS["layer_0.key"], compressors=None)
    assert list(kvmnn.open(tmp_path / "x")) == ["k"]
    (tmp_path / "x" / ".zgroup").unlink()
    with pytest.raises(SourceError, match=r"arrays of a Zarr store \('k'\)"):
        kvmnn.open(tmp_path / "x")


@pytest.mark.slow
def test_zarr_stores_in_a_folder_are_no_group(arrays: Path, tmp_path: Path, run) -> None:
    run("encode", arrays, "-o", tmp_path / "all.zarr")
    (tmp_path / "two").mkdir()
    for name in ("fortran", "one"):
        shutil.copytree(tmp_path / "all.zarr" / name, tmp_path / "two" / f"{name}.zarr")
    lines = run("inspect", tmp_path / "two", "--jobs", "1").out.splitlines()
    assert len(lines) == 2 and all('"error"' not in line for line in lines)
    with pytest.raises(SourceError, match="not a file kvmnn knows"):
        kvmnn.open(tmp_path / "two")
