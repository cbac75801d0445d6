"""Which files below folders are inputs, and in which order."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from hf_files import pairs, save

from kvmnn.batch import InputKinds, find_inputs
from kvmnn.cli import main
from kvmnn.compressor.kvcm import MAGIC_BYTES
from kvmnn.errors import OptionError, SourceError

ALL = InputKinds(arrays=True, frames=True, weights=True)
ARRAYS = InputKinds(arrays=True)


def put(root: Path, *names: str, data: bytes = b"") -> None:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def names(root: Path, kinds: InputKinds = ALL) -> list[str]:
    return [named.name for named in find_inputs([str(root)], kinds).inputs]


def test_find_inputs_sorts_by_bytes_of_the_path(tmp_path: Path) -> None:
    put(tmp_path, "b/z.npy", "b/a.npy", "a.npy", "c.npz", "B.npy", "b.npy", "b/ä.npy")
    assert names(tmp_path) == ["B.npy", "a.npy", "b/a.npy", "b/z.npy", "b/ä.npy", "b.npy", "c.npz"]


def test_find_inputs_non_utf8_name(tmp_path: Path) -> None:
    name = os.fsdecode(b"\xff\n\x1b.npy")
    put(tmp_path, name)
    assert names(tmp_path) == [name]


def test_find_inputs_recognizes_names_and_contents(tmp_path: Path) -> None:
    put(tmp_path, "a.npy", "b.NPZ", "c.safetensors", "d.session", "e.frame", "f.txt", "g.bin", "h.pth", "i.json")
    put(tmp_path, "state", data=b"nsgg" + bytes(60))
    put(tmp_path, "x", "x.json")  # a frame of another name, and its manifest
    put(tmp_path, "w.bin", data=MAGIC_BYTES + bytes(60))
    found = find_inputs([str(tmp_path)], ALL)
    everything = ["a.npy", "b.NPZ", "c.safetensors", "d.session", "e.frame", "state", "w.bin", "x"]
    assert [named.name for named in found.inputs] == everything
    assert names(tmp_path, ARRAYS) == ["a.npy", "b.NPZ", "c.safetensors", "d.session", "state"]
    assert names(tmp_path, InputKinds(frames=True)) == ["e.frame", "x"]
    assert names(tmp_path, InputKinds(match="[fg].*")) == ["f.txt", "g.bin"]


def test_find_inputs_torch_files_by_content(tmp_path: Path) -> None:
    """Caches under any name and truncated files that may have been caches are inputs; other complete files are not."""
    cache = save(tmp_path / "a", pairs(1)).read_bytes()
    other = save(tmp_path / "other.pt", {"weight": pairs(1)[0][0]}).read_bytes()
    put(tmp_path, "a.pt", "a.bin", data=cache)
    put(tmp_path, "cut.pt", "cut.pth", "cut.bin", data=cache[: len(cache) // 2])
    put(tmp_path, "other.bin", data=other)
    put(tmp_path, "other_cut.bin", data=other[:-30])
    put(tmp_path, "model@1@0@12ab@bfloat16.pt", "model@1@0@12ab@half@3.data", "model.data", "empty.pt", "empty.pth")
    put(tmp_path, "garbage.pt", "garbage.pth", data=b"garbage")
    assert names(tmp_path, ARRAYS) == [
        *("a", "a.bin", "a.pt", "cut.bin", "cut.pt", "cut.pth", "empty.pt", "garbage.pt"),
        *("model@1@0@12ab@bfloat16.pt", "model@1@0@12ab@half@3.data", "other_cut.bin"),
    ]
    assert names(tmp_path, InputKinds(frames=True)) == []


def test_find_inputs_reports_ignored_files(tmp_path: Path) -> None:
    put(tmp_path, "a.npy", "b.txt", "c.txt", "a.npy.json", "sub/a.npy")
    (tmp_path / "link").symlink_to("sub")
    found = find_inputs([str(tmp_path)], ARRAYS)
    assert list(found.describe_ignored("kvmnn encode")) == [
        f"2 files or folders left out that kvmnn encode does not look for, such as {tmp_path}/b.txt (--glob does)",
        "1 link to folders not followed",
    ]


def test_find_inputs_skips_hidden_names_unless_named(tmp_path: Path) -> None:
    put(tmp_path, ".a.npy", ".git/a.npy", ".x.kvmnn-1-00000000.tmp/a.npy", "b.npy")
    assert names(tmp_path) == ["b.npy"]
    assert [named.name for named in find_inputs([str(tmp_path / ".a.npy")], ALL).inputs] == [".a.npy"], (
        "unless it is named"
    )


def test_find_inputs_follows_links_to_files_only(tmp_path: Path) -> None:
    """Links to folders are not followed, so there is no cycle; a dangling link is an input."""
    put(tmp_path, "a/x.npy")
    (tmp_path / "a/up").symlink_to("..")
    (tmp_path / "a/y.npy").symlink_to("x.npy")
    (tmp_path / "a/nothing.npy").symlink_to("gone")
    (tmp_path / "a/round.npy").symlink_to("round.npy")
    found = find_inputs([str(tmp_path)], ALL)
    assert [named.name for named in found.inputs] == ["a/nothing.npy", "a/round.npy", "a/x.npy", "a/y.npy"]
    assert found.num_links == 1
    (tmp_path / "b").symlink_to("a")
    assert len(find_inputs([str(tmp_path / "b")], ALL).inputs) == 4, "a link that is named is followed"


def test_find_inputs_does_not_open_pipes(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "p.npy")
    (tmp_path / "q.npy").symlink_to("p.npy")
    found = find_inputs([str(tmp_path)], ALL)
    assert (found.inputs, found.num_ignored) == ([], 2)


def test_find_inputs_cache_folders_are_one_input(tmp_path: Path) -> None:
    put(tmp_path, "dump/meta_t0_3.json", "dump/k.bin", "run/layer_0/meta_t0_3.json", "run/layer_1/meta_t0_3.json")
    put(tmp_path, "prefix/sys_0.k", "prefix/sys_0.v", "live/0123456789ABCDEF.k", "packed/packed_meta_t0_3.json")
    put(tmp_path, "bundle/manifest.json", "bundle/a.frame", "arrays/a.npy", "arrays/b.npy")
    caches = ["arrays/a.npy", "arrays/b.npy", "dump", "live", "packed", "prefix", "run"]
    assert names(tmp_path) == sorted([*caches, "bundle"])
    assert names(tmp_path, ARRAYS) == caches
    assert names(tmp_path, InputKinds(frames=True)) == ["bundle"]
    assert names(tmp_path / "dump") == ["dump"], "of what is named itself, its own name"


def test_find_inputs_folder_of_arrays_of_a_cache_is_one_input(tmp_path: Path) -> None:
    """Its documents describe the arrays together; other inputs next to them and below are inputs of their own."""
    put(tmp_path, "kv/layer_0.key.npy", "kv/layer_0.value.npy", "kv/positions.json", "kv/x.npz", "kv/sub/b.npy")
    put(tmp_path, "described/a.npy", "described/b.NPY", "described/token_ids.json", "described/note.txt")
    put(tmp_path, "plain/a.npy", "plain/layer_3.key.npy", "plain/other.json", "empty/positions.json")
    caches = ["described", "kv", "kv/sub/b.npy", "kv/x.npz", "plain/a.npy", "plain/layer_3.key.npy"]
    assert names(tmp_path, ARRAYS) == names(tmp_path) == caches
    assert names(tmp_path / "kv", ARRAYS) == ["kv", "sub/b.npy", "x.npz"]
    assert find_inputs([str(tmp_path)], ARRAYS).num_ignored == 3  # the text and the two documents of no arrays
    assert names(tmp_path, InputKinds(match="layer_0*.npy")) == ["kv/layer_0.key.npy", "kv/layer_0.value.npy"]
    assert names(tmp_path, InputKinds(frames=True)) == []


def test_find_inputs_folder_of_layer_streams_is_one_input(tmp_path: Path) -> None:
    put(tmp_path, "a/layers.json", "a/layer_0.kvml", "a/adapted.kvmp", "b/layers.json")
    assert names(tmp_path) == names(tmp_path, InputKinds(frames=True)) == ["a", "b"]
    assert names(tmp_path, ARRAYS) == []


def test_find_inputs_bundle_without_manifest_is_one_input(tmp_path: Path) -> None:
    """Its frames decode one by one, but only a manifest shows that all of them are present."""
    put(tmp_path, "x.frames/a.frame", "x.frames/b.frame", "all.frames/a.frame", "all.frames/a.frame.json")
    put(tmp_path, "plain/a.frame", "all.frames/sub/b.frame")
    assert names(tmp_path) == ["all.frames/a.frame", "all.frames/sub/b.frame", "plain/a.frame", "x.frames"]


def test_find_inputs_vllm_folder_is_one_input(tmp_path: Path) -> None:
    header = json.dumps({"kv_cache": {"dtype": "F16", "shape": [2], "data_offsets": [0, 4]}}).encode()
    put(tmp_path, "h/layers.0.safetensors", data=len(header).to_bytes(8, "little") + header + bytes(4))
    put(tmp_path, "other/layers.0.safetensors", data=b"damaged")
    assert names(tmp_path) == ["h", "other/layers.0.safetensors"]


def test_find_inputs_unreadable_folder_is_an_input(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path, "a/x.npy", "b/x.npy")
    listed = os.scandir

    def scandir(path: str) -> object:
        if path.endswith("/a"):
            raise PermissionError(13, "Permission denied", path)
        return listed(path)

    monkeypatch.setattr(os, "scandir", scandir)
    assert names(tmp_path) == ["a", "b/x.npy"]


@pytest.mark.slow
def test_find_inputs_nesting_beyond_recursion_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    try:
        for _ in range(1200):
            os.mkdir("d")
            os.chdir("d")
        Path("x.npy").touch()
        os.chdir(tmp_path)
        assert names(tmp_path) == ["d/" * 1200 + "x.npy"]
    finally:
        os.chdir(tmp_path)
        subprocess.run(["rm", "-rf", "d"], check=True)  # pytest recurses


def test_find_inputs_overlapping_roots_are_refused(tmp_path: Path) -> None:
    put(tmp_path, "a/b/x.npy")
    (tmp_path / "l").symlink_to("a/b")
    a = str(tmp_path / "a")
    for roots, message in (
        ([a, a + "/."], f"{a}/.: is given twice"),
        ([a, a + "/b"], f"{a}/b: lies in {a}, and would count twice"),
        ([a + "/b/x.npy", a], f"{a}/b/x.npy: lies in {a}, and would count twice"),
        ([str(tmp_path / "l"), a], f"{tmp_path}/l: lies in {a}, and would count twice"),
    ):
        with pytest.raises(OptionError) as found:
            find_inputs(roots, ALL)
        assert str(found.value) == message
    with pytest.raises(SourceError, match="gone: no such file or directory"):
        find_inputs([str(tmp_path / "gone")], ALL)


def test_find_inputs_skips_outputs(tmp_path: Path) -> None:
    put(tmp_path, "a.npy", "out/b.npy")
    assert [n.name for n in find_inputs([str(tmp_path)], ALL, [str(tmp_path / "out")]).inputs] == ["a.npy"]


def test_find_inputs_finds_what_inspect_reads(tmp_path: Path) -> None:
    """Each output of kvmnn is found once for inspect, and inspect reads it."""
    half = np.ones((2, 3, 4), np.float16)
    np.save(tmp_path / "k.npy", half)
    np.savez(tmp_path / "kv.npz", **{"layer_0.key": half, "layer_0.value": half})
    for argv in (
        ["encode", f"{tmp_path}/k.npy", "-q"],
        ["encode", f"{tmp_path}/kv.npz", "-q"],
        ["encode", f"{tmp_path}/k.npy", "-o", f"{tmp_path}/other", "-q"],
        ["mnn", "unpack", f"{tmp_path}/kv.npz", "--output-kind", "dump", "-o", f"{tmp_path}/dump", "-q"],
    ):
        assert main(argv) == 0
    found = names(tmp_path)
    assert found == ["dump/kvmnn", "k.npy", "k.npy.frame", "kv.npz", "kv.npz.frames", "other"]
    assert main(["inspect", "-q", *(str(tmp_path / name) for name in found)]) == 0
