"""Zip archives with inconsistent headers, overlapping members or false sizes are refused by every reader."""

from __future__ import annotations

import io
import resource
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from compressor_files import checkpoint
from hostile_archives import DEFLATED, STORED, Entry, archive

import kvmnn
from kvmnn.compressor.checkpoint import open_checkpoint
from kvmnn.errors import CheckpointError, KvmnnError, LimitError, SourceError

Run = Callable[..., SimpleNamespace]


def npy(array: np.ndarray) -> bytes:
    file = io.BytesIO()
    np.save(file, array)
    return file.getvalue()


WORDS = np.arange(24, dtype=np.float32)
DATA = npy(WORDS)
ZEROS = npy(np.zeros(1 << 20, np.float32))


def read(path: Path) -> dict[str, np.ndarray]:
    source = kvmnn.open(path)
    return {array.name: array.to_numpy() for array in source.arrays}


@pytest.mark.parametrize("method", [STORED, DEFLATED])
def test_archive_with_consistent_headers_is_read(tmp_path: Path, method: int) -> None:
    (tmp_path / "a.npz").write_bytes(archive(Entry(b"k.npy", DATA, method), Entry(b"v.npy", ZEROS, method)))
    with np.load(tmp_path / "a.npz") as theirs:
        assert {name: array.tobytes() for name, array in read(tmp_path / "a.npz").items()} == {
            name: theirs[name].tobytes() for name in theirs
        }


LIES: dict[str, tuple[bytes, str]] = {
    "another name": (archive(Entry(b"k.npy", DATA, local={"name": b"v.npy"})), "differ in its name"),
    "another size": (archive(Entry(b"k.npy", DATA, local={"size": 5, "packed": 5})), "differ in its size"),
    "another size, deflated": (archive(Entry(b"k.npy", DATA, DEFLATED, local={"size": 5})), "differ in its size"),
    "another method": (archive(Entry(b"k.npy", DATA, local={"method": DEFLATED})), "differ in its method"),
    "another checksum": (archive(Entry(b"k.npy", DATA, local={"crc": 1})), "differ in its checksum"),
    "other flags": (archive(Entry(b"k.npy", DATA, local={"flags": 0x800})), "differ in its flags"),
    "another disk": (archive(Entry(b"k.npy", DATA, central={"disk": 1})), "several parts"),
    "two disks": (archive(Entry(b"k.npy", DATA), end={"disk": 1}), "several parts"),
    "wrong entry count": (archive(Entry(b"k.npy", DATA), end={"here": 0}), "several parts"),
    "bytes after it": (archive(Entry(b"k.npy", DATA), behind=b"more"), "4 bytes lie after the end"),
    "a second archive after it": (archive(Entry(b"k.npy", DATA)) + archive(Entry(b"v.npy", DATA)), "must end at"),
    "bytes before it": (b"#!" + archive(Entry(b"k.npy", DATA)), "must end at"),
    "a gap before the end": (archive(Entry(b"k.npy", DATA), end={"bytes": 10}), "must end at"),
    "fewer members than entries": (
        archive(Entry(b"k.npy", DATA), Entry(b"v.npy", DATA), end={"count": 1, "here": 1}),
        "its 1 entries take",
    ),
    "NUL in a name": (archive(Entry(b"k\0one.npy", DATA), Entry(b"k\0two.npy", DATA)), "NUL"),
    "a name that is not UTF-8": (
        archive(Entry(b"\xff.npy", DATA, local={"flags": 0x800}, central={"flags": 0x800})),
        "not UTF-8",
    ),
    "one member twice": (archive(Entry(b"k.npy", DATA), Entry(b"v.npy", DATA, at=0)), "overlaps"),
    "a member within another": (
        archive(Entry(b"k.npy", bytes(100) + DATA), Entry(b"v.npy", DATA, at=40)),
        "overlaps",
    ),
    "a zip64 field that is cut": (
        archive(Entry(b"k.npy", DATA, local={"size": 0xFFFFFFFF, "extra": b"\1\0\x10\x1b" + bytes(4)})),
        "without its zip64 field",
    ),
    "data in the next member": (
        archive(Entry(b"k.npy", DATA, local={"extra": b""}), Entry(b"v.npy", DATA)).replace(
            b"k.npy" + DATA[:6], b"k.npy" + DATA[:6]
        )[:28]
        + (50).to_bytes(2, "little")
        + archive(Entry(b"k.npy", DATA), Entry(b"v.npy", DATA))[30:],
        "reaches into what follows",
    ),
}


