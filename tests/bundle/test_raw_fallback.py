"""Arrays whose frames do not gain are stored raw: as the engine decides, or each by itself."""

from __future__ import annotations

import io
import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bundles import edit, frame_file, named
from plain_dumps import dump

import kvmnn
from kvmnn import bundle, formats
from kvmnn.bundle import EncodeOptions
from kvmnn.errors import FrameError, KvmnnError, ManifestError, OptionError, SourceError

RANDOM = np.random.default_rng(11)


def noise(dtype: str = "f2", shape: tuple[int, ...] = (2, 40, 16)) -> np.ndarray:
    """Words that no frame makes smaller; NaN among them."""
    word = np.dtype(dtype)
    return RANDOM.integers(0, 256, (*shape[:-1], shape[-1] * word.itemsize), np.uint8).view(word)


def normal() -> np.ndarray:
    """Words that shrink well, in small frames too."""
    return RANDOM.integers(0, 4, (2, 40, 16)).astype(np.float16)


LAYERS = {
    "layer_0.key": noise(),
    "layer_0.value": noise(),
    "layer_1.key": noise(),
    "layer_1.value": np.zeros((2, 40, 16), np.float16),
    "layer_2.key": normal(),
    "layer_2.value": normal(),
}
BLOCK = EncodeOptions(block=True)
ALLOW = EncodeOptions(allow_raw=True)


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("kv.npz", **LAYERS)
    np.save("k.npy", LAYERS["layer_0.key"])
    return tmp_path


def raw_of(folder: str) -> list[str]:
    arrays = bundle.open_frames(folder).arrays
    assert all(len({entry.stored for entry in array.frames}) == 1 for array in arrays)
    return [array.name for array in arrays if array.frames[0].is_raw]


def test_raw_fallback_block_decision_equals_encode_block():
    made = bundle.encode_source(kvmnn.open("kv.npz"), "frames/", BLOCK)
    blocks = [kvmnn.encode_block(LAYERS[f"layer_{i}.key"], LAYERS[f"layer_{i}.value"]) for i in range(3)]
    assert [block.is_stored for block in blocks] == [False, True, True]
    sizes = [array.stored_bytes for array in made.manifest.arrays]
    assert [k + v for k, v in zip(sizes[::2], sizes[1::2], strict=True)] == [b.compressed_bytes for b in blocks]
    assert sizes[2] > LAYERS["layer_1.key"].nbytes  # its V gains more than it loses
    assert raw_of("frames") == ["layer_0.key", "layer_0.value"]
    assert Path("frames/layer_0.key.frame").read_bytes() == LAYERS["layer_0.key"].tobytes()
    assert Path("frames/layer_1.key.frame").read_bytes() == blocks[1].key_frame
    assert made.manifest.arrays[0].stored_bytes == made.manifest.arrays[0].nbytes
    assert "4 frames, 2 pieces stored: raw, LOSSLESS (decoded and compared)" in str(made)


@pytest.mark.parametrize(("options", "kept"), [(BLOCK, 2), (ALLOW, 3), (EncodeOptions(), 0)])
@pytest.mark.parametrize("frame_bytes", [0, 512])
def test_raw_fallback_arrays_round_trip_and_are_verified(options, kept, frame_bytes):
    cut = EncodeOptions(frame_bytes=frame_bytes, block=options.block, allow_raw=options.allow_raw)
    bundle.encode_source(kvmnn.open("kv.npz"), "frames/", cut)
    assert len(raw_of("frames")) == kept
    frames = bundle.open_frames("frames")
    assert str(formats.restore(frames, "back.npz")).endswith("LOSSLESS (read back, sha256 of the manifest)")
    with np.load("back.npz") as back:
        assert {name: back[name].tobytes() for name in back} == {name: kv.tobytes() for name, kv in LAYERS.items()}
    for against, proof in ((None, "sha256"), (kvmnn.open("kv.npz"), "bytes")):
        found = bundle.verify_frame_set(frames, against)
        assert (found.label, found.proof) == ("LOSSLESS", proof)
    assert json.loads(Path("frames/manifest.json").read_text())["schema_version"] == (2 if kept else 1)
    assert ('"stored"' in Path("frames/manifest.json").read_text()) == bool(kept)
    np.savez("other.npz", **{**LAYERS, "layer_0.value": LAYERS["layer_0.key"]})
    found = bundle.verify_frame_set(frames, kvmnn.open("other.npz"))
    assert found.difference is not None and found.difference.array == "layer_0.value"


@pytest.mark.parametrize("values", [noise(">f2"), noise("<f4"), noise("u2"), np.array([1.5], np.float16)])
def test_raw_fallback_single_array_file_round_trips(values):
    np.save("a.npy", values)
    made = bundle.encode_source(kvmnn.open("a.npy"), "a.frame", ALLOW)
    assert (made.ratio, made.label) == (1.0, "LOSSLESS") and ", stored: raw, LOSSLESS" in str(made)
    assert Path("a.frame").read_bytes() == values.astype(values.dtype.newbyteorder("<")).tobytes()
    Path("a.frame").rename("b.frame")
    Path("a.frame.json").rename("b.frame.json")
    formats.restore(bundle.open_frames("b.frame"), "back.npy")
    assert Path("back.npy").read_bytes() == Path("a.npy").read_bytes()
    with pytest.raises(FrameError):
        bundle.open_frames("b.frame", use_manifest=False)


