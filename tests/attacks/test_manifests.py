"""Manifests with false sizes, repeated frames, invalid file names, or outputs that would replace inputs."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from bundles import edit
from hostile_files import write_dump

import kvmnn
from kvmnn.bundle import manifest

KEYS = np.random.default_rng(4).standard_normal((4, 30, 32)).astype(np.float16)


@pytest.fixture
def here(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    np.save("k.npy", KEYS)
    np.savez("both.npz", k=KEYS, v=-KEYS)
    run("encode", "k.npy", "-o", "k.frame")
    run("encode", "both.npz", "-o", "both/", "--chunk-bytes", "4K")
    return tmp_path


def document(path: str = "k.frame.json") -> Any:
    return json.loads(Path(path).read_text())


# -- numbers that frames deny ------------------------------------------------------------------------------------------


def larger(found: Any) -> None:
    """1 TiB in a frame of a few KiB, and all sums in order."""
    (array,) = found["arrays"]
    array["shape"], array["frames"][0]["raw_bytes"] = [1 << 39], 1 << 40
    array["raw_bytes"] = found["raw_bytes"] = 1 << 40


def another_hash(found: Any) -> None:
    found["arrays"][0]["frames"][0]["sha256"] = "0" * 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (larger, "holds 7680 bytes, the manifest says 1099511627776"),
        (another_hash, "does not match the manifest's sha256"),
    ],
)
def test_manifest_mismatch_is_refused_by_every_verb(here, run, change, message):
    edit(Path("k.frame.json"), change)
    for argv in (["inspect", "k.frame"], ["verify", "k.frame"], ["decode", "k.frame", "-o", "x.npy"]):
        said = run(*argv, code=1)
        assert message in said.err
        assert said.out == ""
    assert not Path("x.npy").exists()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("codecs", ["rle"], "stream lo has codec zstd, the manifest says rle"),
        ("predictors", ["xor_seq"], "stream lo has predictor raw, the manifest says xor_seq"),
        ("hi_predictors", ["xor_seq"], "stream hi has predictor raw, the manifest says xor_seq"),
    ],
)
def test_inspect_stream_mismatch_with_manifest_is_refused(here, run, key, value, message):
    edit(Path("k.frame.json"), lambda found: found.update({key: value}))
    assert message in run("inspect", "k.frame", code=1).err


# -- frames that are used twice ----------------------------------------------------------------------------------------


def doubled(found: Any, count: int, **more: object) -> None:
    """The first array `count` times, under names of their own."""
    array = {**found["arrays"][0], **more}
    found["arrays"] = [{**array, "name": f"k{number}"} for number in range(count)]
    found["raw_bytes"], found["stored_bytes"] = array["raw_bytes"] * count, array["stored_bytes"] * count


def test_manifest_repeated_frame_is_refused(here, run):
    edit(Path("k.frame.json"), lambda found: doubled(found, 1000))
    for argv in (["inspect", "k.frame"], ["decode", "k.frame", "-o", "x/"]):
        error = run(*argv, code=1).err
        assert "arrays[1]: bytes 0 to " in error
        assert "of 'k.frame' belong to arrays[0] as well, and are not declared as shared" in error


def test_manifest_declared_shared_frame_is_read(here, run):
    edit(Path("k.frame.json"), lambda found: doubled(found, 3, shared=True))
    assert "LOSSLESS" in run("verify", "k.frame").out
    run("decode", "k.frame", "-o", "x/")
    assert {np.load(path).tobytes() for path in Path("x").iterdir()} == {KEYS.tobytes()}
    assert (
        manifest.parse_manifest(manifest.dump_manifest(manifest.load_manifest(Path("k.frame.json")))).arrays[2].shared
    )


def overlapping(found: Any) -> None:
    """The second frame begins inside the first."""
    for array in found["arrays"]:
        array["shared"] = True
    found["arrays"][0]["frames"][1]["offset"] -= 1


def twice_in_one(found: Any) -> None:
    parts = found["arrays"][0]["frames"]
    found["arrays"][0]["shared"] = True
    parts[0] = parts[1]


def shared_by_one(found: Any) -> None:
    doubled(found, 2)
    found["arrays"][1]["shared"] = True


@pytest.mark.parametrize("change", [overlapping, twice_in_one, shared_by_one])
def test_manifest_partly_declared_sharing_is_refused(here, run, change):
    path = "both/manifest.json"
    edit(Path(path), change)
    found = document(path)
    for array in found["arrays"]:
        array["stored_bytes"] = sum(frame["bytes"] for frame in array["frames"])
    found["stored_bytes"] = sum(array["stored_bytes"] for array in found["arrays"])
    Path(path).write_text(json.dumps(found))
    error = run("inspect", "both", code=1).err
    assert "not declared as shared" in error or "raw_bytes" in error


@pytest.mark.parametrize("link", [os.symlink, os.link])
def test_manifest_one_file_under_two_names_is_refused(here, run, link):
    def change(found: Any) -> None:
        first = found["arrays"][0]
        frames = [{**frame, "file": "v.frame"} for frame in first["frames"]]
        found["arrays"][1] = {**first, "name": "v", "frames": frames}
        found["stored_bytes"] = 2 * first["stored_bytes"]

    Path("both/v.frame").unlink()
    link("k.frame" if link is os.symlink else "both/k.frame", "both/v.frame")
    edit(Path("both/manifest.json"), change)
    assert "'v.frame' and 'k.frame' are one file of frames under two names" in run("verify", "both", code=1).err


# -- what is no file ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["k.frame/", "./k.frame", "a//k.frame", "a/./k.frame"])
def test_manifest_non_normalized_file_name_is_refused(here, run, name):
    edit(Path("k.frame.json"), lambda found: found["arrays"][0]["frames"][0].update(file=name))
    for verb in ("inspect", "verify"):
        assert "frames[0].file: found" in run(verb, "k.frame.json", code=1).err


def test_manifest_fifo_or_directory_is_refused(here, run):
    """Opening a FIFO would wait forever."""
    Path("k.frame.json").unlink()
    os.mkfifo("k.frame.json")
    Path("both/manifest.json").unlink()
    os.mkfifo("both/manifest.json")
    for name in ("k.frame", "k.frame.json", "both", "both/manifest.json"):
        assert "json: is not a regular file, so it is no manifest" in run("inspect", name, code=1).err
    Path("k.frame.json").unlink()
    Path("k.frame.json").mkdir()
    assert "k.frame.json: is not a regular file" in run("decode", "k.frame", "-o", "x.npy", code=1).err
    assert "DECODES" in run("verify", "--ignore", "manifest", "k.frame").out


# -- outputs that are inputs -------------------------------------------------------------------------------------------


def tree() -> dict[str, str]:
    return {str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in Path().rglob("*") if path.is_file()}


def test_output_that_is_an_input_is_refused(here, run):
    write_dump(here / "dump", KEYS)
    os.link("k.frame.json", "hard.bin")
    os.symlink("k.frame.json", "soft.bin")
    os.symlink("../both/manifest.json", "dump/leads.bin")
    run("encode", "both.npz", "-o", "plain.frames/")
    run("decode", "both", "-o", "arrays/")
    before = tree()
    for argv in (
        "decode --raw k.frame -o k.frame.json",
        "decode --raw k.frame -o k.frame",
        "decode --raw k.frame.json -o k.frame",
        "decode --raw k.frame.json -o k.frame.json",
        "decode --raw k.frame -o hard.bin",
        "decode --raw k.frame -o soft.bin",
        "decode --raw k.frame -o ./both/../k.frame.json",
        "mnn unpack --raw k.frame -o k.frame.json",
        "encode k.npy -o k.npy",
        "encode arrays --tensor k -o arrays/v.npy",
        "mnn unpack arrays -o arrays/",
        "encode dump --tensor k_t0_4 -o dump/k_t0_4.bin",
        "encode dump --tensor k_t0_4 -o dump/v_t0_4.bin",
        "encode dump --tensor k_t0_4 -o dump/meta_t0_4.json",
        "mnn unpack --raw dump --tensor k_t0_4 -o dump/meta_t0_4.json",
    ):
        assert "is the input itself" in run(*argv.split(), "--force", code=1).err, argv
        assert tree() == before, argv


def test_side_manifest_that_is_an_input_is_refused(here, run):
    os.link("k.npy", "new.frame.json")
    before = tree()
    assert "new.frame.json: is the input itself" in run("encode", "k.npy", "-o", "new.frame", "-f", code=1).err
    assert tree() == before


def test_output_that_is_no_input_is_replaced(here, run):
    run("decode", "both", "-o", "both/")
    run("decode", "both", "-o", "both/", "--force")
    run("encode", "both.npz", "-o", "both/", "--force")
    assert kvmnn.open("both").files[0] == "both"
