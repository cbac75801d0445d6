"""Sidecar files next to the arrays of a folder are kept in bundles and stores, and restored byte for byte."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from plain_dumps import contents, dump

import kvmnn
from kvmnn.bundle import passthrough
from kvmnn.errors import ManifestError
from kvmnn.formats import encode_store, restore, restore_store
from kvmnn.formats.mnn import pack, restore_dump
from kvmnn.lm.warm_start import read_stored_tokens
from kvmnn.packed.inference import PackedGeometry

TEXTS = {
    "positions.json": b'{"tokens_seen": 9,\r\n "layers": [{"positions": [0, 4, 8]}]}',  # bytes, not what they say
    "token_ids.json": b"[5, 6, 7, 8, 9, 10, 11, 12, 13]\xff",
}


def folder(path: Path) -> Path:
    path.mkdir()
    rng = np.random.default_rng(3)
    for name in ("layer_0.key", "layer_0.value"):
        np.save(path / f"{name}.npy", rng.standard_normal((2, 3, 8)).astype(np.float16))
    return with_texts(path)


def with_texts(path: Path) -> Path:
    for name, text in TEXTS.items():
        (path / name).write_bytes(text)
    return path


def test_sidecars_of_folder_round_trip(tmp_path: Path) -> None:
    original = folder(tmp_path / "kv")
    kvmnn.bundle.encode_source(kvmnn.open(original), tmp_path / "kv.frames")
    frames = kvmnn.bundle.open_frames(tmp_path / "kv.frames")
    made = restore(frames, f"{tmp_path / 'back'}/")
    assert contents(tmp_path / "back") == contents(original)
    assert made.sidecars == tuple(TEXTS) and made.to_dict()["sidecars"] == list(TEXTS)
    assert str(made).startswith(f"{tmp_path / 'back'}/: 2 arrays, positions.json and token_ids.json, ")
    again = kvmnn.open(tmp_path / "kv.frames")  # and what is made of the bundle
    encode_store(again, tmp_path / "kv.zarr")
    restore_store(str(tmp_path / "kv.zarr"), f"{tmp_path / 'stored'}/")
    assert contents(tmp_path / "stored") == contents(original)


@pytest.mark.parametrize("suffix", ["safetensors", "npz"])
def test_sidecars_in_array_files_keep_positions(tmp_path: Path, run: Any, suffix: str) -> None:
    """Without positions, arrays of a cut cache would pass for those of the first tokens."""
    original = folder(tmp_path / "kv")
    (original / "positions.json").write_text(json.dumps({"tokens_seen": 9, "layers": [{"positions": [0, 4, 8]}]}))
    (original / "token_ids.json").write_text(json.dumps(list(range(9))))
    kvmnn.bundle.encode_source(kvmnn.open(original), tmp_path / "frames")
    encode_store(kvmnn.open(original), tmp_path / "kv.zarr")
    for number, path in enumerate((original, tmp_path / "frames", tmp_path / "kv.zarr")):
        file = tmp_path / f"{number}.{suffix}"
        assert "note" not in run("mnn unpack" if path == original else "decode", path, "-o", file).err
        held = read_stored_tokens(kvmnn.open(file), [3])
        assert held.positions[0].tolist() == [0, 4, 8] and held.ids is not None and held.ids.size == 9
        said = run(
            "store",
            "put",
            tmp_path / "s",
            file,
            "--fingerprint",
            "m",
            "--token-ids",
            original / "token_ids.json",
            code=1,
        ).err
        assert "layer 0 was cut: a cache without some tokens is no prefix" in said
        run("mnn", "unpack", file, "-o", f"{tmp_path / 'again'}/", "-f")
        assert contents(tmp_path / "again") == contents(original)
        for options in ({"tensors": ("layer_0.key",)}, {"axes": "htd"}):
            source = kvmnn.open(file, **options)  # type: ignore[arg-type]
            assert "kvmnn.beside" in source.metadata and not source.notes
        source = kvmnn.open(file, axes="thd")
        assert "kvmnn.beside" not in source.metadata and "says of its tokens is left out" in source.notes[0]


def test_sidecars_without_place_are_noted(tmp_path: Path, run: Any) -> None:
    original = folder(tmp_path / "kv")
    ids = np.random.default_rng(3).integers(0, 50000, 40000)
    (original / "token_ids.json").write_text(json.dumps(ids.tolist()))
    assert ".npz does not say the token ids" in run("mnn", "unpack", original, "-o", tmp_path / "k.npz").err
    files = passthrough.parse_sidecars(kvmnn.open(tmp_path / "k.npz").metadata, "k.npz")
    assert files == {"positions.json": TEXTS["positions.json"]}
    one = tmp_path / "one"
    one.mkdir()
    np.save(one / "k.npy", np.ones((2, 3, 8), np.float16))
    with_texts(one)
    said = "one.npy does not say which tokens of which text it holds: .safetensors and folders of arrays do"
    assert said in run("mnn", "unpack", one, "-o", tmp_path / "one.npy").err
    run("encode", one, "-o", f"{tmp_path / 'one.frames'}/")
    assert said in run("decode", tmp_path / "one.frames", "-o", tmp_path / "one.npy", "-f").err


def test_sidecars_of_unpacked_dump_are_written(tmp_path: Path, run: Any) -> None:
    run("mnn", "unpack", folder(tmp_path / "kv"), "--output-kind", "dump", "-o", f"{tmp_path / 'dump'}/")
    assert {name: (tmp_path / "dump" / name).read_bytes() for name in TEXTS} == TEXTS


def test_sidecars_of_dump_round_trip(tmp_path: Path) -> None:
    dump(tmp_path / "dump" / "run" / "layer_0")
    original = with_texts(tmp_path / "dump")
    kvmnn.bundle.encode_source(kvmnn.open(original), tmp_path / "frames")
    made = restore_dump(kvmnn.bundle.open_frames(tmp_path / "frames"), str(tmp_path / "back"))
    assert contents(tmp_path / "back") == contents(original)
    assert set(TEXTS) < set(made.metadata_files)


@pytest.mark.parametrize("name", TEXTS)
def test_verify_compares_sidecars(tmp_path: Path, run: Any, name: str) -> None:
    original = folder(tmp_path / "kv")
    run("encode", original, "-o", tmp_path / "frames/")
    assert "LOSSLESS" in run("verify", tmp_path / "frames", "--against", original).out
    path = original / name
    path.write_bytes(path.read_bytes() + b" ")
    assert f"{name} differs" in run("verify", tmp_path / "frames", "--against", original, code=1).err
    path.unlink()
    assert f"{name} is missing in {original}" in run("verify", tmp_path / "frames", "--against", original, code=1).err


def test_sidecars_too_large_or_irregular_are_skipped(tmp_path: Path) -> None:
    original = folder(tmp_path / "kv")
    (original / "positions.json").write_bytes(bytes(passthrough.MAX_SIDECAR_BYTES + 1))
    (original / "token_ids.json").unlink()
    (original / "token_ids.json").mkdir()
    source = kvmnn.open(original)
    assert source.metadata == {}
    assert source.notes[0].startswith("frames of these arrays will be without positions.json: ")
    assert "holds more than 16,777,216 bytes" in source.notes[0] and len(source.notes) == 1


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"../positions.json": {"bytes": 1, "base64": "AA=="}},
            "expected files called positions.json or token",
        ),
        ([], "expected files called"),
        ({"positions.json": {"bytes": 2, "base64": "AA=="}}, "found 2, expected 1, as its bytes are"),
        ({"positions.json": {"bytes": 1 << 40, "zlib": "AA=="}}, "expected at most 16777216"),
        ({"positions.json": {"bytes": 9, "zlib": "////"}}, "expected bytes that zlib made"),
        ({"positions.json": {"bytes": 9}}, "files.positions.json.base64: is missing"),
    ],
)
def test_sidecars_hostile_manifest_writes_nothing(tmp_path: Path, files: Any, said: str) -> None:
    kvmnn.bundle.encode_source(kvmnn.open(folder(tmp_path / "kv")), tmp_path / "frames")
    path = tmp_path / "frames" / "manifest.json"
    document = json.loads(path.read_text())
    document["metadata"]["kvmnn.beside"] = json.dumps({"schema": "kvmnn-beside", "schema_version": 1, "files": files})
    path.write_text(json.dumps(document))
    with pytest.raises(ManifestError, match="metadata") as caught:
        restore(kvmnn.bundle.open_frames(tmp_path / "frames"), f"{tmp_path / 'back'}/")
    assert str(caught.value).startswith(f"{tmp_path / 'frames'}: metadata 'kvmnn.beside': ")
    assert said in str(caught.value) and not (tmp_path / "back").exists()
    for version in (0, 2):
        document["metadata"]["kvmnn.beside"] = json.dumps({"schema": "kvmnn-beside", "schema_version": version})
        path.write_text(json.dumps(document))
        with pytest.raises(ManifestError, match="schema_version"):
            restore(kvmnn.bundle.open_frames(tmp_path / "frames"), f"{tmp_path / 'back'}/")


def cut_folder(path: Path) -> Path:
    """Of two layers, the second one cut, with token ids of the text."""
    path.mkdir()
    words = np.random.default_rng(4).standard_normal((2, 3, 8)).astype(np.float16)
    for layer in range(2):
        for part in ("key", "value"):
            np.save(path / f"layer_{layer}.{part}.npy", words)
    layers = [{"layer": layer, "positions": places} for layer, places in enumerate(([0, 1, 2], [0, 4, 8]))]
    (path / "positions.json").write_text(json.dumps({"tokens_seen": 9, "layers": layers}))
    (path / "token_ids.json").write_text(json.dumps(list(range(9))))
    return path


def test_sidecars_selected_arrays_keep_their_positions(tmp_path: Path, run: Any) -> None:
    original = cut_folder(tmp_path / "kv")
    put = ("--token-ids", "0,1,2", "--fingerprint", "m")
    first, second = (
        [word for part in ("key", "value") for word in ("--tensor", f"layer_{layer}.{part}")] for layer in range(2)
    )
    paths = [original, *(tmp_path / name for name in ("a.npz", "a.safetensors", "a.frames", "a.zarr"))]
    for path in paths[1:]:
        run("mnn unpack" if path.suffix in (".npz", ".safetensors") else "encode", original, "-o", path)
    for number, path in enumerate(paths):
        assert "layer 1 was cut" in run("store", "put", tmp_path / "s", path, *second, *put, code=1).err
        run("store", "put", tmp_path / f"s{number}", path, *first, *put)
        part = tmp_path / f"part{number}.npz"
        run("mnn", "unpack", path, *second, "-o", part)
        assert "layer 1 was cut" in run("store", "put", tmp_path / "s", part, *put, code=1).err
        packed = run(
            "mnn", "pack", path, *first, "--backend", "arm64-fp16", "--name", "p", "-o", tmp_path / f"p{number}"
        )
        assert "true positions are as positions.json" in packed.err.replace("\n", " ")


def test_sidecars_selected_arrays_of_cut_packed_files(tmp_path: Path, run: Any) -> None:
    original = cut_folder(tmp_path / "kv")
    run("mnn", "pack", original, "--backend", "arm64-fp16", "--name", "p", "-o", tmp_path / "p")
    run("encode", tmp_path / "p", "-o", tmp_path / "p.frames/")
    run("encode", tmp_path / "p", "-o", tmp_path / "p.zarr")
    put = ("--token-ids", "0,1,2", "--fingerprint", "m")
    part = ("--tensor", "layer_1.key", "--tensor", "layer_1.value")
    run("mnn", "unpack", tmp_path / "p", "-o", tmp_path / "p.npz")
    run("mnn", "unpack", tmp_path / "p", "-o", tmp_path / "p.safetensors")
    for path in (tmp_path / name for name in ("p", "p.frames", "p.zarr", "p.npz", "p.safetensors")):
        assert "layer 1 was cut" in run("store", "put", tmp_path / "s", path, *part, *put, code=1).err
        run("mnn", "unpack", path, *part, "-o", tmp_path / "part.npz", "-f")
        assert "layer 1 was cut" in run("store", "put", tmp_path / "s", tmp_path / "part.npz", *put, code=1).err


@pytest.mark.parametrize("suffix", ["npz", "safetensors"])
def test_sidecars_selected_layers_are_packed_again(tmp_path: Path, run: Any, suffix: str) -> None:
    file, pack_as = tmp_path / f"p.{suffix}", ("--backend", "arm64-fp16", "--name", "q", "-o")
    run("mnn", "pack", cut_folder(tmp_path / "kv"), "--backend", "arm64-fp16", "--name", "p", "-o", tmp_path / "p")
    run("mnn", "unpack", tmp_path / "p", "-o", file)
    part = ("--tensor", "layer_0.key", "--tensor", "layer_0.value")
    run("mnn", "pack", file, *part, *pack_as, tmp_path / "q")
    run("encode", file, *part, "-o", tmp_path / "part.frames/")
    run("mnn", "pack", tmp_path / "part.frames", *pack_as, tmp_path / "r")
    for made in ("q", "r"):
        assert run("diff", tmp_path / made, tmp_path / "kv", *part).out.startswith("equal")
    every = [word for n in (0, 1) for name in ("key", "value") for word in ("--tensor", f"layer_{n}.{name}")]
    run("mnn", "pack", file, *every, "-o", tmp_path / "all")  # the layout is known


def test_sidecars_apply_to_all_files_of_their_folder(tmp_path: Path, run: Any) -> None:
    original = cut_folder(tmp_path / "kv")
    files = sorted(original.glob("*.npy"))
    put = ("--fingerprint", "m")
    assert "layer 1 was cut" in run("store", "put", tmp_path / "s", *files, *put, code=1).err
    run("encode", *files, "-o", tmp_path / "frames/")
    assert "LOSSLESS" in run("verify", tmp_path / "frames", "--against", original).out
    assert "layer 1 was cut" in run("store", "put", tmp_path / "s", tmp_path / "frames", *put, code=1).err
    run("store", "put", tmp_path / "s", *files[:2], "--token-ids", "0,1,2", *put)
    packed = run("mnn", "pack", *files, "--backend", "arm64-fp16", "--name", "p", "-o", tmp_path / "p")
    assert "true positions are as positions.json" in packed.err.replace("\n", " ")


def test_sidecars_apply_to_single_file_of_their_folder(tmp_path: Path, run: Any) -> None:
    original = cut_folder(tmp_path / "kv")
    both = np.stack([np.load(original / f"layer_{layer}.{part}.npy") for part in ("key", "value") for layer in (0, 1)])
    for old in original.glob("*.npy"):
        old.unlink()
    np.save(original / "kv.npy", both.reshape(2, 2, *both.shape[1:]))
    said, frame = (original / "kv.npy", "--axes", "2lhtd"), tmp_path / "kv.frame"
    assert "note" not in run("encode", original / "kv.npy", "-o", frame).err
    for made in (said, (frame, *said[1:])):
        assert "layer 1 was cut" in run("store", "put", tmp_path / "s", *made, "--fingerprint", "m", code=1).err
        packed = run("mnn", "pack", *made, "--backend", "arm64-fp16", "--name", "p", "-o", tmp_path / "p", "-f")
        assert "true positions are as positions.json" in packed.err.replace("\n", " ")
    shape = ("--shape", "2,2,2,3,8")
    assert "kv.npy says of its tokens is left out" in run("measure", *said, *shape).err.replace("\n", " ")
    assert run("verify", frame, "--against", original / "kv.npy").out
    (original / "kv.npy").rename(tmp_path / "kv.npy")  # its bytes are the same anywhere
    assert run("verify", frame, "--against", tmp_path / "kv.npy").out


def test_store_put_uses_token_ids_sidecar(tmp_path: Path, run: Any) -> None:
    original = cut_folder(tmp_path / "kv")
    layers = [{"positions": [0, 1, 2]}] * 2
    (original / "positions.json").write_text(json.dumps({"tokens_seen": 3, "layers": layers}))
    (original / "token_ids.json").write_text("[7, 8, 9]")
    said = run("store", "put", tmp_path / "s", original, "--token-ids", "7,8,8", "--fingerprint", "m", code=2).err
    assert "its token 2 is 9, --token-ids says 8" in said
    run("store", "put", tmp_path / "s", original, "--fingerprint", "m")
    assert run("store", "match", tmp_path / "s", "--token-ids", "7,8,9").out == "3\n"
    (original / "token_ids.json").write_text("[7, 8")
    assert (
        "token_ids.json: holds no list of token ids"
        in run("store", "put", tmp_path / "s", original, "--fingerprint", "m", code=1).err
    )


def test_sidecars_of_evicted_cache_are_kept_in_bundle(tmp_path: Path) -> None:
    """As the folder does, for `pack` and `eval --initial-cache`."""
    original = folder(tmp_path / "kv")
    places = [0, 4, 8]
    (original / "positions.json").write_text(json.dumps({"tokens_seen": 9, "layers": [{"positions": places}]}))
    (original / "token_ids.json").write_text(json.dumps(list(range(9))))
    kvmnn.bundle.encode_source(kvmnn.open(original), tmp_path / "frames")
    encode_store(kvmnn.open(original), tmp_path / "kv.zarr")
    for path in (original, tmp_path / "frames", tmp_path / "kv.zarr"):
        held = read_stored_tokens(kvmnn.open(path), [3])
        assert held.positions[0].tolist() == places and held.num_seen == 9 and held.ids is not None
        assert held.ids.tolist() == list(range(9))
        made = pack(kvmnn.open(path), str(tmp_path / f"p.{path.name}"), PackedGeometry(backend="arm64-fp16"), name="p")
        assert made.info.layers[0].positions == ((0, 1), (4, 1), (8, 1))
    (original / "positions.json").write_text('{"layers": [{"positions": [1, 2]}]}')
    kvmnn.bundle.encode_source(kvmnn.open(original), tmp_path / "wrong")
    with pytest.raises(ManifestError, match=r"wrong: its positions\.json: layers\[0\]\.positions: found"):
        read_stored_tokens(kvmnn.open(tmp_path / "wrong"), [3])


def test_sidecars_existing_in_output_folder_are_noted(tmp_path: Path, run: Any) -> None:
    """Old arrays are read with the new ones; sidecars of the old ones go."""
    run("mnn", "unpack", cut_folder(tmp_path / "kv"), "-o", f"{tmp_path / 'out'}/")
    keys = np.ones((2, 3, 8), np.float16)
    np.savez(tmp_path / "one.npz", **{"layer_0.key": keys, "layer_0.value": keys})
    run("encode", tmp_path / "one.npz", "-o", tmp_path / "one.frames")
    run("encode", tmp_path / "one.npz", "-o", tmp_path / "one.zarr")
    said = "out/: layer_1.key.npy and 1 more lay there before, and what reads the folder takes them for a part of it"
    assert {"positions.json", "token_ids.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    for verb, made in (("mnn unpack", "one.npz"), ("decode", "one.frames"), ("decode", "one.zarr")):
        assert said in run(verb, tmp_path / made, "-o", f"{tmp_path / 'out'}/", "-f").err.replace("\n", " ")
    assert not {"positions.json", "token_ids.json"} & {path.name for path in (tmp_path / "out").iterdir()}
    assert "lay there" not in run("mnn", "unpack", tmp_path / "kv", "-o", f"{tmp_path / 'out'}/", "-f").err
