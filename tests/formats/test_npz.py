"""``.npz`` archives: stored and deflated; and damaged ones."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np
import pytest
from sources import WORDS, content, saved

from kvmnn import formats
from kvmnn.errors import SourceError
from kvmnn.formats import ReadOptions


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_npz_stored_and_deflated_arrays_are_read(tmp_path, save):
    big = np.asfortranarray(WORDS).astype(">f4")
    save(tmp_path / "a.npz", k=WORDS, v=WORDS.astype(np.float16), big=big)
    arrays = {array.name: array for array in formats.open(str(tmp_path / "a.npz")).arrays}
    assert list(arrays) == ["k", "v", "big"]
    assert content(arrays["k"], 16) == WORDS.tobytes()
    assert content(arrays["v"], 7) == WORDS.astype(np.float16).tobytes()
    assert (arrays["big"].order, arrays["big"].array_dtype) == ("F", ">f4")
    assert content(arrays["big"], 16) == WORDS.tobytes("F")


def test_npz_selected_arrays_are_read(tmp_path):
    np.savez(tmp_path / "a.npz", k=WORDS, v=WORDS, n=np.arange(3))
    path = str(tmp_path / "a.npz")
    with pytest.raises(SourceError, match=r"'n.npy'.*int64"):
        formats.open(path)
    assert [a.name for a in formats.open(path, ReadOptions(tensors=("v",))).arrays] == ["v"]
    source = formats.open(path, ReadOptions(skip_unsupported=True))
    assert [a.name for a in source.arrays] == ["k", "v"]
    assert len(source.skipped_arrays) == 1
    with pytest.raises(SourceError, match="no array named 'x'; it has 'k', 'v', 'n'"):
        formats.open(path, ReadOptions(tensors=("x",)))
    with pytest.raises(SourceError, match="int64"):
        formats.open(path, ReadOptions(tensors=("n",), skip_unsupported=True))


def test_npz_pickles_are_never_loaded(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (tmp_path / "ran",))

    np.savez(tmp_path / "a.npz", k=np.array([Bomb()], object))
    with pytest.raises(SourceError, match="pickles"):
        formats.open(str(tmp_path / "a.npz"))
    assert not (tmp_path / "ran").exists()


def archive(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_STORED) -> None:
    with zipfile.ZipFile(path, "w", method) as file:
        for name, data in members.items():
            file.writestr(name, data)


@pytest.mark.parametrize("method", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
def test_npz_malformed_archive_is_refused(tmp_path, method):
    path = tmp_path / "a.npz"

    def refused(message: str) -> None:
        with pytest.raises(SourceError, match=message):
            for array in formats.open(str(path)).arrays:
                content(array)

    path.write_bytes(b"not a zip file")
    refused("not a readable .npz")
    archive(path, {"readme.txt": b"hello"}, method)
    refused("is not a .npy file")
    archive(path, {"k.npy": saved(WORDS)[:-4]}, method)
    refused("header promises 96 bytes of data after 128 of header, the archive says 220")
    archive(path, {}, method)
    refused("holds no array")
    archive(path, {"k.npy": saved(WORDS)}, method)
    whole = path.read_bytes()
    path.write_bytes(whole[:-30])
    refused("not a readable .npz")
    at = whole.index(b"k.npy") + 5 + (150 if method == zipfile.ZIP_STORED else 90)
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 0x55]) + whole[at + 1 :])
    refused("checksum|damaged|ends .* early|not a valid")


def test_npz_member_longer_than_recorded_is_refused(tmp_path):
    archive(tmp_path / "a.npz", {"k.npy": saved(WORDS) + bytes(1000)}, zipfile.ZIP_DEFLATED)
    data = (tmp_path / "a.npz").read_bytes()
    size = (len(saved(WORDS)) + 1000).to_bytes(4, "little")
    assert data.count(size) == 2
    (tmp_path / "a.npz").write_bytes(data.replace(size, len(saved(WORDS)).to_bytes(4, "little")))
    (array,) = formats.open(str(tmp_path / "a.npz")).arrays
    with pytest.raises(SourceError, match="holds more data than the archive says"):
        content(array, 16)


@pytest.mark.parametrize(("method", "flags"), [(zipfile.ZIP_BZIP2, 0), (zipfile.ZIP_STORED, 1)])
def test_npz_other_compression_methods_are_refused(tmp_path, method, flags):
    archive(tmp_path / "a.npz", {"k.npy": saved(WORDS)}, method)
    data = bytearray((tmp_path / "a.npz").read_bytes())
    data[6] |= flags
    data[data.index(b"PK\1\2") + 8] |= flags
    (tmp_path / "a.npz").write_bytes(data)
    with pytest.raises(SourceError, match=r"is encrypted|compression method 12"):
        formats.open(str(tmp_path / "a.npz"))


def test_npz_duplicate_member_is_refused(tmp_path):
    with pytest.warns(UserWarning, match="Duplicate"), zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("k.npy", saved(WORDS))
        file.writestr("k.npy", saved(WORDS))
    with pytest.raises(SourceError, match="2 arrays named 'k'"):
        formats.open(str(tmp_path / "a.npz"))
