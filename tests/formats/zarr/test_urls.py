"""Zarr stores at URLs, over fsspec's file system in memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest

import kvmnn
from kvmnn.bundle import EncodeOptions
from kvmnn.cli import main
from kvmnn.errors import KvmnnError, MissingDependencyError, OptionError, OutputError, SourceError
from kvmnn.formats.zarr import encode_store, inspect_store, restore_store, verify_store

URL = "memory://caches/x.zarr"
ARRAYS = {
    f"layer_{layer}.{part}": np.random.default_rng(layer).standard_normal((2, 40, 8)).astype(np.float16)
    for layer in range(3)
    for part in ("key", "value")
}


@pytest.fixture(autouse=True)
def memory() -> Iterator[Any]:
    found = fsspec.filesystem("memory")
    yield found
    for path in found.find(""):
        found.rm_file(path)


def made(url: str = URL, **options: Any) -> None:
    encode_store(kvmnn.open(ARRAYS), url, EncodeOptions(frame_bytes=300), **options)


def same(path: str) -> bool:
    source = kvmnn.open(path)
    return source.names == tuple(ARRAYS) and all((source[name].to_numpy() == ARRAYS[name]).all() for name in ARRAYS)


def test_zarr_url_round_trips(memory: Any, tmp_path: Path) -> None:
    made()
    made(str(tmp_path / "x.zarr"))
    here = {path.relative_to(tmp_path).as_posix(): path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    assert {path.removeprefix("/caches/"): memory.cat_file(path) for path in memory.find("/caches")} == here
    assert same(URL) and same(URL + "/")
    assert verify_store(URL).proof == "sha256"
    local, there = inspect_store(str(tmp_path / "x.zarr")).to_dict(), inspect_store(URL).to_dict()
    assert there == {**local, "input": URL}
    restored = restore_store(URL, tmp_path / "back.npz")
    assert restored.is_verified and restored.stored_bytes == there["stored_bytes"] and restored.input == URL
    assert same(str(tmp_path / "back.npz"))


@pytest.mark.filterwarnings("ignore:.*onsolidated metadata")
def test_zarr_url_is_read_by_zarr_python(memory: Any) -> None:
    zarr = pytest.importorskip("zarr")
    made()
    group = zarr.open_group(URL, mode="r")
    assert (group["layer_2.value"][:] == ARRAYS["layer_2.value"]).all()


def test_zarr_url_single_array_and_no_consolidated_metadata(memory: Any) -> None:
    made()
    path = "/caches/x.zarr/zarr.json"
    document = json.loads(memory.cat_file(path))
    del document["consolidated_metadata"]
    memory.pipe_file(path, json.dumps(document).encode())
    assert same(URL)
    assert (kvmnn.open(f"{URL}/layer_1.key")["layer_1.key"].to_numpy() == ARRAYS["layer_1.key"]).all()


def test_zarr_url_conflicting_metadata_is_refused(memory: Any) -> None:
    made()
    path = "/caches/x.zarr/layer_1.key/zarr.json"
    memory.pipe_file(path, memory.cat_file(path).replace(b"float16", b"uint16"))
    with pytest.raises(SourceError, match=r"says other things of 'layer_1\.key'"):
        verify_store(URL)
    memory.rm_file(path)
    with pytest.raises(SourceError, match=r"says other things of 'layer_1\.key'"):
        verify_store(URL)


@pytest.mark.parametrize("name", ["../layer_0.key", "a//b", "/".join("a" * 40)])
def test_zarr_url_consolidated_metadata_with_odd_paths(memory: Any, name: str) -> None:
    made()
    path = "/caches/x.zarr/zarr.json"
    document = json.loads(memory.cat_file(path))
    entries = document["consolidated_metadata"]["metadata"]
    entries[name] = entries["layer_0.key"]
    memory.pipe_file(path, json.dumps(document).encode())
    assert same(URL)


def test_zarr_url_existing_store_needs_force(memory: Any) -> None:
    made()
    with pytest.raises(OutputError, match="exists already"):
        made()
    memory.pipe_file("/caches/x.zarr/layer_0.key/c/7/0/0", b"of before")
    made(force=True)
    assert same(URL) and not memory.exists("/caches/x.zarr/layer_0.key/c/7/0/0")
    with pytest.raises(OutputError, match="is the input itself"):
        encode_store(kvmnn.open(URL), URL, force=True)
    assert same(URL)
    memory.pipe_file("/other/x.zarr/thesis.txt", b"years")
    with pytest.raises(OutputError, match="holds 1 files, and is no Zarr store"):
        made("memory://other/x.zarr", force=True)
    assert memory.cat_file("/other/x.zarr/thesis.txt") == b"years"


@pytest.mark.parametrize("ending", ["layer_1.key/c/0/0/0", "layer_2.value/zarr.json", "x.zarr/zarr.json"])
def test_zarr_url_failed_write_is_removed(memory: Any, monkeypatch: pytest.MonkeyPatch, ending: str) -> None:
    pipe_file = type(memory).pipe_file

    def failing(self: Any, path: str, value: bytes, **options: Any) -> Any:
        if path.endswith(ending):
            raise OSError("the disk of the cloud is full\nand more")
        return pipe_file(self, path, value, **options)

    monkeypatch.setattr(type(memory), "pipe_file", failing)
    with pytest.raises(OutputError, match=r"x\.zarr: cannot be written: the disk of the cloud is full$"):
        made()
    assert memory.find("/caches") == []


def test_zarr_url_verification_failure_is_reported(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe_file = type(memory).pipe_file

    def damaging(self: Any, path: str, value: bytes, **options: Any) -> Any:
        return pipe_file(self, path, value[:-3] if path.endswith("layer_1.key/c/0/0/0") else value, **options)

    monkeypatch.setattr(type(memory), "pipe_file", damaging)
    with pytest.raises(OutputError, match="does not read back as written"):
        made()
    assert memory.find("/caches") == []


def test_zarr_url_damaged_chunk_is_named(memory: Any) -> None:
    made()
    path = "/caches/x.zarr/layer_1.key/c/0/0/0"
    memory.pipe_file(path, memory.cat_file(path)[:-1])
    with pytest.raises(KvmnnError, match=r"memory://caches/x\.zarr/layer_1\.key/c/0/0/0"):
        verify_store(URL)
    memory.pipe_file(path, b"")
    with pytest.raises(KvmnnError, match=r"memory://caches/x\.zarr/layer_1\.key/c/0/0/0"):
        verify_store(URL)
    memory.rm_file(path)
    assert "1 of 36 chunks are not there" in str(inspect_store(URL))
    memory.pipe_file("/caches/x.zarr/zarr.json", b"{")
    with pytest.raises(KvmnnError, match=r"x\.zarr/zarr\.json"):
        kvmnn.open(URL)


def test_zarr_url_unreadable_store_is_refused(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made()

    def refused(*_: Any, **__: Any) -> Any:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(type(memory), "cat_file", refused)
    with pytest.raises(SourceError, match=r"^memory://caches/x\.zarr/zarr\.json: cannot be read: Access Denied$"):
        kvmnn.open(URL)


def test_zarr_url_invalid_url_is_refused(memory: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SourceError, match="is no Zarr store, and nothing else is read at a URL"):
        kvmnn.open("memory://caches/none.zarr")
    with pytest.raises(OptionError, match=r"^nowhere://x\.zarr: is no URL of files"):
        kvmnn.open("nowhere://x.zarr")
    with pytest.raises(OptionError) as caught:
        kvmnn.open("nowhere://me:secret@x.zarr")
    assert "secret" not in str(caught.value)

    def lacking(*_: Any, **__: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(fsspec.core, "url_to_fs", lacking)
    with pytest.raises(MissingDependencyError, match=r"^s3://b/x\.zarr: Install s3fs"):
        kvmnn.open("s3://b/x.zarr")


def test_zarr_url_commands(memory: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache, back = str(tmp_path / "kv.npz"), str(tmp_path / "back.npz")
    np.savez(cache, **ARRAYS)
    assert main(["encode", cache, "-o", URL]) == 0
    assert "LOSSLESS" in capsys.readouterr().out
    assert main(["inspect", URL]) == main(["verify", URL]) == main(["measure", URL]) == 0
    assert main(["decode", URL, "-o", back]) == main(["diff", URL, back]) == main(["diff", cache, URL]) == 0
    assert main(["encode", cache, "-o", URL]) == 1
    assert main(["encode", cache, "-o", URL, "-f"]) == 0
    capsys.readouterr()
    for verb in (["encode"], ["mnn", "unpack"], ["mnn", "pack", "--backend", "arm64-fp16", "--name", "p"]):
        assert main([*verb, URL]) == 2
        assert "no output given: use -o" in capsys.readouterr().err
    for arguments in (
        ["-o", "s3://bucket/kv/"],
        ["-o", "s3://bucket/kv.frame"],
        ["--jobs", "2", "-o", "s3://bucket/kv"],
    ):
        assert main(["encode", cache, *arguments]) == 2
        assert "a URL is written to as a Zarr store" in capsys.readouterr().err
