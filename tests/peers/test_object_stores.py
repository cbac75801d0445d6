"""Prefix stores and Zarr stores on emulators of S3 (s3fs, moto) and of Google's store (gcsfs, gcp-storage-emulator)."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import fsspec
import numpy as np
import pytest
from dense_texts import layers_of, same, text

import kvmnn
from kvmnn.bundle import EncodeOptions
from kvmnn.errors import KvmnnError, OutputError, SourceError
from kvmnn.formats import encode_store, restore_store, verify_store
from kvmnn.store import PrefixStore

BUCKET = "prefixes"


@contextmanager
def amazon(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    s3fs = pytest.importorskip("s3fs")
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", _free_port())
    server.start()
    try:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.setenv(name, "none")
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
        s3fs.S3FileSystem.clear_instance_cache()
        with suppress(FileExistsError):  # of the test before
            s3fs.S3FileSystem().mkdir(BUCKET)
        yield f"s3://{BUCKET}/kv"
    finally:
        server.stop()


@contextmanager
def google(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    pytest.importorskip("gcsfs")
    port = _free_port()
    create_server: Any = pytest.importorskip("gcp_storage_emulator.server").create_server
    server = create_server("127.0.0.1", port, in_memory=True, default_bucket=BUCKET)
    server.start()
    try:
        monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{port}")
        yield f"gs://{BUCKET}/kv"
    finally:
        server.stop()


@pytest.mark.parametrize("engine", [amazon, google])
def test_prefix_store_on_object_store(engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    ids, model = text(1000), "m"
    with engine(monkeypatch) as url:
        with PrefixStore(url, block_tokens=16, timeout=60) as store:
            for end in (300, 340, 1000):
                store.put(ids[:end], layers_of(ids[:end]), model=model)
            assert store.notes == ()
            store.pin(ids[:340], model=model)
            store.park("chat", ids[:340], layers_of(ids[:340]), model=model)
        with PrefixStore(url, timeout=60) as store:
            found = store.get([*ids, 5], model=model)
            assert (found.tokens, found.notes) == (1000, ()) and same(found.layers, layers_of(ids), 1000)
            assert store.sessions() == ["chat"] and same(store.resume("chat").prefix.layers, layers_of(ids), 340)
            store.export(ids, tmp_path / "text", model=model)
            assert store.verify().damaged == () and store.verify().units == store.stats().units == 4
            assert store.delete(ids, model=model).units == 2
            store.gc(max_bytes=0)
            assert store.match(ids, model=model) == 340
            store.unpin(ids[:340], model=model)
            store.forget("chat")
            store.gc(max_bytes=0)
            assert store.stats().units == 0


@pytest.mark.parametrize("engine", [amazon, google])
def test_zarr_store_on_object_store(engine: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    rng = np.random.default_rng(1)
    arrays = {f"layer_{n}.key": rng.standard_normal((2, 300, 16)).astype(np.float16) for n in range(3)}
    with engine(monkeypatch) as begin:
        url = f"{begin}/x.zarr"
        for force in (False, True):
            encode_store(kvmnn.open(arrays), url, EncodeOptions(frame_bytes=4000), force=force)
        source = kvmnn.open(url)
        assert source.names == tuple(arrays)
        assert all((source[name].to_numpy() == arrays[name]).all() for name in arrays)
        assert verify_store(url).proof == "sha256" and restore_store(url, tmp_path / "x.npz").is_verified
        with pytest.raises(OutputError, match="exists already"):
            encode_store(kvmnn.open(arrays), url)
        for wrong in (f"{begin}/none.zarr", f"{begin.replace(BUCKET, 'nobody-has-it')}/x.zarr"):
            with pytest.raises(SourceError, match="is no Zarr store"):
                kvmnn.open(wrong)
        fs, path = fsspec.core.url_to_fs(f"{url}/layer_1.key/c/0/0/0")
        fs.pipe_file(path, b"")
        with pytest.raises(KvmnnError, match=r"layer_1\.key/c/0/0/0"):
            verify_store(url)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