@pytest.mark.parametrize("lie", sorted(LIES))
def test_archive_with_ambiguous_headers_is_refused(tmp_path: Path, lie: str, run: Run) -> None:
    data, message = LIES[lie]
    path = tmp_path / "a.npz"
    path.write_bytes(data)
    with pytest.raises(SourceError, match=message):
        read(path)
    assert message in run("encode", path, "-o", tmp_path / "out/", code=1).err
    assert not (tmp_path / "out").exists()


def test_checkpoint_with_differing_headers_is_refused(tmp_path: Path) -> None:
    path = checkpoint(tmp_path / "c.pth", {"model": WORDS})
    data = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as file:
        offset = next(info.header_offset for info in file.infolist() if info.filename.endswith("data.pkl"))
    data[offset + 14] ^= 1  # the local checksum
    path.write_bytes(data)
    with pytest.raises(CheckpointError, match="differ in its checksum"):
        open_checkpoint(path)


def shared(members: int, nbytes: int) -> bytes:
    """One deflated member that the directory lists many times."""
    first = Entry(b"a.npy", npy(np.zeros(nbytes // 4, np.float32)), DEFLATED)
    others = [Entry(b"%d.npy" % number, first.data, DEFLATED, at=0) for number in range(members)]
    return archive(first, *others)


@pytest.mark.slow
@pytest.mark.parametrize("verb", ["encode", "inspect", "measure"])
def test_archive_bomb_of_overlapping_members_is_refused(tmp_path: Path, verb: str, run: Run) -> None:
    """The members have 33,000 times the size of the file and are refused before anything is inflated."""
    path = tmp_path / "bomb.npz"
    path.write_bytes(shared(32, 4 << 20))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    assert "overlaps" in run(verb, path, *(["-o", tmp_path / "out/"] if verb == "encode" else []), code=1).err
    assert time.process_time() - start < 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10


def test_archive_member_beyond_deflate_ratio_is_refused(tmp_path: Path) -> None:
    """The header claims a terabyte in two hundred bytes."""
    head = npy(np.zeros(0, np.float32)).replace(b"(0,)", b"(274877906912,)")
    head = head[: len(npy(np.zeros(1, np.float32))) - 4]
    size = {"size": 0xFFFF_FF00}
    entry = Entry(b"k.npy", head + bytes(64), DEFLATED, local=size, central=size)
    (tmp_path / "a.npz").write_bytes(archive(entry))
    with pytest.raises(LimitError, match="deflate makes at most 1032 of one"):
        read(tmp_path / "a.npz")


@pytest.mark.parametrize("verb", ["encode", "inspect", "verify", "measure", "compressor convert"])
def test_archive_beyond_max_bytes_is_refused(tmp_path: Path, verb: str, run: Run) -> None:
    """The zeros exist, but exceed the caller's limit."""
    array = np.zeros((64, 4, 128), np.float16)
    np.savez_compressed(tmp_path / "a.npz", **{"layer_0.key": array, "layer_0.value": array})
    run("encode", tmp_path / "a.npz", "-o", tmp_path / "frames/", "-q")
    state = {"compress_tk.0.0.weight": WORDS}
    words: dict[str, list[object]] = {
        "encode": [tmp_path / "a.npz", "-o", tmp_path / "out/"],
        "inspect": [tmp_path / "a.npz"],
        "verify": [tmp_path / "frames"],
        "measure": [tmp_path / "a.npz"],
        "compressor convert": [checkpoint(tmp_path / "c.pth", state), tmp_path / "out.bin"],
    }
    limit = 95 if verb == "compressor convert" else 2 * array.nbytes - 1
    err = run(verb, *words[verb], "--max-input-bytes", limit, code=1).err
    assert f"above the limit of {limit}" in err
    assert len(err.splitlines()) == 1
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(("out", "."))]


def test_archive_damaged_member_is_refused_every_time(tmp_path: Path) -> None:
    """A member with a wrong checksum is refused at the second reading as well."""
    path = tmp_path / "a.npz"
    path.write_bytes(archive(Entry(b"k.npy", DATA, local={"crc": 5}, central={"crc": 5})))
    for _ in range(2):
        with pytest.raises(KvmnnError, match="checksum"):
            read(path)
