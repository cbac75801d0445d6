"""`kvmnn.bundle.encode`: paths and arrays in, frames with their manifest out."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import transform_samples

import kvmnn
from kvmnn.errors import MissingFileError, OptionError, OutputError, SourceError

WORDS = np.random.default_rng(3).standard_normal((4, 20, 16)).astype(np.float16)


def test_encode_of_a_path_names_the_output_after_it(tmp_path: Path) -> None:
    np.save(tmp_path / "k.npy", WORDS)
    for path in (str(tmp_path / "k.npy"), tmp_path / "k.npy"):
        result = kvmnn.bundle.encode(path, overwrite=True)
        assert result.output == str(tmp_path / "k.npy.frame")
    assert Path(result.output).read_bytes() == kvmnn.encode(WORDS)
    assert (kvmnn.open(result.output)["k"].to_numpy() == WORDS).all()
    with pytest.raises(OutputError, match="exists already"):
        kvmnn.bundle.encode(path)


def test_encode_of_several_arrays_makes_a_folder(tmp_path: Path) -> None:
    np.savez(tmp_path / "kv.npz", **{"layer_0.key": WORDS, "layer_0.value": WORDS[::-1]})
    result = kvmnn.bundle.encode(tmp_path / "kv.npz")
    assert result.output == f"{tmp_path}/kv.npz.frames/"
    source = kvmnn.open(result.output)
    assert (source["layer_0.value"].to_numpy() == WORDS[::-1]).all()


def test_encode_of_arrays_and_sources_needs_an_output(tmp_path: Path) -> None:
    for number, values in enumerate((WORDS, {"k": WORDS, "v": WORDS})):
        with pytest.raises(OptionError, match="no output given"):
            kvmnn.bundle.encode(values)
        result = kvmnn.bundle.encode(values, tmp_path / f"o{number}")
        source = kvmnn.open(result.output)
        assert all((source[name].to_numpy() == WORDS).all() for name in source)


def test_encode_notes_frames_that_are_not_mnn_s_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kvmnn.frames.zstd, "_version", (1, 5, 7))
    options = kvmnn.bundle.EncodeOptions
    note = (
        "MNN reads these frames, but not all are the bytes that MNN would store: libzstd is 1.5.7, and those are of "
        "1.5.2 to 1.5.6"
    )
    exact = kvmnn.bundle.encode(WORDS, tmp_path / "a.frame")
    assert exact.to_dict()["notes"] == [note] and str(exact).splitlines()[1:] == [f"  {note}"]
    fast = kvmnn.bundle.encode(WORDS, tmp_path / "b.frame", options(effort="fast"))
    assert fast.to_dict()["notes"] == [] and len(str(fast).splitlines()) == 1


def test_encode_missing_file_is_a_file_not_found_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"none\.npy: cannot be read: No such file or directory") as raised:
        kvmnn.bundle.encode(tmp_path / "none.npy")
    assert isinstance(raised.value, MissingFileError) and isinstance(raised.value, SourceError)


@pytest.mark.parametrize("name", ["x.npy", "x.npz", "x.safetensors", "x.pt", "x.gguf", "x", "x.frame"])
def test_open_missing_file_is_a_file_not_found_error(name: str, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=name) as raised:
        kvmnn.open(tmp_path / name)
    assert isinstance(raised.value, kvmnn.KvmnnError)


def test_file_not_found_is_raised_by_readers_of_other_files(tmp_path: Path) -> None:
    path = tmp_path / "none"
    for read in (
        lambda: kvmnn.compressor.inspect_weights(path),
        lambda: kvmnn.store.PrefixStore(path, create=False),
        lambda: kvmnn.lm.Tokenizer(path),
        lambda: kvmnn.lm.DecoderSession.open(path),
    ):
        with pytest.raises(FileNotFoundError):
            read()


def test_encode_source_of_a_path_names_the_function_that_takes_paths(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match=r"source is str: .* kvmnn\.bundle\.encode takes paths"):
        kvmnn.bundle.encode_source("k.npy", tmp_path / "o")  # type: ignore[arg-type]


def test_restore_of_a_path_reads_frames_streams_and_stores(tmp_path: Path) -> None:
    arrays = {f"layer_0.{part}": np.arange(48, dtype=np.float32).reshape(2, 6, 4) for part in ("key", "value")}
    np.savez(tmp_path / "a.npz", **arrays)
    frames, streams, store = tmp_path / "frames", tmp_path / "streams", tmp_path / "x.zarr"
    kvmnn.bundle.encode(tmp_path / "a.npz", frames)
    kvmnn.formats.encode_store(kvmnn.open(tmp_path / "a.npz"), store)
    geometry = transform_samples.create_geometries(1, 2, 4, 4, kvmnn.RopeConfig(10000.0, 4))
    transform_samples.create_profile(geometry).write(tmp_path / "p.kvmp")
    options = kvmnn.formats.LayerStreamOptions(codec="transform", profile=str(tmp_path / "p.kvmp"))
    assert kvmnn.bundle.encode(tmp_path / "a.npz", streams, options).label == "LOSSY"
    for path in (str(frames), streams, store):
        kvmnn.formats.restore(path, tmp_path / "back.npz", force=True)
        with np.load(tmp_path / "back.npz") as back:
            assert all((back[name] == kvmnn.open(path)[name].to_numpy()).all() for name in arrays)
            assert path == streams or all((back[name] == arrays[name]).all() for name in arrays)
    with pytest.raises(FileNotFoundError):
        kvmnn.formats.restore(tmp_path / "gone", tmp_path / "back.npz")
    with pytest.raises(kvmnn.KvmnnError, match="form is 'dump'"):
        kvmnn.formats.restore(streams, tmp_path / "dump", form="dump")


def _encode_pairs(folder: Path, layers: int) -> None:
    kvmnn.bundle.encode(
        {f"layer_{n}.{part}": WORDS + n for n in range(layers) for part in ("key", "value")},
        f"{folder}/",
        overwrite=True,
    )


def test_encode_over_a_larger_bundle_leaves_none_of_its_frames(tmp_path: Path) -> None:
    _encode_pairs(tmp_path, 3)
    (tmp_path / "notes.txt").write_text("mine")
    (tmp_path / "other.frame").write_bytes(kvmnn.encode(WORDS))
    _encode_pairs(tmp_path, 1)
    names = {"layer_0.key.frame", "layer_0.value.frame", "manifest.json"}
    assert {path.name for path in tmp_path.iterdir()} == names | {"notes.txt", "other.frame"}


@pytest.mark.parametrize("name", ["notes.txt", "../outside.frame", "/outside.frame"])
def test_encode_over_a_bundle_removes_frames_of_the_folder_alone(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "b"
    _encode_pairs(folder, 2)
    for path in (folder / "notes.txt", tmp_path / "outside.frame"):
        path.write_text("mine")
    manifest = (folder / "manifest.json").read_text()
    (folder / "manifest.json").write_text(manifest.replace("layer_1.key.frame", name))
    _encode_pairs(folder, 1)
    assert (folder / "notes.txt").read_text() == (tmp_path / "outside.frame").read_text() == "mine"


def test_encode_over_a_bundle_with_a_damaged_manifest_leaves_its_frames(tmp_path: Path) -> None:
    _encode_pairs(tmp_path, 2)
    (tmp_path / "manifest.json").write_bytes(b'{"arrays": [')
    _encode_pairs(tmp_path, 1)
    assert (tmp_path / "layer_1.key.frame").exists()