def test_raw_fallback_compressible_array_is_encoded_as_usual():
    np.save("n.npy", normal())
    bundle.encode_source(kvmnn.open("n.npy"), "a.frame", ALLOW)
    bundle.encode_source(kvmnn.open("n.npy"), "b.frame")
    assert Path("a.frame").read_bytes() == Path("b.frame").read_bytes()
    assert json.loads(Path("a.frame.json").read_text())["schema_version"] == 1


def test_inspect_raw_fallback_arrays_are_marked(run):
    run("encode", "kv.npz", "-o", "frames/", "--joint-kv")
    found = bundle.inspect_frame_set(bundle.open_frames("frames"))
    assert isinstance(found, bundle.BundleInfo)
    text = found.text(verbose=True)
    assert "layer_0.key    fp16 [2, 40, 16] C  2,560 -> 2,560  ratio 1.0000  stored: raw" in text
    assert "layer_0.key.frame at 0: fp16 words, stored: raw, 2,560 bytes (entropy 7." in text
    total = found.streams["fp16 raw"]
    assert (total.raw_bytes, total.payload_bytes, total.header_bytes, total.chosen) == (
        5120,
        5120,
        0,
        {"stored raw": 2},
    )
    assert sum(each.raw_bytes for each in found.streams.values()) == found.raw_bytes
    first = found.to_dict()["arrays"][0]["frames"][0]
    assert (first["stored"], first["streams"]) == ("raw", [])
    assert "stored" not in found.to_dict()["arrays"][2]["frames"][0]
    assert json.loads(run("inspect", "frames", "--json").out)["inputs"] == [found.to_dict()]
    verified = bundle.verify_frame_set(bundle.open_frames("frames")).to_dict()
    stored = [frame.get("stored") for array in found.to_dict()["arrays"] for frame in array["frames"]]
    assert verified["raw_pieces"] == stored.count("raw") == 2
    assert (verified["frames"], verified["dense_streams"]) == (stored.count(None), 0)


def test_encode_command_allow_raw_and_joint_kv(run):
    assert "has no partner: expected an array with its values" in run("encode", "k.npy", "--joint-kv", code=2).err
    said = run("encode", "k.npy", "--allow-raw").out
    assert said.startswith("k.npy.frame: 2,560 -> 2,560 bytes, ratio 1.0000, stored: raw, LOSSLESS")
    run("decode", "k.npy.frame", "-o", "back.npy")
    assert Path("back.npy").read_bytes() == Path("k.npy").read_bytes()
    assert "not allowed with argument" in run("encode", "kv.npz", "--joint-kv", "--allow-raw", code=2).err
    assert "need a manifest" in run("encode", "k.npy", "--allow-raw", "-o", "-", code=2).err
    assert "need a manifest" in run("encode", "k.npy", "--allow-raw", "-o", os.devnull, code=2).err


def test_raw_fallback_dump_pieces_are_separate_blocks():
    ones = np.ones((32, 2, 16), np.float16)
    pieces = {f"dump/layer_0/{part}_t0_8": noise(shape=(8, 2, 16)) for part in "kv"}
    np.savez("dump.npz", **pieces, **{f"dump/layer_0/{part}_t8_40": ones for part in "kv"})
    bundle.encode_source(kvmnn.open("dump.npz"), "frames/", BLOCK)
    assert raw_of("frames") == list(pieces)


def test_decode_dump_stored_raw_is_restored(run):
    dump(Path("dump/run/layer_0"))
    run("encode", "dump", "-o", "frames/", "--joint-kv")
    assert raw_of("frames") == ["run/layer_0/k_t0_3", "run/layer_0/v_t0_3"]
    run("decode", "frames", "--output-kind", "dump", "-o", "back/")
    for file in Path("dump").rglob("*.*"):
        assert Path("back", file.relative_to("dump")).read_bytes() == file.read_bytes()


@pytest.mark.parametrize(
    ("arrays", "error", "message"),
    [
        ({"a": noise(), "b": noise()}, OptionError, "--joint-kv: array 'a' is neither K nor V by its name"),
        ({"l0.k": noise(), "l1.v": noise()}, OptionError, "'l0.k' has no partner: expected an array with its values"),
        ({"v": noise()}, OptionError, "'v' has no partner: expected an array with its keys"),
        ({"k": noise(), "key": noise()}, OptionError, "'k' and 'key' are both the keys of one layer"),
        ({"k": noise(), "v": noise("f4")}, SourceError, "'k' is fp16, 'v' is fp32"),
        ({"k": noise(shape=(3, 2, 4, 8)), "v": noise()}, OptionError, "'k' of shape [3, 2, 4, 8] holds 3 layers"),
    ],
)  # fmt: skip
def test_raw_fallback_joint_kv_without_pairs_is_refused(arrays, error, message):
    np.savez("x.npz", **arrays)
    with pytest.raises(error) as caught:
        bundle.encode_source(kvmnn.open("x.npz"), "frames/", BLOCK)
    assert message in str(caught.value) and not Path("frames").exists()


