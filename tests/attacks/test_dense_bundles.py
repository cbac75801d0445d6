"""Hostile dense streams with a matching manifest: one line of error, no output, bounded memory."""

from __future__ import annotations

import hashlib
import struct
from pathlib import Path

import numpy as np
import pytest
from bundles import edit
from dense_samples import near_rows, to_dtype

HEADER = struct.Struct("<4sBBBBHHIIQ")


@pytest.fixture
def here(tmp_path, monkeypatch, run):
    monkeypatch.chdir(tmp_path)
    np.save("k.npy", to_dtype(near_rows(np.random.default_rng(3), 2, 200, 16), "fp16"))
    run("encode", "k.npy", "-o", "k.frame", "--codec", "dense", "--rope", "dims=16")
    return tmp_path


def vouched(stream: bytes, shape: list[int] | None = None) -> None:
    """Write a stream, and a manifest whose hashes and sizes are its own."""

    def change(document):
        (array,) = document["arrays"]
        (entry,) = array["frames"]
        entry.update(bytes=len(stream), sha256=hashlib.sha256(stream).hexdigest())
        array["stored_bytes"] = document["stored_bytes"] = len(stream)
        if shape is not None:
            array["shape"] = shape
            entry["raw_bytes"] = array["raw_bytes"] = document["raw_bytes"] = 2 * int(np.prod(shape, dtype=object))

    Path("k.frame").write_bytes(stream)
    edit(Path("k.frame.json"), change)


def header(stream: bytes, **fields: int) -> bytes:
    names = ("magic", "version", "method", "dtype", "flags", "heads", "dim", "tokens", "payload", "checksum")
    said = dict(zip(names, HEADER.unpack_from(stream), strict=True)) | fields
    return HEADER.pack(*said.values()) + stream[HEADER.size :]


VERBS = (["inspect"], ["verify"], ["decode", "-o", "x.npy"], ["encode", "-o", "x.frame", "--codec", "mnn"])


def refused(run, message: str = "k.frame") -> None:
    for verb, *argv in VERBS:
        said = run(verb, "k.frame", *argv, code=1).err
        assert message in said and said.count("\n") == 1 and "Traceback" not in said
    assert not Path("x.npy").exists() and not Path("x.frame").exists()


@pytest.mark.slow
def test_dense_stream_damaged_is_refused_despite_manifest(here, run):
    stream = Path("k.frame").read_bytes()
    for at in [*range(0, 200, 9), *range(200, len(stream), 401)]:
        damaged = bytearray(stream)
        damaged[at] ^= 0x41
        vouched(bytes(damaged))
        refused(run)
    for end in (28, 29, 60, len(stream) // 2, len(stream) - 1):
        vouched(stream[:end])
        refused(run)


@pytest.mark.parametrize("tokens", [(1 << 24) - 1, 0x03FFFFFF, 0x07FFFFFF, 0xFFFFFFFF])
def test_dense_stream_claiming_gigabytes_takes_no_memory(here, run, tokens):
    """Streams and manifests of some kilobytes claim 4 GiB and more."""
    stream = Path("k.frame").read_bytes()
    for method in (0, 1, 2):
        fields = {"tokens": tokens, "method": method, **({} if method == 2 else {"flags": 0})}
        vouched(header(stream, **fields), [2, tokens, 16])
        refused(run)


def test_dense_stream_with_history_is_refused_in_bundle(here, run):
    from kvmnn import dense

    keys = np.load("k.npy")
    vouched(dense.encode(keys[:, 50:], history=keys[:, :50]), [2, 150, 16])
    refused(run, "refers to rows or tables outside of it, which no bundle has")


def test_dense_stream_doubled_is_refused(here, run):
    stream = Path("k.frame").read_bytes()
    vouched(stream + stream)
    refused(run)