def test_raw_fallback_without_manifest_is_refused():
    with pytest.raises(OptionError, match="need a manifest"):
        bundle.encode_source(kvmnn.open("k.npy"), io.BytesIO(), ALLOW)
    with pytest.raises(OptionError, match="judged with its partner or by itself"):
        EncodeOptions(block=True, allow_raw=True)


def test_raw_fallback_array_changed_between_reads_is_refused(tmp_path):
    reads = iter([noise(), noise()])
    array = replace(named(noise()), reader=lambda step: iter([next(reads).reshape(-1).view(np.uint8)]))
    with pytest.raises(SourceError, match="'k': changed while it was read"):
        frame_file(tmp_path / "a.frame", array, ALLOW)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["k.npy", "kv.npz"]


@pytest.mark.parametrize(
    ("array", "change", "message"),
    [
        (0, {"stored": "row"}, "arrays[0].frames[0].stored: found \"row\", expected 'frame' or 'raw'"),
        (0, {"stored": None}, "arrays[0].frames[0].stored: found null"),
        (0, {"stored": ["raw"]}, "arrays[0].frames[0].stored: found [\"raw\"]"),
        (0, {"bytes": 2558}, "arrays[0].frames[0].bytes: found 2558, expected 2560, its raw_bytes"),
        (0, {"bytes": 0}, "arrays[0].frames[0].bytes: found 0, expected 2560"),
        (2, {"stored": "raw"}, "expected 2560, its raw_bytes, as the words are stored raw"),
        (0, {"stored": "frame"}, "array 'layer_0.key': stream 0 at offset 4"),
        (0, {"offset": 2}, "has 2560 bytes, but the manifest puts a frame of 2560 bytes at offset 2"),
        (0, {"file": "layer_0.value.frame"}, "belong to arrays[0] as well"),
        (0, {"sha256": "0" * 64}, "what is stored raw does not match the manifest's sha256"),
    ],
)  # fmt: skip
def test_raw_fallback_inconsistent_manifest_is_refused(array, change, message):
    bundle.encode_source(kvmnn.open("kv.npz"), "frames/", BLOCK)
    edit(Path("frames/manifest.json"), lambda document: document["arrays"][array]["frames"][0].update(change))
    with pytest.raises(KvmnnError) as caught:
        bundle.verify_frame_set(bundle.open_frames("frames"))
    assert message in str(caught.value) and "\n" not in str(caught.value)


def test_raw_fallback_unaligned_words_round_trip():
    np.save("a.npy", noise(">f2"))
    bundle.encode_source(kvmnn.open("a.npy"), "a.frame", ALLOW)
    Path("a.frame").write_bytes(b"\0" + Path("a.frame").read_bytes())
    edit(Path("a.frame.json"), lambda document: document["arrays"][0]["frames"][0].update(offset=1))
    frames = bundle.open_frames("a.frame")
    assert bundle.verify_frame_set(frames, kvmnn.open("a.npy")).label == "LOSSLESS"
    formats.restore(frames, "back.npy")
    assert Path("back.npy").read_bytes() == Path("a.npy").read_bytes()


def test_manifest_version_1_with_raw_array_is_refused():
    bundle.encode_source(kvmnn.open("k.npy"), "k.frame", ALLOW)
    edit(Path("k.frame.json"), lambda document: document.update(schema_version=1))
    with pytest.raises(ManifestError, match="found \"raw\", expected 'frame': only version 2 of the schema"):
        bundle.open_frames("k.frame")


def test_raw_fallback_changed_words_fail_sha256(run):
    run("encode", "kv.npz", "-o", "frames/", "--joint-kv")
    path = Path("frames/layer_0.value.frame")
    path.write_bytes(path.read_bytes()[:-1] + b"\0")
    for verb in (["verify", "frames"], ["inspect", "frames"], ["decode", "frames", "-o", "x.npz"]):
        assert "does not match the manifest's sha256" in run(*verb, code=1).err
    path.write_bytes(path.read_bytes()[:-2])
    assert "has 2558 bytes" in run("verify", "frames", code=1).err
    assert not Path("x.npz").exists()


def test_decode_prefix_cache_stored_raw_restores_files(run):
    np.savez("one.npz", **{name: noise("f4") for name in ("layer_0.key", "layer_0.value")})
    run(
        "mnn",
        "pack",
        "one.npz",
        "-o",
        "sys/",
        "--kv-heads",
        2,
        "--head-dim",
        16,
        "--backend",
        "x86-sse",
        "--name",
        "sys",
    )
    run("encode", "sys", "-o", "frames/", "--joint-kv")
    assert raw_of("frames") == ["layer_0.key", "layer_0.value"]
    run("decode", "frames", "-o", "again/")
    for file in Path("sys").glob("*.[kv]"):
        assert Path("again", file.name).read_bytes() == file.read_bytes()
    assert "LOSSLESS (every byte compared" in run("verify", "frames", "--against", "sys").out
